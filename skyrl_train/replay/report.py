"""A replay's answer as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_train.messages import visible
from skyrl_train.replay.answer import Answer, means

SHOWN = {
    "advantages/mean": "advantage, mean over tokens",
    "advantages/std": "  standard deviation",
    "advantages/abs_mean": "  absolute, mean",
    "advantages/abs_max": "  largest",
    "advantages/zero_fraction": "  share of tokens with 0",
    "groups/without_push": "groups that teach nothing, share",
    "tokens/trained": "tokens that count, a step",
    "tokens/masked": "  masked by corrections, share",
    "importance_weights/mean": "importance weight, mean",
    "clipped/first_pass": "clipped in the first pass, share",
    "clipped/engine_gap": "  had the policy moved from the engine's",
    "pushes/up": "push up, an optimizer step",
    "pushes/down": "push down",
    "pushes/effective_tokens": "effective share of tokens",
    "pushes/effective_samples": "effective share of samples",
    "pushes/on_longest_quarter": "push on the longest quarter, share",
}
"""Number of an update -> what the table calls it. Others have their own names, below these."""
_WIDTH = 42


def lines(answer: Answer) -> Iterator[str]:
    """The whole of it; nothing in a line is obeyed by a terminal."""
    yield from map(visible, _lines(answer))


def _lines(answer: Answer) -> Iterator[str]:
    steps = answer.steps
    samples = sum(len(table) for table in answer.samples)
    which = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    yield f"{answer.run}: {which}, {samples:,} samples"
    yield from _own(answer)
    if answer.rewards is not None:
        yield ""
        yield from _rewards(str(answer.reward), answer.rewards.numbers())
    yield ""
    yield from _update(answer)
    for note in answer.notes.values():
        yield ""
        yield f"note: {note}"


def _own(answer: Answer) -> Iterator[str]:
    """Whether the run's own numbers came out again."""
    if answer.tokens:
        wrong = f"{answer.differing_tokens:,} DIFFER" if answer.differing_tokens else "all as in the run, bit for bit"
        yield f"own advantages of {answer.tokens:,} tokens: {wrong}"
    if answer.recorded:
        names = ", ".join(f"{name} in {steps}" for name, steps in answer.differing_metrics.items())
        wrong = f"DIFFERENT: {names}" if names else "all as in the run"
        yield f"own numbers in metrics.jsonl, {answer.recorded:,}: {wrong}"


def _rewards(reward: str, found: Mapping[str, Any]) -> Iterator[str]:
    yield _row("rewards", "in the run", "replayed")
    for name in ("mean", "std", "min", "max"):
        yield _row(f"  {name}", *(_number(found[name][side]) for side in ("old", "new")))
    yield f"scored with {reward}: {found['samples']:,} samples, {found['changed']:,} with another reward"
    if found["changed"]:
        yield f"  largest change {_number(found['largest_change'])}, correlation {_number(found['correlation'])}"
    passes, groups = found["passes"], found["groups"]
    yield _row("  passes or fails (run \\ now)", "pass", "fail")
    for before in ("pass", "fail"):
        yield _row(f"    {before}", *(f"{passes[f'{before}_to_{after}']:,}" for after in ("pass", "fail")))
    yield (
        f"  groups whose rewards vary: {groups['both_vary'] + groups['variance_vanished']:,} in the run, "
        f"{groups['both_vary'] + groups['variance_appeared']:,} now; {groups['variance_vanished']:,} vanished, "
        f"{groups['variance_appeared']:,} appeared"
    )
    if found["failed_in_run"]:
        yield f"  not scored, as they had failed in the run: {found['failed_in_run']:,}"
    if found["failures"]:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in found["failures"].items())
        yield f"  could not be scored: {sum(found['failures'].values()):,} ({kinds})"
    if found["environment_differs"]:
        yield f"  the environment said something else than in the run: {found['environment_differs']:,} episodes"


def _update(answer: Answer) -> Iterator[str]:
    old, new = means(answer.old), means(answer.new)
    yield _row("update, mean over steps", "in the run", *(["replayed"] if new else []))
    if answer.own != answer.changed:
        yield f"  {answer.own} -> {answer.changed}"
    else:
        yield f"  {answer.own}"
    others = [name for name in {**old, **new} if name not in SHOWN]
    for name in [*SHOWN, *sorted(others)]:
        if name in old or name in new:
            sides = [old, new] if new else [old]
            yield _row(f"  {SHOWN.get(name, name)}", *(_number(side.get(name)) for side in sides))
    if answer.cosines:
        yield f"  direction of both pushes, cosine: {_number(sum(answer.cosines) / len(answer.cosines))}"


def _row(name: str, *cells: str) -> str:
    return f"{name:<{_WIDTH}}" + "".join(f"{cell:>14}" for cell in cells)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.5g}"
