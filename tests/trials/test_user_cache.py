"""The cache ends at its limit, and takes nothing away that somebody uses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from dhen.errors import UserError
from search.verbs.cache import command
from trials.data.prepared_log import PreparedLog
from trials.store import user_cache
from trials.store.user_cache import LIMIT, built, entries, make_room, remove, use

KB = 1000
DEMO = "demo/demo-1-0.parquet"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four logs of a kB each, each unused for longer than the next, and measured speeds."""
    root = tmp_path / "cache"
    monkeypatch.setenv("DHEN_SEARCH_CACHE", str(root))
    monkeypatch.setenv(LIMIT, "4kB")
    monkeypatch.setattr(user_cache, "_HELD", {})
    files = ("step-times/a.json", DEMO, "one/manifest.json", "copies/two/x.csv", "three/manifest.json")
    for age, name in zip((500, 400, 300, 200, 100), files, strict=True):
        path = root / name
        path.parent.mkdir(parents=True)
        path.write_text('{"name": "ads"}'.ljust(KB))
        os.utime(path if name == DEMO else path.parent, (1e9 - age, 1e9 - age))
    return root


def names(cache: Path) -> list[str]:
    return [str(entry.path.relative_to(cache)) for entry in entries()]


def test_what_was_unused_the_longest_goes_when_something_new_comes(cache: Path) -> None:
    make_room(cache / "new", 0)
    make_room(cache.parent / "elsewhere", 5 * KB)
    assert names(cache) == [DEMO, "one", "copies/two", "three"]
    with built(cache / "new", 2 * KB) as folder:
        (folder / "x.npy").write_bytes(bytes(2 * KB))
    assert sorted(os.listdir(cache)) == ["copies", "demo", "new", "step-times", "three"]
    assert names(cache) == ["copies/two", "three"]


def test_what_a_process_uses_stays_and_is_the_newest(cache: Path) -> None:
    written = (cache / DEMO).stat().st_mtime_ns
    for name in ("one", DEMO, DEMO):
        use(cache / name)
    assert names(cache)[-2:] == ["one", DEMO]
    assert (cache / DEMO).stat().st_mtime_ns == written, "it would be read anew"
    make_room(cache / "new", 100 * KB)
    assert names(cache) == ["one", DEMO]
    assert not remove(cache / "one")
    for descriptor in user_cache._HELD.values():  # as at the end of a process
        os.close(descriptor)
    assert remove(cache / "one")
    assert not list(cache.glob(".*"))


def test_a_prepared_log_that_is_open_is_used(cache: Path) -> None:
    with pytest.raises(UserError):
        PreparedLog.open(cache / "one")  # damaged, but looked at
    assert not remove(cache / "one")


def test_a_limit_that_is_none_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "much")
    with pytest.raises(UserError, match=f"{LIMIT} is 'much': expected a number"):
        make_room(cache / "new", 0)


def test_the_command_lists_and_clears(cache: Path) -> None:
    def run(*words: str) -> str:
        return CliRunner().invoke(command, list(words), catch_exceptions=False).output

    listed = json.loads(run("--json"))
    assert listed["limit_bytes"] == 4 * KB
    assert [entry["name"] for entry in listed["entries"]] == names(cache)
    assert {entry["bytes"] for entry in listed["entries"]} == {KB}
    assert "prepared log 'ads'" in run("one")
    with pytest.raises(UserError, match=r"unknown entry of the cache 'on'. Did you mean 'one'"):
        run("--clear", "on")
    assert json.loads(run("--clear", "one", "--json"))["cleared"] == ["one"]
    use(cache / "copies" / "two")
    with pytest.raises(UserError, match="a process uses copies/two: not cleared"):
        run("--clear")
    assert names(cache) == ["copies/two"]
