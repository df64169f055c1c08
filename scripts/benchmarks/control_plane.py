"""Measure the driver's cost of a step: from rollouts to the shards of ranks, and many concurrent conversations.

    python scripts/benchmarks/control_plane.py [--against COMMIT] [--scored] [--json FILE]
    python scripts/benchmarks/control_plane.py --sizes 2048x4096 1024x16384 --conversations 16384x64 16384x1000
    python scripts/benchmarks/control_plane.py --sizes --conversations --parts 16384x512 131072x4096

Scripted engines in this process answer each request after 5 ms with new arrays; no model runs. `TrajectoryBuilder`,
batches, `ConversationGenerator`, `EngineClient` and `WorkerPool` are those of a run. Token ids are above 1,000, like
most real ones, because Python caches small integers and creates an object for each occurrence of a larger one. Every
measurement runs in a separate process.

- batch: SEQUENCESxTOKENS, with 8 samples per prompt. Measures the bytes per token of rollouts, the peak of the
  process's own memory until GRPO's advantages are computed, and the peak through an update by 8 ranks, which are idle
  Ray actors. Also measures million tokens per CPU-second of `collate` and of the complete path from rollouts to ranks,
  and the longest stall of the event loop.
- scored, with `--scored`: the same, with old and reference log-probs of these ranks before the advantages. Also
  measures the memory of these log-probs, and million tokens per CPU-second of computing both.
- shards: the same rollouts to the shards of 8 ranks, without Ray and advantages. Measures million tokens per
  CPU-second, the median of seven repeats.
- parts, with `--parts SEQUENCESxRANKS`: a batch of short sequences, in 4 mini-batches, to the shards of that many
  ranks, without Ray. Measures CPU-seconds, which depend on sequences and ranks rather than on tokens.
- conversations: NUMBERxTOKENS, where each of 3 turns has TOKENS tokens, all at once over 256 engines. Measures turns
  per CPU-second of the driver (without the environments' processes), the driver's peak memory, and the longest
  stall of the event loop.
- actors: the same over 4 engines in Ray actors, so that the driver's part of every call to an actor counts, too.

`--against` also measures another commit, in a worktree, alternating with this one. The commit must have the names and
signatures that this script uses.
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
from pathlib import Path
from typing import Any

import numpy as np
from fixed_answer_engine import FixedAnswerEngine
from measure import HERE, environment_info
from worktrees import trees

SIZES, CONVERSATIONS = ("2048x4096", "1024x16384"), ("16384x64", "16384x1000")
WITH_ACTORS = ("16384x64",)
SAMPLES, RANKS, PROMPT_TOKENS, MINI_BATCHES = 8, 8, 128, 4
ENGINES, TURNS = 256, 3
ACTORS = 4
MIN_TOKEN_ID = 1000


# -- one measurement, in a separate process --------------------------------------------------------------------------


def scored(sequences: int, tokens: int) -> dict[str, float]:
    return batch(sequences, tokens, scores=True)


def batch(sequences: int, tokens: int, scores: bool = False) -> dict[str, float]:
    from skyrl_train.cluster.ray_cluster import Cluster

    total = sequences * tokens
    with Cluster(num_actors=RANKS, preload=["torch"]) as cluster:
        learner = idle_learner(cluster, scores)
        asyncio.run(run_update(learner, rollouts(8, 2 * PROMPT_TOKENS)))  # starts threads, imports modules
        gc.collect()
        with PeakMemoryMonitor() as monitor:
            groups = rollouts(sequences, tokens)
            rollout_bytes = own_memory() - monitor.initial
            monitor.reset()
            start = time.process_time()
            result = asyncio.run(run_update(learner, groups, monitor))
            cpu_s = time.process_time() - start
    score_figures = {
        "old and reference log-probs, bytes per token": result["logprob_bytes"] / total,
        "computing old and reference log-probs, million tokens per CPU-s": total / max(result["score_s"], 1e-9) / 1e6,
    }
    return {
        "rollouts, bytes per token": rollout_bytes / total,
        "peak until advantages, bytes per token": result["advantage_peak_bytes"] / total,
        "peak, bytes per token": monitor.peak / total,
        **(score_figures if scores else {}),
        "collate, million tokens per CPU-s": total / result["collate_s"] / 1e6,
        "rollouts to ranks, million tokens per CPU-s": total / cpu_s / 1e6,
        "longest stall of the event loop, ms": 1000 * result["stall_s"],
    }


def idle_learner(cluster: Any, scores: bool) -> Any:
    from idle_rank import IdleRank

    from skyrl_train.cluster.actors import spawn
    from skyrl_train.cluster.placement import reserve_pool
    from skyrl_train.learner.learner import BatchSizes, Learner, WorkerGroup

    # More ranks than cores are fine, because the ranks are idle.
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


async def run_update(learner: Any, groups: list[Any], monitor: PeakMemoryMonitor | None = None) -> dict[str, float]:
    """Run the driver's part of a step, from rollouts to an update. Clear `groups`.

    Returns:
        `advantage_peak_bytes`: peak memory until the advantages are computed. `logprob_bytes`: size of the learner's
        log-probs. `collate_s` and `score_s`: CPU-seconds. `stall_s`: the longest stall of the event loop.
    """
    from skyrl_train.algorithms.advantages import AdvantageCalculator, grpo
    from skyrl_train.data.batch import collate
    from skyrl_train.data.token_arrays import trim_memory
    from skyrl_train.metrics import Metrics

    compute_advantages = AdvantageCalculator(partial(grpo, grpo_norm_by_std=True))
    async with measure_loop_lag() as longest:
        start = time.process_time()
        batch = await asyncio.to_thread(partial(collate, token_rewards=False), groups)
        collated = time.process_time()
        groups.clear()  # a run has written them to disk by then
        batch = await learner.add_logprobs_and_values(batch)
        result = {"collate_s": collated - start, "score_s": time.process_time() - collated}
        logprobs = [tensor for tensor in (batch.old_logprobs, batch.ref_logprobs) if tensor is not None]
        result["logprob_bytes"] = sum(tensor.nbytes for tensor in logprobs)
        batch = await asyncio.to_thread(compute_advantages, batch, Metrics())
        result["advantage_peak_bytes"] = monitor.peak if monitor else 0
        batch = batch.with_tokens(token_rewards=None)
        await asyncio.to_thread(trim_memory)
        await learner.update(batch)
    return result | {"stall_s": longest[0]}


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


def rollouts(sequences: int, tokens: int) -> list[Any]:
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
            spans = [VersionSpan(0, len(ids), 0)]
            item: Any = Trajectory(prompt, sample, [], [], [], [], [], 0.0, "abort", 1.0)  # type: ignore[arg-type]
            builder = TrajectoryBuilder(item)
            builder.start_episode(list(range(1000, 1000 + PROMPT_TOKENS)))
            builder.append_sample(Completion(str(sample), ids, logprobs, logprobs, "stop", spans))
            item.reward = float(sample % 2)
            items.append(item)
        groups.append(TrajectoryGroup(prompt, items))
    return groups


def shards(sequences: int, tokens: int) -> dict[str, float]:
    from skyrl_train.data.batch import collate
    from skyrl_train.learner.batch_sharding import MicroBatchLimits, ShardedBatch

    groups = rollouts(sequences, tokens)
    limits = MicroBatchLimits(None, 16_384, 6 * 1024, None)
    times = []
    for _ in range(7):
        start = time.process_time()
        batch = collate(groups, token_rewards=False).select_update_inputs("policy")
        sharded = ShardedBatch(batch, [range(len(batch))], RANKS, limits)
        sharded.update_calls(lambda shard: shard, sharded.mini_batches[0], batch)
        times.append(time.process_time() - start)
    return {"rollouts to shards, million tokens per CPU-s": sequences * tokens / statistics.median(times) / 1e6}


def parts(sequences: int, ranks: int) -> dict[str, float]:
    from skyrl_train.data.batch import collate
    from skyrl_train.learner.batch_sharding import MicroBatchLimits, ShardedBatch

    batch = collate(rollouts(sequences, PROMPT_TOKENS + 16), token_rewards=False).select_update_inputs("policy")
    size = sequences // MINI_BATCHES
    rows = [range(begin, begin + size) for begin in range(0, sequences, size)]
    start = time.process_time()
    sharded = ShardedBatch(batch, rows, ranks, MicroBatchLimits(None, 16_384, 6 * 1024, None))
    for mini_batch in sharded.mini_batches:
        sharded.update_calls(lambda shard: shard, mini_batch, batch.select(mini_batch.rows, copy=False))
    return {"batch to shards, CPU-s": time.process_time() - start}


def conversations(number: int, tokens: int) -> dict[str, float]:
    answer = fixed_answer(tokens)
    return converse([FixedAnswerEngine(*answer, name=f"engine {index}") for index in range(ENGINES)], number, tokens)


def actors(number: int, tokens: int) -> dict[str, float]:
    from skyrl_train.cluster.actors import spawn
    from skyrl_train.cluster.placement import reserve_pool
    from skyrl_train.cluster.ray_cluster import Cluster

    ids, logprobs = fixed_answer(tokens)
    with Cluster(num_actors=ACTORS, preload=["skyrl_train.testing.scripted_engine"]) as cluster:
        slots = reserve_pool(
            cluster, count=1, actors_per_slot=ACTORS, device="cpu", total_slots=1, deadline_s=60, key="engines"
        )
        target = f"{FixedAnswerEngine.__module__}:{FixedAnswerEngine.__name__}"
        engines = [
            spawn(
                cluster,
                target,
                {"ids": ids, "logprobs": logprobs, "name": f"engine {index}"},
                pool=slots,
                index=0,
                name=f"engine {index}",
                is_async=True,
                deadline_s=3600.0,
            )
            for index in range(ACTORS)
        ]
        return converse(engines, number, tokens)


def fixed_answer(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids [tokens] of every answer, and log-probs for them."""
    tokenizer = bytes_as_large_ids()
    ids = np.array([*tokenizer.encode("a" * (tokens - 1), add_special_tokens=False), tokenizer.eos_token_id], np.int32)
    assert ids.min() >= MIN_TOKEN_ID and len(ids) == tokens
    return ids, np.full(tokens, -1.0, np.float32)


def converse(engines: Sequence[Any], number: int, tokens: int) -> dict[str, float]:
    from skyrl_train.data.messages import Prompt
    from skyrl_train.engines.base import SamplingParams
    from skyrl_train.engines.client import EngineClient
    from skyrl_train.environments.pool import WorkerPool
    from skyrl_train.experiment.driver import relaxed_gc
    from skyrl_train.rollouts.conversation import ConversationGenerator, RolloutSettings

    settings = RolloutSettings(SamplingParams(max_tokens=tokens + 1), SAMPLES, 0, 1 << 20, 3600.0, max_turns=TURNS)

    async def run() -> tuple[float, float]:
        client = EngineClient(engines, deadline_s=3600.0)
        async with WorkerPool({}, 2, 3600.0) as pool:
            generator = ConversationGenerator(client, pool, bytes_as_large_ids(), settings)
            row = {"reward_spec": {"method": "rule", "ground_truth": "5"}, "max_turns": TURNS}
            messages = [{"role": "user", "content": "2 + 3 = ?"}]
            prompts = [
                Prompt(str(index), messages, "gsm8k_multi_turn", dict(row)) for index in range(number // SAMPLES)
            ]
            await generator.rollout(prompts[0], 0)  # starts processes
            reset_peak()
            async with measure_loop_lag() as longest:
                start = time.process_time()
                groups = await asyncio.gather(
                    *(generator.rollout(prompt, index) for index, prompt in enumerate(prompts))
                )
                cpu_s = time.process_time() - start
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        errors = {trajectory.error for trajectory in trajectories if trajectory.error}
        assert not errors and all(len(trajectory.turns) == TURNS for trajectory in trajectories), errors
        return number * TURNS / cpu_s, longest[0]

    with relaxed_gc():
        turns_per_s, stall_s = asyncio.run(run())
    return {
        "turns per CPU-s": turns_per_s,
        "peak memory of the driver, GiB": peak() / 2**30,
        "longest stall of the event loop, ms": 1000 * stall_s,
    }


def bytes_as_large_ids() -> Any:
    """Return a byte tokenizer whose token ids are too large for Python's cache of integers."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from skyrl_train.testing.tiny_models import byte_tokenizer

    small = byte_tokenizer()
    tokenizer_json = json.loads(small.backend_tokenizer.to_str())
    tokenizer_json["model"]["vocab"] = {
        token: index + MIN_TOKEN_ID for token, index in tokenizer_json["model"]["vocab"].items()
    }
    for added in tokenizer_json["added_tokens"]:
        added["id"] += MIN_TOKEN_ID
    names = {"eos_token": small.eos_token, "pad_token": small.pad_token, "clean_up_tokenization_spaces": False}
    large = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer_json)), **names)
    large.chat_template = small.chat_template
    return large


class PeakMemoryMonitor:
    """A monitor that reads this process's anonymous memory every 2 ms; memory shared with Ray does not count."""

    def __init__(self) -> None:
        self.initial = own_memory()
        """Memory at the start in bytes."""
        self.peak = 0
        """Peak in bytes above `initial`."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def reset(self) -> None:
        """Reset the peak."""
        self.peak = 0

    def __enter__(self) -> PeakMemoryMonitor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._ended.wait(0.002):
            self.peak = max(self.peak, own_memory() - self.initial)


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


# -- all measurements ------------------------------------------------------------------------------------------------


def measure(tree: Path, kind: str, size: str) -> dict[str, float]:
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
    parser.add_argument("--actors", nargs="*", default=WITH_ACTORS, metavar="NUMBERxTOKENS")
    parser.add_argument("--parts", nargs="*", default=(), metavar="SEQUENCESxRANKS")
    parser.add_argument("--scored", action="store_true", help="also measure with old and reference log-probs")
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        kind, size = options.only
        measures = {
            "batch": batch,
            "scored": scored,
            "shards": shards,
            "parts": parts,
            "conversations": conversations,
            "actors": actors,
        }
        print(json.dumps(measures[kind](*map(int, size.split("x")))))
        return
    print(json.dumps(environment_info()))
    rows: list[dict[str, Any]] = []
    with trees(options.against) as folders:
        sizes_by_kind = {
            "batch": options.sizes,
            "scored": options.sizes if options.scored else (),
            "shards": options.sizes,
            "parts": options.parts,
            "conversations": options.conversations,
            "actors": options.actors,
        }
        for kind, sizes in sizes_by_kind.items():
            for size in sizes:
                for name, tree in folders.items():
                    rows.append({"kind": kind, "size": size, "commit": name, **measure(tree, kind, size)})
                    print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps({"about": environment_info(), "rows": rows}, indent=1))


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a row per result and a column per commit."""
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    lines = [f"| size | figure | {' | '.join(commits)} |", "| --- " * (2 + len(commits)) + "|"]
    for kind, size in dict.fromkeys((row["kind"], row["size"]) for row in rows):
        by_commit = {row["commit"]: row for row in rows if (row["kind"], row["size"]) == (kind, size)}
        for figure in next(iter(by_commit.values())):
            if figure not in ("kind", "size", "commit"):
                values = (f"{by_commit[commit][figure]:,.4g}" for commit in commits)
                lines.append(f"| {kind} {size} | {figure} | {' | '.join(values)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
