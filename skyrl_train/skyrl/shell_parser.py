"""The commands of a shell script, with the variables that it assigns: read, never run.

It understands assignments, arrays, `export`, `: "${NAME:=default}"`, arithmetic, line continuations, and `if` that
compares texts. What only a shell knows, the output of a command or a variable that nobody assigned, stays as it is
written, between MARKS, and `quoted` leaves it to the shell.
"""

from __future__ import annotations

import ast
import operator
import os.path
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile

from skyrl_train.errors import ConfigError

UNEXPANDED_MARKERS = "\ue000", "\ue001"
"""Around what is left to the shell; characters that no script has."""
_MARKED = re.compile(f"{UNEXPANDED_MARKERS[0]}(.*?){UNEXPANDED_MARKERS[1]}", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_FUNCTION = re.compile(r"[\w-]+\(\)")
_ELEMENT = re.compile(r"\w+\[[^]]*\]\+?=")
_VARIABLE = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9@*])(\[[@*0-9]+\])?(?:(:?[-=?+]|##?|%%?|//?)(.*))?", re.DOTALL)
_INSIDE = re.compile(r"\$\{[^{}]*\}|\$\w+")
_REDIRECTION = re.compile(r"&?\d*(<<?<?|>>?)[&-]?")
_DECLARES = frozenset({"export", "readonly", "local", "declare", "typeset"})
_SUCCEEDS = frozenset({":", "true", "cd", "echo", "export", "mkdir", "pushd", "set", "shift"})
"""Commands that are taken to succeed."""
_CHANGES = frozenset({"let", "read", "readarray", "mapfile", "unset", "source", ".", "eval"})
"""Commands that may change variables and are not followed."""
_SKIPPED = {"for": "done", "while": "done", "until": "done", "case": "esac"}
"""What begins a part of a script that is not followed, and what ends it."""
_COMPARISONS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_SUMS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class ShellScript:
    """What `commands` has found in a script beside the commands."""

    path: str
    variables: dict[str, list[str]] = field(default_factory=dict)
    """The words of each variable that was assigned: one, unless it is an array."""
    arguments: list[str] = field(default_factory=list)
    """What `$@` stands for."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the caller sets, as in `NUM_GPUS=1 bash recipe.sh`."""
    exported: list[str] = field(default_factory=list)
    """Names of variables that the script exports."""
    unresolved: list[str] = field(default_factory=list)
    """Assignments in loops, functions, and under conditions that cannot be decided."""


@dataclass
class ShellCommand:
    """A command of a script, without quotes and redirections."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that it sets for itself, as in `A=1 python ...`."""


def parse_commands(text: str, script: ShellScript) -> Iterator[ShellCommand]:
    """Yield every command. Raises ConfigError for a script that cannot be read."""
    branches: list[_Branch] = []
    skipped: list[str] = []
    succeeded: bool | None = True  # the last command; None: unknown
    for joined, raw in _split(text, script.path):
        defines = raw[0] == "function" or raw[1:2] == ["()"] or _FUNCTION.fullmatch(raw[0])
        if skipped or defines or raw[0] in _SKIPPED:
            _skip(raw, skipped, script)
            continue
        if not (words := _of_branch(raw, branches, succeeded)):
            continue
        runs = {"&&": succeeded, "||": None if succeeded is None else not succeeded}.get(joined, True)
        if runs is False:
            continue
        declares = words[0] in _DECLARES
        assigned = list((filter if declares else takewhile)(_ASSIGNMENT.match, words))
        assigns = declares or len(assigned) == len(words)
        if not all(branch.is_taken for branch in branches) or (runs is None and assigns):
            if assigns and (runs is None or any(branch.is_unknown for branch in branches)):
                script.unresolved.append(" ".join(words))
            succeeded = None if runs is None else _status(words, script)
            continue
        if assigns:
            for word in assigned:
                _assign(word, script)
            if words[0] == "export":
                script.exported += [word.partition("=")[0] for word in assigned]
        elif words[0].startswith("(") and not words[0].startswith("(("):
            yield from parse_commands(words[0][1:-1], script)
        elif words[0] in _CHANGES or words[0].startswith("((") or _ELEMENT.match(words[0]):
            script.unresolved.append(" ".join(words))
        if words[0] == "shift":
            count = int(words[1]) if words[1:] and words[1].isdigit() else 1
            script.arguments = script.arguments[count:]
        elif words[:2] == ["set", "--"]:
            script.arguments = [one for word in words[2:] for one in _expand(word, script)]
        elif not assigns and words[0] not in ("[", "[["):
            own = dict(_assigned(word, script) for word in assigned)
            yield ShellCommand(
                [one for word in words[len(assigned) :] for one in _expand(word, script)],
                {name: " ".join(value) for name, value in own.items()},
            )
        succeeded = _status(words, script) if runs else None


@dataclass
class _Branch:
    """The branch of an `if` that is being read."""

    is_taken: bool = True
    is_unknown: bool = False
    """The condition cannot be decided here; the branch is not taken."""
    is_decided: bool = False
    """A branch before it was taken."""


def _of_branch(raw: list[str], branches: list[_Branch], succeeded: bool | None) -> list[str]:
    """Return a command without the words of `if` before it; updates `branches`."""
    first = raw[0]
    if first == "if":
        branches.append(_Branch())
    elif first in ("elif", "else", "then", "fi") and branches:
        branch = branches.pop()
        if first in ("elif", "else"):
            decided = branch.is_decided or branch.is_taken
            branches.append(_Branch(is_taken=not decided, is_decided=decided))
        elif first == "then":
            holds = None if succeeded is None else succeeded and not branch.is_decided
            branches.append(_Branch(bool(holds), holds is None and not branch.is_decided, branch.is_decided))
    else:
        return raw
    return raw[1:]


def display_word(word: str, environment: Mapping[str, str] | None = None) -> str:
    """The word with what is left to the shell as it is written, or as `environment` has it."""
    known = environment or {}
    return _MARKED.sub(lambda found: known.get(found[1].removeprefix("$"), found[1]), word)


def quote_word(word: str) -> str:
    """The word for a shell, which fills in what was left to it."""
    if UNEXPANDED_MARKERS[0] not in word:
        return shlex.quote(word)
    parts = _MARKED.split(word)
    plain = [re.sub(r'([\\"$`])', r"\\\1", part) for part in parts[::2]]
    return f'"{"".join(a + b for a, b in zip(plain, [*parts[1::2], ""], strict=True))}"'


def unexpanded_parts(word: str) -> list[str]:
    """What is left to the shell in a word."""
    return _MARKED.findall(word)


def _marked(text: str) -> str:
    return f"{UNEXPANDED_MARKERS[0]}{text}{UNEXPANDED_MARKERS[1]}"


def _skip(raw: list[str], skipped: list[str], script: ShellScript) -> None:
    first = raw[0]
    if first in _SKIPPED:
        skipped.append(_SKIPPED[first])
    elif not skipped:
        skipped.append("}")
    if skipped[-1] in raw:
        skipped.pop()
    else:
        words = raw[1:] if first in ("do", "then", "else") else raw
        if words and _ASSIGNMENT.match(words[0]):
            script.unresolved.append(" ".join(words))


def _status(words: list[str], script: ShellScript) -> bool | None:
    """True if the command succeeds, or is a comparison that holds; None if nothing here says so."""
    if words[0] == "!":
        status = _status(words[1:], script) if words[1:] else None
        return None if status is None else not status
    if _ASSIGNMENT.match(words[-1]) or words[0] in _SUCCEEDS:
        return True
    test = ["[", *words[1:], "]"] if words[0] == "test" else words
    if test[0] == "[[" and any(re.search(r"[*?\[]", word) for word in test[3:-1]):
        return None  # a pattern
    expanded = [one for word in test for one in _expand(word, script)]
    match expanded:
        case ["[" | "[[", *inner, "]" | "]]"] if not any(UNEXPANDED_MARKERS[0] in word for word in inner):
            return _holds(inner)
    return None


def _holds(words: list[str]) -> bool | None:
    """True if a comparison holds; None if it is none of texts or integers."""
    match words:
        case ["!", *rest]:
            return None if (holds := _holds(rest)) is None else not holds
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
        case ["-n" | "-z" as kind, value]:
            return bool(value) is (kind == "-n")
        case [left, kind, right] if kind in _COMPARISONS and left.isdigit() and right.isdigit():
            return bool(_COMPARISONS[kind](int(left), int(right)))
    return None


def _assign(word: str, script: ShellScript) -> None:
    name, value = _assigned(word, script)
    script.variables[name] = value


def _assigned(word: str, script: ShellScript) -> tuple[str, list[str]]:
    """Return the variable of an assignment, and the words that it gets."""
    found = _ASSIGNMENT.fullmatch(word)
    assert found is not None
    name, adds, value = found.groups()
    before = script.variables.get(name, []) if adds else []
    if value.startswith("(") and value.endswith(")"):
        inner = [word for _, raw in _split(value[1:-1], script.path) for word in raw]
        return name, [*before, *(one for word in inner for one in _expand(word, script))]
    home = re.sub(r"^~(?=/|$)", "$HOME", value)
    return name, ["".join([*before, " ".join(_expand(home, script, splits=False))])]


def _split(text: str, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the operator before each command, and its words as written, with quotes and without redirections.

    The operator is `&&`, `||`, or `;` for any other.
    """
    joined = ";"
    words: list[str] = []
    here_documents: list[str] = []
    at, begin = 0, None
    while at <= len(text):
        char = text[at : at + 1]
        if text.startswith("\\\n", at) and begin is None:
            at += 2
        elif char in " \t" or (char in "\n;&|" and not (char == "&" and text[at - 1] in "<>")):  # "" at the end
            if begin is not None:
                words.append(text[begin:at])
            if (char == "" or char in "\n;&|") and words:
                here_documents += [word[2:].strip("-'\"") for word in words if re.match("<<[^<]", word)]
                if kept := _without_redirections(words):
                    yield joined, kept
                words, joined = [], ";"
            if (pair := text[at : at + 2]) in ("&&", "||"):
                joined, at = pair, at + 1
            at, begin = at + 1, None
            while char == "\n" and here_documents:
                found = re.compile(rf"^\t*{re.escape(here_documents.pop(0))}$", re.MULTILINE).search(text, at)
                at = found.end() if found else len(text)
        elif char == "#" and begin is None:
            at = _end_of_line(text, at)
        else:
            begin = at if begin is None else begin
            at = _end_of_piece(text, at, path)


def _without_redirections(words: list[str]) -> list[str]:
    kept = []
    rest = iter(words)
    for word in rest:
        if _REDIRECTION.fullmatch(word):
            next(rest, None)  # the file
        elif not _REDIRECTION.match(word):
            kept.append(word)
    return kept


def _end_of_line(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found


def _end_of_piece(text: str, at: int, path: str) -> int:
    """The end of the character, quoted text, expansion or array that begins at `at`."""
    char = text[at]
    if char == "\\":
        return at + 2
    if char == "'":
        return _closing(text, at + 1, "'", path, plain=True)
    if char == '"':
        return _closing(text, at + 1, '"', path)
    if text.startswith("$'", at):
        return _closing(text, at + 2, "'", path, plain=True)
    if text.startswith(("$(", "${"), at):
        return _closing(text, at + 2, ")" if text[at + 1] == "(" else "}", path)
    if char == "`":
        return _closing(text, at + 1, "`", path, plain=True)
    if char == "(":
        return _closing(text, at + 1, ")", path)
    return at + 1


def _closing(text: str, at: int, end: str, path: str, plain: bool = False) -> int:
    """The place after `end`. With `plain`, nothing in between is special."""
    begin = at
    while at < len(text):
        if text[at] == end:
            return at + 1
        inside_quotes = end == '"' and text[at] in "'("
        is_comment = end == ")" and text[at] == "#" and text[at - 1].isspace()
        if is_comment:
            at = _end_of_line(text, at)
        else:
            at = at + 1 if plain or inside_quotes else _end_of_piece(text, at, path)
    line = text.count("\n", 0, begin) + 1
    raise ConfigError(f"{path}, line {line}: a {end} is missing. Only plain scripts of a shell can be read.")


def _expand(word: str, script: ShellScript, splits: bool = True) -> list[str]:
    """The words that a written word stands for, without quotes, in order."""
    fields, started, at, in_quotes = [""], False, 0, False

    def add(values: list[str], whole: bool) -> None:
        """`whole`: a quoted value stays one word."""
        nonlocal started
        parts = values if whole or not splits else [part for value in values for part in _words_of(value)]
        if parts:
            fields[-1] += parts[0]
            fields.extend(parts[1:])
            started = True

    while at < len(word):
        char = word[at]
        if char == '"':
            in_quotes, started, at = not in_quotes, started or word[at + 1 : at + 2] == '"', at + 1
        elif char == "'" and not in_quotes:
            end = word.index("'", at + 1)
            add([word[at + 1 : end]], whole=True)
            at = end + 1
        elif word.startswith("\\\n", at):
            at += 2
        elif char == "\\":
            kept = char if in_quotes and word[at + 1 : at + 2] not in '\\"$`\n' else ""
            add([kept + word[at + 1 : at + 2]], whole=True)
            at += 2
        elif char == "`" or (char == "$" and word[at + 1 : at + 2] in ("(", "{", "'")):
            end = _end_of_piece(word, at, script.path)
            add(_value(word[at:end], script), whole=in_quotes)
            at = end
        elif char == "$" and (name := _VARIABLE.match(word, at + 1)):
            add(_variable(name[0], script), whole=in_quotes)
            at = name.end()
        else:
            add([char], whole=True)
            at += 1
    return fields if started else []


def _words_of(value: str) -> list[str]:
    """A value that stands without quotes, as the shell splits it; what is left to the shell is not split."""
    marked = _MARKED.findall(value)
    numbered = iter(marked)
    plain = _MARKED.sub(UNEXPANDED_MARKERS[0], value)
    return [re.sub(UNEXPANDED_MARKERS[0], lambda _: _marked(next(numbered)), part) for part in plain.split()]


def _value(written: str, script: ShellScript) -> list[str]:
    """What `$(...)`, `${...}`, `$'...'` or a command in backquotes stands for."""
    if written.startswith("$'"):
        return [written[2:-1].encode().decode("unicode_escape")]
    if written.startswith("$((") and written.endswith("))"):
        return [_sum(written, script)]
    if written.startswith("${"):
        return _braced(written, script)
    inner = written[2:-1] if written.startswith("$(") else written[1:-1]
    command = [one for _, raw in _split(inner, script.path) for word in raw for one in _expand(word, script)]
    match [word for word in command if not word.startswith("-")]:
        case ["dirname", path] if UNEXPANDED_MARKERS[0] not in path:
            return [os.path.dirname(path) or "."]
        case ["cd", path, "pwd"] | ["realpath", path] if UNEXPANDED_MARKERS[0] not in path:
            return [os.path.abspath(path)]
    return [_marked(_INSIDE.sub(lambda name: _known(name[0], script), written))]


def _known(written: str, script: ShellScript) -> str:
    """The value of a variable that the script knows, inside a command that is left to the shell."""
    name = written.strip("${}")
    values = _braced(written, script) if written.startswith("${") else _variable(name, script)
    return " ".join(map(display_word, values)) if values or name in script.variables else written


def _variable(name: str, script: ShellScript) -> list[str]:
    if name in script.variables:
        return script.variables[name][:1]
    if name == "0":
        return [script.path]
    if name in "@*":
        return script.arguments
    if name == "#":
        return [str(len(script.arguments))]
    return script.arguments[int(name) - 1 : int(name)] if name.isdigit() else [_marked(f"${name}")]


def _braced(written: str, script: ShellScript) -> list[str]:
    """`${NAME}`, `${NAME[@]}`, and with a default, an error, an alternative or a pattern; others stay as written."""
    found = _BRACED.fullmatch(written[2:-1])
    if found is None:
        return _not_followed(written, script)
    name, index, kind, other = found.groups()
    if name == "BASH_SOURCE":
        return [script.path]
    if index in ("[@]", "[*]"):
        return script.variables.get(name, [])
    value = _variable(name, script)
    if index and name in script.variables:
        value = script.variables[name][int(index[1:-1]) :][:1]
    if kind is not None and name not in script.variables and name in script.environment:
        value = script.variables[name] = [script.environment[name]]
    if kind is not None and kind[0] in "#%/":
        pattern = " ".join(_expand(other, script, splits=False))
        text = "".join(value)
        if UNEXPANDED_MARKERS[0] in text + pattern or (kind[0] == "/" and re.search(r"[*?\[]", pattern)):
            return _not_followed(written, script)
        return [_without(text, kind, pattern)]
    is_set = name in script.variables or (name.isdigit() and bool(value))
    has_value = is_set and (value != [""] or not (kind or "").startswith(":"))
    if kind in (":+", "+"):
        return _expand(f'"{other}"', script) if has_value else []
    if kind is None or has_value or kind.endswith("?"):
        return value
    default = _expand(other if other.startswith(('"', "'")) else f'"{other}"', script) or [""]
    if kind.endswith("="):
        script.variables[name] = default
    return default


def _without(value: str, kind: str, pattern: str) -> str:
    """The value without a prefix (`#`, `##`) or suffix (`%`, `%%`), or with a text replaced (`/`, `//`)."""
    if kind[0] == "/":
        old, _, new = pattern.partition("/")
        return value.replace(old, new, -1 if kind == "//" else 1)
    ends = range(len(value) + 1)
    for end in ends if kind in ("#", "%%") else reversed(ends):
        if kind[0] == "#" and fnmatchcase(value[:end], pattern):
            return value[end:]
        if kind[0] == "%" and fnmatchcase(value[end:], pattern):
            return value[:end]
    return value


def _not_followed(written: str, script: ShellScript) -> list[str]:
    """Leave an expansion to the shell, and name it if it reads a variable that only the script has."""
    if any(name in script.variables for name in re.findall(r"[A-Za-z_]\w*", written)):
        script.unresolved.append(written)
    return [_marked(written)]


def _sum(written: str, script: ShellScript) -> str:
    """The value of `$((...))`; as written if it is no sum of known numbers."""
    text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda name: "".join(_variable(name[1], script)), written[3:-2])
    try:
        return str(_evaluated(ast.parse(text.replace("/", "//").strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return _marked(written)


def _evaluated(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SUMS:
            return int(_SUMS[type(op)](_evaluated(left), _evaluated(right)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand)
    raise ValueError("not a sum of integers")
