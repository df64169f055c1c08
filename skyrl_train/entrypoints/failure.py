"""What a person reads when a run ends by an error: where it was, and last what went wrong first."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import skyrl_train
from skyrl_train.cluster.actors import carries_another
from skyrl_train.config.secrets import redact
from skyrl_train.errors import SkyRLError
from skyrl_train.report.logs import TRACEBACK

REPORT = "No line of your own code is in its traceback: please report it."
_LONGEST = 2000
"""Characters of a message."""
_OURS = str(Path(skyrl_train.__file__).parent)
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), _OURS, "<")
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')


def account_of(error: BaseException) -> str:
    """Lines about what ended a run; the last one is the error that everything else follows from.

    An error of ours says by itself what to do. Of any other one the line of the user's own code is named in which it
    was raised, here or in another process; if there is none, it is a defect, and is called that.
    """
    chain = list(_chain(error))
    notes = [note for one in chain for note in getattr(one, "__notes__", ())]
    lines = [*dict.fromkeys(notes)]
    if not any(note.startswith(TRACEBACK) for note in notes) and not isinstance(error, SkyRLError):
        lines += [redact("".join(traceback.format_exception(error)).rstrip())]  # there is no log yet
    if isinstance(error, SkyRLError):
        return "\n".join([*lines, f"{type(error).__name__}: {redact(str(error))}"])
    places = [_place(one) for one in chain]
    if not any(places):
        lines.append(REPORT)
    shown = [(one, place) for one, place in zip(chain, places, strict=True) if not carries_another(one)]
    for one, place in shown:
        where = getattr(one, "raised_in", "")
        message = redact(str(one))[:_LONGEST]
        lines.append(f"{where + ': ' if where else ''}{type(one).__name__}: {message}{f' ({place})' if place else ''}")
    return "\n".join(lines)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, then what it was raised from, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _place(error: BaseException) -> str:
    """The last line of the user's own code that an exception came through; "" if it came through none."""
    frames = [(frame.filename, str(frame.lineno), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    cause = error.__cause__
    if carries_another(cause):  # in another process, of which only a text is left
        frames += _FRAME.findall(str(cause))
    own = [frame for frame in frames if not frame[0].startswith(_LIBRARIES)]
    return "{}:{} in {}".format(*own[-1]) if own else ""
