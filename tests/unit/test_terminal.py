from __future__ import annotations

import logging
import unicodedata

import pytest
from hypothesis import given, strategies as st

from skyrl_train.terminal import EscapingFormatter, escape_control_chars, print_stderr, print_stdout


@pytest.mark.fault("F24")
@given(st.text(st.characters(exclude_categories=())))
def test_escaped_text_has_no_control_characters(text: str):
    assert not [c for c in escape_control_chars(text) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


@pytest.mark.defect("errors-emit-terminal-codes")
def test_stderr_lines_are_escaped(capsys: pytest.CaptureFixture[str]):
    print_stderr("2 problems:\n  the environment says \x1b[2J\x07 no\r")
    assert capsys.readouterr().err == "2 problems:\n  the environment says \\x1b[2J\\x07 no\\r\n"


@pytest.mark.fault("F24")
def test_stdout_and_log_lines_are_escaped(capsys: pytest.CaptureFixture[str]):
    text, shown = "a\tb \x1b]0;title\x07\n\u202eb\x00", "a       b \\x1b]0;title\\x07\n\\u202eb\\x00"
    print_stdout(text)
    assert capsys.readouterr().out == f"{shown}\n"
    record = logging.makeLogRecord({"msg": "%s", "args": (text,)})
    assert EscapingFormatter().format(record) == shown
