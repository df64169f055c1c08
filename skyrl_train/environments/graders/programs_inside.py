"""What a grader runs inside a sandbox, with the system's Python: solution.py as a program, or one function of it."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# what the problems' starter code takes for granted
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
    os.dup2(2, 1)  # what it prints is not what it returns
    exec(compile(code, "solution.py", "exec", dont_inherit=True), scope)
    holder = scope["Solution"]() if "Solution" in scope else None
    function = getattr(holder, sys.argv[1], None) or scope[sys.argv[1]]
    with os.fdopen(answer, "w") as stream:
        json.dump(function(*arguments), stream)


if __name__ == "__main__":
    main()
