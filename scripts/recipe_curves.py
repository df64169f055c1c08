"""Run the recipes that two CPU cores can run, and draw their learning curves to docs/images/recipes/NAME.png.

    python scripts/recipe_curves.py quickstart lora            # run both, then draw both
    python scripts/recipe_curves.py lora --draw runs/lora      # draw the curve of a finished run

`async`, `lora` and `on_policy_distillation` start from the folder of `quickstart`. The console output of a recipe is
saved as RUNS/NAME.txt.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg

from skyrl_train.report.curve import Curve, metric_points, plot_curves
from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl

REPOSITORY = Path(__file__).resolve().parents[1]
IMAGES = REPOSITORY / "docs" / "images" / "recipes"
RUNS = Path("runs")
"""The folder that commands in the documentation write to."""
MAX_BYTES = 200_000
DOTS_PER_INCH = 150
FROM_QUICKSTART = "skyrl-train train --config-dir runs/quickstart/grpo --config-name config"
ARITHMETIC = "eval/arithmetic/avg_score"
REWARD = "reward/mean"
PRINTED = re.compile(r"step (\d+): right ([\d.]+)", re.MULTILINE)
"""Steps of examples/tensordict_grpo, which prints its metrics."""
PRINTED_ACCURACY = re.compile(r"eval accuracy ([\d.]+) -> ([\d.]+)")


@dataclass(frozen=True)
class Recipe:
    """A recipe's commands and the metrics to draw."""

    commands: Sequence[str]
    """The commands as the recipe's README has them, with folders in RUNS."""
    folder: str
    """Folder with metrics.jsonl, below RUNS; empty if the recipe only prints its metrics."""
    title: str
    metrics: Mapping[str, str]
    """Metric -> its label."""
    compared: Mapping[str, str] | None = None
    """Metrics of the quickstart to draw for comparison -> their labels."""
    unit: str = "fraction of right answers"


RECIPES = {
    "quickstart": Recipe(
        ["python examples/quickstart/quickstart.py --output runs/quickstart"],
        "quickstart/grpo",
        "Quickstart: GRPO on word problems, 1.5 million parameters",
        {REWARD: "training rollouts", ARITHMETIC: "held-out problems, greedy"},
    ),
    "tool": Recipe(
        ["python examples/quickstart/tool.py --output runs/tool"],
        "tool/grpo",
        "Multiplication with a Python tool, 1.5 million parameters",
        {
            REWARD: "training rollouts",
            "eval/products/avg_score": "held-out problems, greedy",
            "environment/tool_calls": "tool calls per training rollout",
        },
        unit="fraction of right answers, calls",
    ),
    "async": Recipe(
        [
            f"{FROM_QUICKSTART} "
            "trainer.fully_async.enabled=true trainer.fully_async.max_staleness_steps=1 "
            "trainer.placement.colocate_all=false "
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token "
            "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0 "
            "trainer.run_name=async trainer.ckpt_path=runs/async trainer.export_path=runs/async/export"
        ],
        "async",
        "Asynchronous GRPO, one step off, on the quickstart's problems",
        {REWARD: "training rollouts, asynchronous", ARITHMETIC: "held-out problems, asynchronous"},
        {REWARD: "training rollouts, synchronous", ARITHMETIC: "held-out problems, synchronous"},
    ),
    "lora": Recipe(
        [
            f"{FROM_QUICKSTART} "
            "trainer.policy.model.lora.rank=32 trainer.policy.model.lora.alpha=64 "
            "trainer.policy.optimizer_config.lr=1e-3 "
            "trainer.run_name=lora trainer.ckpt_path=runs/lora trainer.export_path=runs/lora/export"
        ],
        "lora",
        "LoRA of rank 32 on the quickstart's problems",
        {REWARD: "training rollouts, LoRA", ARITHMETIC: "held-out problems, LoRA"},
        {REWARD: "training rollouts, all weights", ARITHMETIC: "held-out problems, all weights"},
    ),
    "on_policy_distillation": Recipe(
        [
            "skyrl-train export runs/quickstart/grpo/global_step_40 --to runs/teacher",
            f"{FROM_QUICKSTART} "
            "trainer.ref.model.path=runs/teacher "
            "trainer.algorithm.advantage_estimator=distillation "
            "trainer.algorithm.policy_loss_type=importance_sampling "
            "trainer.max_steps=20 trainer.eval_interval=5 "
            "trainer.run_name=distillation trainer.ckpt_path=runs/distillation "
            "trainer.export_path=runs/distillation/export",
        ],
        "distillation",
        "On-policy distillation: the quickstart's model before GRPO learns from the model after it",
        {REWARD: "student, training rollouts", ARITHMETIC: "student, held-out problems"},
        {ARITHMETIC: "the teacher's GRPO run, held-out problems"},
    ),
    "tensordict_grpo": Recipe(
        ["python examples/tensordict_grpo/grpo.py --output runs/tensordict_grpo"],
        "",
        "GRPO with tensordict parts, 250,000 parameters",
        {REWARD: "training rollouts", ARITHMETIC: "held-out problems, greedy"},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=RECIPES, metavar="NAME", help=f"any of: {', '.join(RECIPES)}")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder for the runs (default: %(default)s)")
    parser.add_argument("--draw", type=Path, metavar="RUN_FOLDER", help="draw this run of NAME; run nothing")
    arguments = parser.parse_args()
    if arguments.draw and len(arguments.names) > 1:
        parser.error("--draw draws one run, so give one NAME.")
    for name in arguments.names:
        if arguments.draw is None:
            run(name, arguments.runs)
        draw(name, arguments.runs, arguments.draw)


def run(name: str, runs: Path) -> None:
    """Run a recipe, print its output, save it as RUNS/NAME.txt, and print the time that the recipe took."""
    runs.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with open(runs / f"{name}.txt", "w", encoding="utf-8") as file:
        for command in RECIPES[name].commands:
            words = localize(command, runs)
            with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    file.write(line)
                    file.flush()
                    print(line, end="", flush=True)
            if process.returncode:
                sys.exit(f"{name}: exit status {process.returncode}. The output is in {runs / name}.txt.")
    print(f"{name}: {(time.monotonic() - start) / 60:.1f} minutes", flush=True)


def localize(command: str, runs: Path) -> list[str]:
    """Return the words of a command with another folder for the runs and with this Python."""
    program, *arguments = shlex.split(command)
    start = ["-m", "skyrl_train.entrypoints.cli"] if program == "skyrl-train" else []
    return [sys.executable, *start, *(re.sub(rf"(^|=){RUNS}/", rf"\g<1>{runs.resolve()}/", one) for one in arguments)]


def draw(name: str, runs: Path, folder: Path | None = None) -> None:
    """Draw a recipe's curves from the run in `folder`, or in the recipe's own folder below `runs`."""
    recipe = RECIPES[name]
    lines = read_lines(name, runs, folder)
    curves = list(read_curves(lines, recipe.metrics))
    if recipe.compared is not None:
        other = read_jsonl(runs / RECIPES["quickstart"].folder / METRICS_FILE)
        curves += read_curves(other, recipe.compared)
    if not curves:
        sys.exit(f"{name}: the run has none of these metrics: {', '.join(recipe.metrics)}.")
    figure = plot_curves(curves, recipe.unit)
    axes = figure.axes[0]
    axes.set_title(recipe.title, fontsize=11)
    axes.set_ylim(0, 1.02)
    target = io.BytesIO()
    figure.set_dpi(DOTS_PER_INCH)
    FigureCanvasAgg(figure).print_png(target)
    image = target.getvalue()
    if len(image) > MAX_BYTES:
        sys.exit(f"{name}: the picture has {len(image):,} bytes. At most {MAX_BYTES:,} may be committed.")
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / f"{name}.png").write_bytes(image)
    print(f"docs/images/recipes/{name}.png: {len(image) / 1000:.0f} kB")


def read_lines(name: str, runs: Path, folder: Path | None) -> Sequence[Mapping[str, Any]]:
    """Return the metrics of every step."""
    if below := RECIPES[name].folder:
        return read_jsonl((folder or runs / below) / METRICS_FILE)
    text = (folder.with_suffix(".txt") if folder else runs / f"{name}.txt").read_text(encoding="utf-8")
    lines: list[Mapping[str, Any]] = [
        {"step": int(step), REWARD: float(right)} for step, right in PRINTED.findall(text)
    ]
    if found := PRINTED_ACCURACY.search(text):
        last = lines[-1]["step"] if lines else 0
        lines = [{"step": 0, ARITHMETIC: float(found[1])}, *lines, {"step": last, ARITHMETIC: float(found[2])}]
    return lines


def read_curves(lines: Sequence[Mapping[str, Any]], metrics: Mapping[str, str]) -> Iterator[Curve]:
    for metric, label in metrics.items():
        if points := metric_points(lines, metric):
            yield Curve(label, points, has_markers=metric.startswith("eval/"))


if __name__ == "__main__":
    main()
