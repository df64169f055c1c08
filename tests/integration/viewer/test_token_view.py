"""The token view shows the batch that the step trained on, as trainer.dump_data_batch saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import torch

from skyrl_train.report.rollout_files import write_rollouts, write_vocabulary
from skyrl_train.trainer.batch_dump import BatchDump, read_batch
from skyrl_train.trainer.rollout_writer import rollout_tables
from tests.integration.viewer.conftest import reported, shown, sync_api
from tests.integration.viewer.test_viewer import TOKEN_FACTS
from tests.support.rollout_examples import groups_of_all_kinds, scored_batch
from tests.support.viewer_runs import write_run

STEP = 4
COLUMNS_SHOWN = {
    "id": "input_ids",
    "in the loss": "loss_mask",
    "log-prob in the engine": "rollout_logprobs",
    "log-prob in the trainer": "old_logprobs",
    "log-prob in the reference": "ref_logprobs",
    "advantage": "advantages",
}


def test_token_view_matches_dumped_batch(browser: Any, tmp_path: Path):
    """The episodes have one or several turns or three sequences, or failed. All response tokens are compared."""
    groups = groups_of_all_kinds()
    batch = scored_batch(groups)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    uids = [trajectory.prompt.uid for trajectory in trajectories for _ in trajectory.sequences()]
    BatchDump(tmp_path).write(STEP, batch, uids)
    run = write_run(tmp_path / "run", "run", steps=STEP)
    write_rollouts(run, STEP, rollout_tables(STEP, groups, batch))
    write_vocabulary(run, [f" {token}" for token in range(100)])
    (file,) = tmp_path.glob("*.safetensors")
    expected = _responses(read_batch(file)[0], [len(list(item.sequences())) for item in trajectories])
    numbered = [(index, item) for index, group in enumerate(groups) for item in group.trajectories]
    compared = 0
    with shown(browser, reported([run], tmp_path)) as window:
        for number, (group_index, trajectory) in enumerate(numbered):
            if not len(trajectory.response_ids):
                continue
            uid = trajectory.prompt.uid.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            view = {
                "tab": "rollouts",
                "how": "tokens",
                "token": 0,
                "step": STEP,
                "uid": uid,
                "group": group_index,
                "sample": trajectory.sample,
            }
            page = window.open(urlencode(view))
            sync_api.expect(page.locator("[data-token]")).to_have_count(
                len(trajectory.prompt_ids) + len(trajectory.response_ids)
            )
            facts = page.evaluate(TOKEN_FACTS)[len(trajectory.prompt_ids) :]
            sampled = [
                any(turn.start <= index < turn.stop for turn in trajectory.turns)
                for index in range(len(trajectory.response_ids))
            ]
            for name, column in COLUMNS_SHOWN.items():
                texts = [row[name] for row in facts]
                values = expected[number][column].tolist()
                if name == "log-prob in the engine":
                    values = [value if was else None for value, was in zip(values, sampled, strict=True)]
                assert all(map(_same, texts, values)), (number, name, texts, values)
                compared += len(texts)
    assert compared == len(COLUMNS_SHOWN) * sum(len(item.response_ids) for item in trajectories)


def _responses(batch: Any, sequences: list[int]) -> list[dict[str, torch.Tensor]]:
    """Return the response tokens of every trajectory, with its sequences concatenated."""
    offsets, prompts = batch.offsets.tolist(), batch.prompt_lengths.tolist()
    found, first = [], 0
    for count in sequences:
        rows = range(first, first + count)
        parts = [slice(offsets[row] + prompts[row], offsets[row + 1]) for row in rows]
        found.append(
            {name: torch.cat([getattr(batch, name)[part] for part in parts]) for name in COLUMNS_SHOWN.values()}
        )
        first += count
    return found


def _same(text: str, value: Any) -> bool:
    if isinstance(value, bool):
        return text == ("yes" if value else "no")
    return text == "–" if value is None or value != value else np.float32(text) == np.float32(value)
