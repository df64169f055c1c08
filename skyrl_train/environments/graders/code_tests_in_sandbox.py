"""Runs inside a grader's sandbox, with the system's Python: solution.py as a program, or one function of it."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# names that the problems' starter code assumes
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
