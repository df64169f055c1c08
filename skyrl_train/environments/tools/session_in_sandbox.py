"""Program inside a session's sandbox, run by the system's Python: it runs blocks of code and confirms their end."""

from __future__ import annotations

import linecache
import os
import sys
import traceback


def main() -> None:
    """Run the blocks of code on standard input, in one namespace, until standard input ends.

    A block is a frame of 8 bytes of length (big endian), a token of 16 bytes, and the code. After a block has ended,
    its token is written to the descriptor of the first argument. The code itself sees an empty standard input.
    """
    source, control = os.fdopen(os.dup(0), "rb"), int(sys.argv[1])
    os.set_inheritable(control, False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    scope = {"__name__": "__main__"}
    number = 0
    while header := source.read(8):
        token = source.read(16)
        code = source.read(int.from_bytes(header, "big")).decode("utf-8", "replace")
        number += 1
        name = f"<block {number}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        try:
            exec(compile(code, name, "exec"), scope)
        except BaseException as error:  # SystemExit too: the session continues
            own_frames = error.__traceback__ and error.__traceback__.tb_next
            traceback.print_exception(type(error), error, own_frames)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        os.write(control, token)


if __name__ == "__main__":
    main()
