"""Exported folders are complete, and equal to the trained model after loading."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from skyrl_train.config.schema import LoraConfig
from skyrl_train.data.chat_templates import TEMPLATES
from skyrl_train.errors import ConfigError
from skyrl_train.learner.worker import LearnerWorker
from skyrl_train.models.export import export_hf
from skyrl_train.models.loading import has_untied_head, list_checkpoint_names, load_causal_lm
from skyrl_train.testing.tiny_models import byte_tokenizer, save_tiny_model, tiny_model
from tests.support.base_checkpoints import END_OF_SEQUENCE, END_OF_TURN, FILE, save_base_model, save_with_head
from tests.support.learner_specs import tiny_spec


def export(model: str, tokenizer: Any, to: Path) -> None:
    loaded = load_causal_lm(model, dtype=torch.float32)
    export_hf(loaded.config, iter(loaded.named_parameters()), tokenizer, to)


def export_learner(model: str, to: Path, chat_template: str | None = None, **spec: Any) -> Path:
    """Export a model that a learner has loaded, as trainer.hf_save_interval does."""
    worker = LearnerWorker(replace(tiny_spec(model), **spec), 0, 1)
    worker.build(model)
    worker.export(str(to), chat_template)
    return to


@pytest.mark.parametrize("max_shard_bytes", [5 << 30, 100_000])
@pytest.mark.parametrize("tied", [True, False])
def test_exported_folder_reloads_equal(tmp_path: Path, max_shard_bytes: int, tied: bool) -> None:
    model = tiny_model(tied=tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    export_hf(model.config, iter(model.named_parameters()), byte_tokenizer(), tmp_path, max_shard_bytes=max_shard_bytes)
    assert (len(list(tmp_path.glob("*.safetensors"))) == 1) == (max_shard_bytes > 1_000_000)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(reloaded) is type(model)
    assert reloaded.dtype == torch.float32
    for (name, expected), (_, actual) in zip(model.named_parameters(), reloaded.named_parameters(), strict=True):
        assert torch.equal(expected, actual), name
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == byte_tokenizer().chat_template


@pytest.mark.parametrize(
    ("kind", "tied"), [("qwen3_moe", False), ("mixtral", False), ("qwen3", True), ("qwen3", False)]
)
def test_exported_names_are_those_of_published_checkpoints(tmp_path: Path, kind: str, tied: bool) -> None:
    published = save_tiny_model(tmp_path / "published", kind, tied=tied)
    model = tiny_model(kind, tied=tied)
    model.config._attn_implementation = "flash_attention_2"  # not installed
    export_hf(model.config, iter(model.named_parameters()), byte_tokenizer(), tmp_path, max_shard_bytes=200_000)
    names = list_checkpoint_names(str(tmp_path))
    assert names == list_checkpoint_names(published)
    assert any(".experts.3." in name for name in names) == (kind in {"qwen3_moe", "mixtral"}), "experts are separate"
    reloaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    for name, expected in model.named_parameters():
        assert torch.equal(expected, reloaded[name]), name


@pytest.mark.parametrize("problem", ["other rank", "no folder", "broken tokenizer"])
def test_every_rank_iterates_all_exported_tensors(problem: str, tiny_model_path: str, tmp_path: Path):
    """Gathering is a collective: the other ranks would wait for one that stops early."""
    model = shutil.copytree(tiny_model_path, tmp_path / "model")
    worker = LearnerWorker(tiny_spec(str(model)), int(problem == "other rank"), 2)
    worker.world_size = 1
    worker.build(str(model))
    tensors, num_iterated = list(worker.full_parameters()), 0

    def full_parameters(adapters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        nonlocal num_iterated
        for pair in tensors:
            num_iterated += 1
            yield pair

    worker.full_parameters = full_parameters  # type: ignore[assignment]
    if problem == "no folder":
        (tmp_path / "out").write_text("a file")
    if problem == "broken tokenizer":
        (model / "tokenizer_config.json").write_text("{")
    with nullcontext() if problem == "other rank" else pytest.raises((OSError, ConfigError)):
        worker.export(str(tmp_path / "out"))
    assert num_iterated == len(tensors)
    assert not (tmp_path / "out").is_dir()


def test_export_does_not_name_code_of_the_base_model(tmp_path: Path):
    file = Path(save_tiny_model(tmp_path / "model")) / "config.json"
    code = {"AutoConfig": "configuration_a.AConfig", "AutoModelForCausalLM": "modeling_a.AModel"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": code}))
    folder = export_learner(str(file.parent), tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def test_unreadable_generation_config_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = save_base_model(tmp_path / "model", generation=None)
    (tmp_path / "model" / FILE).write_text("{")
    export(path, AutoTokenizer.from_pretrained(path), tmp_path / "out")
    assert json.loads((tmp_path / "out" / FILE).read_text()) == {"eos_token_id": [END_OF_SEQUENCE, END_OF_TURN]}
    assert "is not valid JSON" in caplog.text


def test_export_holds_one_file_of_tensors_at_a_time(tmp_path: Path) -> None:
    files_when_yielded: list[int] = []

    def tensors() -> Any:
        for index in range(6):
            files_when_yielded.append(len(list(tmp_path.glob("part-*"))))
            yield f"t{index}", Tensor(1000)

    export_hf(tiny_model().config, tensors(), byte_tokenizer(), tmp_path, max_shard_bytes=8000)
    assert files_when_yielded == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("generation", "ends"),
    [
        ({"eos_token_id": 100, "top_k": 3}, [100, END_OF_TURN]),
        ({"eos_token_id": [101, 100]}, [101, 100, END_OF_TURN]),
        ({"eos_token_id": [END_OF_TURN, 100]}, [END_OF_TURN, 100]),
        ({"top_k": 3}, [END_OF_SEQUENCE, END_OF_TURN]),
        (None, [END_OF_SEQUENCE, END_OF_TURN]),
    ],
)
def test_generation_config_names_the_end_of_turn(generation: dict[str, Any] | None, ends: list[int], tmp_path: Path):
    path = save_base_model(tmp_path / "model", generation=generation)
    export(path, AutoTokenizer.from_pretrained(path), tmp_path)
    assert json.loads((tmp_path / FILE).read_text()) == (generation or {}) | {"eos_token_id": ends}


def test_no_generation_config_is_written_without_need(tmp_path: Path):
    path = save_base_model(tmp_path / "model", generation=None)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATES["mistral"]
    export(path, tokenizer, tmp_path)
    assert not (tmp_path / FILE).exists()


def test_learner_exports_template_and_its_end_of_turn(tmp_path: Path):
    path = save_base_model(tmp_path / "model", generation={"eos_token_id": [100, END_OF_SEQUENCE]})
    (tmp_path / "model" / "chat_template.jinja").unlink()
    export_learner(path, tmp_path / "export", chat_template=TEMPLATES["chatml"])
    exported = json.loads((tmp_path / "export" / FILE).read_text())
    assert exported["eos_token_id"] == [100, END_OF_SEQUENCE, END_OF_TURN]
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template == TEMPLATES["chatml"]


def test_adapter_folder_has_tokenizer_template_and_generation_config(tmp_path: Path):
    path = save_base_model(tmp_path / "model", generation={"eos_token_id": 100})
    folder = export_learner(path, tmp_path / "out", chat_template=TEMPLATES["chatml"], lora=LoraConfig(rank=2))
    for export_folder in (folder, folder / "adapter"):
        assert AutoTokenizer.from_pretrained(export_folder).chat_template == TEMPLATES["chatml"]
        assert GenerationConfig.from_pretrained(export_folder).eos_token_id == [100, END_OF_TURN]


def is_tied(folder: Path) -> bool:
    tied: bool = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    return tied


@torch.no_grad()
def logits(folder: Path | str) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output: Tensor = model(input_ids=torch.arange(40).view(2, 20)).logits
    return output


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_separate_head_is_exported_as_untied(lora: LoraConfig | None, tmp_path: Path):
    model = save_with_head(tmp_path / "model")
    export(model, byte_tokenizer(), tmp_path / "plain")
    export_learner(model, tmp_path / "learner", lora=lora)
    for folder in (tmp_path / "plain", tmp_path / "learner"):
        assert "lm_head.weight" in list_checkpoint_names(str(folder)) and not is_tied(folder)
        assert torch.equal(logits(folder), logits(model))


def test_equal_head_stays_tied(tmp_path: Path):
    model = save_with_head(tmp_path / "model", equal=True)
    folder = export_learner(model, tmp_path / "learner")
    assert "lm_head.weight" not in list_checkpoint_names(str(folder)) and is_tied(folder)
    assert torch.equal(logits(folder), logits(model))


def test_separate_head_is_found_in_the_weights(tmp_path: Path):
    assert has_untied_head(save_with_head(tmp_path / "separate"))
    assert not has_untied_head(save_with_head(tmp_path / "equal", equal=True))
    for tied in (True, False):
        assert not has_untied_head(save_tiny_model(tmp_path / str(tied), tied=tied))
