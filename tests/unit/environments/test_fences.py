from __future__ import annotations

import time

import pytest

from skyrl_train.environments.fences import blocks_in, fences, outside


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
    assert [(fence.language, fence.body, fence.closed) for fence in fences(text)] == found


def test_text_outside_has_no_block():
    text = "a\n```py\nb\n```\nc ```sh\nd\n```\ne"
    assert outside(text, fences(text)) == "a\n\n\nc \n\ne"
    assert blocks_in(text, ("sh",)) == ["d"]


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
        outside(text := unit * (10**5 // len(unit)), fences(text))
        fences(text + "x`")
    assert time.process_time() - began < 10
