"""Write programming problems with tests as train.parquet and validation.parquet in SkyRL's row format.

python examples/livecodebench/lcb_dataset.py --output ~/data/lcb                     from the hub
python examples/livecodebench/lcb_dataset.py --input FOLDER --output ~/data/lcb      from FOLDER/train.jsonl, test.jsonl

Source rows have the format of DeepCoder (problem, tests, starter_code, metadata) or LiveCodeBench (question_content,
public_test_cases, private_test_cases, starter_code, metadata). The hub's data set is
agentica-org/DeepCoder-Preview-Dataset.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from typing import Any, NoReturn

from skyrl_train.data.conversion import conversion_main, text_column
from skyrl_train.environments.graders.code_tests import parse_tests
from skyrl_train.errors import DataError

HUB_NAME = "agentica-org/DeepCoder-Preview-Dataset"
MAX_TESTS_BYTES = 256 * 2**20
TASK = "Solve this programming problem in Python. End your answer with the whole program in one ```python block.\n\n"
PROGRAM = "\n\nThe program reads from standard input and writes its answer, and nothing else, to standard output."
FUNCTION = "\n\nStart from this code, and keep its names:\n```python\n{}\n```"


def convert(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Convert a source row to SkyRL's format.

    Raises:
        DataError: The row has no problem, or no tests that can run.
    """
    problem = text_column(where, row, "problem" if row.get("problem") is not None else "question_content")
    try:
        tests = parse_tests(_tests(row))
    except (ValueError, zlib.error, pickle.UnpicklingError) as error:
        raise DataError(f"{where}: {error}.") from error
    starter = row.get("starter_code")
    ground_truth = [
        {"input": test.input, "output": test.output, "testtype": "functional", "metadata": {"func_name": test.function}}
        if test.function
        else {"input": test.input, "output": test.output, "testtype": "stdin"}
        for test in tests
    ]
    return {
        "data_source": "livecodebench",
        "prompt": [{"role": "user", "content": TASK + problem + (FUNCTION.format(starter) if starter else PROGRAM)}],
        "env_class": "lcb",
        "reward_spec": {"method": "rule", "ground_truth": json.dumps(ground_truth)},
        "extra_info": {"split": split, "index": index},
    }


def _tests(row: dict[str, Any]) -> Any:
    metadata = row.get("metadata")
    metadata = json.loads(metadata) if isinstance(metadata, str) and metadata.strip() else metadata
    tests = row.get("tests")
    if tests is None:
        tests = [*json.loads(row.get("public_test_cases") or "[]"), *_private(row.get("private_test_cases") or "[]")]
    tests = json.loads(tests) if isinstance(tests, str) else tests
    if isinstance(metadata, dict) and metadata.get("func_name"):
        if isinstance(tests, dict):
            return {"metadata": metadata, **tests}
        if isinstance(tests, list):
            return [{**test, "metadata": metadata} if isinstance(test, dict) else test for test in tests]
    return tests


def _private(text: str) -> list[Any]:
    """Decode hidden tests, which LiveCodeBench stores as base64 of zlib of a pickled JSON string."""
    if text.lstrip().startswith("["):
        return json.loads(text)
    data = zlib.decompressobj().decompress(base64.b64decode(text), MAX_TESTS_BYTES)
    return json.loads(_StringUnpickler(io.BytesIO(data)).load())


class _StringUnpickler(pickle.Unpickler):
    """An unpickler that rejects classes and functions, which a string does not need."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"private_test_cases contain {module}.{name}, but must be a pickled string")


if __name__ == "__main__":
    conversion_main(convert, doc=__doc__, hub=HUB_NAME, hub_config="lcbv5")
