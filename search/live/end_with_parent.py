"""Runs a command that must not outlive its parent: `python end_with_parent.py COMMAND...`.

The guard and the command are a process group of their own. The parent holds the guard's standard input
open; when that closes, by intent or because the parent died in whatever way, the whole group is ended.
Standard library alone: it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 5.0
"""Seconds between the request to end and the end by force."""


def main() -> int:
    """Returns the command's exit code, should it end by itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the whole group, this process included
    # what was passed on to the guard is the command's: a socket to listen on, say
    command = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, close_fds=False, preexec_fn=_default_signals
    )
    threading.Thread(target=_end_with_parent, args=(command,), daemon=True).start()
    return command.wait()


def _default_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_with_parent(command: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1024):  # unbuffered: a reader inside a buffer's lock would stop the interpreter's exit
        pass
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
