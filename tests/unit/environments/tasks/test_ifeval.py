from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.prepare import prepare_config
from skyrl_train.data.dataset import load_prompts
from skyrl_train.environments.graders.instructions import INSTRUCTIONS, parse_instruction_kwargs
from skyrl_train.environments.graders.language_detection import MAX_CHARACTERS, detect_language
from skyrl_train.environments.tasks.ifeval import IFEvalEnv, IFEvalScores, score
from skyrl_train.errors import ConfigError

SCRIPT = Path(__file__).parents[4] / "examples" / "ifeval" / "ifeval_dataset.py"
ENGLISH = "Thank you for your letter. We are glad that the garden is doing well this year."
GERMAN = "Vielen Dank für Ihren Brief. Wir freuen uns, dass der Garten in diesem Jahr so gut gedeiht."

# (instruction, its arguments, responses that follow it, responses that do not)
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "keywords:existence",
        {"keywords": ["sky", "Rain"]},
        ["The SKY brings rain.", "Skylark, rainbow."],
        ["The sky is clear.", "sk y rain"],
    ),
    (
        "keywords:frequency",
        {"keyword": "sky", "frequency": 2, "relation": "at least"},
        ["Sky and sky.", "skysky"],
        ["sky", "none"],
    ),
    (
        "keywords:frequency",
        {"keyword": "sky", "frequency": 2, "relation": "less than"},
        ["Sky.", "none"],
        ["sky, SKY", "sky sky sky"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["cat", "C++"]},
        ["concatenate", "catalogue", "C+", "C++ "],  # no boundary between a sign and a space: the benchmark's \b
        ["a Cat.", "no dog, cat", "xC++y is not it, C++y is"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "E", "let_frequency": 3, "let_relation": "at least"},
        ["eEe", "elephant trees"],
        ["ee", "trees"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "!", "let_frequency": 1, "let_relation": "less than"},
        ["quiet"],
        ["loud!"],
    ),
    ("language:response_language", {"language": "de"}, [GERMAN, GERMAN.upper()], [ENGLISH, "1234", "नमस्ते दुनिया"]),
    ("language:response_language", {"language": "kn"}, ["ನಾನು ಶಾಲೆಗೆ ಹೋಗುತ್ತೇನೆ ಮತ್ತು ಅಲ್ಲಿ ಪಾಠ ಕಲಿಯುತ್ತೇನೆ."], [ENGLISH]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        ["One. Two! Three?", "He said “no.” She left. Then rain.", "one. two. three.", "一。二。三。"],
        [
            "One. Two.",
            "Mr. Smith met J. R. Brown. Two.",
            "1. Milk\n2. Bread",
            "! ! ! . . .",
            "It is 3.5 vs. 4.5 e.g. here.",
        ],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        ["One. Two...", "No end", "Version 1.2.3 is out!!! Get it?!"],
        ["I am I. So am I. End.", "In 1990. In 1991. In 1992."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb\n***", "a *** b"],
        ["a", "a\n\nb", "a\n***\n\n***\nb", "a***b***c"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        ["a b c", "don't go"],
        ["a b", "a-b"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["a b", "..."], ["a b c"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        ["One.\n\nThen two.", "One\n\n\n\n'then', two", 'One\n\n"Then" two'],
        ["Then one.\n\nTwo.", "One\n\nThen\n\nthree", "One\nThen", "One\n\nThenceforth"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] at [address]", "[[a] [b]", "[][]"],
        ["[name]", "[a\n] [b\n]", "[a] b]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. Write!", "p. s. write", "Bye p.s."],
        ["Bye. PS: write", "P.S write"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Bye\nP.P.S. x", "p. p. s x"], ["P.S. x"]),
    ("detectable_content:postscript", {"postscript_marker": "(Note)"}, ["x (note) y"], ["note"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "text\n  - a\n\t* b\nend", "*a\n-b"],
        ["* a", "* a\n* b\n- c", "** a\n** b", "1. a\n2. b"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "  My answer is maybe.\n", "Hm. My answer is no."],
        ["yes", "My answer is yes", "my answer is no."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b*", "**a** and *b*", "**a b** **c**"],
        ["*a*", "* *  ** **", "*a\nb* *c\n*", "a*b"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "SECTION1 SECTION2"],
        ["SECTION 1", "Section 1 Section 2", "SECTION one SECTION two"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1, 2]}', '```json\n{"a": 1}\n```', "```\n[]\n```", "5", f"[{'1' * 5000}]"],
        ["{'a': 1}", 'Here: {"a": 1}', "```json\n{", '{"a": 1} {"b": 2}', "```"],
    ),
    (
        "detectable_format:title",
        {},
        ["<<Joy>>\ntext", "a <<b>> c", "<<a>> <<b>>"],
        ["<Joy>", "<<>>", "<< >>", "<<a\nb>>", ">>a<<", "<<<>>>"],
    ),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb", "******a******b******"],
        ["a", "a******a", "a******b******c", "a************b", "a***b", "******a"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem."},
        ["Write a poem. Roses...", "\n write A poem."],
        ["A poem: write a poem.", "Write a"],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        ["So. That is all.", '"So. that IS all."  '],
        ["That is all. Bye.", "That is all"],
    ),
    ("startend:quotation", {}, ['"a b"', ' "a\nb" ', '""'], ['"a', 'a"', '"', "'a'", "“a”"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["I saw NASA", "A-B and DON'T", "U.S. and UK"],
        ["NASA", "Nasa Esa", "WELL-KNOWN", "1 2 3"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["NASA", "small"],
        ["NASA AND ESA"],
    ),
    ("change_case:english_capital", {}, [ENGLISH.upper()], [ENGLISH, GERMAN.upper(), "123"]),
    ("change_case:english_lowercase", {}, [ENGLISH.lower()], [ENGLISH, GERMAN.lower(), "..."]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b", ","]),
]


def follows(id: str, arguments: dict[str, Any], text: str) -> bool:
    return score([id], [arguments], "", text).strict == (True,)


@pytest.mark.parametrize(("id", "arguments", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_instruction_is_followed_or_not(id: str, arguments: dict[str, Any], good: list[str], bad: list[str]):
    assert [text for text in good if not follows(id, arguments, text)] == []
    assert [text for text in bad if follows(id, arguments, text)] == []


def test_blank_response_follows_none_of_25_instructions():
    assert {id for id, _, good, bad in CASES if good and bad} == set(INSTRUCTIONS)
    assert len(INSTRUCTIONS) == 25
    for id, arguments, _, _ in CASES:
        for text in ("", " \n\t "):
            assert score([id], [arguments], "", text) == IFEvalScores((False,), (False,)), id


HOSTILE = [
    *(
        "*",
        "**",
        "* ",
        "[",
        "]",
        "[]",
        "<<",
        ">>",
        "<",
        "\n",
        " ",
        "\n ",
        ".",
        ". ",
        ".)",
        "!”",
        "***",
        "*****\n",
        "-\n",
    ),
    *(
        "\n\n",
        "P.",
        "p. ",
        '"',
        "```",
        "[1,",
        '{"a":',
        "SECTION ",
        "SECTION 1",
        "1",
        "1.",
        "\n1.",
        "a",
        "ab",
        "a-",
        "a ",
    ),
    *("İ", "ä", "\x00", "\u202e", "\ud800", "My answer is "),
]


@pytest.mark.fault("F14")
def test_checks_take_linear_time_on_adversarial_text():
    """A quadratic check would take a minute for one text. All checks take seconds for all texts."""
    checks = {id: arguments | {"keywords": ["aab"], "forbidden_words": ["aab"]} for id, arguments, _, _ in CASES}
    prepared = [(INSTRUCTIONS[id], parse_instruction_kwargs(id, arguments, "x")) for id, arguments in checks.items()]
    for unit in HOSTILE:
        text = (unit * 100_000)[:100_000] + "x"
        before = time.process_time()
        for check, arguments in prepared:
            assert check(text, **arguments) in (True, False)
        assert time.process_time() - before < 10, unit


def test_loose_scores_ignore_outer_lines_and_asterisks():
    for text in ('Sure:\n"a"', '"a"\nBye', 'Sure:\n"a"\nBye', '**"a"**', 'Sure:\n**"a"**\nBye'):
        assert score(["startend:quotation"], [{}], "", text) == IFEvalScores((False,), (True,)), text
    for text in ('Sure:\nwell\n"a"', "a", "Sure:\nBye"):
        assert score(["startend:quotation"], [{}], "", text) == IFEvalScores((False,), (False,)), text


def test_scores_are_ordered_and_have_both_accuracies():
    scores = score(["punctuation:no_comma", "startend:quotation"], [None, {"language": None}], "", "a b")
    assert scores == IFEvalScores((True, False), (True, False))
    assert scores.metrics() == {
        "prompt_level_strict_acc": 0.0,
        "inst_level_strict_acc": 0.5,
        "prompt_level_loose_acc": 0.0,
        "inst_level_loose_acc": 0.5,
    }


def test_prompt_is_default_of_prompt_to_repeat():
    assert score(["combination:repeat_prompt"], [{"prompt_to_repeat": None}], "Sing!", "sing! la").strict == (True,)


@pytest.mark.parametrize(
    ("id", "arguments", "message"),
    [
        ("keywords:no_such", {}, "instruction 'keywords:no_such' is not one of keywords:existence"),
        ("length_constraints:number_words", {"num_words": 3}, "relation=None is not 'less than' or 'at least'"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "at most"}, "relation='at most' is not"),
        ("length_constraints:number_words", {"num_words": -1, "relation": "at least"}, "num_words=-1 is not a whole"),
        ("length_constraints:number_words", {"num_words": 1.5, "relation": "at least"}, "num_words=1.5 is not a whole"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": float("nan")}, "num_paragraphs=nan is not"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": True}, "num_paragraphs=True is not"),
        (
            "keywords:letter_frequency",
            {"letter": "ab", "let_frequency": 1, "let_relation": "at least"},
            "one character",
        ),
        ("keywords:existence", {"keywords": []}, "keywords=[] is not a list of texts"),
        ("keywords:existence", {"keywords": ["a", ""]}, "is not a list of texts"),
        ("keywords:existence", {"keywords": "sky"}, "keywords='sky' is not a list of texts"),
        ("language:response_language", {"language": "tlh"}, "language='tlh' is not one of af, ar"),
    ],
)
def test_invalid_instruction_is_reported(id: str, arguments: dict[str, Any], message: str):
    extras = {"reward_spec": {"ground_truth": {"instruction_id_list": [id], "kwargs": [arguments]}}}
    with pytest.raises(ValueError, match=re.escape(message)):
        IFEvalEnv({}, extras)


def test_integral_floats_are_accepted():
    assert follows("length_constraints:number_paragraphs", {"num_paragraphs": 1.0}, "a")


def environment(settings: dict[str, Any], *, as_json: bool) -> IFEvalEnv:
    truth = {"instruction_id_list": ["punctuation:no_comma", "combination:repeat_prompt"], "kwargs": [{}, {}]}
    extras = {"reward_spec": {"ground_truth": json.dumps(truth) if as_json else truth}}
    env = IFEvalEnv(settings, extras)
    env.init([{"role": "system", "content": "x"}, {"role": "user", "content": "Sing!"}])
    return env


@pytest.mark.parametrize(
    ("settings", "text", "reward"),
    [
        ({}, "Sing! La", 1.0),
        ({}, "Sing! La, la", 0.5),
        ({}, "", 0.0),
        ({"reward": "all"}, "Sing! La, la", 0.0),
        ({"reward": "all"}, "Sing! La", 1.0),
        ({"reward": "all"}, "*Sing!* La", 0.0),
        ({"reward": "all", "loose": True}, "*Sing!* La", 1.0),
    ],
)
def test_reward_is_fraction_or_all(settings: dict[str, Any], text: str, reward: float):
    output = environment(settings, as_json=bool(settings)).step(text)
    assert (output.reward, output.done) == (reward, True)
    assert output.metadata["prompt_level_strict_acc"] == float(text == "Sing! La")


@pytest.mark.parametrize(
    "truth", [None, "{}", {"instruction_id_list": [], "kwargs": []}, {"instruction_id_list": ["x"]}]
)
def test_row_without_instructions_is_rejected(truth: Any):
    with pytest.raises(ValueError, match="instruction_id_list"):
        IFEvalEnv({}, {"reward_spec": {"ground_truth": truth}})


def test_settings_are_checked_before_the_run():
    with pytest.raises(ConfigError, match="one of all, fraction"):
        prepare_config(
            ["environment.env_class=ifeval", "environment.skyrl_gym.ifeval.reward=most"], has_accelerator=False
        )


def test_language_of_long_text_uses_both_ends():
    assert detect_language(GERMAN + "x " * MAX_CHARACTERS + GERMAN) == "de"
    assert detect_language("12 3.") is None


def test_missing_library_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    from skyrl_train.environments.graders import language_detection as module

    module._identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(ConfigError, match=r"pip install 'skyrl-train\[ifeval\]'"):
        detect_language("a")


def test_local_rows_are_converted_and_scored(tmp_path: Path):
    row = {
        "key": 1000,
        "prompt": "Write at least two words.",
        "instruction_id_list": ["length_constraints:number_words", "punctuation:no_comma"],
        "kwargs": [{"num_words": 2, "relation": "at least", "language": None}, {"num_words": None}],
    }
    unknown = row | {"instruction_id_list": ["new:palindromes", "punctuation:no_comma"]}
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps(each) for each in (row, row | {"kwargs": json.dumps(row["kwargs"])}, unknown))
    )
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    command = [sys.executable, str(SCRIPT), "--input", str(tmp_path), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train.parquet: 2 rows, 1 left out" in done.stdout
    for prompt in load_prompts([str(tmp_path / "out" / "train.parquet")], lambda messages: 1, 10, "other").prompts:
        assert (prompt.env_class, prompt.data_source) == ("ifeval", "ifeval_like")
        env = IFEvalEnv({}, prompt.env_extras)
        assert [env.step(text).reward for text in ("two words", "one", "one, two")] == [1.0, 0.5, 0.5]


def test_row_with_unequal_lists_is_reported(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "a", "instruction_id_list": ["x"], "kwargs": []}))
    command = [sys.executable, str(SCRIPT), "--input", str(tmp_path), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "train.jsonl, line 1: needs instruction_id_list and kwargs" in done.stderr
