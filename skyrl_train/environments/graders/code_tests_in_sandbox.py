"""The driver that the system's Python runs inside a grader's sandbox. It runs solution.py or one function of it."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# names that the starter code of problems uses without importing them
IMPORTS = """
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re, string, sys, time
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, log, log2, log10, pi, prod, sqrt
from typing import *
"""


def main() -> None:
    """Run solution.py as a program, or call the function that the command line names.

    A function's arguments are read from stdin as JSON, one per line, and its return value is written to stdout as JSON.
    """
    sys.setrecursionlimit(50_000)
    with open("solution.py", encoding="utf-8") as file:
        code = file.read()
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(IMPORTS, scope)
    if len(sys.argv) < 2:
        exec(compile(code, "solution.py", "exec", dont_inherit=True), scope)
        return
    arguments = [json.loads(line) for line in sys.stdin.read().split("\n") if line.strip()]
    answer = os.dup(1)
    os.dup2(2, 1)  # keep printed output out of the returned value
    exec(compile(code, "solution.py", "exec", dont_inherit=True), scope)
    solution = scope["Solution"]() if "Solution" in scope else None
    function = getattr(solution, sys.argv[1], None) or scope[sys.argv[1]]
    with os.fdopen(answer, "w") as stream:
        json.dump(function(*arguments), stream)


if __name__ == "__main__":
    main()
