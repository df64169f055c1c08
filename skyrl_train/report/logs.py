"""The folder `logs` of a run: a file for each role, and what of it a person sees at once."""

from __future__ import annotations

import logging
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_train.config.secrets import redact
from skyrl_train.log_files import KeptShort, set_attempt_apart
from skyrl_train.messages import to_stderr
from skyrl_train.trace import TRACE_FILE

FOLDER = "logs"
DRIVER, ENVIRONMENTS = "driver.log", "environments.log"
TRACEBACK = "The traceback is in"
"""How the note of an exception begins that says where its traceback is."""
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OURS = logging.getLogger("skyrl_train")
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@contextmanager
def run_logs(directory: Path) -> Iterator[Path]:
    """Inside, this process logs to `directory/logs/driver.log`; gives that folder.

    All that this package says is there, with times and with the traceback of what ended the run, as are warnings of
    libraries, of which a terminal shows none. Warnings of this package and of the user's modules are on stderr, too,
    unless the program has set up Python's logging itself. Files of an earlier attempt are moved to `attempt_N`,
    its time line among them.

    A folder that cannot be written costs the logs, and is said; the run goes on.
    """
    folder = directory / FOLDER
    try:
        set_attempt_apart(folder, directory / TRACE_FILE)
        file = _File(folder / DRIVER, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        to_stderr(f"warning: {folder}: {error.strerror}; this run has no logs.")
        yield folder
        return
    file.setFormatter(_Redacting(_FORMAT))
    root = logging.getLogger()
    handlers: list[logging.Handler] = [file] if root.handlers else [file, _Terminal(logging.WARNING)]
    level = _OURS.level
    for handler in handlers:
        root.addHandler(handler)
    _OURS.setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    try:
        with KeptShort(folder / DRIVER, folder / ENVIRONMENTS):
            yield folder
    except Exception as error:
        _OURS.debug("What ended the run:", exc_info=True)
        error.add_note(f"{TRACEBACK} {folder.absolute() / DRIVER}.")
        raise
    finally:
        logging.captureWarnings(False)
        _OURS.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def log_of_environments(directory: Path) -> Path:
    return directory / FOLDER / ENVIRONMENTS


class _File(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Lose what cannot be written, as on a full disk."""


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _Terminal(logging.Handler):
    """What concerns the person who started the run, as Python shows warnings of a program without handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.name.partition(".")[0] == _OURS.name
        if (ours or not record.pathname.startswith(_LIBRARIES)) and logging.lastResort is not None:
            logging.lastResort.handle(record)
