from __future__ import annotations

import sys
from functools import partial

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.registry import Registry, load_object, unknown_name_message


def square(x: float) -> float:
    return x * x


def test_a_registered_name_gives_the_object_back():
    registry: Registry = Registry("function")
    assert registry.register("square")(square) is square
    assert registry.get("square") is square


def test_a_table_entry_is_imported_when_it_is_asked_for_and_not_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    registry: Registry = Registry("function", {"hsv": "colorsys:rgb_to_hsv"})
    assert registry.names() == ["hsv"]
    assert "colorsys" not in sys.modules
    assert registry.get("hsv") is sys.modules["colorsys"].rgb_to_hsv


def test_an_unknown_name_lists_what_there_is_and_the_nearest():
    registry: Registry = Registry("reward", {"gsm8k": "a:b", "arithmetic": "c:d"})
    with pytest.raises(ConfigError, match=r"Unknown reward 'gsm8'; known: arithmetic, gsm8k\. Did you mean 'gsm8k'\?"):
        registry.get("gsm8")
    assert "Did you mean" not in unknown_name_message("reward", "zzz", ["gsm8k"])


def test_a_name_is_never_silently_replaced():
    registry: Registry = Registry("function", {"hsv": "colorsys:rgb_to_hsv"})
    registry.register("square")(square)
    with pytest.raises(ConfigError, match="'square' is already registered"):
        registry.register("square")(len)
    with pytest.raises(ConfigError, match="'hsv' is already registered"):
        registry.register("hsv")(square)
    assert registry.get("square") is square


def test_a_module_imported_twice_may_register_its_own_again():
    registry: Registry = Registry("function")
    registry.register("square")(square)
    registry.register("square")(square)


def test_the_builtin_may_register_itself_under_its_name_in_the_table():
    registry: Registry = Registry("function", {"sq": f"{__name__}:square"})
    registry.register("sq")(square)
    assert registry.get("sq") is square


def test_registries_share_nothing():
    table = {"a": "m:a"}
    first: Registry = Registry("kind", table)
    first.register("b")(square)
    assert Registry("kind", table).names() == ["a"]


def test_a_target_names_a_module_and_an_object():
    assert load_object("math:pi") == pytest.approx(3.14159, abs=1e-5)
    with pytest.raises(AttributeError):
        load_object("math:no_such_thing")


def test_functions_without_a_name_are_told_apart_by_their_code():
    registry: Registry = Registry("function")
    registry.register("own")(lambda x: x + 1)
    with pytest.raises(ConfigError, match="'own' is already registered"):
        registry.register("own")(lambda x: x + 2)
    registry.register("part")(partial(square, 2.0))
    with pytest.raises(ConfigError, match="'part' is already registered"):
        registry.register("part")(partial(square, 3.0))


def test_code_that_is_run_again_registers_again():
    registry: Registry = Registry("function")
    cell = "@registry.register('own')\ndef own(x): return x\nregistry.register('more')(lambda x: x + 1)\n"
    for _ in range(2):
        exec(cell, {"registry": registry, "__name__": "__main__"})
    assert registry.names() == ["more", "own"]


@pytest.mark.parametrize("name", ["", None, square])
def test_a_decorator_wants_a_name(name: object):
    with pytest.raises(ConfigError, match="the name must be a non-empty string"):
        Registry("function").register(name)  # type: ignore[arg-type]


def test_what_is_users_own_is_what_is_not_built_in_or_no_longer():
    registry: Registry = Registry("function", {"hsv": "colorsys:rgb_to_hsv", "hls": "colorsys:rgb_to_hls"})
    registry.get("hsv")
    assert registry.user_items() == {}
    registry.unregister("hsv")
    registry.register("hsv")(square)
    registry.table["later"] = "somewhere:later"
    assert registry.user_items() == {"hsv": square, "later": "somewhere:later"}
