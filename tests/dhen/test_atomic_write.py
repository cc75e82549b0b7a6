"""Whole files and folders: the old or the new one, after errors, Ctrl-C and kills; nothing left but by a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dhen.atomic_write import atomic_file, atomic_folder, remove_left_behind, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_atomically(path, "old ä")
    with atomic_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text(encoding="utf-8") == "old ä"
        assert temporary.parent == path.parent  # a rename between file systems would copy
    assert path.read_text() == "new"
    assert names(tmp_path) == ["report.html"]


def break_off(path: Path, error: type[BaseException]) -> None:
    path.write_text("ne")
    raise error


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_cannot_be_written_leaves_the_old_one_alone(tmp_path: Path, error: type[BaseException]) -> None:
    path, folder = tmp_path / "report.html", tmp_path / "best"
    path.write_text("old")
    folder.mkdir()
    (folder / "old").touch()
    with pytest.raises(error), atomic_file(path) as temporary:
        break_off(temporary, error)
    with pytest.raises(error), atomic_folder(folder) as partial:
        break_off(partial / "new", error)
    assert path.read_text() == "old"
    assert names(folder) == ["old"]
    assert names(tmp_path) == ["best", "report.html"]


def test_a_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "best"
    for name in ("old", "new"):
        with atomic_folder(path) as partial:
            (partial / name).touch()
            assert not (path / name).exists()
        assert names(path) == [name]
    assert names(path.parent) == ["best"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_killed_writer_leaves_the_old_one_whole(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "best"
    path.write_text("old") if kind == "file" else path.mkdir()
    script = f"""
import os, signal, sys
from pathlib import Path
from dhen.atomic_write import atomic_{kind}
with atomic_{kind}(Path(sys.argv[1])) as partial:
    (partial if {kind == "file"} else partial / "new").write_text("ne")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script, str(path)], cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    assert path.read_text() == "old" if kind == "file" else names(path) == []
    assert len(names(tmp_path)) == 2
    remove_left_behind(path)
    assert len(names(tmp_path)) == (2 if kind == "file" else 1)


def test_a_link_to_a_folder_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    first, link = tmp_path / "v1", tmp_path / "current"
    first.mkdir()
    link.symlink_to("v1")
    for text in ("a", "b"):
        with atomic_folder(link) as building:
            (building / "file").write_text(text)
        assert link.is_symlink()
        assert (first / "file").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "v1"]
