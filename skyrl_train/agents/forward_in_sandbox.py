"""A program inside of a sandbox without network: it forwards one local port to a socket file, and runs a command.

Arguments: port, socket file, and the command. It exits with the command's exit code. It uses only the standard library,
because the sandbox has the system's Python.
"""

import asyncio
import sys


async def main(port: int, socket_file: str, command: list[str]) -> int:
    """Forward connections to 127.0.0.1:`port` while the command runs."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            outer_reader, outer_writer = await asyncio.open_unix_connection(socket_file)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, outer_writer), copy(outer_reader, writer))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(forward, "127.0.0.1", port)
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    code = await process.wait()
    server.close()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])))
