"""What the token view tells is the batch that the step trained on, as trainer.dump_data_batch keeps it."""

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
from tests.integration.viewer.test_viewer import POINTED_AT
from tests.support.rollout_examples import groups_of_all_kinds, scored_batch
from tests.support.viewer_runs import write_run

STEP = 4
TOLD = {
    "id": "input_ids",
    "in the loss": "loss_mask",
    "log-prob in the engine": "rollout_logprobs",
    "log-prob in the trainer": "old_logprobs",
    "log-prob in the reference": "ref_logprobs",
    "advantage": "advantages",
}


def test_token_view_matches_dumped_batch(browser: Any, tmp_path: Path):
    """Of one and several turns, of an episode of three sequences, of a failed one: all its response tokens."""
    groups = groups_of_all_kinds()
    batch = scored_batch(groups)
    trajectories = [one for group in groups for one in group.trajectories]
    uids = [one.prompt.uid for one in trajectories for _ in one.sequences()]
    BatchDump(tmp_path).write(STEP, batch, uids)
    run = write_run(tmp_path / "run", "run", steps=STEP)
    write_rollouts(run, STEP, rollout_tables(STEP, groups, batch))
    write_vocabulary(run, [f" {token}" for token in range(100)])
    (file,) = tmp_path.glob("*.safetensors")
    expected = _responses(read_batch(file)[0], [len(list(one.sequences())) for one in trajectories])
    places = [(at, one) for at, group in enumerate(groups) for one in group.trajectories]
    compared = 0
    with shown(browser, reported([run], tmp_path)) as window:
        for number, (at, one) in enumerate(places):
            if not len(one.response_ids):
                continue
            uid = one.prompt.uid.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            view = {
                "tab": "rollouts",
                "how": "tokens",
                "token": 0,
                "step": STEP,
                "uid": uid,
                "group": at,
                "sample": one.sample,
            }
            page = window.open(urlencode(view))
            sync_api.expect(page.locator("[data-token]")).to_have_count(len(one.prompt_ids) + len(one.response_ids))
            said = page.evaluate(POINTED_AT)[len(one.prompt_ids) :]
            sampled = [any(turn.start <= own < turn.stop for turn in one.turns) for own in range(len(one.response_ids))]
            for name, column in TOLD.items():
                values = [row[name] for row in said]
                wanted = expected[number][column].tolist()
                if name == "log-prob in the engine":
                    wanted = [value if was else None for value, was in zip(wanted, sampled, strict=True)]
                assert all(map(_same, values, wanted)), (number, name, values, wanted)
                compared += len(values)
    assert compared == len(TOLD) * sum(len(one.response_ids) for one in trajectories)


def _responses(batch: Any, sequences: list[int]) -> list[dict[str, torch.Tensor]]:
    """The response tokens of every trajectory, those of its sequences one after the other."""
    offsets, prompts = batch.offsets.tolist(), batch.prompt_lengths.tolist()
    found, first = [], 0
    for count in sequences:
        rows = range(first, first + count)
        parts = [slice(offsets[row] + prompts[row], offsets[row + 1]) for row in rows]
        found.append({name: torch.cat([getattr(batch, name)[part] for part in parts]) for name in TOLD.values()})
        first += count
    return found


def _same(said: str, value: Any) -> bool:
    if isinstance(value, bool):
        return said == ("yes" if value else "no")
    return said == "–" if value is None or value != value else np.float32(said) == np.float32(value)
