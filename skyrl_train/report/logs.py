"""The folder `logs` of a run, with one file per role, and the warnings that a run shows on the terminal."""

from __future__ import annotations

import logging
import re
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skyrl_train.aio import RefCountedContext
from skyrl_train.config.redaction import redact
from skyrl_train.log_rotation import LogRotator, archive_previous_attempt
from skyrl_train.terminal import escape_multiline, print_stderr
from skyrl_train.trace import TRACE_FILE

FOLDER = "logs"
DRIVER, ENVIRONMENTS = "driver.log", "environments.log"
TRACEBACK_NOTE_PREFIX = "The traceback is in"
"""Start of the note on an exception that names the file with its traceback."""
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PACKAGE_LOGGER = logging.getLogger("skyrl_train")
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def is_library(file: str) -> bool:
    """True if a source file belongs to the standard library or an installed package, and so not to the user's code."""
    return file.startswith(_STANDARD) or _INSTALLED.search(file) is not None


@contextmanager
def run_logs(run_folder: Path) -> Iterator[Path]:
    """Log this process to `<run folder>/logs/driver.log` while the context is active. Yield the folder `logs`.

    The file gets all records of this package, with times, and warnings of other packages. If the context ends with an
    exception, the file gets its traceback, and a note on the exception names the file. Credentials are redacted. Unless
    the program has configured Python's logging itself, warnings of this package and of the user's modules also go to
    stderr. Files of an earlier attempt, including its trace, move to `attempt_N` first.

    If the folder cannot be written, print a warning and run without logs. If several runs are active in one process,
    each file gets the records of all of them.
    """
    folder = (run_folder / FOLDER).absolute()
    file: _RedactedFileHandler | None = None
    try:
        archive_previous_attempt(folder, run_folder / TRACE_FILE)
        file = _RedactedFileHandler(folder / DRIVER)
    except OSError as error:
        print_stderr(f"warning: {folder} cannot be written: {error.strerror}. This run has no logs.")
    if file is None:
        yield folder
        return
    with _set_up, _attached(file), LogRotator(folder / DRIVER, folder / ENVIRONMENTS):
        try:
            yield folder
        except Exception as error:
            if file.wrote_traceback(error):
                with suppress(Exception):  # a subclass may refuse notes
                    error.add_note(f"{TRACEBACK_NOTE_PREFIX} {folder / DRIVER}.")
            raise


def environment_log(run_folder: Path) -> Path:
    """Return the path of the log of a run's environment processes."""
    return run_folder / FOLDER / ENVIRONMENTS


@contextmanager
def _logging_set_up() -> Iterator[None]:
    """Let the package log at all levels, while the program's own handlers get the same records as before."""
    root, level, original_showwarning = logging.getLogger(), _PACKAGE_LOGGER.level, warnings.showwarning
    program_handlers, level_filter = list(root.handlers), _OriginalLevelFilter(_PACKAGE_LOGGER.getEffectiveLevel())
    own_handlers: list[logging.Handler] = [] if program_handlers else [_StderrHandler(logging.WARNING)]
    for handler in program_handlers:
        handler.addFilter(level_filter)
    for handler in own_handlers:
        root.addHandler(handler)
    _PACKAGE_LOGGER.setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        if original_showwarning.__module__ != logging.__name__:  # else the program itself captures warnings
            logging.captureWarnings(False)
        _PACKAGE_LOGGER.setLevel(level)
        for handler in own_handlers:
            root.removeHandler(handler)
        for handler in program_handlers:
            handler.removeFilter(level_filter)


_set_up = RefCountedContext(_logging_set_up)


@contextmanager
def _attached(file: logging.Handler) -> Iterator[None]:
    root = logging.getLogger()
    root.addHandler(file)
    try:
        yield
    finally:
        root.removeHandler(file)
        with suppress(OSError):  # a full disk: earlier records could not be written either
            file.close()


class _OriginalLevelFilter(logging.Filter):
    def __init__(self, level: int):
        super().__init__()
        self._level = level

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self._level or record.name.partition(".")[0] != _PACKAGE_LOGGER.name


class _RedactedFileHandler(logging.FileHandler):
    """A file handler that redacts credentials. Records that cannot be written, as on a full disk, are lost."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(_RedactingFormatter(_FORMAT))
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        self._has_failed = True

    def wrote_traceback(self, error: Exception) -> bool:
        """Write the traceback of an error, bypassing loggers. Return True if it was written."""
        self._has_failed = False
        exc_info = (type(error), error, error.__traceback__)
        name = _PACKAGE_LOGGER.name
        message = "The run ended with this error:"
        self.handle(_PACKAGE_LOGGER.makeRecord(name, logging.ERROR, __file__, 0, message, (), exc_info))
        return not self._has_failed


class _RedactingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escape_multiline(redact(super().format(record)))


_PLAIN = _RedactingFormatter("%(message)s")


class _StderrHandler(logging.Handler):
    """A handler for records of this package and of the user's code, in the format of Python's last-resort handler."""

    def emit(self, record: logging.LogRecord) -> None:
        is_own = record.name.partition(".")[0] == _PACKAGE_LOGGER.name
        file = record.pathname
        if record.name == "py.warnings":  # the message begins with the file that caused the warning
            file = record.getMessage().partition(":")[0]
        if (is_own or not is_library(file)) and logging.lastResort is not None:
            text = _PLAIN.format(record)
            plain = {"msg": text, "args": None, "exc_info": None, "exc_text": None, "stack_info": None}
            logging.lastResort.handle(logging.makeLogRecord({**record.__dict__, **plain}))
