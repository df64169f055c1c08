from __future__ import annotations

import inspect
import pickle

from skyrl_train import errors
from skyrl_train.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeadlineExceeded,
    EnvironmentFailure,
    RunFolderError,
    RunInterrupted,
    SkyRLError,
)
from tests.support.table_cases import check_each

CLASSES = [item for _, item in inspect.getmembers(errors, inspect.isclass)]
ARGUMENTS: dict[type, tuple] = {
    DeadlineExceeded: ("engine 0", 3.0),
    EnvironmentFailure: ("timeout", "after 3 s"),
    RunInterrupted: (15,),
}


def survives_pickling(kind: type) -> None:
    assert issubclass(kind, SkyRLError)
    error = kind(*ARGUMENTS.get(kind, ("what went wrong",)))
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


def test_every_error_survives_pickling():
    check_each(CLASSES, survives_pickling)


def test_module_docstring_names_every_error():
    assert [kind.__name__ for kind in CLASSES if kind.__name__ not in str(errors.__doc__)] == []


def test_errors_subclass_standard_exceptions():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(DeadlineExceeded, TimeoutError)
    assert issubclass(DataError, ConfigError)
    assert issubclass(RunFolderError, ConfigError)
    assert not issubclass(CheckpointError, ConfigError), "damage on disk is not a typing mistake"


def test_deadline_message_names_operation_and_limit():
    assert str(DeadlineExceeded("engine 0", 2.5)) == "engine 0 did not finish within 2.5 s"


def test_a_failure_without_detail_is_its_kind():
    assert str(EnvironmentFailure("timeout")) == "timeout"
    assert str(EnvironmentFailure("timeout", "after 3 s")) == "timeout: after 3 s"
