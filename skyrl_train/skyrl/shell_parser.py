"""A parser that extracts commands and variable assignments from a shell script, without running it.

It understands assignments, arrays, `export`, `: "${NAME:=default}"`, arithmetic, line continuations, and `if` with
comparisons of strings and integers. It cannot expand the output of a command or a variable that the script never
assigns: such a part stays as written, between UNEXPANDED_MARKERS, and `quote_word` leaves its expansion to the shell.
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
"""Characters, which no script contains, before and after a part that the shell must expand."""
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
"""Commands that are assumed to succeed."""
_CHANGES_VARIABLES = frozenset({"let", "read", "readarray", "mapfile", "unset", "source", ".", "eval"})
"""Commands that may change variables in a way that the parser does not follow."""
_SKIPPED = {"for": "done", "while": "done", "until": "done", "case": "esac"}
"""First words of constructs that the parser skips -> their last words."""
_COMPARISONS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class ShellScript:
    """The state of a script during parsing: variables, arguments, and parts that the parser cannot resolve."""

    path: str
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Names of assigned variables -> their words; only an array has more or fewer than one word."""
    arguments: list[str] = field(default_factory=list)
    """The positional parameters, `$@`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the caller of the script sets, as in `NUM_GPUS=1 bash recipe.sh`."""
    exported: list[str] = field(default_factory=list)
    """Names of variables that the script exports."""
    unresolved: list[str] = field(default_factory=list)
    """Assignments and expansions that cannot be resolved: in loops, functions or under undecidable conditions."""


@dataclass
class ShellCommand:
    """A command of a script, with expanded words, without quotes and redirections."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the command sets for itself, as in `A=1 python ...`."""


def parse_commands(text: str, script: ShellScript) -> Iterator[ShellCommand]:
    """Yield the commands that the script would run, in order, and update the state of the script.

    Commands in skipped constructs, and in branches that are not taken or cannot be decided, are not yielded.

    Args:
        text: The text of the script.
        script: The state, with the script's path, arguments and environment. Assignments change it.

    Raises:
        ConfigError: A quote, bracket or brace is not closed. The message names path and line.
    """
    branches: list[_Branch] = []
    skipped: list[str] = []
    succeeded: bool | None = True  # status of the last command; None if unknown
    for separator, raw in _split(text, script.path):
        defines = raw[0] == "function" or raw[1:2] == ["()"] or _FUNCTION.fullmatch(raw[0])
        if skipped or defines or raw[0] in _SKIPPED:
            _skip(raw, skipped, script)
            continue
        if not (words := _parse_branch(raw, branches, succeeded)):
            continue
        runs = {"&&": succeeded, "||": None if succeeded is None else not succeeded}.get(separator, True)
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
        elif words[0] in _CHANGES_VARIABLES or words[0].startswith("((") or _ELEMENT.match(words[0]):
            script.unresolved.append(" ".join(words))
        if words[0] == "shift":
            count = int(words[1]) if words[1:] and words[1].isdigit() else 1
            script.arguments = script.arguments[count:]
        elif words[:2] == ["set", "--"]:
            script.arguments = [part for word in words[2:] for part in _expand(word, script)]
        elif not assigns and words[0] not in ("[", "[["):
            variables = dict(_parse_assignment(word, script) for word in assigned)
            yield ShellCommand(
                [part for word in words[len(assigned) :] for part in _expand(word, script)],
                {name: " ".join(value) for name, value in variables.items()},
            )
        succeeded = _status(words, script) if runs else None


@dataclass
class _Branch:
    """The branch of an `if` that is being parsed."""

    is_taken: bool = True
    is_unknown: bool = False
    """True if the condition cannot be decided; the branch is then not taken."""
    is_decided: bool = False
    """True if an earlier branch of the same `if` was taken."""


def _parse_branch(raw: list[str], branches: list[_Branch], succeeded: bool | None) -> list[str]:
    """Return a command without a keyword of `if` at its start, and update `branches`."""
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
    """Return a word without markers.

    Args:
        word: A word of a ShellCommand.
        environment: Values of variables that replace unexpanded `$NAME`; other unexpanded parts stay as written. None:
            no variable is replaced.
    """
    values = environment or {}
    return _MARKED.sub(lambda match: values.get(match[1].removeprefix("$"), match[1]), word)


def quote_word(word: str) -> str:
    """Return a word quoted for a shell, which still expands the word's unexpanded parts."""
    if UNEXPANDED_MARKERS[0] not in word:
        return shlex.quote(word)
    parts = _MARKED.split(word)
    plain = [re.sub(r'([\\"$`])', r"\\\1", part) for part in parts[::2]]
    return f'"{"".join(a + b for a, b in zip(plain, [*parts[1::2], ""], strict=True))}"'


def unexpanded_parts(word: str) -> list[str]:
    """Return the parts of a word that the shell must expand, as written."""
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
    """Return True if the command succeeds, False if it fails, and None if the parser cannot know."""
    if words[0] == "!":
        status = _status(words[1:], script) if words[1:] else None
        return None if status is None else not status
    if _ASSIGNMENT.match(words[-1]) or words[0] in _SUCCEEDS:
        return True
    test = ["[", *words[1:], "]"] if words[0] == "test" else words
    if test[0] == "[[" and any(re.search(r"[*?\[]", word) for word in test[3:-1]):
        return None  # pattern matching is not supported
    expanded = [part for word in test for part in _expand(word, script)]
    match expanded:
        case ["[" | "[[", *inner, "]" | "]]"] if not any(UNEXPANDED_MARKERS[0] in word for word in inner):
            return _holds(inner)
    return None


def _holds(words: list[str]) -> bool | None:
    """Return True if a comparison of strings or integers holds; None if it is another kind of test."""
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
    name, value = _parse_assignment(word, script)
    script.variables[name] = value


def _parse_assignment(word: str, script: ShellScript) -> tuple[str, list[str]]:
    """Return the name of the variable that a word assigns, and its new words."""
    match = _ASSIGNMENT.fullmatch(word)
    assert match is not None
    name, adds, value = match.groups()
    before = script.variables.get(name, []) if adds else []
    if value.startswith("(") and value.endswith(")"):
        inner = [word for _, raw in _split(value[1:-1], script.path) for word in raw]
        return name, [*before, *(part for word in inner for part in _expand(word, script))]
    value = re.sub(r"^~(?=/|$)", "$HOME", value)
    return name, ["".join([*before, " ".join(_expand(value, script, splits=False))])]


def _split(text: str, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the operator before each command, and its words as written, with quotes and without redirections.

    The operator is `&&`, `||`, or `;` for any other.
    """
    separator = ";"
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
                if command := _without_redirections(words):
                    yield separator, command
                words, separator = [], ";"
            if (pair := text[at : at + 2]) in ("&&", "||"):
                separator, at = pair, at + 1
            at, begin = at + 1, None
            while char == "\n" and here_documents:
                match = re.compile(rf"^\t*{re.escape(here_documents.pop(0))}$", re.MULTILINE).search(text, at)
                at = match.end() if match else len(text)
        elif char == "#" and begin is None:
            at = _end_of_line(text, at)
        else:
            begin = at if begin is None else begin
            at = _end_of_piece(text, at, path)


def _without_redirections(words: list[str]) -> list[str]:
    remaining = []
    rest = iter(words)
    for word in rest:
        if _REDIRECTION.fullmatch(word):
            next(rest, None)  # skip the file
        elif not _REDIRECTION.match(word):
            remaining.append(word)
    return remaining


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _end_of_piece(text: str, at: int, path: str) -> int:
    """Return the index after the character, quoted text, expansion or array that begins at `at`."""
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
    """Return the index after the next `end`; with `plain`, no character before it is special.

    Raises:
        ConfigError: The text has no such `end`.
    """
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
    raise ConfigError(f"{path}, line {line}: a closing {end} is missing. Only plain shell scripts can be parsed.")


def _expand(word: str, script: ShellScript, splits: bool = True) -> list[str]:
    """Return the words to which a word of the script expands, in order and without quotes."""
    fields, started, at, in_quotes = [""], False, 0, False

    def add(values: list[str], is_quoted: bool) -> None:
        nonlocal started
        parts = values if is_quoted or not splits else [part for value in values for part in _split_words(value)]
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
            add([word[at + 1 : end]], is_quoted=True)
            at = end + 1
        elif word.startswith("\\\n", at):
            at += 2
        elif char == "\\":
            backslash = char if in_quotes and word[at + 1 : at + 2] not in '\\"$`\n' else ""
            add([backslash + word[at + 1 : at + 2]], is_quoted=True)
            at += 2
        elif char == "`" or (char == "$" and word[at + 1 : at + 2] in ("(", "{", "'")):
            end = _end_of_piece(word, at, script.path)
            add(_value(word[at:end], script), is_quoted=in_quotes)
            at = end
        elif char == "$" and (name := _VARIABLE.match(word, at + 1)):
            add(_variable(name[0], script), is_quoted=in_quotes)
            at = name.end()
        else:
            add([char], is_quoted=True)
            at += 1
    return fields if started else []


def _split_words(value: str) -> list[str]:
    """Split an unquoted value at white space, as a shell does; unexpanded parts are not split."""
    marked = _MARKED.findall(value)
    numbered = iter(marked)
    plain = _MARKED.sub(UNEXPANDED_MARKERS[0], value)
    return [re.sub(UNEXPANDED_MARKERS[0], lambda _: _marked(next(numbered)), part) for part in plain.split()]


def _value(written: str, script: ShellScript) -> list[str]:
    """Expand `$(...)`, `${...}`, `$'...'` or a command in backquotes."""
    if written.startswith("$'"):
        return [written[2:-1].encode().decode("unicode_escape")]
    if written.startswith("$((") and written.endswith("))"):
        return [_evaluate_arithmetic(written, script)]
    if written.startswith("${"):
        return _braced(written, script)
    inner = written[2:-1] if written.startswith("$(") else written[1:-1]
    command = [part for _, raw in _split(inner, script.path) for word in raw for part in _expand(word, script)]
    match [word for word in command if not word.startswith("-")]:
        case ["dirname", path] if UNEXPANDED_MARKERS[0] not in path:
            return [os.path.dirname(path) or "."]
        case ["cd", path, "pwd"] | ["realpath", path] if UNEXPANDED_MARKERS[0] not in path:
            return [os.path.abspath(path)]
    return [_marked(_INSIDE.sub(lambda name: _expand_known(name[0], script), written))]


def _expand_known(written: str, script: ShellScript) -> str:
    """Expand a variable inside a command that the shell must run; unknown variables stay as written."""
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
    """Expand `${NAME}`, `${NAME[@]}`, and forms with a default, an error, an alternative or a pattern.

    Other forms stay as written.
    """
    match = _BRACED.fullmatch(written[2:-1])
    if match is None:
        return _leave_unexpanded(written, script)
    name, index, kind, other = match.groups()
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
            return _leave_unexpanded(written, script)
        return [_apply_pattern(text, kind, pattern)]
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


def _apply_pattern(value: str, kind: str, pattern: str) -> str:
    """Remove a prefix (`#`, `##`) or suffix (`%`, `%%`) from the value, or replace a text in it (`/`, `//`)."""
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


def _leave_unexpanded(written: str, script: ShellScript) -> list[str]:
    """Leave an expansion to the shell; list it as unresolved if it reads a variable of the script."""
    if any(name in script.variables for name in re.findall(r"[A-Za-z_]\w*", written)):
        script.unresolved.append(written)
    return [_marked(written)]


def _evaluate_arithmetic(written: str, script: ShellScript) -> str:
    """Evaluate `$((...))`; it stays as written if it is not integer arithmetic with known values."""
    text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda name: "".join(_variable(name[1], script)), written[3:-2])
    try:
        return str(_evaluate(ast.parse(text.replace("/", "//").strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return _marked(written)


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return int(_OPERATORS[type(op)](_evaluate(left), _evaluate(right)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
    raise ValueError("not integer arithmetic")
