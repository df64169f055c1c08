"""Linux attributes of this process: what happens to it, or to its descendants, when another process ends."""

from __future__ import annotations

import ctypes
import sys


def set_process_attribute(option: str, value: int) -> None:
    """Set an attribute of this process on Linux. Do nothing on other systems.

    Args:
        option: "PR_SET_PDEATHSIG": signal that this process gets when its parent ends. "PR_SET_CHILD_SUBREAPER": 1 to
            become the parent of descendants whose own parent has ended.
        value: Its value.
    """
    numbers = {"PR_SET_PDEATHSIG": 1, "PR_SET_CHILD_SUBREAPER": 36}
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(numbers[option], value)
