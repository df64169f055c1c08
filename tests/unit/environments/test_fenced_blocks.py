from __future__ import annotations

import time

import pytest

from skyrl_train.environments.fenced_blocks import extract_blocks, find_fenced_blocks, text_outside


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\na\n\nb\n```", [("python", "a\n\nb", True)]),
        ('```Python title="x.py"\na\n```', [("python", "a", True)]),
        ("```python:x.py {1,3}\na\n```", [("python", "a", True)]),
        ("```{.c++ #id}\na\n```", [("c++", "a", True)]),
        ("~~~py\na\n~~~", [("py", "a", True)]),
        ("~~~ py\n```\na\n```\n~~~", [("py", "```\na\n```", True)]),
        ("````md\n```py\na\n```\n````", [("md", "```py\na\n```", True)]),
        ("```py\na\n`````", [("py", "a", True)]),
        ("  ```\n  a:\n\n    b\n c\n  ```", [("", "a:\n\n  b\n c", True)]),
        ("  ```\na:\n  b\n  ```", [("", "a:\n  b", True)]),
        ("1. ```py\n\n   a\n   ```", [("py", "\na", True)]),
        ("\t```py\n\ta\n\t```sh\n\tb", [("py", "a", False), ("sh", "b", False)]),
        ("```py\n```", [("py", "", True)]),
        ("Run: ```py\na\n``` and wait.", [("py", "a", True)]),
        ("```py\na\n```sh\nb\n```", [("py", "a", False), ("sh", "b", True)]),
        ("```py\na", [("py", "a", False)]),
        ("```py\r\na\r\n```\r\n", [("py", "a\r", True)]),
        ("`a` and ```b``` are code", []),
        ("ends with ```", []),
        ("", []),
    ],
)
def test_fenced_blocks_are_found(text: str, found: list[tuple[str, str, bool]]):
    assert [(fence.language, fence.body, fence.is_closed) for fence in find_fenced_blocks(text)] == found


def test_text_outside_has_no_block():
    text = "a\n```py\nb\n```\nc ```sh\nd\n```\ne"
    assert text_outside(text, find_fenced_blocks(text)) == "a\n\n\nc \n\ne"
    assert extract_blocks(text, ("sh",)) == ["d"]


def test_finding_blocks_takes_linear_time():
    began = time.process_time()
    for unit in (
        "`",
        "```\n",
        "```a\n",
        "~~~\n",
        "``` ",
        "`\n",
        "```a```",
        "```a",
        "````a\n```\n",
        " ",
        " ```a\n",
        "- ```a\n \n",
    ):
        text_outside(text := unit * (10**5 // len(unit)), find_fenced_blocks(text))
        find_fenced_blocks(text + "x`")
    assert time.process_time() - began < 10
