from __future__ import annotations

import re

import pytest

from skyrl_train.environments.prints import AT_FIRST, AT_LAST, EACH_WINDOW, LONGEST_LINE, WINDOW_S, BoundedPrints

SECRET = "hf_0123456789abcdef"


class Shown:
    """What was shown, in a time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.takes = True
        self.text = ""
        self.prints = BoundedPrints("env 7", self._take, lambda: self.now)

    def _take(self, line: bytes) -> bool:
        self.text += line.decode() if self.takes else ""
        return self.takes

    def feed(self, data: bytes, chunk: int) -> None:
        """A pipe may give it in any parts."""
        for at in range(0, len(data), chunk):
            self.prints.feed(data[at : at + chunk])

    def more(self) -> str:
        """What came since it was asked last."""
        text, self.text = self.text, ""
        return text


def left_out(text: str) -> int:
    """The bytes that the only line about it speaks of."""
    (count,) = re.findall(r"^\(env 7\) \.\.\. ([\d,]+) bytes more were printed", text, re.MULTILINE)
    return int(count.replace(",", ""))


def parts_of_the_secret(text: str) -> list[str]:
    parts = [SECRET[at : at + 8] for at in range(len(SECRET) - 7)]
    return [part for part in parts if part in text]


def test_lines_pass_as_they_are_printed_with_the_name_of_their_process():
    shown = Shown()
    shown.prints.feed(b"one\ntw")
    assert shown.more() == "(env 7) one\n"
    shown.prints.feed(b"o\n\n")
    assert shown.more() == "(env 7) two\n(env 7) \n"
    shown.prints.feed(b" 10 %\r 20 %\r")
    assert shown.more() == "(env 7)  10 %\n(env 7)  20 %\n"
    shown.prints.feed(b"no end")
    shown.prints.close()
    assert shown.more() == "(env 7) no end\n"


@pytest.mark.defect("environments-printed-without-a-bound")
@pytest.mark.parametrize(
    "data",
    [b"0123456789\n", b"\n", b"x", b"\x00", b"\xff\xfe\x00\x9f", "\U0001f600".encode(), b"\x1b[2J\x07", b"a\tb\r\n"],
    ids=repr,
)
def test_whatever_is_printed_is_bounded_and_text_and_shown_again_later(data: bytes):
    shown = Shown()
    for _ in range(200):
        shown.prints.feed(data * (50_000 // len(data)))
    first = shown.more()
    assert len(first.encode()) <= AT_FIRST
    shown.now += WINDOW_S - 1
    shown.prints.feed(data * 1000)
    assert shown.more() == ""
    assert len(first.encode()) > AT_FIRST // 2
    assert shown.prints.seconds_to_tick == pytest.approx(1.0)
    shown.now += 1
    shown.prints.tick()
    assert 9_000_000 < left_out(shown.more()) <= 10_300_000
    assert shown.prints.seconds_to_tick is None
    for _ in range(20):
        shown.prints.feed(data * (50_000 // len(data)))
    later = shown.more()
    assert len(later.encode()) <= EACH_WINDOW
    assert (len(later) > 0) is (b"\n" in data), "what has no lines is only counted"
    shown.prints.close()
    last = shown.more()
    assert len(last) < 11 * AT_LAST
    for line in (first + later + last).splitlines():
        assert line.isprintable() and len(line) <= 10 * LONGEST_LINE + len("(env 7) ")


@pytest.mark.defect("environments-printed-without-a-bound")
def test_the_last_lines_of_a_process_are_shown_whatever_it_has_printed():
    shown = Shown()
    shown.prints.feed(b"noise\n" * 100_000)
    shown.more()
    shown.prints.feed(b"Traceback:\nMemoryError: no more\n")
    shown.prints.close()
    text = shown.more()
    assert 500_000 < left_out(text) < 600_100
    assert text.endswith("(env 7) noise\n(env 7) Traceback:\n(env 7) MemoryError: no more\n")


def test_what_nobody_takes_is_not_waited_for_and_counted():
    shown = Shown()
    shown.takes = False
    shown.prints.feed(b"0123456789\n" * 3)
    shown.takes = True
    shown.prints.feed(b"more\n")
    assert shown.more() == ""
    shown.now += WINDOW_S
    shown.prints.feed(b"and more\n")
    text = shown.more()
    assert left_out(text) == pytest.approx(37, abs=2)
    assert text.endswith("(env 7) and more\n")


@pytest.mark.defect("trackers-showed-secrets-of-the-environment")
@pytest.mark.parametrize("before", [0, 1, AT_FIRST - 5, 10 * AT_FIRST])
@pytest.mark.parametrize("noise", [b"x", b"noise\n"])
@pytest.mark.parametrize("chunk", [7, 64 * 2**10])
def test_secrets_are_not_shown_wherever_their_text_is_cut(
    before: int, noise: bytes, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    shown = Shown()
    shown.feed((noise * AT_FIRST)[:before] + b"token " + SECRET.encode() + b" token\n", chunk)
    shown.prints.close()
    assert not parts_of_the_secret(shown.text)
    assert "<HF_TOKEN>" in shown.text or (before == AT_FIRST - 5 and noise == b"x")


@pytest.mark.defect("trackers-showed-secrets-of-the-environment")
@pytest.mark.parametrize("between", ["", " ", "\U0001f600", "\n"])
@pytest.mark.parametrize("chunk", [1009, 64 * 2**10])
def test_a_secret_that_is_printed_again_and_again_is_never_shown(
    between: str, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    for times in (100, 300, 10_000):
        shown = Shown()
        for _ in range(3):
            shown.feed(f"{SECRET}{between}".encode() * times + SECRET[:9].encode(), chunk)
            shown.now += WINDOW_S
            shown.feed(SECRET[9:].encode(), chunk)
        shown.prints.close()
        assert "<HF_TOKEN>" in shown.text and not parts_of_the_secret(shown.text)
