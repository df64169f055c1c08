"""Measure the driver's cost of a step: from rollouts to the shards of ranks, and many concurrent conversations.

    python scripts/benchmarks/control_plane.py [--against COMMIT] [--scored] [--json FILE]
    python scripts/benchmarks/control_plane.py --sizes 2048x4096 1024x16384 --conversations 16384x64 16384x1000
    python scripts/benchmarks/control_plane.py --sizes --conversations --parts 16384x512 131072x4096

Scripted engines in this process answer each request after 5 ms with new arrays; no model runs. `TrajectoryBuilder`,
batches, `ConversationGenerator`, `EngineClient` and `WorkerPool` are those of a run. Token ids are above 1,000, like
most real ones, because Python caches small integers and creates an object for each occurrence of a larger one. Every
measurement runs in a process of its own.

- batch: SEQUENCESxTOKENS, with 8 samples per prompt. Measures the bytes per token of rollouts, the peak of the
  process's own memory until GRPO's advantages are computed, and the peak through an update by 8 ranks, which are idle Ray actors.
  Also measures million tokens per CPU-second of `collate` and of the complete path from rollouts to ranks, and the
  longest stall of the event loop.
- scored, with `--scored`: the same, with old and reference log-probs of these ranks before the advantages. Also
  measures the memory of these log-probs, and million tokens per CPU-second of computing both.
- shards: the same rollouts to the shards of 8 ranks, without Ray and advantages. Measures million tokens per
  CPU-second, the median of seven repeats.
- parts, with `--parts SEQUENCESxRANKS`: a batch of short sequences, in 4 mini-batches, to the shards of that many
  ranks, without Ray. Measures CPU-seconds, which depend on sequences and ranks rather than on tokens.
- conversations: NUMBERxTOKENS, where each of 3 turns has TOKENS tokens, all at once over 256 engines. Measures turns
  per CPU-second of the driver (without the environments' processes), the driver's peak memory, and the longest stall of the
  event loop.

`--against` also measures another commit, in a worktree, alternating with this one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from measure import HERE, environment_info
from worktrees import trees

SIZES, CONVERSATIONS = ("2048x4096", "1024x16384"), ("16384x64", "16384x1000")
SAMPLES, RANKS, PROMPT_TOKENS, MINI_BATCHES = 8, 8, 128, 4
ENGINES, TURNS = 256, 3
ANSWER_S, BEYOND_SMALL = 0.005, 1000


# -- one measurement, in a process of its own ------------------------------------------------------------------------


def scored(sequences: int, tokens: int) -> dict[str, float]:
    return batch(sequences, tokens, scores=True)


def batch(sequences: int, tokens: int, scores: bool = False) -> dict[str, float]:
    from skyrl_train.cluster.ray_cluster import Cluster
    from skyrl_train.data import batch as module

    with_arrays = hasattr(module, "rewards_by_token")
    total = sequences * tokens
    with Cluster(num_actors=RANKS, preload=["torch"]) as cluster:
        learner = idle_learner(cluster, scores)
        asyncio.run(
            run_update(learner, rollouts(8, 2 * PROMPT_TOKENS, with_arrays), with_arrays)
        )  # starts threads, imports
        gc.collect()
        with PeakMemoryMonitor() as watch:
            groups = rollouts(sequences, tokens, with_arrays)
            held = own_memory() - watch.at_first
            watch.begin()
            spent = time.process_time()
            taken = asyncio.run(run_update(learner, groups, with_arrays, watch))
            spent = time.process_time() - spent
    of_scores = {
        "of these old and reference log-probs, bytes a token": taken["scored"] / total,
        "both scores, million tokens a CPU-s": total / max(taken["score"], 1e-9) / 1e6,
    }
    return {
        "rollouts, bytes a token": held / total,
        "at most until advantages, bytes a token": taken["until advantages"] / total,
        "at most in all, bytes a token": watch.most / total,
        **(of_scores if scores else {}),
        "collate, million tokens a CPU-s": total / taken["collate"] / 1e6,
        "rollouts to ranks, million tokens a CPU-s": total / spent / 1e6,
        "event loop stood still, ms": 1000 * taken["stood still"],
    }


def idle_learner(cluster: Any, scores: bool) -> Any:
    from idle_rank import IdleRank

    from skyrl_train.cluster.actors import spawn
    from skyrl_train.cluster.placement import reserve_pool
    from skyrl_train.learner.learner import BatchSizes, Learner, WorkerGroup

    # Beyond the machine's cores: they have nothing to do.
    slots = reserve_pool(
        cluster, count=1, actors_per_slot=RANKS, device="cpu", total_slots=1, deadline_s=60, key="ranks"
    )
    ranks = [
        spawn(
            cluster,
            f"{IdleRank.__module__}:{IdleRank.__name__}",
            {},
            pool=slots,
            index=0,
            name=f"rank {rank}",
            is_async=False,
            deadline_s=600.0,
        )
        for rank in range(RANKS)
    ]
    group = WorkerGroup(ranks)
    sizes = BatchSizes(1 << 30, max_tokens_per_microbatch=16_384)
    return Learner(group, group if scores else None, sizes, needs_old_logprobs=True if scores else None)


async def run_update(
    learner: Any, groups: list[Any], with_arrays: bool, watch: PeakMemoryMonitor | None = None
) -> dict[str, float]:
    """Run the driver's part of a step, from rollouts to an update.

    Returns:
        `until advantages`: peak memory until the advantages are computed, in bytes. `scored`: bytes of the learner's
        log-probs. `collate` and `score`: CPU-seconds. `stood still`: the longest stall of the event loop, in seconds.
    """
    from skyrl_train.algorithms.advantages import AdvantageCalculator, grpo
    from skyrl_train.data import batch as module
    from skyrl_train.metrics import Metrics

    step = AdvantageCalculator(partial(grpo, grpo_norm_by_std=True))
    in_thread = asyncio.to_thread if with_arrays else call_synchronously
    without: dict[str, Any] = (
        {"token_rewards": False} if "token_rewards" in signature(module.collate).parameters else {}
    )
    async with measure_loop_lag() as longest:
        begun = time.process_time()
        found = await in_thread(partial(module.collate, **without), groups)
        collated = time.process_time()
        groups.clear()  # a run has written them to disk by then
        found = await learner.add_logprobs_and_values(found)
        taken = {"collate": collated - begun, "score": time.process_time() - collated}
        log_probs = [one for one in (found.old_logprobs, found.ref_logprobs) if one is not None]
        taken["scored"] = sum(one.nbytes for one in log_probs)
        found = await in_thread(step, found, Metrics())
        taken["until advantages"] = watch.most if watch else 0
        if with_arrays:
            from skyrl_train.data.token_arrays import trim_memory

            found = found.with_tokens(token_rewards=None)
            await asyncio.to_thread(trim_memory)
        await learner.update(found)
    return taken | {"stood still": longest[0]}


@contextlib.asynccontextmanager
async def measure_loop_lag() -> AsyncIterator[list[float]]:
    """Measure the longest stall of the event loop; yield a list whose only item is that time in seconds."""
    longest = [0.0]

    async def tick() -> None:
        while True:
            due = time.perf_counter() + 0.002
            await asyncio.sleep(0.002)
            longest[0] = max(longest[0], time.perf_counter() - due)

    task = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    yield longest
    await asyncio.sleep(0.01)
    task.cancel()


async def call_synchronously(function: Any, *args: Any) -> Any:
    """Call a function directly, as older commits do."""
    return function(*args)


def rollouts(sequences: int, tokens: int, with_arrays: bool) -> list[Any]:
    """Return groups of single-turn trajectories that a TrajectoryBuilder has written."""
    from skyrl_train.data.messages import Prompt
    from skyrl_train.data.trajectory import Trajectory, TrajectoryGroup
    from skyrl_train.engines.base import Completion, VersionSpan
    from skyrl_train.rollouts.conversation import TrajectoryBuilder

    generator = np.random.default_rng(0)
    groups = []
    for index in range(sequences // SAMPLES):
        prompt = Prompt(str(index), [], "none")
        items = []
        for sample in range(SAMPLES):
            ids: Any = generator.integers(0, 150_000, tokens - PROMPT_TOKENS, dtype=np.int32)
            logprobs: Any = generator.standard_normal(tokens - PROMPT_TOKENS, dtype=np.float32)
            if not with_arrays:
                ids, logprobs = ids.tolist(), logprobs.tolist()
            spans = [VersionSpan(0, len(ids), 0)]
            item: Any = Trajectory(prompt, sample, [], [], [], [], [], 0.0, "abort", 1.0)  # type: ignore[arg-type]
            ledger = TrajectoryBuilder(item)
            ledger.start_episode(list(range(1000, 1000 + PROMPT_TOKENS)))
            ledger.append_sample(Completion(str(sample), ids, logprobs, logprobs, "stop", spans))
            item.reward = float(sample % 2)
            items.append(item)
        groups.append(TrajectoryGroup(prompt, items))
    return groups


def shards(sequences: int, tokens: int) -> dict[str, float]:
    from skyrl_train.data import batch as module
    from skyrl_train.learner.batch_sharding import MicroBatchLimits, should_share_prompts, split_into_micro_batches

    with_arrays = hasattr(module, "rewards_by_token")
    groups = rollouts(sequences, tokens, with_arrays)
    without: dict[str, Any] = (
        {"token_rewards": False} if "token_rewards" in signature(module.collate).parameters else {}
    )
    limits = MicroBatchLimits(None, 16_384, 6 * 1024, None)
    with_store = find_spec("skyrl_train.learner.batch_sharding") is not None
    stored_shards: Any = import_module("skyrl_train.learner.batch_sharding") if with_store else None
    times = []
    for _ in range(7):
        start = time.process_time()
        found = module.collate(groups, **without)
        sent = found.select_update_inputs("policy") if hasattr(found, "select_update_inputs") else found
        if stored_shards is not None:
            divided = stored_shards.Shards(sent, [range(len(sent))], RANKS, limits)
            divided.updates(lambda part: part, divided.mini_batches[0], sent)
        else:
            for rows in split_into_micro_batches(sent, RANKS, limits, should_share_prompts(sent, limits)):
                for one in rows:
                    sent.select(one)
        times.append(time.process_time() - start)
    return {"rollouts to shards, million tokens a CPU-s": sequences * tokens / statistics.median(times) / 1e6}


def parts(sequences: int, ranks: int) -> dict[str, float]:
    from skyrl_train.data.batch import collate
    from skyrl_train.learner.batch_sharding import MicroBatchLimits, ShardedBatch

    found = collate(rollouts(sequences, PROMPT_TOKENS + 16, True), token_rewards=False).select_update_inputs("policy")
    each = sequences // MINI_BATCHES
    rows = [range(begin, begin + each) for begin in range(0, sequences, each)]
    start = time.process_time()
    divided = ShardedBatch(found, rows, ranks, MicroBatchLimits(None, 16_384, 6 * 1024, None))
    for one in divided.mini_batches:
        divided.update_calls(lambda part: part, one, found.select(one.rows, copy=False))
    return {"into parts, CPU-s": time.process_time() - start}


def conversations(number: int, tokens: int) -> dict[str, float]:
    from skyrl_train.data.messages import Prompt
    from skyrl_train.data.trajectory import Trajectory
    from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams, VersionSpan
    from skyrl_train.engines.client import EngineClient
    from skyrl_train.environments.pool import WorkerPool
    from skyrl_train.rollouts.conversation import ConversationGenerator, RolloutSettings
    from skyrl_train.testing.scripted_engine import ScriptedEngine

    tokenizer = bytes_as_large_ids()
    ids = np.array([*tokenizer.encode("a" * (tokens - 1), add_special_tokens=False), tokenizer.eos_token_id], np.int32)
    logprobs, with_arrays = np.full(tokens, -1.0, np.float32), hasattr(Trajectory, "empty")
    assert ids.min() >= BEYOND_SMALL and len(ids) == tokens

    def copy_values(values: Any) -> Any:
        return values.copy() if with_arrays else values.tolist()

    class Answers(ScriptedEngine):
        async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
            await asyncio.sleep(ANSWER_S)
            spans = [VersionSpan(0, tokens, 0)]
            return [
                Completion(
                    one.request_id, copy_values(ids), copy_values(logprobs), copy_values(logprobs), "stop", spans
                )
                for one in requests
            ]

    settings = RolloutSettings(SamplingParams(max_tokens=tokens + 1), SAMPLES, 0, 1 << 20, 3600.0, max_turns=TURNS)

    async def run() -> tuple[float, float]:
        engines = [Answers(name=f"engine {index}") for index in range(ENGINES)]
        client = EngineClient(engines, deadline_s=3600.0)
        async with WorkerPool({}, 2, 3600.0) as pool:
            generator = ConversationGenerator(client, pool, tokenizer, settings)
            row = {"reward_spec": {"method": "rule", "ground_truth": "5"}, "max_turns": TURNS}
            messages = [{"role": "user", "content": "2 + 3 = ?"}]
            prompts = [
                Prompt(str(index), messages, "gsm8k_multi_turn", dict(row)) for index in range(number // SAMPLES)
            ]
            await generator.rollout(prompts[0], 0)  # starts processes
            reset_peak()
            async with measure_loop_lag() as longest:
                start = time.process_time()
                found = await asyncio.gather(*(generator.rollout(one, at) for at, one in enumerate(prompts)))
                spent = time.process_time() - start
        items = [item for group in found for item in group.trajectories]
        failed = {item.error for item in items if item.error}
        assert not failed and all(len(item.turns) == TURNS for item in items), failed
        return number * TURNS / spent, longest[0]

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):  # as a run does since then
            from skyrl_train.experiment.driver import relaxed_gc

            stack.enter_context(relaxed_gc())
        turns, stood_still = asyncio.run(run())
    return {
        "turns a CPU-s": turns,
        "driver's memory at its peak, GiB": peak() / 2**30,
        "event loop stood still, ms": 1000 * stood_still,
    }


def bytes_as_large_ids() -> Any:
    """Return a byte tokenizer whose token ids are too large for Python's cache of integers."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from skyrl_train.testing.tiny_models import byte_tokenizer

    small = byte_tokenizer()
    tokenizer_json = json.loads(small.backend_tokenizer.to_str())
    tokenizer_json["model"]["vocab"] = {
        token: index + BEYOND_SMALL for token, index in tokenizer_json["model"]["vocab"].items()
    }
    for added in tokenizer_json["added_tokens"]:
        added["id"] += BEYOND_SMALL
    names = {"eos_token": small.eos_token, "pad_token": small.pad_token, "clean_up_tokenization_spaces": False}
    large = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer_json)), **names)
    large.chat_template = small.chat_template
    return large


class PeakMemoryMonitor:
    """A monitor that reads this process's anonymous memory every 2 ms; memory shared with Ray does not count."""

    def __init__(self) -> None:
        self.at_first, self.most = own_memory(), 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def begin(self) -> None:
        """Reset the peak."""
        self.most = 0

    def __enter__(self) -> PeakMemoryMonitor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, own_memory() - self.at_first)


def own_memory() -> int:
    return status("RssAnon")


def peak() -> int:
    return status("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status(name: str) -> int:
    """Return a size in /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


# -- all of them -----------------------------------------------------------------------------------------------------


def measured(tree: Path, kind: str, size: str) -> dict[str, float]:
    path = os.pathsep.join([str(tree), str(HERE)])
    command = [sys.executable, __file__, "--only", kind, size]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{kind} {size} in {tree}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=SIZES, metavar="SEQUENCESxTOKENS")
    parser.add_argument("--conversations", nargs="*", default=CONVERSATIONS, metavar="NUMBERxTOKENS")
    parser.add_argument("--parts", nargs="*", default=(), metavar="SEQUENCESxRANKS")
    parser.add_argument("--scored", action="store_true", help="also measure with old and reference log-probs")
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        kind, size = options.only
        measures = {"batch": batch, "scored": scored, "shards": shards, "parts": parts, "conversations": conversations}
        print(json.dumps(measures[kind](*map(int, size.split("x")))))
        return
    print(json.dumps(environment_info()))
    rows: list[dict[str, Any]] = []
    with trees(options.against) as found:
        sizes_of = {
            "batch": options.sizes,
            "scored": options.sizes if options.scored else (),
            "shards": options.sizes,
            "parts": options.parts,
            "conversations": options.conversations,
        }
        for kind, sizes in sizes_of.items():
            for size in sizes:
                for name, tree in found.items():
                    rows.append({"kind": kind, "size": size, "commit": name, **measured(tree, kind, size)})
                    print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps({"about": environment_info(), "rows": rows}, indent=1))


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a row per result and a column per commit."""
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    lines = [f"| size | what | {' | '.join(commits)} |", "| --- " * (2 + len(commits)) + "|"]
    for kind, size in dict.fromkeys((row["kind"], row["size"]) for row in rows):
        these = {row["commit"]: row for row in rows if (row["kind"], row["size"]) == (kind, size)}
        for what in next(iter(these.values())):
            if what not in ("kind", "size", "commit"):
                values = (f"{these[commit][what]:,.4g}" for commit in commits)
                lines.append(f"| {kind} {size} | {what} | {' | '.join(values)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
