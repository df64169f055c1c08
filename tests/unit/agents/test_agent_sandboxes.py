"""Sandboxes of agents: the same commands in each, and what each isolates."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from skyrl_train.agents.commands import CommandResult
from skyrl_train.agents.sandboxes import AgentSandbox, make_sandbox
from skyrl_train.environments.placeholders import PlaceholderValues
from skyrl_train.errors import ConfigError, EnvironmentFailure
from tests.support import fake_docker
from tests.support.async_tests import async_test

KINDS = [
    "none",
    pytest.param("bubblewrap", marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")),
    "docker",
]


class OwnSandbox:
    """A user's class: it accepts settings, and keeps what was done."""

    def __init__(self, size: int, image: str):
        self.size, self.image = size, image

    async def exec(
        self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, max_output_bytes: int
    ) -> CommandResult:
        return CommandResult(0, " ".join(argv))


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = fake_docker.install(tmp_path / "docker")
    monkeypatch.setenv("PATH", f"{tmp_path}/docker/bin:{os.environ['PATH']}")
    return root


@asynccontextmanager
async def started(
    kind: str, base_url: str = "http://127.0.0.1:9999/v1", **settings: object
) -> AsyncIterator[AgentSandbox]:
    image = {"image": "{row.image}"} if kind == "docker" else {}
    sandbox = make_sandbox({"kind": kind, **image, **settings}, values(base_url))
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.stop()


def values(base_url: str = "http://127.0.0.1:9999/v1") -> PlaceholderValues:
    return PlaceholderValues(base_url, "policy", "", "0", {"image": "python:3.11"})


@asynccontextmanager
async def files_for_everybody() -> AsyncIterator[Path]:
    """Yield a folder that the unprivileged user of a sandbox can read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


async def run(sandbox: AgentSandbox, script: str, timeout_s: float = 20.0, **env: str) -> CommandResult:
    return await sandbox.exec(["sh", "-c", script], env=env, timeout_s=timeout_s, max_output_bytes=4096)


@pytest.mark.parametrize("kind", KINDS)
@async_test
async def test_files_and_variables_reach_the_command(kind: str, docker: Path):
    async with started(kind) as sandbox:
        await sandbox.upload({"folder/in.txt": b"hello "})
        result = await run(sandbox, "cat folder/in.txt > out.txt; printf $NAME >> out.txt; exit 4", NAME="world")
        assert result.returncode == 4
        assert await sandbox.download("out.txt") == b"hello world"
        await sandbox.upload({"out.txt": b"replaced"})
        assert (await run(sandbox, "cat out.txt")).stdout == "replaced"


@pytest.mark.parametrize("kind", KINDS)
@async_test
async def test_nothing_is_left_after_a_timeout(kind: str, docker: Path, monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)  # the unprivileged user of bubblewrap passes through it
        monkeypatch.setattr(tempfile, "tempdir", folder)
        async with started(kind) as sandbox:
            assert (await run(sandbox, "setsid sleep 60 & sleep 60", timeout_s=1.0)).timed_out
        assert list(Path(folder).iterdir()) == []
    assert list(docker.iterdir()) == []


DRIVER = """
import asyncio, sys
from skyrl_train.agents.sandboxes import make_sandbox
from skyrl_train.environments.placeholders import PlaceholderValues

async def main():
    sandbox = make_sandbox({"kind": sys.argv[1]}, PlaceholderValues("http://127.0.0.1:9999/v1", "", "", "", {}))
    await sandbox.start()
    script = "mkdir -p left/behind; chmod 0 left; echo > begun; sleep 60"
    await sandbox.exec(["sh", "-c", script], env={}, timeout_s=60, max_output_bytes=1024)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
@pytest.mark.parametrize("kind", KINDS[:2])
@async_test
async def test_killed_driver_leaves_no_folder(kind: str):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        driver = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", DRIVER, kind), env=os.environ | {"TMPDIR": folder}
        )
        async with asyncio.timeout(20):
            while not list(Path(folder).glob("**/begun")):
                await asyncio.sleep(0.01)
            driver.kill()
            while list(Path(folder).iterdir()):
                await asyncio.sleep(0.01)
        await driver.wait()


@pytest.mark.parametrize("kind", KINDS)
@async_test
async def test_missing_file_cannot_be_downloaded(kind: str, docker: Path):
    async with started(kind) as sandbox:
        with pytest.raises(OSError, match="missing"):
            await sandbox.download("missing")


@async_test
async def test_links_do_not_lead_out_of_the_folder(tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    async with started("none") as sandbox:
        await run(sandbox, f"ln -s {tmp_path} out; ln -s {tmp_path}/secret secret")
        with pytest.raises(OSError, match="not a regular file"):
            await sandbox.download("secret")
        with pytest.raises(OSError, match="outside of the working folder"):
            await sandbox.upload({"../secret": b"overwritten"})
        await sandbox.upload({"out/secret": b"a new file in a new folder", "secret": b"a new file"})
        assert await sandbox.download("secret") == b"a new file"
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.parametrize("kind", KINDS[:2])
@async_test
async def test_files_replace_what_blocks_them(kind: str, monkeypatch: pytest.MonkeyPatch):
    # in /tmp, because the user of a command may not enter pytest's folders
    with tempfile.TemporaryDirectory(prefix="skyrl-test-") as folder:
        os.chmod(folder, 0o711)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        async with started(kind) as sandbox:
            await run(sandbox, "mkdir -p test.py/deep/er; chmod 0 test.py/deep; echo > tests; chmod 500 .")
            await sandbox.upload({"test.py": b"grader", "tests/a.py": b"a"})
            result = await run(sandbox, "cat test.py tests/a.py; mkdir -p left/behind; chmod 0 left")
            assert result.stdout == "gradera"
        assert list(Path(folder).iterdir()) == []


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
@async_test
async def test_variables_are_not_on_the_command_line():
    async with started("bubblewrap") as sandbox:
        result = await run(sandbox, "cat /proc/1/cmdline; echo; env", OPENAI_API_KEY="shown once")
    first, *variables = result.stdout.splitlines()
    assert "bwrap" in first
    assert "shown once" not in first
    assert "OPENAI_API_KEY=shown once" in variables
    assert {line.partition("=")[0] for line in variables} <= {
        *(
            "PATH",
            "LANG",
            "PYTHONDONTWRITEBYTECODE",
            "HOME",
            "OPENAI_API_KEY",
            "PWD",
            "LC_CTYPE",
            "_",
            "SHLVL",
            "OLDPWD",
        )
    }


@async_test
async def test_credentials_are_not_inherited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    monkeypatch.setenv("HARMLESS", "yes")
    async with started("none") as sandbox:
        assert (await run(sandbox, "echo $WANDB_API_KEY $HARMLESS $GIVEN_KEY", GIVEN_KEY="k")).stdout == "yes k\n"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
@async_test
async def test_bubblewrap_reaches_only_the_session():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 7\r\n\r\nsession")
        writer.close()

    session, other = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(2)]
    port, other_port = (server.sockets[0].getsockname()[1] for server in (session, other))
    get = "import sys, urllib.request; print(urllib.request.urlopen('http://127.0.0.1:' + sys.argv[1]).read().decode())"
    async with session, other, files_for_everybody() as folder:
        (folder / "shown").write_text("shown")
        (folder / "hidden").write_text("hidden")
        async with started("bubblewrap", f"http://127.0.0.1:{port}/v1", paths=[f"{folder}/shown"]) as sandbox:
            python = f'/usr/bin/python3 -c "{get}"'
            assert (await run(sandbox, f"{python} {port}")).stdout == "session\n"
            assert "refused" in (await run(sandbox, f"{python} {other_port}")).stderr
            result = await run(sandbox, f"cat {folder}/shown {folder}/hidden; echo x > {folder}/shown")
            assert result.stdout == "shown"
        assert (folder / "shown").read_text() == "shown"


@async_test
async def test_docker_gets_image_and_arguments(docker: Path):
    async with started("docker", run_args=["--memory=1g"]) as sandbox:
        await run(sandbox, "sleep 60 & true", OPENAI_API_KEY="not on the command line")
        await run(sandbox, "true")
    start, first, restart, second, remove = fake_docker.calls(docker)
    assert start[-4:] == ["--memory=1g", "python:3.11", "sleep", "86400"]
    assert {"--network=host", "--rm"} <= {*start}
    assert first[:3] == ["exec", "--env", "OPENAI_API_KEY"]
    assert (restart[0], second[0], remove[0]) == ("restart", "exec", "rm")
    assert "not on the command line" not in str(fake_docker.calls(docker))


@async_test
async def test_docker_network_can_be_chosen(docker: Path):
    async with started("docker", run_args=["--network=agents"]):
        pass
    assert "--network=host" not in fake_docker.calls(docker)[0]


@async_test
async def test_lost_container_is_no_exit_code(docker: Path):
    async with started("docker") as sandbox:
        (container,) = docker.iterdir()
        assert (await run(sandbox, "exit 1")).returncode == 1
        shutil.rmtree(container)
        with pytest.raises(EnvironmentFailure, match="the container has ended"):
            await run(sandbox, "true")


def test_image_of_a_row_is_no_option():
    row = PlaceholderValues("http://host/v1", "policy", "", "0", {"image": "--privileged"})
    with pytest.raises(ValueError, match="would be an option of docker run"):
        make_sandbox({"kind": "docker", "image": "{row.image}"}, row)


@async_test
async def test_failed_docker_start_is_a_failure(docker: Path):
    sandbox = make_sandbox({"kind": "docker", "image": "missing-image"}, values())
    with pytest.raises(EnvironmentFailure, match="docker run failed: Unable to find image") as caught:
        await sandbox.start()
    assert caught.value.kind == "agent_sandbox"
    await sandbox.stop()


@async_test
async def test_own_class_receives_expanded_settings():
    settings = {"kind": f"{__name__}:OwnSandbox", "settings": {"size": 3, "image": "{row.image}"}}
    sandbox = make_sandbox(settings, values())
    assert isinstance(sandbox, OwnSandbox)
    assert (sandbox.size, sandbox.image) == (3, "python:3.11")
    assert (await run(sandbox, "true")).stdout == "sh -c true"


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [("no_module:Box", {}, "cannot be imported"), (f"{__name__}:OwnSandbox", {"colour": 1}, "does not accept them")],
)
def test_unusable_class_is_config_error(kind: str, settings: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        make_sandbox({"kind": kind, "settings": settings}, values())
