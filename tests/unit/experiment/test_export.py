"""Exports of checkpoints: the written model, its card, and refusals."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from skyrl_train.config.run_folder import load_run_config
from skyrl_train.data.chat_templates import TEMPLATES
from skyrl_train.entrypoints.export import main
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.experiment.data import chat_template_text
from skyrl_train.experiment.export import ExportRequest, atomic_folder, export
from skyrl_train.learner.checkpoint_policy import open_policy, verify_model
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.testing.tiny_models import byte_tokenizer, save_tiny_model, tiny_model
from tests.support.checkpoint_fixtures import rewrite_trainer_state
from tests.support.checkpointed_run import save_run
from tests.support.engine_harness import END_OF_SEQUENCE, END_OF_TURN, save_as_base_model
from tests.support.hub_server import TOKEN, hub_server

LORA = ("trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.alpha=8")
IDS = torch.arange(40).view(2, 20)
SECRET = "hf_NeverInAnyFileOrMessage42"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: str) -> Path:
    """A checkpoint of a run that trains the full model."""
    return save_run(tmp_path_factory.mktemp("whole"), tiny_model_path, "trainer.run_name=a whole run")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: str) -> Path:
    """A checkpoint of a run in bfloat16 that trains adapters."""
    return save_run(tmp_path_factory.mktemp("adapted"), tiny_model_path, *LORA, "trainer.bf16=true")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def exported(checkpoint: Path, to: Path, **options: Any) -> Path:
    export(ExportRequest(str(checkpoint), str(to), **options))
    return to


def split_card(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the metadata and the Markdown of a card."""
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_full_model_equals_checkpoint_bitwise(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main([str(whole), "--to", str(tmp_path / "model")])
    said = capsys.readouterr().out
    assert "all 26 tensors equal the checkpoint's" in said and f"exported to {tmp_path / 'model'}" in said
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    shard = load_file(whole / "policy" / "shard_0.safetensors")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, shard[f"param/{name}"].view_as(parameter)), name
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([5]) == "#"
    assert len({path.stat().st_mode for path in (tmp_path / "model").iterdir()}) == 1, "all files have the same mode"


def test_bfloat16_export_is_rounded_checkpoint(whole: Path, tmp_path: Path):
    exact = exported(whole, tmp_path / "exact") / "model.safetensors"
    folder = exported(whole, tmp_path / "rounded", dtype="bfloat16")
    rounded = load_file(folder / "model.safetensors")
    assert all(torch.equal(rounded[name], tensor.bfloat16()) for name, tensor in load_file(exact).items())
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert "rounded to bfloat16" in split_card(folder)[1]


def test_separate_and_merged_adapters_agree(adapted: Path, tmp_path: Path, tiny_model_path: str):
    merged = AutoModelForCausalLM.from_pretrained(exported(adapted, tmp_path / "merged"), dtype=torch.float32)
    assert "all 26 tensors equal the checkpoint's, and" in split_card(tmp_path / "merged")[1]
    folder = exported(adapted, tmp_path / "adapter", adapter=True)
    base = load_causal_lm(tiny_model_path, dtype=torch.bfloat16).float()
    start = logits(base)
    apart: Any = peft.PeftModel.from_pretrained(base, str(folder))
    assert not torch.allclose(logits(merged), start, atol=0.1)
    torch.testing.assert_close(logits(apart), logits(merged), rtol=0, atol=1e-4)
    with open_policy(adapted, load_run_config(adapted.parent).trainer) as policy:
        expected = logits(merged)[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
        torch.testing.assert_close(policy.logprobs(IDS), expected, rtol=0, atol=1e-4)
    metadata, card = split_card(folder)
    assert metadata["library_name"] == "peft" and "lora" in metadata["tags"]
    assert "LoRA adapters (rank 4, alpha 8) for" in card and "PeftModel.from_pretrained" in card
    assert sorted(path.suffix for path in folder.glob("*.safetensors")) == [".safetensors"], "adapters only"


def test_experts_are_exported_one_by_one(tmp_path: Path):
    base = save_tiny_model(tmp_path / "base", "qwen3_moe", tied=False)
    folder = exported(save_run(tmp_path / "run", base), tmp_path / "model", dtype="bfloat16")
    assert load_file(folder / "model.safetensors").keys() == load_file(Path(base) / "model.safetensors").keys()


def test_changed_weight_or_configuration_is_detected(whole: Path, tmp_path: Path):
    folder = exported(whole, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    with open_policy(whole, load_run_config(whole.parent).trainer) as policy:
        assert verify_model(policy, folder, torch.float32).max_logprob_diff < 1e-4
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-6
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight differs from the checkpoint"):
            verify_model(policy, folder, torch.float32)
        exported(whole, folder, overwrite=True)
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = 100.0
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"log-probs of 508 tokens differ from the checkpoint's by \d"):
            verify_model(policy, folder, torch.float32)


def test_adapter_of_changed_model_is_refused(tmp_path: Path, tiny_model_path: str):
    checkpoint = save_run(tmp_path / "run", tiny_model_path, *LORA, "trainer.rope_theta=100", rope_theta=100.0)
    with pytest.raises(CheckpointError, match="Export such a run without --adapter"):
        exported(checkpoint, tmp_path / "adapter", adapter=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "a failed export leaves no files"
    exported(checkpoint, tmp_path / "model")


def test_card_contains_only_recorded_facts(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = exported(whole, tmp_path / "model")
    metadata, card = split_card(folder)
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["skyrl-train", "reinforcement-learning"],
    }, "the base model is not a name on the hub"
    assert "# `a whole run`, step 2" in card
    assert "| metric | step 0 | step 2 |" in card and "| `eval/all/avg_score` | 0.125 | 0.375 |" in card
    assert "| `trainer.algorithm.advantage_estimator` | `grpo` |" in card
    assert "25% of the responses of step 2 were truncated" in card
    assert "all 26 tensors equal the checkpoint's" in card
    assert f"torch {torch.__version__.partition('+')[0]}" in card and "peft" not in card
    assert 5_000 < (folder / "learning_curve.png").stat().st_size < 100_000


def test_files_contain_no_local_folders_or_secrets(
    adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_path: str
):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    run = tmp_path / "run"
    shutil.copytree(adapted.parent, run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["trainer"]["run_name"] = f"{SECRET} of {Path.home()}/experiments"
    config["trainer"]["a_key_of_an_earlier_version"] = 1
    config["data"]["train_data"] = ["/secret/folder/train.parquet", "s3://private-bucket/x/y.jsonl", "openai/gsm8k"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for options in ({}, {"adapter": True}):
        folder = exported(run / adapted.name, tmp_path / f"model{len(options)}", **options)
        card = split_card(folder)[1]
        assert "Training data: `train.parquet`, `y.jsonl`, `openai/gsm8k`." in card
        for path in folder.iterdir():
            for word in (SECRET, tiny_model_path, str(tmp_path), "/secret", "private-bucket", str(Path.home())):
                assert word not in html.unescape(path.read_bytes().decode("latin-1")), f"{path.name}: {word}"


HOSTILE = (
    "<script>alert(1)</script>",
    "](javascript:alert(1)) [x](https://a.example)",
    "| a | b |\n| --- | --- |",
    "---\nlicense: mit\n---",
    "`` ` ```\n# heading",
    "*bold* _em_ ~~gone~~ ![i](x.png) <!-- c -->",
    "\x1b[31m\u202egnp.exe\ud800\x00",
    "a\\|b\\",
    "&lt;b&gt; &#60;i&#62;",
)


@pytest.mark.parametrize("word", HOSTILE, ids=range(len(HOSTILE)))
def test_card_escapes_texts_of_run(word: str, card_of: Callable[[str], str]):
    """Check headings, lists and tables with a renderer that lets HTML through."""
    plain, hostile = card_of("harmless"), card_of(word)
    assert yaml.safe_load(plain.split("---\n")[1]) == yaml.safe_load(hostile.split("---\n")[1])
    renderer = MarkdownIt("gfm-like", {"linkify": False})
    shape = [re.findall(r"<[^>]*>", renderer.render(card.split("---\n", 2)[2])) for card in (plain, hostile)]
    without_code = [[tag for tag in tags if tag not in ("<code>", "</code>")] for tags in shape]
    assert without_code[0] == without_code[1]
    assert not set("\x1b\u202e\ud800\x00") & set(hostile)
    hostile.encode()


@pytest.fixture
def card_of() -> Callable[[str], str]:
    from skyrl_train.report.model_card import Card, model_card

    def card(word: str) -> str:
        return model_card(
            Card(
                model_class="AutoModelForCausalLM",
                run=word,
                repository="",
                base=word,
                base_is_on_hub=False,
                is_adapter=False,
                lora="",
                dtype="float32",
                step=1,
                trained_on="rewards",
                environment=word,
                data={"training": [word, word]},
                keys={word: word, "trainer.algorithm.x": [word]},
                rows=[{"step": 1, f"eval/{word}/avg_score": 0.5}],
                has_curve=True,
                checked="",
                versions={"torch": "2"},
            )
        )

    return card


def test_only_models_are_replaced_with_overwrite(whole: Path, tmp_path: Path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty\. Give another folder, or --overwrite"):
        exported(whole, tmp_path / "notes")
    with pytest.raises(ConfigError, match="holds no model, so it is not replaced"):
        exported(whole, tmp_path / "notes", overwrite=True)
    (tmp_path / "notes" / "config.json").write_text("{}")  # many programs have such a file
    with pytest.raises(ConfigError, match="holds no model, so it is not replaced"):
        exported(whole, tmp_path / "notes", overwrite=True)
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"
    (tmp_path / "model").mkdir()
    folder = exported(whole, tmp_path / "model", verify=False)
    (folder / "old.safetensors").write_text("old")
    exported(whole, folder, overwrite=True, verify=False)
    assert not (folder / "old.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "notes"]


def test_failed_replacement_restores_target(tmp_path: Path):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "old.safetensors"):
        (tmp_path / "model" / name).touch()
    with pytest.raises(FileNotFoundError), atomic_folder(str(tmp_path / "model"), overwrite=True) as folder:
        folder.rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "old.safetensors").is_file()


@pytest.mark.parametrize(("overwrite", "says"), [(False, "is not empty"), (True, "holds no model")])
def test_target_filled_during_export_is_kept(overwrite: bool, says: str, tmp_path: Path):
    notes = tmp_path / "model" / "notes.txt"
    notes.parent.mkdir()
    with pytest.raises(ConfigError, match=says), atomic_folder(str(notes.parent), overwrite):
        notes.write_text("mine")
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and notes.read_text() == "mine"


def test_invalid_exports_are_refused_before_writing(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    shutil.copytree(whole.parent, run)
    for arguments, message in (
        (
            [str(run), "--to", "x"],
            r"is not a checkpoint. Give RUN/global_step_N of a finished save. This folder contains global_step_2",
        ),
        ([str(whole), "--to", "x", "--adapter"], "the run trained the full model"),
        ([str(whole), "--to", "x", "--dtype", "int8"], "Choose one of: float32, bfloat16"),
        ([str(whole), "--to", "s3://bucket/x"], "a folder on this machine or hub:OWNER/NAME"),
        ([str(whole), "--to", "hub:a/b/c"], "must be hub:OWNER/NAME"),
        ([str(whole), "--to", "x", "--public"], "--public only applies to hub:NAME"),
        ([str(whole), "--to", "x", "--base", str(tmp_path / "none")], "--base='.*none' cannot be loaded"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([argument if argument != "x" else str(tmp_path / "x") for argument in arguments])
        assert re.search(message, capsys.readouterr().err)
    shard = next((run / whole.name / "policy").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(SystemExit, match="1"):
        main([str(run / whole.name), "--to", str(tmp_path / "x")])
    assert "is damaged: policy/shard_0.safetensors has another SHA-256" in capsys.readouterr().err
    shutil.copyfile(whole / "policy" / shard.name, shard)
    (run / "config.yaml").unlink()
    with pytest.raises(SystemExit, match="2"):
        main([str(run / whole.name), "--to", str(tmp_path / "x")])
    assert re.search(
        r"config\.yaml cannot be read .* It must be the configuration that the run saved", capsys.readouterr().err
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own, for a file's bytes
def test_hub_upload_is_private_and_atomic(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("SKYRL_CACHE", str(tmp_path / "cache"))
    with hub_server(monkeypatch) as hub:
        main([str(whole), "--to", "hub:me/model"])
        assert hub.private == {"me/model": True} and hub.commits == ["Step 2"]
        folder = exported(whole, tmp_path / "model")
        here = {path.name: path.read_bytes() for path in folder.iterdir()}
        published = dict(hub.files["me/model"])
        card, card_of_folder = published.pop("README.md").decode(), here.pop("README.md").decode()
        assert card.count('.from_pretrained("me/model")') == 2 and str(tmp_path) not in card
        assert card_of_folder == card.replace("me/model", "path/to/this/folder")
        assert published == here
        assert f"exported to {hub.url}/me/model" in capsys.readouterr().out
        with pytest.raises(SystemExit, match="2"):
            main([str(whole), "--to", "hub:me/model"])
        assert "hub:me/model exists: choose another name, or pass --overwrite" in capsys.readouterr().err
        hub.files["me/model"]["old.safetensors"] = b"old"
        main([str(whole), "--to", "hub:me/model", "--overwrite", "--no-verify"])
        assert hub.files["me/model"].keys() == {*here, "README.md"} and len(hub.commits) == 2
        main([str(whole), "--to", "hub:team/open", "--public", "--no-verify"])
        assert hub.private["team/open"] is False
        hub.refuses_commits = True
        with pytest.raises(SystemExit, match="1"):
            main([str(whole), "--to", "hub:me/other", "--no-verify"])
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(SystemExit, match="2"):
            main([str(whole), "--to", "hub:me/third"])
    said = "".join(capsys.readouterr())
    assert "hub:me/other cannot be written" in said and "Set HF_TOKEN" in said
    assert TOKEN not in said and not any(TOKEN.encode() in content for content in here.values())
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("adapter", [False, True])
def test_exports_have_chat_template_of_run(adapter: bool, tmp_path: Path, tiny_model_path: str):
    template = "generator.chat_template.name_or_path=mistral"
    checkpoint = save_run(tmp_path / "run", tiny_model_path, template, *(LORA if adapter else ()))
    folder = exported(checkpoint, tmp_path / "export", adapter=adapter)
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATES["mistral"]


@pytest.mark.parametrize("recorded", [False, True])
def test_template_in_chat_template_kwargs_is_exported(recorded: bool, tmp_path: Path, tiny_model_path: str):
    checkpoint = save_run(tmp_path / "run", tiny_model_path)
    file = tmp_path / "run" / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    saved["generator"]["chat_template_kwargs"] = {"chat_template": TEMPLATES["mistral"]}
    file.write_text(yaml.safe_dump(saved))
    if recorded:
        rewrite_trainer_state(
            checkpoint, chat_template=chat_template_text(byte_tokenizer(), saved["generator"]["chat_template_kwargs"])
        )
    folder = exported(checkpoint, tmp_path / "export")
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATES["mistral"]


@pytest.mark.parametrize("adapter", [False, True])
def test_export_that_renders_another_prompt_is_refused(
    adapter: bool, adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def without_template(tokenizer: Any, folder: Path, **options: Any) -> Any:
        saved = original(tokenizer, folder, **options)
        (folder / "chat_template.jinja").unlink()
        return saved

    original = PreTrainedTokenizerBase.save_pretrained
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", without_template)
    with pytest.raises(CheckpointError, match=r"encodes a prompt as \[.*\], but the tokenizer of the training as \["):
        exported(adapted, tmp_path / "export", adapter=adapter)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("adapter", [False, True])
def test_adapters_are_not_exported_with_another_base(
    adapter: bool, adapted: Path, tmp_path: Path, tiny_model_path: str
):
    moved, other = tmp_path / "moved", tmp_path / "other"
    for folder in (moved, other):
        shutil.copytree(tiny_model_path, folder)
    weights = load_file(other / "model.safetensors")
    weights["model.embed_tokens.weight"][3, 5] += 1e-3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"trainer\.policy\.model\.path: its weights had the fingerprint"):
        exported(adapted, tmp_path / "export", adapter=adapter, base=str(other))
    exported(adapted, tmp_path / "export", adapter=adapter, base=str(moved))


def test_card_tells_if_base_is_unrecorded(adapted: Path, tmp_path: Path):
    shutil.copytree(adapted.parent, tmp_path / "run")
    rewrite_trainer_state(tmp_path / "run" / adapted.name, base_models=None)
    exported(tmp_path / "run" / adapted.name, tmp_path / "export")
    assert "of the given base model (the checkpoint does not record" in split_card(tmp_path / "export")[1]


def test_recorded_template_takes_precedence_over_configuration(whole: Path, tmp_path: Path):
    shutil.copytree(whole.parent, tmp_path / "run")
    rewrite_trainer_state(tmp_path / "run" / whole.name, chat_template=TEMPLATES["mistral"])
    folder = exported(tmp_path / "run" / whole.name, tmp_path / "export")
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATES["mistral"]


def test_exports_name_the_end_of_turn(tmp_path: Path):
    model = tmp_path / "model"
    save_as_base_model(tiny_model(), model)
    folder = exported(save_run(tmp_path / "run", str(model)), tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends) == [END_OF_SEQUENCE, END_OF_TURN]
