"""The folder `logs` of a run: a file for each role, and what of it a person sees at once."""

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
"""How the note of an exception begins that says where its traceback is."""
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PACKAGE_LOGGER = logging.getLogger("skyrl_train")
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def is_library(file: str) -> bool:
    """Whether source at this path was installed, and not written by the person who started the run."""
    return file.startswith(_STANDARD) or _INSTALLED.search(file) is not None


@contextmanager
def run_logs(run_folder: Path) -> Iterator[Path]:
    """Inside, this process logs to `directory/logs/driver.log`; gives that folder.

    What this package says is there, with times and with the traceback of what ended the run, as are warnings of
    libraries, of which a terminal shows none. Warnings of this package and of the user's modules are on stderr, too,
    unless the program has set up Python's logging itself. Files of an earlier attempt are moved to `attempt_N`,
    its time line among them.

    A folder that cannot be written costs the logs, and is said; the run goes on. Several runs in one process: each file
    has what all of them say while its run lasts.
    """
    folder = (run_folder / FOLDER).absolute()
    file: _RedactedFileHandler | None = None
    try:
        archive_previous_attempt(folder, run_folder / TRACE_FILE)
        file = _RedactedFileHandler(folder / DRIVER)
    except OSError as error:
        print_stderr(f"warning: {folder}: {error.strerror}; this run has no logs.")
    if file is None:
        yield folder
        return
    with _set_up, _attached(file), LogRotator(folder / DRIVER, folder / ENVIRONMENTS):
        try:
            yield folder
        except Exception as error:
            if file.wrote_traceback(error):
                with suppress(Exception):  # a class of exceptions may take none
                    error.add_note(f"{TRACEBACK_NOTE_PREFIX} {folder / DRIVER}.")
            raise


def environment_log(run_folder: Path) -> Path:
    return run_folder / FOLDER / ENVIRONMENTS


@contextmanager
def _logging_set_up() -> Iterator[None]:
    """Our loggers give handlers of runs all there is, and those of the program what they got before."""
    root, level, shown = logging.getLogger(), _PACKAGE_LOGGER.level, warnings.showwarning
    theirs, as_before = list(root.handlers), _OriginalLevelFilter(_PACKAGE_LOGGER.getEffectiveLevel())
    ours: list[logging.Handler] = [] if theirs else [_StderrHandler(logging.WARNING)]
    for handler in theirs:
        handler.addFilter(as_before)
    for handler in ours:
        root.addHandler(handler)
    _PACKAGE_LOGGER.setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        if shown.__module__ != logging.__name__:  # the program itself may have asked for it
            logging.captureWarnings(False)
        _PACKAGE_LOGGER.setLevel(level)
        for handler in ours:
            root.removeHandler(handler)
        for handler in theirs:
            handler.removeFilter(as_before)


_set_up = RefCountedContext(_logging_set_up)


@contextmanager
def _attached(file: logging.Handler) -> Iterator[None]:
    root = logging.getLogger()
    root.addHandler(file)
    try:
        yield
    finally:
        root.removeHandler(file)
        with suppress(OSError):  # what could not be written before cannot be now
            file.close()


class _OriginalLevelFilter(logging.Filter):
    def __init__(self, level: int):
        super().__init__()
        self._level = level

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self._level or record.name.partition(".")[0] != _PACKAGE_LOGGER.name


class _RedactedFileHandler(logging.FileHandler):
    """Without credentials; what cannot be written, as on a full disk, is lost."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(_Redacting(_FORMAT))
        self._lost = False

    def handleError(self, record: logging.LogRecord) -> None:
        self._lost = True

    def wrote_traceback(self, error: Exception) -> bool:
        """Write it, whatever the program has done to our loggers since. Whether it is there."""
        self._lost = False
        what = (type(error), error, error.__traceback__)
        self.handle(
            _PACKAGE_LOGGER.makeRecord(
                _PACKAGE_LOGGER.name, logging.ERROR, __file__, 0, "What ended the run:", (), what
            )
        )
        return not self._lost


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escape_multiline(redact(super().format(record)))


_PLAIN = _Redacting("%(message)s")


class _StderrHandler(logging.Handler):
    """What concerns the person who started the run, as Python shows warnings of a program without handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.name.partition(".")[0] == _PACKAGE_LOGGER.name
        file = record.pathname
        if record.name == "py.warnings":  # whose message begins with the file that is warned of
            file = record.getMessage().partition(":")[0]
        if (ours or not is_library(file)) and logging.lastResort is not None:
            text = _PLAIN.format(record)
            plain = {"msg": text, "args": None, "exc_info": None, "exc_text": None, "stack_info": None}
            logging.lastResort.handle(logging.makeLogRecord({**record.__dict__, **plain}))
