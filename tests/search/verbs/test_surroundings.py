"""What a command meets besides its words: closed streams, terminals that obey control characters, other processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_closed_streams_are_opened_before_anything_can_take_their_place(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    program = (
        "import os, subprocess, sys\n"
        "from search.cli import main\n"
        "main(['--version'])\n"
        "print('lost', flush=True)\n"
        "inherited = \"import os; print(*(os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 2)))\"\n"
        "said = subprocess.run([sys.executable, '-c', inherited], stdout=subprocess.PIPE).stdout.decode()\n"
        f"open({str(shown)!r}, 'w').write(os.readlink('/proc/self/fd/1') + ' ' + said)\n"
    )
    closed = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", program]
    subprocess.run(closed, check=True)
    assert shown.read_text().split() == ["/dev/null"] * 3
