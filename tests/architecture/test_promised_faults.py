"""Invalid input that this project must survive. Every row below has a test that carries its ID."""

from __future__ import annotations

from pathlib import Path

from tests.support.marker_scan import all_marked_tests, marked_tests

TESTS = Path(__file__).resolve().parents[1]
REQUIRED_FAULTS = {
    "F01": "unknown or misspelt key, with or without +: exit 2 with the nearest match, before torch or Ray start",
    "F02": "NaN, negative, wrong type, group of 1: every mistake at once with key, value, what is allowed",
    "F03": "_target_ or an unknown resolver in a value: refused; the set of resolvers is pinned",
    "F04": "a secret in the environment: absent from saved and printed configuration",
    "F05": "more GPUs than there are, an engine that is not installed: need and have, or the extra, within 10 s",
    "F06": "an output folder of another run, in use, or read-only: refused unless resuming",
    "F07": "empty file, missing column, null answer, invalid UTF-8, 10 MB prompt: row named, or skipped and counted",
    "F08": "every prompt too long: an error, not an endless loop",
    "F09": "the dataset changed before resuming: refused by fingerprint",
    "F10": "chat-template control tokens or Jinja in a prompt: plain text, loss mask unchanged",
    "F11": "a reward that raises, is no finite number, or never comes: masked and counted by type",
    "F12": "all rewards of a group equal, everything masked: advantage 0, no NaN",
    "F13": "answer spam: one stated rule, guessing is never rewarded",
    "F14": "expressions that never end, deep nesting, 1 MB of text: scored within the deadline or killed",
    "F15": "a truncated or empty completion: flagged, by a stated policy",
    "F16": "nearly all rollouts of a step fail: a stop that says so, no step trained on zeros",
    "F17": "code that never ends: killed at the wall limit, told as a text",
    "F18": "fork bomb, much memory, large files, endless print: limits hold, output cut with a marker, our memory flat",
    "F19": "a daemonised grandchild: none survives",
    "F20": "reads of home, /etc/shadow, descriptors, /proc/1/environ, a planted secret: absent",
    "F21": "loopback, link-local addresses, abstract sockets: refused",
    "F22": "no sandbox on the machine: refused at start; unsafe_local needs a second key and prints a banner",
    "F23": "a program that leaves, patches or prints its way past the tests: 0, the verdict is reached outside of it",
    "F24": "escapes, markup, NUL in output: console and files survive",
    "F25": "MCP: a server or tool not allowed, a changing list, 50 MB, a hang: refused, pinned, cut, timed out",
    "F26": "file:, odd spellings, user-info, redirects, rebinding, gzip bombs: refused at every hop, addresses pinned",
    "F27": "engine HTTP without the right token, or on an open address without one: 401; refuses to start",
    "F28": "1 GB body, n = 1e9, NaN temperature, pickle: 4xx, the engine lives",
    "F29": "an engine killed, stopped or slow: requests go on elsewhere, it comes back with current weights, or a stop",
    "F30": "a missing, extra, mis-shaped, non-finite tensor, death between buckets: named, no hang",
    "F31": "stale rollouts, a version going backwards: dropped and counted; raised",
    "F34": "out of memory: where, and three settings with what each saves in GiB",
    "F35": "kill -9 in a save: the newest committed checkpoint loads, the incomplete one is reported and kept",
    "F36": "a flipped byte, a truncated or lost file, a full disk: found by checksum, the one before is loaded",
    "F32": "NaN in loss or gradient: every rank skips the update, parameters stay bit-equal; several in a row stop",
    "F33": "a rank that holds up the others: a deadline, the rank named, the stacks of all ranks in one file",
    "F37": "a run resumed wherever it was ended: weights, optimizer, order and metrics of one that was not",
    "F38": "a path or link out of a checkpoint: refused",
    "F39": "a signal once, twice; a tracker that is down, a full disk: saves and leaves, leaves; training goes on",
}


def test_marker_scan_ignores_skipped_tests():
    source = """
@pytest.mark.fault("F01")
@pytest.mark.parametrize("x", [1])
def test_a(x): ...
@pytest.mark.fault("F02")
@pytest.mark.skip
def test_b(): ...
@pytest.mark.fault("F03")
def helper(): ...
@pytest.mark.skipif(True, reason="x")
@pytest.mark.fault("F04")
async def test_c(): ...
@pytest.mark.fault("F05")
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.on_demand), pytest.param(2, marks=pytest.mark.gpu)])
def test_d(x): ...
"""
    assert list(marked_tests(source, "fault")) == [("F01", "test_a")]


def test_every_fault_has_unskipped_test():
    missing = [
        f"{id}: {REQUIRED_FAULTS[id]}" for id in sorted(set(REQUIRED_FAULTS) - all_marked_tests(TESTS, "fault").keys())
    ]
    assert not missing, "no unskipped test carries @pytest.mark.fault(id) for:\n" + "\n".join(missing)


def test_every_marked_fault_is_in_table():
    assert sorted(all_marked_tests(TESTS, "fault").keys() - set(REQUIRED_FAULTS)) == []
    assert sorted(REQUIRED_FAULTS) == [f"F{number:02}" for number in range(1, 40)]
