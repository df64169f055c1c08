"""What a person reads when a run ends by an error: where it was, and last what went wrong first."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import skyrl_train
from skyrl_train.cluster.actors import carries_another
from skyrl_train.config.secrets import redact
from skyrl_train.errors import SkyRLError
from skyrl_train.report.logs import TRACEBACK, is_library

REPORT = "Its traceback has lines of installed packages alone: if none of them is yours, please report it."
_LONGEST = 2000
"""Characters of a message."""
_OURS = str(Path(skyrl_train.__file__).parent) + os.sep
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')


def account_of(error: Exception) -> str:
    """Lines about what ended a run; the last one is the error that everything else follows from.

    An error of ours says by itself what to do. Of any other one the line of the user's own code is named in which it
    was raised, here or in another process; if there is none, it is a defect, and is called that.
    """
    links = list(_links(error))
    notes = [redact(str(note)) for one, _ in links for note in getattr(one, "__notes__", ())]
    lines = [*dict.fromkeys(notes)]
    if isinstance(error, SkyRLError):
        return "\n".join([*lines, f"{type(error).__name__}: {redact(str(error))}"])
    if not any(note.startswith(TRACEBACK) for note in notes):
        lines += [redact("".join(traceback.format_exception(error)).rstrip())]  # there is no log
    places = [_place(one, there) for one, there in links]
    if not any(places):
        lines.append(REPORT)
    for (one, _), place in zip(links, places, strict=True):
        where = getattr(one, "raised_in", "")
        message = redact(str(one))[:_LONGEST]
        lines.append(f"{where + ': ' if where else ''}{type(one).__name__}: {message}{f' ({place})' if place else ''}")
    return "\n".join(lines)


def _links(error: BaseException | None) -> Iterator[tuple[Exception, str]]:
    """An exception, then what it was raised from, and so on; each with its traceback in another process, if it has one.

    What was handled while another one was raised is no cause of it, and a cancellation is none either.
    """
    seen: set[int] = set()
    while isinstance(error, Exception) and id(error) not in seen:
        seen.add(id(error))
        if carries_another(error):
            yield getattr(error, "cause", error), str(error)
            return
        cause = error.__cause__
        if carries_another(cause):
            yield error, str(cause)
            return
        yield error, ""
        error = cause


def _place(error: Exception, there: str) -> str:
    """The last line of the user's own code that an exception came through; "" if it came through none."""
    frames = [(frame.filename, str(frame.lineno), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    frames += _FRAME.findall(there)
    own = [frame for frame in frames if not frame[0].startswith((_OURS, "<")) and not is_library(frame[0])]
    return "{}:{} in {}".format(*own[-1]) if own else ""
