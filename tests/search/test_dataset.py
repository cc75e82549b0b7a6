"""A log at a URL is copied once, and again when it has changed; what cannot be read is said without secrets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from command_line import Run, write_log
from servers.web_site import Site, web_site

from dhen.errors import UserError
from search.dataset import log_files, log_name
from trials.data.remote import local_copy, shown_url


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("DHEN_SEARCH_CACHE", str(tmp_path / "cache"))
    with web_site(tmp_path / "site") as one:
        yield one


def test_a_file_is_copied_once_and_again_when_it_has_changed(site: Site) -> None:
    file, url = site.folder / "log.csv", f"{site.address}/log.csv?signature=abc"
    file.write_bytes(b"x" * 3_000_000)
    said: list[tuple[str, int, int | None]] = []
    copy = local_copy(url, lambda *step: said.append(step))
    assert copy.name == "log.csv"
    assert copy.read_bytes() == file.read_bytes()
    assert said[-1] == ("copying", 2, 2)
    asked = site.copies()
    assert local_copy(url) == copy
    assert site.copies() == asked
    file.write_bytes(b"y" * 3_000_000)
    os.utime(file, (1, 1))
    assert local_copy(url).read_bytes() == file.read_bytes()
    assert copy.read_bytes().startswith(b"x")


def test_a_folder_of_a_store_is_copied_with_all_below_it(tmp_path: Path, site: Site) -> None:
    store = fsspec.filesystem("memory")
    store.pipe({"/logs/day/a.csv": b"1", "/logs/day/part/b.csv": b"2"})
    copy = local_copy("memory://logs/day")
    assert (copy / "a.csv").read_bytes() + (copy / "part" / "b.csv").read_bytes() == b"12"
    assert local_copy("memory://logs/day/a.csv").read_bytes() == b"1"
    store.pipe("/logs/day/a.csv", b"3")  # this store says nothing of the content
    assert local_copy("memory://logs/day/a.csv").read_bytes() == b"3"


def test_a_copy_that_breaks_off_leaves_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.folder / "log.csv").write_bytes(b"x" * 3_000_000)

    def short(store: object, file: object, url: str) -> Iterator[bytes]:
        yield b"x" * 1000

    with monkeypatch.context() as patch:
        patch.setattr("trials.data.remote._chunks", short)
        with pytest.raises(UserError, match="ended after 1,000 of 3,000,000 bytes"):
            local_copy(f"{site.address}/log.csv")
    assert local_copy(f"{site.address}/log.csv").stat().st_size == 3_000_000


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (
            "{site}/none.csv?token=secret",
            r"^http://127.0.0.1:\d+/none.csv: cannot be read \(FileNotFoundError",
        ),
        ("http://127.0.0.1:1/log.csv", "cannot be read"),
        ("nothing://log.csv", "Protocol not known: nothing; http, https, s3"),
        ("s3://bucket/log.csv", "needs a package .*s3fs"),
        ("https://me:secret@127.0.0.1/log.csv", "a password in a URL"),
        ("memory://no/such", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_said_without_secrets(site: Site, url: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        log_files([url.format(site=site.address)])
    assert "secret" not in str(error.value)
    assert shown_url("s3://key:secret@bucket/a/log.csv?x=secret#secret") == "s3://bucket/a/log.csv"
    assert log_name(["https://host/log?x=secret"]) == "log"


def test_a_pattern_stands_for_what_fits_it(tmp_path: Path) -> None:
    for name in ("day-2.csv", "day-1.csv", "other.csv", "day-[3].csv"):
        (tmp_path / name).touch()
    days = [tmp_path / name for name in ("day-1.csv", "day-2.csv")]
    pattern = str(tmp_path / "day-?.csv")
    assert log_files([pattern]) == days
    assert log_files([pattern, str(tmp_path / "day-[3].csv")]) == [*days, tmp_path / "day-[3].csv"]
    assert log_name([pattern]) == tmp_path.name
    assert log_name([str(tmp_path / "day-[3].csv")]) == "day-[3]"


def test_a_log_at_a_url_is_prepared_as_the_file(dhen_search: Run, site: Site, tmp_path: Path) -> None:
    log = write_log(site.folder / "log.csv", 300)
    dhen_search("prepare", log, "--out", tmp_path / "here")
    dhen_search("prepare", f"{site.address}/log.csv", "--out", tmp_path / "there")
    arrays = [path.relative_to(tmp_path / "here") for path in (tmp_path / "here").rglob("*.npy")]
    assert arrays
    for name in arrays:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
    said = dhen_search("prepare", f"{site.address}/none.csv", "--out", tmp_path / "no", code=2).stderr
    assert "none.csv: cannot be read" in said
