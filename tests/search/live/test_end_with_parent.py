from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from search.live import end_with_parent

SLEEPER = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); {0}"
POLITE = "subprocess.run(['sleep', '600'])"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); " + POLITE
)


def guarded(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, end_with_parent.__file__, sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def alive(pid: int) -> bool:
    """Running, not just waiting to be collected."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_closing_its_input_ends_the_whole_group() -> None:
    process = guarded(SLEEPER.format(POLITE))
    grandchild = int(process.stdout.readline())
    process.stdin.close()
    process.wait(60)
    wait_until_gone(grandchild)
    process.stdout.close()


def test_what_does_not_listen_is_ended_by_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    impatient = tmp_path / "end_with_parent.py"
    impatient.write_text(
        Path(end_with_parent.__file__).read_text().replace("GRACE_SECONDS = 5.0", "GRACE_SECONDS = 0.2")
    )
    monkeypatch.setattr(end_with_parent, "__file__", str(impatient))
    process = guarded(SLEEPER.format(STUBBORN))
    grandchild = int(process.stdout.readline())
    assert process.stdout.readline() == "deaf\n"
    process.stdin.close()
    process.wait(60)
    wait_until_gone(grandchild)
    process.stdout.close()


def test_the_death_of_the_parent_ends_the_group() -> None:
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, {end_with_parent.__file__!r}, "sleep", "600"],
                         stdin=subprocess.PIPE, start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert alive(child)
        os.kill(parent.pid, 9)
        parent.wait(60)
    wait_until_gone(child)


def test_the_commands_exit_code_is_passed_on() -> None:
    with guarded("raise SystemExit(7)") as process:
        assert process.wait(60) == 7
