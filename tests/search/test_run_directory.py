"""The lock of a run directory: one driver, any number of readers, nothing left of a process that was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import lock_descriptor, unlock_descriptor

from dhen.errors import UserError
from search import run_directory
from search.read_study import HEAD, read_study
from search.run_directory import LOCK_FILE, is_driven, network_file_system, only_driver
from trials.store.ledger import Ledger

DRIVE = """
import sys, time
from pathlib import Path
from search.run_directory import only_driver
with only_driver(Path(sys.argv[1])):
    print("driving", flush=True)
    time.sleep(60)
"""


@contextmanager
def driver(directory: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", DRIVE, str(directory)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "driving\n"
        yield process
        process.kill()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_second_driver_is_turned_away_and_the_lock_goes_with_its_process(
    tmp_path: Path, how: signal.Signals
) -> None:
    with driver(tmp_path) as process:
        for _ in range(2):
            with pytest.raises(UserError, match="another process is running"), only_driver(tmp_path):
                pass
            assert is_driven(tmp_path)
        process.send_signal(how)
        process.wait()
    assert not is_driven(tmp_path)
    with only_driver(tmp_path):
        assert is_driven(tmp_path)
    assert not is_driven(tmp_path)


def test_a_reader_leaves_nothing_behind_and_needs_no_right_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_driven(tmp_path)
    assert not is_driven(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []
    opened, real = [], Path.open

    def spied(path: Path, mode: str = "r") -> Any:
        opened.append(mode)
        return real(path, mode)

    (tmp_path / LOCK_FILE).touch()
    monkeypatch.setattr(Path, "open", spied)
    assert not is_driven(tmp_path)
    assert opened == ["r"]


@pytest.mark.parametrize("ask", ["a reader", "a driver"])
def test_a_reader_at_the_lock_is_not_taken_for_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    (tmp_path / LOCK_FILE).touch()
    with (tmp_path / LOCK_FILE).open() as other:
        assert lock_descriptor(other.fileno(), blocking=False)
        monkeypatch.setattr(run_directory.time, "sleep", lambda seconds: unlock_descriptor(other.fileno()))
        if ask == "a reader":
            assert not is_driven(tmp_path)
        else:
            with only_driver(tmp_path):
                assert is_driven(tmp_path)


def test_time_in_which_nothing_ran_is_none_of_a_study_s(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader while `confirm` holds a study that ended, or before one that is gone on with has noted any."""
    before, facts = read_study(study).elapsed_seconds, Ledger.facts

    def going_on(ledger: Ledger) -> dict[str, Any]:
        noted = facts(ledger) or {}
        return noted | {HEAD: noted[HEAD] | {"finished": False}}

    with only_driver(study):
        assert read_study(study).elapsed_seconds == before
        monkeypatch.setattr(Ledger, "facts", going_on)
        assert read_study(study).elapsed_seconds == before


def test_a_network_file_system_is_known_by_its_mount() -> None:
    mounts = """\
/dev/vda / ext4 rw 0 0
host:/export /nfs nfs4 rw 0 0
me@host: /home/me/my\\040files fuse.sshfs rw 0 0
/dev/vdb /nfs/scratch xfs rw 0 0
"""
    for path, kind in {
        "/runs/mine/study.db": None,
        "/nfs": "nfs4",
        "/nfs/runs/study.db": "nfs4",
        "/nfs2/runs": None,
        "/nfs/scratch/study.db": None,
        "/home/me/my files/study.db": "fuse.sshfs",
    }.items():
        assert network_file_system(Path(path), mounts) == kind
