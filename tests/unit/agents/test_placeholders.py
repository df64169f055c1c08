from __future__ import annotations

import pytest

from skyrl_train.environments.placeholders import PlaceholderValues, expand, find_placeholders, is_placeholder

ROW = {"question": "2 + 3", "reward_spec": {"ground_truth": 5}, "none": None}
VALUES = PlaceholderValues("http://host/v1", "policy", "Add.", "7", ROW)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{base_url} {model} {prompt} {uid}", "http://host/v1 policy Add. 7"),
        ("{row.question}={row.reward_spec.ground_truth}", "2 + 3=5"),
        ("{row.reward_spec}", '{"ground_truth": 5}'),
        ('{"json": {}} ${HOME} {0} { model }', '{"json": {}} ${HOME} {0} { model }'),
        ("{{model}}", "{model}"),
    ],
)
def test_placeholders_are_replaced(text: str, expected: str):
    assert expand(text, VALUES) == expected


def test_nested_values_are_replaced():
    assert expand({"a": ["{uid}", 3]}, VALUES) == {"a": ["7", 3]}


def test_values_are_not_expanded_again():
    assert expand("{prompt}", PlaceholderValues("", "m", "{model}", "0", {})) == "{model}"


@pytest.mark.parametrize("text", ["{row.missing}", "{row.none}", "{row.question.more}"])
def test_missing_column_raises(text: str):
    with pytest.raises(KeyError):
        expand(text, VALUES)


def test_unknown_names_are_found():
    names = list(find_placeholders(["{row.a}", {"b": "{promt} {{model}}"}]))
    assert names == ["row.a", "promt"]
    assert [name for name in names if not is_placeholder(name)] == ["promt"]
