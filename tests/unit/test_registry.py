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


def test_builtin_is_imported_on_first_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    registry: Registry = Registry("function", {"hsv": "colorsys:rgb_to_hsv"})
    assert registry.names() == ["hsv"]
    assert "colorsys" not in sys.modules
    assert registry.get("hsv") is sys.modules["colorsys"].rgb_to_hsv


def test_unknown_name_lists_known_names():
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


def test_same_object_may_register_twice():
    registry: Registry = Registry("function")
    registry.register("square")(square)
    registry.register("square")(square)


def test_builtin_may_register_itself():
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


def test_unnamed_functions_are_compared_by_code():
    registry: Registry = Registry("function")
    registry.register("own")(lambda x: x + 1)
    with pytest.raises(ConfigError, match="'own' is already registered"):
        registry.register("own")(lambda x: x + 2)
    registry.register("part")(partial(square, 2.0))
    with pytest.raises(ConfigError, match="'part' is already registered"):
        registry.register("part")(partial(square, 3.0))


def test_rerun_code_may_register_again():
    registry: Registry = Registry("function")
    cell = "@registry.register('own')\ndef own(x): return x\nregistry.register('more')(lambda x: x + 1)\n"
    for _ in range(2):
        exec(cell, {"registry": registry, "__name__": "__main__"})
    assert registry.names() == ["more", "own"]


@pytest.mark.parametrize("name", ["", None, square])
def test_register_requires_a_name(name: object):
    with pytest.raises(ConfigError, match="the name must be a non-empty string"):
        Registry("function").register(name)  # type: ignore[arg-type]


def test_user_items_exclude_unchanged_builtins():
    registry: Registry = Registry("function", {"hsv": "colorsys:rgb_to_hsv", "hls": "colorsys:rgb_to_hls"})
    registry.get("hsv")
    assert registry.user_items() == {}
    registry.unregister("hsv")
    registry.register("hsv")(square)
    registry.table["later"] = "somewhere:later"
    assert registry.user_items() == {"hsv": square, "later": "somewhere:later"}
