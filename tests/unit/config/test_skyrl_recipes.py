"""The command lines that SkyRL publishes in scripts and pages, unchanged. Rejected ones have an expected reason.

skyrl_recipes.tsv has one command per row: its source (below skyrl-train/; @commit for another version of a script, #n
for its n-th command), the module that it starts, its arguments and, if it is rejected, a part of the error message and
the reason.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from integrations.verifiers.entrypoints.main_verifiers import use_verifiers_environment
from scripts.full_context.main_full_ctx import with_steps
from skyrl_train.config.keys import replace_value
from skyrl_train.config.prepare import PreparedConfig, prepare_config
from skyrl_train.config.validate import validate
from skyrl_train.errors import ConfigError


class Recipe(NamedTuple):
    source: str
    module: str
    arguments: str
    refusal: str
    reason: str


RECIPES = [
    Recipe(*line.split("\t")) for line in Path(__file__).with_name("skyrl_recipes.tsv").read_text().splitlines()[1:]
]
REWRITES = {
    "scripts.full_context.main_full_ctx": with_steps,
    "integrations.verifiers.entrypoints.main_verifiers": use_verifiers_environment,
}
"""Changes that a module makes to its command line before the configuration is composed."""
ACCEPTED = [recipe for recipe in RECIPES if not recipe.refusal]
REFUSED = [recipe for recipe in RECIPES if recipe.refusal]


def prepared(recipe: Recipe) -> PreparedConfig:
    """Prepare a configuration as on a machine with accelerators. Modules outside SkyRL's package are user programs."""
    own_code = not recipe.module.startswith("skyrl_train.")
    arguments = shlex.split(recipe.arguments)
    return prepare_config(REWRITES.get(recipe.module, list)(arguments), has_accelerator=True, has_user_code=own_code)


def names(recipes: list[Recipe]) -> list[str]:
    return [recipe.source for recipe in recipes]


@pytest.mark.parametrize("recipe", ACCEPTED, ids=names(ACCEPTED))
def test_published_recipe_is_valid_with_every_engine(recipe: Recipe):
    config = prepared(recipe).config
    assert config.generator.backend == "vllm"  # what each of them is published with
    for backend in ("vllm", "sglang"):
        assert validate(replace_value(config, "generator.backend", backend), allow_unregistered_names=True) == []


@pytest.mark.filterwarnings("ignore:provider=hydra.searchpath")
@pytest.mark.parametrize("recipe", REFUSED, ids=names(REFUSED))
def test_rejected_recipe_has_expected_reason(recipe: Recipe, capsys: pytest.CaptureFixture[str]):
    if recipe.refusal == "exit":  # flags of a server
        with pytest.raises(SystemExit) as stopped:
            prepared(recipe)
        assert stopped.value.code == 2
        assert "unrecognized arguments" in capsys.readouterr().err
    else:
        with pytest.raises(ConfigError) as refused:
            prepared(recipe)
        assert recipe.refusal in str(refused.value)
    assert len(recipe.reason) > 20


def test_the_table_is_large_and_mostly_accepted():
    assert len(RECIPES) >= 130
    assert len(ACCEPTED) >= 100
    assert len({recipe.source for recipe in RECIPES}) == len(RECIPES)
    modules = {recipe.module for recipe in ACCEPTED}
    for part in ("main_base", "main_generate", "main_dapo", "main_async", "main_fully_async"):
        assert any(part in module for module in modules)
    text = "\n".join(recipe.arguments for recipe in ACCEPTED)
    for word in ("ppo", "lora.rank=", "strategy=megatron", "env_class=search", "env_class=text2sql", "max_turns="):
        assert word in text
    assert "pipeline_model_parallel_size=2" in text and "resume_mode=null" in text
