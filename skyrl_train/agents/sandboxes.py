"""Sandboxes in which commands of agents and graders run: bubblewrap, docker, none, or a user's class."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from skyrl_train.agents.commands import CommandResult, run_command
from skyrl_train.agents.working_folders import make_writable, remove_folder
from skyrl_train.config.redaction import secret_variables
from skyrl_train.environments.agent_bubblewrap import PATH, PYTHON, isolation_arguments, visible_paths
from skyrl_train.environments.placeholders import PlaceholderValues, expand
from skyrl_train.environments.tools.sandbox import unprivileged_user
from skyrl_train.errors import ConfigError, EnvironmentFailure
from skyrl_train.registry import load_object

SANDBOX_FAILURE = "agent_sandbox"
"""Failure kind of an episode whose sandbox could not be used."""
START_TIMEOUT_S = 600.0
"""Time to start a container, which may have to download its image."""
COPY_TIMEOUT_S = 60.0
CONTAINER_S = 86_400.0
MAX_DOWNLOAD_BYTES = 64 * 2**20
_FORWARDER = Path(__file__).with_name("forward_in_sandbox.py")
_INNER_ENVIRONMENT = {"PATH": PATH, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
_MAX_ERROR_CHARS = 2000


class AgentSandbox(Protocol):
    """A place with a working folder, in which the commands of one episode run. It is used for one episode.

    An exception of a method fails the episode, which is masked and counted. `stop` is called once at the end, also if
    `start` failed or the run is cancelled.
    """

    async def start(self) -> None:
        """Create the place."""

    async def exec(
        self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, max_output_bytes: int
    ) -> CommandResult:
        """Run a command in the working folder, and return its result when it and all its processes have ended.

        Args:
            argv: Program and arguments.
            env: Environment variables, in addition to those of the place.
            timeout_s: Seconds after which the command is killed; the result is then `timed_out`.
            max_output_bytes: Bytes that are kept of each output stream, the last ones.
        """

    async def upload(self, files: Mapping[str, bytes]) -> None:
        """Write files, given by their paths relative to the working folder."""

    async def download(self, path: str) -> bytes:
        """Return the content of a file in the working folder. Raise OSError if it cannot be read."""

    async def stop(self) -> None:
        """Kill everything that runs in the place, and remove it."""


def make_sandbox(
    settings: Mapping[str, Any], values: PlaceholderValues, container_s: float = CONTAINER_S
) -> AgentSandbox:
    """Return the sandbox of one episode.

    Args:
        settings: The section `environment.skyrl_gym.agent.sandbox`.
        values: Values of the placeholders in the settings.
        container_s: Seconds after which a container ends by itself; see `DockerSandbox`.

    Raises:
        ConfigError: A user's class cannot be imported or does not accept its settings.
        KeyError: The row lacks a column.
        ValueError: The row's image is an option of `docker run`.
    """
    kind = settings.get("kind", "bubblewrap")
    if kind == "bubblewrap":
        return BubblewrapSandbox(values.base_url, visible_paths(settings))
    if kind == "docker":
        image = expand(settings["image"], values)
        if image.startswith("-"):
            raise ValueError(f"the image {image!r:.80} would be an option of docker run")
        return DockerSandbox(image, settings.get("run_args") or (), container_s)
    if kind == "none":
        return DirectSandbox()
    key = "environment.skyrl_gym.agent.sandbox"
    try:
        factory = load_object(kind)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}.kind={kind} cannot be imported: {error}. Write module:Class.") from error
    arguments = expand(settings.get("settings") or {}, values)
    try:
        return factory(**arguments)  # type: ignore[no-any-return]
    except TypeError as error:
        raise ConfigError(f"{key}.settings={arguments!r}: {kind} does not accept them: {error}.") from error


class DirectSandbox:
    """A temporary folder of this machine without isolation. Commands run as the current user."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """The working folder."""
        assert self._folder is not None, "the sandbox was not started"
        return self._folder

    async def start(self) -> None:
        """Create the folder."""
        self._folder = Path(tempfile.mkdtemp(prefix="skyrl-agent-"))

    async def exec(
        self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, max_output_bytes: int
    ) -> CommandResult:
        """Run a command with the variables of this process, except credentials, and with those of `env`."""
        credentials = secret_variables()
        inherited = {name: value for name, value in os.environ.items() if name not in credentials}
        return await run_command(
            argv,
            cwd=str(self.folder),
            env=inherited | dict(env),
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            folder=self._folder,
        )

    async def upload(self, files: Mapping[str, bytes]) -> None:
        """Write files below the folder. They replace what the agent left in their place, such as links and folders."""
        for name, content in files.items():
            self._clear(name).write_bytes(content)

    async def download(self, path: str) -> bytes:
        """Return the content of a regular file below the folder."""
        inside = self._inside(path)
        status = inside.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_DOWNLOAD_BYTES:
            raise OSError(f"{path} is not a regular file of at most {MAX_DOWNLOAD_BYTES} bytes")
        return inside.read_bytes()

    async def stop(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            await asyncio.to_thread(remove_folder, self._folder)

    def _clear(self, name: str) -> Path:
        """Return the path of a file that can be created below the folder."""
        path, parts = self.folder, Path(name).parts
        if Path(name).is_absolute() or ".." in parts:
            raise OSError(f"{name} is outside of the working folder")
        for part in parts[:-1]:
            make_writable(path)
            path /= part
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
                path.mkdir()
        make_writable(path)
        path /= parts[-1]
        if path.is_dir() and not path.is_symlink():
            remove_folder(path)
        path.unlink(missing_ok=True)
        return path

    def _inside(self, name: str) -> Path:
        path = self.folder / name
        if not path.parent.resolve().is_relative_to(self.folder.resolve()):
            raise OSError(f"{name} is outside of the working folder")
        return path


class BubblewrapSandbox(DirectSandbox):
    """A temporary folder in bubblewrap, where only it, /usr and the given paths are visible.

    It has no network, except that the server of the sessions is reachable at its usual address.

    Args:
        base_url: URL of the session. Its host must be this machine's loopback address.
        paths: Absolute paths of folders and files that are visible, read-only.
    """

    def __init__(self, base_url: str, paths: Sequence[str] = ()):
        super().__init__()
        self._base_url, self._paths = base_url, paths
        self._user = unprivileged_user()
        self._relay: asyncio.Server | None = None
        self._outer: Path | None = None

    async def start(self) -> None:
        """Create the folder, and the socket through which the session is reached."""
        self._outer = Path(tempfile.mkdtemp(prefix="skyrl-agent-"))
        self._folder = self._outer / "work"
        self._folder.mkdir()
        os.chmod(self._outer, 0o711)
        self._relay = await asyncio.start_unix_server(self._forward, self._outer / "session")
        os.chmod(self._outer / "session", 0o666)
        self._give_away()

    async def exec(
        self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, max_output_bytes: int
    ) -> CommandResult:
        """Run a command. All of its processes end with it."""
        return await run_command(
            self._command(argv),
            cwd="/",
            env={**_INNER_ENVIRONMENT, "HOME": "/work", **env},  # not on the command line, which all users can see
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            folder=self._outer,
        )

    async def upload(self, files: Mapping[str, bytes]) -> None:
        """Write files below the folder, which belong to the user of the sandbox."""
        await super().upload(files)
        self._give_away(files)

    async def stop(self) -> None:
        """Close the socket and remove the folder."""
        if self._relay is not None:
            self._relay.close()
        if self._outer is not None:
            await asyncio.to_thread(remove_folder, self._outer)

    def _give_away(self, names: Iterable[str] = ()) -> None:
        """Let the unprivileged user own the folder and these files in it, if this process is root."""
        if self._user:
            for path in {Path(), *(path for name in names for path in (Path(name), *Path(name).parents))}:
                os.chown(self.folder / path, self._user["user"], self._user["group"], follow_symlinks=False)

    def _command(self, argv: Sequence[str]) -> list[str]:
        bwrap, setpriv = shutil.which("bwrap"), shutil.which("setpriv")
        if bwrap is None or (self._user and setpriv is None):
            raise EnvironmentFailure(SANDBOX_FAILURE, "the program bwrap or setpriv is not installed")
        assert self._outer is not None
        port = urlsplit(self._base_url).port or 80
        as_user = []
        if self._user:
            user, group = str(self._user["user"]), str(self._user["group"])
            as_user = [str(setpriv), "--reuid", user, "--regid", group, "--clear-groups", "--"]
        return [
            *as_user,
            bwrap,
            *isolation_arguments(self._paths),
            *("--bind", str(self.folder), "/work", "--bind", str(self._outer / "session"), "/run/session"),
            *("--ro-bind", str(_FORWARDER), "/run/forward.py", "--chdir", "/work"),
            *("--", PYTHON, "-I", "/run/forward.py", str(port), "/run/session", *argv),
        ]

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection of the sandbox to the server of the sessions, and to nothing else."""
        address = urlsplit(self._base_url)
        try:
            outer_reader, outer_writer = await asyncio.open_connection(address.hostname, address.port or 80)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, outer_writer), _copy(outer_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()


class DockerSandbox:
    """A container that the program `docker` starts from an image. Its working folder is /work.

    It uses the network of this machine, because the server of the sessions listens at a loopback address. `run_args`
    may choose another network; `environment.skyrl_gym.agent.host` must then be an address that it can reach.

    Args:
        image: Name of the image.
        run_args: Further arguments of `docker run`.
        container_s: Seconds after its start, or a restart, at which the container ends and is removed by itself. A
            driver that was killed cannot do it.
    """

    FOLDER = "/work"

    def __init__(self, image: str, run_args: Sequence[str] = (), container_s: float = CONTAINER_S):
        self._image, self._run_args, self._container_s = image, run_args, container_s
        self._name = f"skyrl-agent-{secrets.token_hex(8)}"
        self._has_run = False

    async def start(self) -> None:
        """Start the container."""
        network = [] if any(word.startswith(("--network", "--net")) for word in self._run_args) else ["--network=host"]
        arguments = ["run", "--detach", "--init", "--rm", "--name", self._name, *network, "--workdir", self.FOLDER]
        command = ["sleep", str(math.ceil(self._container_s))]
        await self._docker([*arguments, *self._run_args, self._image, *command], START_TIMEOUT_S)

    async def exec(
        self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, max_output_bytes: int
    ) -> CommandResult:
        """Run a command. The container restarts first if an earlier command may have left processes behind."""
        if self._has_run:
            await self._docker(["restart", "--time", "0", self._name], COPY_TIMEOUT_S)
        self._has_run = True
        names = [word for name in env for word in ("--env", name)]  # values are not on the command line
        result = await run_command(
            [_docker_program(), "exec", *names, "--workdir", self.FOLDER, self._name, *argv],
            cwd="/",
            env=dict(os.environ) | dict(env),
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
        )
        if result.timed_out:  # the program inside does not end with `docker exec`
            await self.stop()
        elif result.returncode and not await self._is_running():  # docker's own exit code, which may be 1
            reason = result.stderr.strip()[-_MAX_ERROR_CHARS:]
            raise EnvironmentFailure(SANDBOX_FAILURE, f"the container has ended: {reason}")
        return result

    async def upload(self, files: Mapping[str, bytes]) -> None:
        """Copy files into the container."""
        with tempfile.TemporaryDirectory(prefix="skyrl-agent-") as folder:
            root = Path(folder, "files")  # its mode becomes that of the working folder
            for name, content in files.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            await self._docker(["cp", f"{root}/.", f"{self._name}:{self.FOLDER}"], COPY_TIMEOUT_S)

    async def download(self, path: str) -> bytes:
        """Copy a file out of the container."""
        with tempfile.TemporaryDirectory(prefix="skyrl-agent-") as folder:
            archive = Path(folder, "file")
            try:
                await self._docker(["cp", f"{self._name}:{self.FOLDER}/{path}", str(archive)], COPY_TIMEOUT_S)
            except EnvironmentFailure as failure:
                raise OSError(f"{path}: {failure.detail}") from failure
            if not archive.is_file() or archive.is_symlink() or archive.stat().st_size > MAX_DOWNLOAD_BYTES:
                raise OSError(f"{path} is not a regular file of at most {MAX_DOWNLOAD_BYTES} bytes")
            return archive.read_bytes()

    async def stop(self) -> None:
        """Kill and remove the container. Does nothing if it is gone."""
        with suppress(EnvironmentFailure):
            await self._docker(["rm", "--force", "--volumes", self._name], COPY_TIMEOUT_S)

    async def _is_running(self) -> bool:
        arguments = ["inspect", "--format", "{{.State.Running}}", self._name]
        try:
            return (await self._docker(arguments, COPY_TIMEOUT_S)).strip() == "true"
        except EnvironmentFailure:
            return False

    async def _docker(self, arguments: Sequence[str], timeout_s: float) -> str:
        """Run a command of docker, and return its output."""
        result = await run_command(
            [_docker_program(), *arguments],
            cwd="/",
            env=dict(os.environ),
            timeout_s=timeout_s,
            max_output_bytes=2**16,
        )
        if result.returncode or result.timed_out:
            reason = f"no answer within {timeout_s:g} s" if result.timed_out else result.stderr.strip()
            raise EnvironmentFailure(SANDBOX_FAILURE, f"docker {arguments[0]} failed: {reason[-_MAX_ERROR_CHARS:]}")
        return result.stdout


def _docker_program() -> str:
    program = shutil.which("docker")
    if program is None:
        raise EnvironmentFailure(SANDBOX_FAILURE, "the program docker is not installed")
    return program
