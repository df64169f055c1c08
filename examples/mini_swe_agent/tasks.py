"""Ten small repositories with one bug each: the problem, the fix, and the tests.

The tests in a repository are for the agent. The tests that score are scripts with known output outside the repository.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A repository with a bug. `buggy` is the text of `module` with the bug, `fixed` the text without it."""

    name: str
    problem: str
    module: str
    buggy: str
    fixed: str
    visible: str
    """The body of the test in the repository."""
    tests: tuple[tuple[str, str], ...]
    """Scripts that score the submission, each with its expected output."""

    @property
    def test_file(self) -> str:
        return f"test_{self.module.removesuffix('.py')}.py"

    @property
    def repository(self) -> dict[str, str]:
        body = "\n".join(f"        {line}" for line in self.visible.splitlines())
        name = self.module.removesuffix(".py")
        test = (
            f"import unittest\n\nimport {name}\n\n\nclass Test(unittest.TestCase):\n    def test(self):\n{body}\n\n\n"
            'if __name__ == "__main__":\n    unittest.main()\n'
        )
        readme = f"# {self.name}\n\nRun the tests: python3 -m unittest\n"
        return {self.module: self.buggy, self.test_file: test, "README.md": readme}


TASKS = (
    Task(
        "ring",
        "Ring(n) in ring.py keeps the last n values, but items() gives them in the wrong order once it is full: it "
        "must be oldest first.",
        "ring.py",
        "class Ring:\n    def __init__(self, size):\n        self.size, self.kept, self.next = size, [], 0\n\n"
        "    def add(self, value):\n        if len(self.kept) < self.size:\n            self.kept.append(value)\n"
        "        else:\n            self.kept[self.next] = value\n        self.next = (self.next + 1) % self.size\n\n"
        "    def items(self):\n        return list(self.kept)\n",
        "class Ring:\n    def __init__(self, size):\n        self.size, self.kept = size, []\n\n"
        "    def add(self, value):\n        self.kept = [*self.kept, value][-self.size :]\n\n"
        "    def items(self):\n        return list(self.kept)\n",
        "one = ring.Ring(2)\none.add(1)\nself.assertEqual(one.items(), [1])",
        (
            ("from ring import Ring\nr = Ring(3)\nfor n in range(5): r.add(n)\nprint(r.items())", "[2, 3, 4]"),
            ("from ring import Ring\nr = Ring(1)\nr.add(1); r.add(2)\nprint(r.items())", "[2]"),
            ("from ring import Ring\nr = Ring(4)\nr.add(7)\nprint(r.items())", "[7]"),
        ),
    ),
    Task(
        "median",
        "median.median is wrong for lists of even length: it must be the mean of the two values in the middle.",
        "median.py",
        "def median(values):\n    return sorted(values)[len(values) // 2]\n",
        "def median(values):\n    ordered, half = sorted(values), len(values) // 2\n"
        "    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2\n",
        "self.assertEqual(median.median([3, 1, 2]), 2)",
        (
            ("from median import median\nprint(median([4, 1, 3, 2]))", "2.5"),
            ("from median import median\nprint(median([5]), median([1, 2]))", "5 1.5"),
        ),
    ),
    Task(
        "slug",
        "slug.slug leaves two dashes where several characters are replaced, and dashes at the ends. One dash, and none "
        "at the ends.",
        "slug.py",
        'import re\n\n\ndef slug(text):\n    return re.sub("[^a-z0-9]", "-", text.lower())\n',
        'import re\n\n\ndef slug(text):\n    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")\n',
        'self.assertEqual(slug.slug("Some words"), "some-words")',
        (
            ('from slug import slug\nprint(slug("  Hello,   World! "))', "hello-world"),
            ('from slug import slug\nprint(slug("a--b"), slug("C3"))', "a-b c3"),
        ),
    ),
    Task(
        "intervals",
        "intervals.merge forgets an interval that lies inside of an earlier one and shortens the result. Merged "
        "intervals must cover all that was given.",
        "intervals.py",
        "def merge(intervals):\n    merged = []\n    for start, stop in sorted(intervals):\n"
        "        if merged and start <= merged[-1][1]:\n            merged[-1] = (merged[-1][0], stop)\n"
        "        else:\n            merged.append((start, stop))\n    return merged\n",
        "def merge(intervals):\n    merged = []\n    for start, stop in sorted(intervals):\n"
        "        if merged and start <= merged[-1][1]:\n"
        "            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))\n"
        "        else:\n            merged.append((start, stop))\n    return merged\n",
        "self.assertEqual(intervals.merge([(1, 3), (2, 5)]), [(1, 5)])",
        (
            ("from intervals import merge\nprint(merge([(1, 9), (2, 3), (10, 11)]))", "[(1, 9), (10, 11)]"),
            ("from intervals import merge\nprint(merge([]), merge([(3, 4), (1, 2)]))", "[] [(1, 2), (3, 4)]"),
        ),
    ),
    Task(
        "cache",
        "Cache in cache.py must drop the key that was used longest ago. Reading a key is a use as well, but get does "
        "not count it as one.",
        "cache.py",
        "class Cache:\n    def __init__(self, size):\n        self.size, self.kept = size, {}\n\n"
        "    def get(self, key):\n        return self.kept.get(key)\n\n"
        "    def put(self, key, value):\n        self.kept.pop(key, None)\n        self.kept[key] = value\n"
        "        if len(self.kept) > self.size:\n            del self.kept[next(iter(self.kept))]\n",
        "class Cache:\n    def __init__(self, size):\n        self.size, self.kept = size, {}\n\n"
        "    def get(self, key):\n        if key in self.kept:\n            self.kept[key] = self.kept.pop(key)\n"
        "        return self.kept.get(key)\n\n"
        "    def put(self, key, value):\n        self.kept.pop(key, None)\n        self.kept[key] = value\n"
        "        if len(self.kept) > self.size:\n            del self.kept[next(iter(self.kept))]\n",
        'one = cache.Cache(1)\none.put("a", 1)\nself.assertEqual(one.get("a"), 1)',
        (
            (
                'from cache import Cache\nc = Cache(2)\nc.put("a", 1); c.put("b", 2); c.get("a"); c.put("c", 3)\n'
                'print(c.get("a"), c.get("b"), c.get("c"))',
                "1 None 3",
            ),
            ('from cache import Cache\nc = Cache(1)\nc.put("a", 1); c.put("a", 2)\nprint(c.get("a"))', "2"),
        ),
    ),
    Task(
        "words",
        "words.count counts Word and word as two words, and takes punctuation for a part of them. Case and punctuation "
        "do not count; an apostrophe inside of a word does.",
        "words.py",
        "def count(text):\n    found = {}\n    for word in text.split():\n"
        "        found[word] = found.get(word, 0) + 1\n"
        "    return found\n",
        "import re\n\n\ndef count(text):\n    found = {}\n"
        '    for word in re.findall(r"[a-z0-9]+(?:\'[a-z0-9]+)*", text.lower()):\n'
        "        found[word] = found.get(word, 0) + 1\n    return found\n",
        'self.assertEqual(words.count("a b a"), {"a": 2, "b": 1})',
        (
            (
                'from words import count\nprint(sorted(count("The cat, the dog.").items()))',
                "[('cat', 1), ('dog', 1), ('the', 2)]",
            ),
            (
                'from words import count\nprint(sorted(count("Don\'t! don\'t").items()), sorted(count("").items()))',
                '[("don\'t", 2)] []',
            ),
        ),
    ),
    Task(
        "roman",
        "roman.to_roman writes 4 as IIII: it lacks the forms in which a smaller sign stands before a larger one.",
        "roman.py",
        'SIGNS = [(1000, "M"), (500, "D"), (100, "C"), (50, "L"), (10, "X"), (5, "V"), (1, "I")]\n\n\n'
        'def to_roman(number):\n    text = ""\n    for value, sign in SIGNS:\n'
        "        text += sign * (number // value)\n"
        "        number %= value\n    return text\n",
        'SIGNS = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), '
        '(10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]\n\n\n'
        'def to_roman(number):\n    text = ""\n    for value, sign in SIGNS:\n'
        "        text += sign * (number // value)\n"
        "        number %= value\n    return text\n",
        'self.assertEqual(roman.to_roman(7), "VII")',
        (
            ("from roman import to_roman\nprint(to_roman(1994), to_roman(4), to_roman(49))", "MCMXCIV IV XLIX"),
            ("from roman import to_roman\nprint(to_roman(400), to_roman(444))", "CD CDXLIV"),
            ("from roman import to_roman\nprint(to_roman(3), to_roman(2026))", "III MMXXVI"),
        ),
    ),
    Task(
        "matrix",
        "matrix.zeros makes rows that are one and the same list: writing to a row writes to all of them.",
        "matrix.py",
        "def zeros(rows, columns):\n    return [[0] * columns] * rows\n",
        "def zeros(rows, columns):\n    return [[0] * columns for _ in range(rows)]\n",
        "self.assertEqual(matrix.zeros(1, 2), [[0, 0]])",
        (
            ("from matrix import zeros\nm = zeros(2, 2)\nm[0][1] = 5\nprint(m)", "[[0, 5], [0, 0]]"),
            ("from matrix import zeros\nprint(zeros(0, 3), zeros(3, 0))", "[] [[], [], []]"),
        ),
    ),
    Task(
        "retry",
        "retry.retry calls a function one time too often, and loses the last call's exception, which it must raise.",
        "retry.py",
        "def retry(function, times):\n    for _ in range(times + 1):\n        try:\n            return function()\n"
        "        except Exception:\n            pass\n    return None\n",
        "def retry(function, times):\n    for attempt in range(times):\n        try:\n            return function()\n"
        "        except Exception:\n            if attempt == times - 1:\n                raise\n    return None\n",
        "self.assertEqual(retry.retry(lambda: 3, 2), 3)",
        (
            (
                "from retry import retry\ncalls = []\ndef f():\n    calls.append(1)\n    raise KeyError(len(calls))\n"
                "try:\n    retry(f, 3)\nexcept KeyError as error:\n    print(error, len(calls))",
                "3 3",
            ),
            (
                "from retry import retry\nseen = iter([0, 1])\ndef f():\n    return 1 // next(seen)\n"
                "print(retry(f, 5))",
                "1",
            ),
        ),
    ),
    Task(
        "csvline",
        "csvline.split cuts fields at commas inside of double quotes. A quoted field is one field, without its quotes, "
        "and two double quotes inside of it are one.",
        "csvline.py",
        'def split(line):\n    return line.split(",")\n',
        "import csv\n\n\ndef split(line):\n    return next(csv.reader([line]))\n",
        'self.assertEqual(csvline.split("a,b"), ["a", "b"])',
        (
            ("from csvline import split\nprint(split('a,\"b,c\",d'))", "['a', 'b,c', 'd']"),
            ('from csvline import split\nprint(split(\'"say ""hi""",2\'))', "['say \"hi\"', '2']"),
        ),
    ),
)
