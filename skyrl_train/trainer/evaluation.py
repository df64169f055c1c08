"""Evaluation: mean reward and pass@n of every data source."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from skyrl_train.aio import gather_all
from skyrl_train.atomic_files import atomic_write
from skyrl_train.config.redaction import redact
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import MIN_PASS_REWARD, OK, TrajectoryGroup
from skyrl_train.errors import RolloutsFailed, WeightSyncError
from skyrl_train.metrics import MetricNameLimit
from skyrl_train.rollouts.conversation import DEADLINE_KIND
from skyrl_train.terminal import escape_control_chars

_log = logging.getLogger(__name__)
ALL_SOURCES = "all"
"""Stands for all data sources together in metric names."""
OTHER_SOURCES = "other_sources"
"""Stands for the data sources beyond the limits below."""
MAX_SOURCES, MAX_SOURCE_LENGTH = 256, 128
"""Data sources with metrics and a dump of their own, and characters of one: rows may have any number of them."""
_MAX_FILE_NAME_BYTES = 200
"""Bytes; file systems allow 255."""


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
    ):
        """`after` is called once all rollouts have ended: evaluation leaves no trace in what is measured next.

        `one_version`: that the weights of the step evaluated, and no others, sampled every token is checked.
        """
        self._rollout = rollout
        self._prompts = prompts
        self._source_names = _source_names([prompt.data_source for prompt in prompts])
        self._eval_batch_size = eval_batch_size
        self._dump_folder = dump_folder
        self._max_failed_fraction = max_failed_fraction
        self._on_rollouts_done = on_rollouts_done
        self._require_single_version = require_single_version
        self.progress = 0, len(prompts)
        """How many prompts of the evaluation under way are done, and how many there are."""

    async def run(self, step: int) -> dict[str, float]:
        """Returns eval/<source>/avg_score, pass_at_<n> and num_failed; with several sources also eval/all/...

        A data source of the name `all` is eval/source_all; those beyond MAX_SOURCES, and those with longer names than
        MAX_SOURCE_LENGTH, are together eval/other_sources.

        A failed episode counts as reward 0: an evaluation has no mask, and leaving it out would flatter the model.
        Raises RolloutsFailed if more than `max_failed_fraction` of the episodes failed: the numbers would then say
        little about the model.
        """
        groups: list[TrajectoryGroup] = []
        self.progress = 0, len(self._prompts)
        for start in range(0, len(self._prompts), self._eval_batch_size):
            batch = self._prompts[start : start + self._eval_batch_size]
            groups += await gather_all(self._counted(prompt, start + i) for i, prompt in enumerate(batch))
        if self._on_rollouts_done is not None:
            await self._on_rollouts_done()
        if self._require_single_version:
            check_version(groups, step)
        if self._dump_folder is not None:
            await asyncio.to_thread(self._dump, groups, self._dump_folder / f"global_step_{step}_evals")
        failed = Counter(item.error for group in groups for item in group.trajectories if item.status != OK)
        total = sum(len(group.trajectories) for group in groups)
        if failed[DEADLINE_KIND]:
            _log.warning(
                "evaluation at step %d: %d of %d episodes were cut after trainer.timeouts.rollout_s and count as "
                "reward 0. Raise it, or lower eval_sampling_params.max_generate_length.",
                step,
                failed[DEADLINE_KIND],
                total,
            )
        if failed.total() > self._max_failed_fraction * total:
            raise RolloutsFailed(f"evaluation at step {step}: too many episodes failed: {dict(failed)}.")
        by_source: dict[str, list[TrajectoryGroup]] = defaultdict(list)
        for group in groups:
            by_source[self._source_names[group.prompt.data_source]].append(group)
        found = {source: evaluation_metrics(of_source) for source, of_source in by_source.items()}
        if len(by_source) > 1:
            found[ALL_SOURCES] = evaluation_metrics(groups)
        return {
            f"eval/{source}/{name}": value for source, of_source in found.items() for name, value in of_source.items()
        }

    async def _counted(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        group = await self._rollout(prompt, position)
        self.progress = self.progress[0] + 1, self.progress[1]
        return group

    def _dump(self, groups: Sequence[TrajectoryGroup], folder: Path) -> None:
        """Write one JSON line per trajectory, into one file per data source. What fails is a warning, not the run.

        Without the contents of credential variables, which a tool may have shown.
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
    """Return what stands for each data source in names of metrics and files, and warn if some share OTHER_SOURCES.

    That is the source itself, unless it is reserved or beyond the limits.
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
            "%d of %d values of `data_source` in data.val_data, such as %s, are evaluated together as %s: at most %d "
            "values, of at most %d characters, have metrics of their own. `data_source` should name a kind of task.",
            len(others),
            len(names),
            escape_control_chars(f"{others[0]:.{MAX_SOURCE_LENGTH}}"),
            OTHER_SOURCES,
            MAX_SOURCES,
            MAX_SOURCE_LENGTH,
        )
    return names


def _file_name(source: str) -> str:
    """Return a file name that no other data source has: characters that files may not have are percent-encoded."""
    name = "".join(c if c.isalnum() or c in "-_." else quote(c, safe="", errors="surrogatepass") for c in source)
    if len(name.encode()) <= _MAX_FILE_NAME_BYTES:
        return name
    digest = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{name.encode()[: _MAX_FILE_NAME_BYTES // 2].decode(errors='ignore')}%%{digest}"  # no other name has "%%"


def check_version(groups: Sequence[TrajectoryGroup], version: int) -> None:
    """Raises WeightSyncError if other weights sampled a token."""
    items = [item for group in groups for item in group.trajectories if item.status == OK]
    turns = [turn for item in items for turn in item.sampled_turns]
    found = {turn.min_version for turn in turns} | {turn.max_version for turn in turns}
    if found - {version}:
        raise WeightSyncError(f"the evaluation of version {version} has tokens of versions {sorted(found)}.")


def evaluation_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """avg_score (mean reward of all samples), pass_at_<n> (share of prompts with at least one pass) and num_failed."""
    trajectories = [item for group in groups for item in group.trajectories]
    rewards = [item.reward if item.status == OK else 0.0 for item in trajectories]
    passed = [
        any(item.status == OK and item.reward >= MIN_PASS_REWARD for item in group.trajectories) for group in groups
    ]
    samples = max(len(group.trajectories) for group in groups)
    return {
        "avg_score": sum(rewards) / len(rewards),
        f"pass_at_{samples}": sum(passed) / len(passed),
        "num_failed": float(sum(item.status != OK for item in trajectories)),
    }
