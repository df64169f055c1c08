"""One test over the rows of a table or the files of a folder that names every failing case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def check_each(cases: Iterable[Case], check: Callable[[Case], object]) -> None:
    """Run a check on every case, then fail once with a line for each case that failed."""
    count, failed = 0, []
    for case in cases:
        count += 1
        try:
            check(case)
        except (Exception, SystemExit, pytest.fail.Exception) as error:
            failed.append(f"{case}: {type(error).__name__}: {error}")
    assert count, "there are no cases to check"
    assert not failed, f"{len(failed)} of {count} fail:\n" + "\n".join(failed)
