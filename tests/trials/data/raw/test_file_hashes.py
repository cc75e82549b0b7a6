from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from trials.data.raw import files
from trials.data.raw.files import FileFacts, Format, RawFile, facts_of


def facts(path: Path, memory: Path) -> FileFacts:
    return facts_of([RawFile(path=path, format=Format.CSV, fields=("a",))], memory)[0]


def hash_files(paths: list[Path], memory: Path) -> list[str]:
    return [facts(path, memory).sha256 for path in paths]


def test_hashes_are_of_content_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, memory = tmp_path / "log.csv", tmp_path / "memory"
    path.write_text("one")
    os.utime(path, (1e9, 1e9))
    expected = [hashlib.sha256(b"one").hexdigest()]
    assert hash_files([path], memory) == expected
    with monkeypatch.context() as patch:
        patch.setattr(files, "_read", None)  # calling it would fail
        assert hash_files([path], memory) == expected
    path.write_text("two")
    assert hash_files([path], memory) == [hashlib.sha256(b"two").hexdigest()]
    path.write_text("six")  # the same size, perhaps within the clock's resolution
    assert hash_files([path], memory) == [hashlib.sha256(b"six").hexdigest()]


def test_a_damaged_or_unwritable_memory_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("one")
    os.utime(path, (1e9, 1e9))
    (tmp_path / "file_hashes.json").write_text("{")
    assert (
        hash_files([path], tmp_path)
        == hash_files([path], path / "below")
        == [hashlib.sha256(b"one").hexdigest()]
    )
