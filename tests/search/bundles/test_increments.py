"""A chain of increments: what does not follow is refused, and a reader finds a whole version."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from dhen.errors import UserError
from dhen.values import file_hash
from search.bundles.increments import (
    CHANGES,
    INCREMENTS,
    Increment,
    IncrementInfo,
    TrainedPeriod,
    Version,
    increment_folder,
    read_increment,
    read_increments,
    replay,
    take_increments,
    write_increment,
)
from trials.records.trial_record import Metrics

METRICS = Metrics(ne=0.9, log_loss=0.5, auc=0.6, calibration=1.0, examples=10)


def a_bundle(folder: Path, text: str = "{}") -> Version:
    folder.mkdir()
    (folder / "manifest.json").write_text(text)
    identity = file_hash(folder / "manifest.json")
    return Version(number=0, base=identity, identity=identity)


def an_increment(bundle: Path, after: Version, value: float) -> Increment:
    period = TrainedPeriod(
        log="log", length="1d", number=after.number, first=None, last=None, online=METRICS, frozen=METRICS
    )
    info = IncrementInfo(
        number=after.number + 1,
        base=after.base,
        parent=after.identity,
        steps=after.number,
        period=period,
        begun=0,
        gone=0,
    )
    return write_increment(bundle, info, {"a": torch.tensor([value])}, torch.zeros(1))


def a_chain(bundle: Path, base: Version, *values: float) -> list[Increment]:
    made: list[Increment] = []
    for value in values:
        made.append(an_increment(bundle, made[-1].version if made else base, value))
    return made


def test_a_copy_of_the_bundle_replays_them_in_order(tmp_path: Path) -> None:
    base = a_bundle(tmp_path / "origin")
    made = a_chain(tmp_path / "origin", base, 1.0, 2.0, 3.0)
    assert a_bundle(tmp_path / "copy") == base
    (tmp_path / "secret").write_text("of this machine")
    (made[0].directory / "more").symlink_to(tmp_path / "secret")
    version = take_increments(tmp_path / "copy", base, [one.directory for one in made])
    assert version == made[-1].version
    taken = read_increments(tmp_path / "copy", base)
    assert [one.identity for one in taken] == [one.identity for one in made]
    assert not (taken[0].directory / "more").exists(), "only files of the manifest are taken"
    weights = {"a": torch.zeros(1)}
    replay(weights, taken)
    assert weights["a"].item() == 3.0


@pytest.mark.parametrize(
    ("numbers", "says", "version"),
    [
        ([2], "version 1 is missing", 0),
        ([1, 3], "version 2 is missing", 1),
        ([1, 1], "is in .* already", 1),
        ([1, 2, 1], "has passed", 2),
    ],
)
def test_gaps_doubles_and_wrong_order_are_refused(
    tmp_path: Path, numbers: list[int], says: str, version: int
) -> None:
    base = a_bundle(tmp_path / "origin")
    a_chain(tmp_path / "origin", base, 1.0, 2.0, 3.0)
    a_bundle(tmp_path / "copy")
    folders = [increment_folder(tmp_path / "origin", number) for number in numbers]
    with pytest.raises(UserError, match=says):
        take_increments(tmp_path / "copy", base, folders)
    assert len(read_increments(tmp_path / "copy", base)) == version


def test_other_bundles_and_other_histories_are_refused(tmp_path: Path) -> None:
    base, other = a_bundle(tmp_path / "origin"), a_bundle(tmp_path / "other", "{ }")
    (foreign,) = a_chain(tmp_path / "other", other, 1.0)
    with pytest.raises(UserError, match="another bundle"):
        take_increments(tmp_path / "origin", base, [foreign.directory])
    a_chain(tmp_path / "origin", base, 1.0)
    a_bundle(tmp_path / "fork")
    first, second = a_chain(tmp_path / "fork", base, 5.0, 6.0)
    assert first.version.number == 1
    with pytest.raises(UserError, match="trained apart"):
        take_increments(
            tmp_path / "origin", read_increments(tmp_path / "origin", base)[-1].version, [second.directory]
        )


def test_what_is_missing_or_altered_in_the_folder_is_said(tmp_path: Path) -> None:
    base = a_bundle(tmp_path / "origin")
    first, second, third = a_chain(tmp_path / "origin", base, 1.0, 2.0, 3.0)
    changed = third.directory / CHANGES
    changed.write_bytes(changed.read_bytes()[:-1] + b"\0")
    with pytest.raises(UserError, match=f"{CHANGES} was altered"):
        read_increments(tmp_path / "origin", base)
    shutil.rmtree(third.directory)
    assert len(read_increments(tmp_path / "origin", base)) == 2
    shutil.rmtree(first.directory)
    with pytest.raises(UserError, match="version 1 is missing"):
        read_increments(tmp_path / "origin", base)
    assert read_increment(second.directory).version == second.version


def test_half_an_increment_is_none(tmp_path: Path) -> None:
    base = a_bundle(tmp_path / "origin")
    (made,) = a_chain(tmp_path / "origin", base, 1.0)
    left_behind = tmp_path / "origin" / INCREMENTS / ".000002.123.partial"
    shutil.copytree(made.directory, left_behind)
    assert len(read_increments(tmp_path / "origin", base)) == 1
    (made.directory / "manifest.json").unlink()
    with pytest.raises(UserError, match="no increment here"):
        read_increments(tmp_path / "origin", base)
