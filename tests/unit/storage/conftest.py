"""A real S3 server for the tests of a module, and URIs of both schemes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.storage.download_cache import local_copy
from tests.support.mirrored_runs import URI
from tests.support.s3_server import S3Server, s3_server


@pytest.fixture(scope="module", autouse=True)
def one_server() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as running:
        yield running


@pytest.fixture
def server(one_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    monkeypatch.setenv("SKYRL_CACHE", str(tmp_path / "cache"))
    local_copy.cache_clear()
    yield one_server
    local_copy.cache_clear()
    one_server.empty()


@pytest.fixture(params=["s3", "file"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URI of each scheme."""
    if request.param == "s3":
        request.getfixturevalue("server")
        return URI
    return f"file://{tmp_path}/elsewhere/run"
