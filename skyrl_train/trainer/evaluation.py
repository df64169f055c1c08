"""Evaluation of the policy: mean reward (avg@n) and pass@k per data source, with standard errors."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import stdev
from typing import Any
from urllib.parse import quote

from skyrl_train.aio import gather_all
from skyrl_train.atomic_files import atomic_write
from skyrl_train.config.redaction import redact
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import MIN_PASS_REWARD, OK, Trajectory, TrajectoryGroup
from skyrl_train.errors import RolloutsFailed, WeightSyncError
from skyrl_train.metrics import MetricNameLimit
from skyrl_train.rollouts.conversation import FailureKind
from skyrl_train.rollouts.failures import count_failures, describe_first_failure
from skyrl_train.terminal import escape_control_chars

_log = logging.getLogger(__name__)
ALL_SOURCES = "all"
"""Name in metrics for all data sources together."""
OTHER_SOURCES = "other_sources"
"""Name in metrics and files for the data sources beyond the limits below."""
MAX_SOURCES, MAX_SOURCE_LENGTH = 256, 128
"""Number of data sources with separate metrics and files, and characters of a name: a dataset may have any number."""
_MAX_FILE_NAME_BYTES = 200
"""File systems allow 255."""


class Evaluator:
    """Runs a rollout for every evaluation prompt, `eval_batch_size` prompts at a time, in order."""

    def __init__(
        self,
        rollout: Callable[[Prompt, int], Awaitable[TrajectoryGroup]],
        prompts: Sequence[Prompt],
        eval_batch_size: int,
        dump_folder: Path | None,
        max_failed_fraction: float = 1.0,
        on_rollouts_done: Callable[[], Awaitable[None]] | None = None,
        require_single_version: bool = False,
        env_try_overrides: Sequence[str] = (),
    ):
        """Create an evaluator; `run` starts an evaluation.

        Args:
            rollout: Generates and scores the group of a prompt. The integer is the prompt's position in `prompts`.
            prompts: The evaluation prompts.
            eval_batch_size: Number of prompts that are evaluated concurrently.
            dump_folder: Folder for the trajectories of each evaluation; None writes no files.
            max_failed_fraction: Largest fraction of failed episodes that `run` accepts.
            on_rollouts_done: Awaited after the rollouts of an evaluation, to reset what they left in shared metrics.
            require_single_version: True if `run` checks that the weights of the step sampled every token.
            env_try_overrides: Arguments of `skyrl-train env try` with which it finds the run's environments.
        """
        self._rollout = rollout
        self._prompts = prompts
        self._source_names = _source_names([prompt.data_source for prompt in prompts])
        self._eval_batch_size = eval_batch_size
        self._dump_folder = dump_folder
        self._max_failed_fraction = max_failed_fraction
        self._on_rollouts_done = on_rollouts_done
        self._require_single_version = require_single_version
        self._env_try_overrides = env_try_overrides
        self._reported_failure_kinds: set[str] = set()
        self.progress = 0, len(prompts)
        """Number of finished prompts of the current evaluation, and number of all prompts."""

    async def run(self, step: int) -> dict[str, float]:
        """Evaluate all prompts.

        A failed episode counts as reward 0: an evaluation has no mask, and leaving it out would flatter the model.

        Args:
            step: The finished step whose weights the engines serve.

        Returns:
            eval/<source>/avg_score, pass_at_<k>, their standard errors and num_failed (see `evaluation_metrics`); with
            several sources also eval/all/... The metrics of a data source named `all` begin with eval/source_all. Data
            sources beyond MAX_SOURCES, or with names longer than MAX_SOURCE_LENGTH, are evaluated together as
            eval/other_sources.

        Raises:
            RolloutsFailed: More than `max_failed_fraction` of the episodes failed; the metrics would be misleading.
            WeightSyncError: `require_single_version` is set and other weights sampled a token.
        """
        groups: list[TrajectoryGroup] = []
        self.progress = 0, len(self._prompts)
        for start in range(0, len(self._prompts), self._eval_batch_size):
            batch = self._prompts[start : start + self._eval_batch_size]
            groups += await gather_all(self._run_prompt(prompt, start + i) for i, prompt in enumerate(batch))
        if self._on_rollouts_done is not None:
            await self._on_rollouts_done()
        if self._require_single_version:
            check_version(groups, step)
        folder = None if self._dump_folder is None else self._dump_folder / f"global_step_{step}_evals"
        if folder is not None:
            await asyncio.to_thread(self._dump, groups, folder)
        self._report_failures(step, [item for group in groups for item in group.trajectories], folder)
        by_source: dict[str, list[TrajectoryGroup]] = defaultdict(list)
        for group in groups:
            by_source[self._source_names[group.prompt.data_source]].append(group)
        metrics = {source: evaluation_metrics(source_groups) for source, source_groups in by_source.items()}
        if len(by_source) > 1:
            metrics[ALL_SOURCES] = evaluation_metrics(groups)
        return {f"eval/{source}/{name}": value for source, values in metrics.items() for name, value in values.items()}

    def _report_failures(self, step: int, items: Sequence[Trajectory], folder: Path | None) -> None:
        """Log an example of each failure kind once.

        Raises:
            RolloutsFailed: More than `max_failed_fraction` of the episodes failed.
        """
        failures, total = count_failures(items), len(items)
        if failures.total() > self._max_failed_fraction * total:
            counts = ", ".join(f"{kind} x {number}" for kind, number in failures.most_common())
            example = describe_first_failure(failures.most_common(1)[0][0], items, self._env_try_overrides)
            rollouts = "trainer.dump_eval_results=false, so they are not saved" if folder is None else f"see {folder}"
            raise RolloutsFailed(
                f"evaluation at step {step}: too many episodes failed: {failures.total()} of {total} ({counts}), more "
                f"than trainer.max_failed_fraction={self._max_failed_fraction:g} allows. For all of them {rollouts}. "
                f"The first failure: {example}"
            )
        for kind, number in failures.items():
            failed = f"evaluation at step {step}: {number} of {total} episodes"
            if kind == FailureKind.DEADLINE:
                _log.warning(
                    "%s exceeded trainer.timeouts.rollout_s and count as reward 0. "
                    "Raise it, or lower generator.eval_sampling_params.max_generate_length.",
                    failed,
                )
            elif kind not in self._reported_failure_kinds:
                self._reported_failure_kinds.add(kind)
                example = describe_first_failure(kind, items, self._env_try_overrides)
                _log.warning("%s failed and count as reward 0. %s", failed, example)

    async def _run_prompt(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        group = await self._rollout(prompt, position)
        self.progress = self.progress[0] + 1, self.progress[1]
        return group

    def _dump(self, groups: Sequence[TrajectoryGroup], folder: Path) -> None:
        """Write one JSON line per trajectory, into one file per data source. Logs a warning if that fails.

        Contents of credential variables, which a tool may have printed, are redacted.
        """
        by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for group in groups:
            for item in group.trajectories:
                row = {
                    "uid": group.prompt.uid,
                    "sample": item.sample,
                    "prompt": group.prompt.messages,
                    "response": item.text,
                    "reward": item.reward,
                    "stop_reason": item.stop_reason,
                    "status": item.status,
                    "error": item.error,
                    "detail": item.detail,
                }
                by_source[self._source_names[group.prompt.data_source]].append(row)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for source, rows in by_source.items():
                text = "".join(json.dumps(row) + "\n" for row in redact(rows))
                with atomic_write(folder / f"{_file_name(source)}.jsonl", fsync=False) as file:
                    file.write(text.encode())
        except OSError as error:
            _log.warning("trainer.dump_eval_results: %s could not be written (%s).", folder, error)


def _source_names(sources: Sequence[str]) -> dict[str, str]:
    """Map each data source to its name in metrics and files, and warn if some share OTHER_SOURCES.

    The name is the data source itself, unless that is reserved or beyond the limits.
    """
    limit, names = MetricNameLimit(MAX_SOURCES, MAX_SOURCE_LENGTH), dict.fromkeys(sources, OTHER_SOURCES)
    for source in names:
        if limit.admits(source):
            name = source
            while name in (ALL_SOURCES, OTHER_SOURCES) or (name != source and name in names):
                name = f"source_{name}"
            names[source] = name
    others = [source for source, name in names.items() if name == OTHER_SOURCES]
    if others:
        _log.warning(
            "%d of %d values of `data_source` in data.val_data, such as %s, are evaluated together as %s: only %d "
            "values with at most %d characters get separate metrics. `data_source` should name a kind of task.",
            len(others),
            len(names),
            escape_control_chars(f"{others[0]:.{MAX_SOURCE_LENGTH}}"),
            OTHER_SOURCES,
            MAX_SOURCES,
            MAX_SOURCE_LENGTH,
        )
    return names


def _file_name(source: str) -> str:
    """Return a unique file name for a data source. Characters that are not allowed in it are percent-encoded."""
    name = "".join(c if c.isalnum() or c in "-_." else quote(c, safe="", errors="surrogatepass") for c in source)
    if len(name.encode()) <= _MAX_FILE_NAME_BYTES:
        return name
    digest = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{name.encode()[: _MAX_FILE_NAME_BYTES // 2].decode(errors='ignore')}%%{digest}"  # no other name has "%%"


def check_version(groups: Sequence[TrajectoryGroup], version: int) -> None:
    """Raise WeightSyncError if weights other than `version` sampled a token of a successful trajectory."""
    items = [item for group in groups for item in group.trajectories if item.status == OK]
    turns = [turn for item in items for turn in item.sampled_turns]
    versions = {turn.min_version for turn in turns} | {turn.max_version for turn in turns}
    if versions - {version}:
        raise WeightSyncError(
            f"the evaluation of weight version {version} has tokens that versions {sorted(versions)} sampled."
        )


def evaluation_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Compute the metrics of a data source from its groups, of which there is at least one.

    Prompts are the units of the standard errors, because samples of one prompt are not independent. There are none with
    a single prompt.

    Returns:
        avg_score, the mean over prompts of the mean reward of their samples; pass_at_<k>, the probability that at least
        one of k samples of a prompt passes (`pass_at_k`), for 1, 2, 4, ... and the number of samples; their standard
        errors, such as avg_score_stderr; and num_failed, the number of failed episodes. These have reward 0.
    """
    means, passes = list[float](), list[tuple[int, int]]()
    for group in groups:
        rewards = [item.reward if item.status == OK else 0.0 for item in group.trajectories]
        means.append(math.fsum(rewards) / len(rewards))
        passes.append((len(rewards), sum(reward >= MIN_PASS_REWARD for reward in rewards)))
    samples = min(count for count, _ in passes)
    powers = takewhile(lambda k: k < samples, (2**exponent for exponent in range(samples)))
    estimates = {"avg_score": means}
    estimates |= {f"pass_at_{k}": [pass_at_k(*counts, k) for counts in passes] for k in (*powers, samples)}
    metrics = {"num_failed": float(sum(item.status != OK for group in groups for item in group.trajectories))}
    for name, values in estimates.items():
        metrics[name] = math.fsum(values) / len(values)
        if len(values) > 1:
            metrics[f"{name}_stderr"] = stdev(values) / math.sqrt(len(values))
    return metrics


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples passes (arXiv:2107.03374).

    It is the fraction of all choices of k of the samples that contain one that passed.

    Args:
        samples: Number of samples, at least k.
        passed: Number of samples that passed.
        k: Number of samples in a choice.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)
