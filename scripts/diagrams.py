"""Draw the diagrams of the documentation: `python scripts/diagrams.py` writes docs/images/*.svg.

The colors are readable on light and on dark backgrounds, because a picture does not know which theme the page has.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH = 880
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
LINE, LABEL, DARK = "#8a94a3", "#7f8997", "#16202e"
DRIVER, ENGINE, TRAINER, OTHER, IDLE = "#a5b4fc", "#7dd3c0", "#fdba74", "#cbd5e1", "#94a3b833"


def main() -> None:
    for name, picture in draw_all().items():
        (IMAGES / name).write_text(picture, encoding="utf-8")


def draw_all() -> dict[str, str]:
    """Return the SVG of each diagram by its file name in docs/images."""
    return {
        "processes.svg": _picture(340, _processes(), "Processes of a run"),
        "async_schedule.svg": _picture(320, _async_schedule(), "Synchronous and asynchronous schedule"),
        "weight_sync.svg": _picture(478, _weight_sync(), "Steps of a weight sync"),
    }


def _picture(height: int, shapes: Iterator[str], title: str) -> str:
    body = "\n".join(shapes)
    arrow = f'<path d="M0 0L10 5L0 10z" fill="{LINE}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="{FONT}" role="img">\n<title>{escape(title)}</title>\n'
        '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse">{arrow}</marker></defs>\n{body}\n</svg>\n'
    )


def _text(
    x: float, y: float, text: str, *, size: float = 13, color: str = LABEL, weight: int = 400, anchor: str = "middle"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" font-weight="{weight}" fill="{color}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _box(x: float, y: float, width: float, height: float, fill: str, *lines: str) -> str:
    """Return a box whose first line of text is a heading."""
    shapes = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{fill}"/>']
    top = y + height / 2 - 9 * (len(lines) - 1) + 5
    for number, line in enumerate(lines):
        size, weight = (14.5, 600) if number == 0 else (12.5, 400)
        shapes.append(_text(x + width / 2, top + 18 * number, line, size=size, color=DARK, weight=weight))
    return "\n".join(shapes)


def _arrow(x1: float, y1: float, x2: float, y2: float, *, both: bool = False) -> str:
    start = ' marker-start="url(#arrow)"' if both else ""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{LINE}" stroke-width="1.6"{start} '
        'marker-end="url(#arrow)"/>'
    )


def _processes() -> Iterator[str]:
    yield _box(10, 10, 860, 62, DRIVER, "Driver", "training loop, rollouts, trackers, checkpoints; holds no weights")
    columns = [
        (10, ENGINE, ("Engines", "vLLM, SGLang or", "transformers"), ("prompts as token ids", "tokens, log-probs")),
        (230, TRAINER, ("Trainer ranks", "FSDP2, DeepSpeed", "or one process"), ("batches", "metrics")),
        (450, OTHER, ("Environments", "user code, can be", "killed and replaced"), ("texts", "rewards")),
        (670, OTHER, ("Reward model", "optional", "one or more replicas"), ("messages", "scores")),
    ]
    for x, fill, lines, (down, up) in columns:
        middle = x + 100
        yield _arrow(middle, 76, middle, 170, both=True)
        yield _text(middle + 10, 112, f"↓ {down}", anchor="start", size=12)
        yield _text(middle + 10, 146, f"↑ {up}", anchor="start", size=12)
        yield _box(x, 174, 200, 86, fill, *lines)
    path = "M330 264V300H110V268"
    yield f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.6" marker-end="url(#arrow)"/>'
    yield _text(220, 322, "weight sync: NCCL, gloo, CUDA IPC or files", size=12.5)


def _async_schedule() -> Iterator[str]:
    unit, left = 92, 118
    yield _text(10, 22, "Synchronous", size=14.5, weight=600, anchor="start")
    yield from _schedule(36, left, unit, engine_starts=(0, 2, 4, 6), trainer_starts=(1, 3, 5, 7), staleness=0)
    yield _text(10, 172, "Asynchronous, max_staleness_steps=1", size=14.5, weight=600, anchor="start")
    yield from _schedule(
        186, left, unit, engine_starts=(0, 1, 2, 3, 4, 5, 6, 7), trainer_starts=(1, 2, 3, 4, 5, 6, 7), staleness=1
    )
    yield _text(left, 310, "Dashed lines are weight syncs; v2 are the weights after step 2.", size=12, anchor="start")
    yield _text(left + 7 * unit - 8, 310, "time", size=12, anchor="end")
    yield _arrow(left + 7 * unit, 306, left + 8 * unit, 306)


def _schedule(
    y: float,
    left: float,
    unit: float,
    *,
    engine_starts: tuple[int, ...],
    trainer_starts: tuple[int, ...],
    staleness: int,
) -> Iterator[str]:
    """Yield the bars of engines and trainer. `v2` are the weights after step 2."""
    for row, (name, starts, fill) in enumerate(
        (("Engines", engine_starts, ENGINE), ("Trainer", trainer_starts, TRAINER))
    ):
        top = y + 52 * row
        yield _text(left - 12, top + 26, name, anchor="end", weight=500)
        yield f'<rect x="{left:g}" y="{top:g}" width="{8 * unit:g}" height="42" rx="6" fill="{IDLE}"/>'
        for step, start in enumerate(starts, 1):
            version = max(0, step - 1 - staleness)
            lines = (f"step {step}", f"with v{version}" if row == 0 else f"makes v{step}")
            x = left + start * unit + 2
            yield f'<rect x="{x:g}" y="{top:g}" width="{unit - 4:g}" height="42" rx="6" fill="{fill}"/>'
            yield _text(x + unit / 2 - 2, top + 18, lines[0], size=12.5, color=DARK, weight=600)
            yield _text(x + unit / 2 - 2, top + 34, lines[1], size=11.5, color=DARK)
    for start in trainer_starts[:-1]:
        x = left + (start + 1) * unit
        yield (
            f'<line x1="{x:g}" y1="{y - 6:g}" x2="{x:g}" y2="{y + 100:g}" stroke="{LINE}" stroke-width="1.6" '
            'stroke-dasharray="4 3"/>'
        )


def _weight_sync() -> Iterator[str]:
    driver, sender, receiver = 120, 440, 760
    for x, fill, lines in (
        (driver, DRIVER, ("Driver", "WeightSync")),
        (sender, TRAINER, ("Trainer ranks", "WeightSender")),
        (receiver, ENGINE, ("Engines", "WeightReceiver")),
    ):
        yield _box(x - 100, 8, 200, 52, fill, *lines)
        yield f'<line x1="{x}" y1="60" x2="{x}" y2="462" stroke="{LINE}" stroke-width="1.2" stroke-dasharray="2 4"/>'
    yield f'<rect x="{sender - 108}" y="196" width="{receiver - sender + 216}" height="128" rx="8" fill="{IDLE}"/>'
    yield _text(receiver + 100, 214, "for each bucket", size=11.5, anchor="end")
    steps = [
        (92, driver, receiver, "1  pause requests between two tokens"),
        (132, driver, sender, "2  describe the weights"),
        (172, driver, receiver, "3  manifest: names, shapes, dtypes"),
        (250, sender, receiver, "4  bytes and fingerprints"),
        (356, driver, receiver, "5  commit: check the loaded tensors"),
        (396, receiver, driver, "6  probe (optional): compare log-probs"),
        (436, driver, receiver, "7  resume requests"),
    ]
    for y, start, end, text in steps:
        sign = 1 if end > start else -1
        yield _arrow(start + 4 * sign, y, end - 4 * sign, y)
        yield _text(min(start, end) + 16, y - 7, text, size=12.5, anchor="start")
    yield _box(sender - 102, 276, 204, 36, TRAINER, "gather the next bucket")
    yield _box(receiver - 102, 276, 204, 36, ENGINE, "verify, load")


if __name__ == "__main__":
    main()
