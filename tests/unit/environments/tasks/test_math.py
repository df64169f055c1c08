from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from skyrl_train.environments import registry
from skyrl_train.environments.graders import math_grader
from skyrl_train.environments.graders.math_grader import MathGrader, is_unambiguous
from skyrl_train.environments.graders.math_normalization import normalize_latex
from skyrl_train.errors import ConfigError

DEADLINE_S = 1.0
PATIENCE_S = 30.0
"""Time for a process to end on a busy machine."""


def servers() -> set[psutil.Process]:
    """Return the child processes of graders that this process has started."""
    return {child for child in psutil.Process().children() if math_grader.__name__ in child.cmdline()}


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    with MathGrader(PATIENCE_S) as grader:
        grader.grade("42.0", "42")
        yield grader


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("42", "42"),
        ("x = 42", "42"),
        ("42", "x=42"),
        (r"42 \text{ apples}", "42"),
        (r"\$42.00", "42"),
        ("0.5", r"\frac{1}{2}"),
        (r"\dfrac{2}{4}", r"\frac12"),
        ("2, 1", r"\{1, 2\}"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"10\sqrt 3", r"10\sqrt{3}"),
        (r"1\,234", "1,234"),
        (r"\text{Monday}", "Monday"),
        ("x^2+y^2=1", "x^2 + y^2 = 1"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ],
)
def test_equal_answers_are_accepted_in_all_spellings(grader: MathGrader, answer: str, truth: str):
    assert grader.grade(answer, truth)[0]


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("41", "42"), ("-42", "42"), ("142", "42"), ("0.33", r"\frac13"), ("(2,1)", "(1,2)"), ("y", "x")],
)
def test_other_answers_are_wrong(grader: MathGrader, answer: str, truth: str):
    assert grader.grade(answer, truth)[0] is False


@pytest.mark.fault("F13")
@pytest.mark.parametrize(
    "answer",
    [
        "41 or 42",
        r"41 \text{ or } 42",
        "41, 42",
        r"\{41, 42\}",
        "41 = 42",
        "x = 41 = 42",
        "1 + 41 = 42",
        r"\pm 42",
        r"42 \approx 41",
        r"41 \equiv 42",
        r"41 \Rightarrow 42",
        r"42 \text{ (or 41)}",
        r"42 \text{41}",
        r"42 \text{ maybe}",
        "[41, 42]",
        r"41 \cup 42",
        "$41$ and $42$",
        r"41}\boxed{42",
        "4242",
    ],
)
def test_hedging_answer_is_rejected(grader: MathGrader, answer: str):
    assert grader.grade(answer, "42")[0] is False


@pytest.mark.fault("F13")
def test_digits_side_by_side_are_not_added():
    assert not is_unambiguous(normalize_latex("4 2"), "6")
    assert not is_unambiguous(normalize_latex(r"5 \quad 1"), "6")


@pytest.mark.fault("F14")
@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9}}",
        "9^{9^{9^9}}",
        "10000000!",
        "{" * 450 + "}" * 450,
        "(" * 900,
        r"\sqrt{" * 130 + "42" + "}" * 130,
        r"\binom{10^9}{10^8}",
        "42!!!!!!",
    ],
    ids=lambda answer: answer[:12],
)
def test_endless_comparison_times_out(answer: str):
    took = []
    with MathGrader(PATIENCE_S) as grader:
        for _ in range(4):  # repeats in case the machine was busy
            assert grader.grade("42.0", "42") == (True, "graded")
            start = time.monotonic()
            grader.deadline_s = DEADLINE_S
            assert grader.grade(answer, "42")[0] is False
            grader.deadline_s = PATIENCE_S
            took.append(time.monotonic() - start)
            if took[-1] < DEADLINE_S + 1:
                break
    assert min(took) < DEADLINE_S + 1


@pytest.mark.fault("F14")
def test_megabyte_is_not_an_answer(grader: MathGrader):
    assert grader.grade("9" * 2**20, "42") == (False, "no_answer")


@pytest.mark.fault("F14")
def test_dead_or_hung_child_is_replaced():
    with MathGrader(PATIENCE_S) as grader:
        before = servers()
        assert grader.grade("42.0", "42") == (True, "graded")
        (first,) = servers() - before
        first.kill()
        assert grader.grade("42.0", "42") == (True, "graded"), "the answer was not to blame"
        (second,) = servers() - before
        second.suspend()
        grader.deadline_s = DEADLINE_S
        assert grader.grade("42.0", "42") == (False, "timeout")
        assert not second.is_running()
        assert len(servers() - before) == 1


@pytest.mark.defect("forked-child-answers-on-pipe")
def test_fork_starts_its_own_child():
    with MathGrader(PATIENCE_S) as grader:
        before = servers()
        assert grader.grade("42.0", "42") == (True, "graded")
        own = servers() - before
        fork = os.fork()
        if fork == 0:
            right = grader.grade("43.0", "43") == (True, "graded") and len(servers()) == 1
            grader.close()
            os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
        assert grader.grade("44.0", "43") == (False, "graded") and servers() - before == own


@pytest.mark.defect("forked-child-answers-on-pipe")
def test_reply_to_another_request_is_ignored():
    with MathGrader(PATIENCE_S) as grader:
        before = servers()
        assert grader.grade("42.0", "42") == (True, "graded")
        (server,) = servers() - before
        request = {"truth": "1", "answer": "1.0", "deadline_s": 5.0, "number": -1}
        Path(f"/proc/{server.pid}/fd/0").write_text(
            json.dumps(request) + "\n"
        )  # as another thread could do at the same time
        assert grader.grade("44.0", "43") == (False, "graded")


def test_missing_math_verify_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(math_grader.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'skyrl-train\[math\]'"):
        registry.check_environments(["math"], {})
    with pytest.raises(ConfigError, match="math-verify"):
        MathGrader().start()


def test_environment_scores_box_and_reports_reason():
    extras = {"reward_spec": {"method": "rule", "ground_truth": r"\frac{1}{2}"}}
    environment = registry.make("math", {"timeout": PATIENCE_S}, extras)
    grader = math_grader.get_grader(PATIENCE_S)
    try:
        output = environment.step(r"<think>\boxed{3}</think> It is \boxed{0.5}.")
        assert (output.reward, output.done, output.observations) == (1.0, True, [])
        grader.deadline_s = DEADLINE_S
        for text, metric in (
            (r"\boxed{9^{9^{9^9}}}", "timeout"),
            (r"\boxed{\frac12}\boxed{2}", "no_answer"),
            ("", "no_answer"),
        ):
            output = environment.step(text)
            assert (output.reward, output.metadata[metric]) == (0.0, 1.0)
    finally:
        grader.close()
        math_grader.get_grader.cache_clear()
