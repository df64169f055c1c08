"""Today's SkyRL: its keys, and the command lines that it publishes, as arguments of this package.

skyrl_head_recipes.tsv has a row for each recipe (below SkyRL's examples/): its module; a part of what check_config
refuses, or nothing; the same of from_skyrl, which knows the programs that are here; and why. skyrl_head_overrides.tsv
says which recipes have which override, without names and folders of runs and without Harbor's own section.
skyrl_head_keys.tsv has the keys that 0.3 does not have, with their defaults.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from skyrl_train.config.keys import all_keys, find
from skyrl_train.config.prepare import prepare
from skyrl_train.config.skyrl_keys import SKYRL_KEYS, skyrl_key
from skyrl_train.entrypoints.from_skyrl import translate
from skyrl_train.errors import ConfigError

FOLDER = Path(__file__).parent
ENGINE = "generator.inference_engine."


class Recipe(NamedTuple):
    number: str
    name: str
    module: str
    check: str = ""
    from_skyrl: str = ""
    reason: str = ""


def rows(name: str) -> list[list[str]]:
    return [line.split("\t") for line in (FOLDER / name).read_text().splitlines()[1:]]


def overrides_by_recipe() -> dict[str, list[str]]:
    found = defaultdict(list)
    for override, numbers in rows("skyrl_head_overrides.tsv"):
        for first, _, last in (part.partition("-") for part in numbers.split(",")):
            for number in range(int(first), int(last or first) + 1):
                found[str(number)].append(override)
    return found


RECIPES = [Recipe(*row) for row in rows("skyrl_head_recipes.tsv")]
OVERRIDES = overrides_by_recipe()
KEYS = dict(rows("skyrl_head_keys.tsv"))


def refusal(arguments: list[str]) -> str:
    """What `check_config --elsewhere` says of a command line for a machine with accelerators."""
    try:
        prepare(arguments, has_accelerator=True)
    except ConfigError as error:
        return str(error)
    return ""


def as_script(recipe: Recipe) -> str:
    """A script in SkyRL's style, in which `$HOME` is the caller's."""
    program = (
        f"python {recipe.module.replace('.', '/')}.py"
        if recipe.module.endswith("entrypoint")
        else f"-m {recipe.module}"
    )
    quoted = ['"' + override.replace('"', '\\"') + '"' for override in OVERRIDES[recipe.number]]
    return "\n".join(["set -x", "", " \\\n  ".join([f"uv run --isolated --extra fsdp {program}", *quoted, "$@"])])


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.name for recipe in RECIPES])
def test_recipe_is_accepted_or_refused_for_its_reason(recipe: Recipe):
    said = refusal(OVERRIDES[recipe.number])
    assert recipe.check in said if recipe.check else said == ""
    done = translate(as_script(recipe), recipe.name)
    assert recipe.from_skyrl in "\n".join(done.problems) if recipe.from_skyrl else done.problems == []
    assert bool(recipe.check or recipe.from_skyrl) == bool(recipe.reason)


def test_most_recipes_are_accepted():
    assert len(RECIPES) == 71
    assert len([recipe for recipe in RECIPES if not recipe.check]) >= 60


def test_every_key_of_todays_skyrl_is_accepted_at_its_default():
    done = prepare([f"{key}={value}" for key, value in KEYS.items()], has_accelerator=True)
    noted = "\n".join(done.notes)
    for key in KEYS:
        entry = skyrl_key(key)
        assert (entry is None) == (find(key) is not None), key
        assert (f"{key}=" in noted) == (entry is not None and entry.accepted is None), key


def test_every_entry_of_the_table_is_a_key_of_skyrl():
    sections = {"trainer.*.fsdp_config.mixed_precision", f"{ENGINE}engine_init_kwargs.kv_transfer_config"}
    used = [id(skyrl_key(key)) for key in KEYS]
    assert {name for name, entry in SKYRL_KEYS.items() if id(entry) not in used} == sections
    assert not SKYRL_KEYS.keys() & all_keys().keys()
    assert all(entry.advice.endswith(".") for entry in SKYRL_KEYS.values())
