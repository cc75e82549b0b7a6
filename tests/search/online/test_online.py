"""`online` and `apply`: a bundle learns newer rows, and copies of it follow by increments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from command_line import LATER, TRAINED, Run

from search.bundles import online
from search.bundles.bundle import read_bundle
from search.bundles.increments import IncrementInfo, only_trainer
from search.bundles.online import CHECKPOINTS
from trials.data.vocabulary import hash64
from trials.training.progressive import train_once
from trials.training.step import DivergenceError

pytestmark = pytest.mark.usefixtures("one_thread")

PERIODS = ["2026-01-03 02:00", "2026-01-04 00:00", "2026-01-05 00:00"]


def infos(folder: Path) -> list[IncrementInfo]:
    return [one.info for one in read_bundle(folder).increments]


def scores(dhen_search: Run, bundle: Path, log: Path, out: Path) -> list[float]:
    dhen_search("predict", bundle, "--data", log, "--out", out)
    return [float(line.split(",")[1]) for line in out.read_text().splitlines()[1:]]


def test_each_period_is_scored_before_it_is_trained_on(
    dhen_search: Run, bundle: Path, live: Path, logs: tuple[Path, Path]
) -> None:
    made = infos(live)
    assert [one.number for one in made] == [1, 2, 3]
    assert sum(one.period.online.examples for one in made) == LATER - TRAINED
    assert made[0].period.online.ne == pytest.approx(made[0].period.frozen.ne, abs=1e-9)
    assert all(one.period.online.ne != one.period.frozen.ne for one in made[1:])
    assert made[-1].period.online.ne < made[-1].period.frozen.ne
    assert sum(one.begun for one in made) > 0
    assert sum(one.gone for one in made) > 0
    page = (live / "online.html").read_text()
    assert "as it was" in page
    assert "http://" not in page.split("</style>")[0]


def test_a_copy_follows_by_increments_and_is_written_whole(
    dhen_search: Run, bundle: Path, live: Path, logs: tuple[Path, Path], tmp_path: Path
) -> None:
    served, whole = tmp_path / "served", tmp_path / "whole"
    shutil.copytree(bundle, served)
    folders = [live / "increments" / f"{number:06d}" for number in (1, 2, 3)]
    said = dhen_search("apply", served, folders[1], code=2).stderr
    assert "version 1 is missing" in said
    dhen_search("apply", served, folders[0], "--json")
    dhen_search("apply", served, *folders[1:2], "--out", whole)
    assert infos(served) == infos(live)[:2]
    dhen_search("verify", whole)
    assert scores(dhen_search, whole, logs[1], tmp_path / "a") == scores(
        dhen_search, served, logs[1], tmp_path / "b"
    )
    dhen_search("apply", whole, folders[2])  # which goes on from the version that it has in its weights
    assert scores(dhen_search, whole, logs[1], tmp_path / "a") == scores(
        dhen_search, live, logs[1], tmp_path / "b"
    )
    assert "passed" in dhen_search("apply", whole, folders[0], code=2).stderr
    assert "apply" in dhen_search("apply", whole, "--help").stdout
    assert "nothing to do" in dhen_search("apply", whole, code=2).stderr


@contextmanager
def interrupted_in_second_period(name: str) -> Iterator[None]:
    whole, calls = getattr(online.OnlineTraining, name), []

    def interrupted(self: object, *given: object) -> object:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online.OnlineTraining, name, interrupted)
        yield


@pytest.mark.parametrize("name", ["_train", "_serve"])
def test_it_goes_on_from_the_last_period_to_the_bit(
    dhen_search: Run, bundle: Path, live: Path, logs: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    """Ctrl-C in the second period, or when it has been trained on and its increment has not been written."""
    out = tmp_path / "live"
    with interrupted_in_second_period(name):
        said = dhen_search("online", bundle, "--data", logs[1], "--out", out, code=130).stdout
    assert "the same command goes on" in said
    assert len(infos(out)) == 1
    if name == "_serve":
        header, *rows = logs[1].read_text().splitlines()
        (tmp_path / "latest.csv").write_text("\n".join([header, *rows[-900:]]) + "\n")
        words = ("--data", tmp_path / "latest.csv", "--out", out)
        assert "that --data again first" in dhen_search("online", bundle, *words, code=2).stderr
        assert len(infos(out)) == 1
    dhen_search("online", bundle, "--data", logs[1], "--out", out, "--json")
    assert [one.period for one in infos(out)] == [one.period for one in infos(live)]
    alike = zip(read_bundle(out).increments, read_bundle(live).increments, strict=True)
    for one, other in alike:
        changes = other.changes()
        assert one.changes().keys() == changes.keys()
        assert all(torch.equal(tensor, changes[key]) for key, tensor in one.changes().items())


def test_the_same_command_again_trains_nothing_twice(
    dhen_search: Run, bundle: Path, live: Path, logs: tuple[Path, Path], tmp_path: Path
) -> None:
    """And training from the weights says how it goes on."""
    words = ("--data", logs[0], "--from-weights", "--out", tmp_path / "on")
    assert f"apply {live} --out" in dhen_search("train", live, *words, code=2).stderr
    before = read_bundle(live).version
    said = dhen_search("online", bundle, "--data", logs[1], "--out", live).stdout
    assert [line[:16] for line in said.splitlines() if "as it was" in line] == PERIODS
    assert read_bundle(live).version == before


def test_without_its_checkpoint_it_goes_on_with_fresh_optimizers(
    dhen_search: Run, bundle: Path, live: Path, logs: tuple[Path, Path], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(live, tmp_path / "live"))
    shutil.rmtree(out / CHECKPOINTS)
    shutil.rmtree(out / "increments" / "000003")
    said = dhen_search("online", bundle, "--data", logs[1], "--out", out).stdout
    assert "no checkpoint of the optimizers after the newest increment" in " ".join(said.split())
    assert len(infos(out)) == 3


def test_rows_may_be_counted_where_there_is_no_time(
    dhen_search: Run, bundle: Path, logs: tuple[Path, Path], tmp_path: Path
) -> None:
    def without_time(log: Path, name: str) -> Path:
        rows = [line.split(",") for line in log.read_text().splitlines()]
        path = tmp_path / name
        path.write_text("\n".join(",".join([row[0], *row[2:]]) for row in rows) + "\n")
        return path

    earlier, later = without_time(logs[0], "a.csv"), without_time(logs[1], "b.csv")
    base, out = tmp_path / "base", tmp_path / "live"
    dhen_search("train", bundle.parent / "model.yaml", "--data", earlier, "--out", base, "training.epochs=1")
    said = dhen_search("online", base, "--data", later, "--out", out, code=2).stderr
    assert "period=50000" in said
    assert not out.exists()
    dhen_search("online", base, "--data", later, "--out", out, "period=2000")
    assert [one.period.online.examples for one in infos(out)] == [2000, 1600]


def test_rows_are_given_back_by_the_time_stamps(
    dhen_search: Run, bundle: Path, logs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Time goes on from one period, and from one command, to the next."""
    log, base, out = tmp_path / "log", tmp_path / "base", tmp_path / "live"
    schema = (bundle.parent / "log" / "schema.yaml").read_text()
    ttl = "growing: {capacity: 3000, admit_after: 1, ttl: 12h}"
    log.mkdir()
    (log / "schema.yaml").write_text(schema.replace("growing: {capacity: 12, evict: lru}", ttl))
    dhen_search("prepare", logs[0], "--out", log)
    words = ("training.epochs=1", "training.order=log", "training.batch_size=20")
    dhen_search("train", bundle.parent / "model.yaml", "--data", log, "--out", base, *words)
    header, *rows = logs[1].read_text().splitlines()
    for name, part in (("a.csv", rows[:2000]), ("b.csv", rows[2000:])):
        (tmp_path / name).write_text("\n".join([header, *part]) + "\n")
        dhen_search("online", base, "--data", tmp_path / name, "--out", out, "period=6h")
    assert sum(one.gone for one in infos(out)) > 0
    opened = read_bundle(out)
    held = opened.model().features.growing.held(0)[0].tolist()
    users = [row.split(",")[3] for row in rows]

    def keys(names: list[str]) -> set[int]:
        return set(hash64(pa.array(names)).view("int64").tolist())

    assert keys(users[-12 * 60 + 20 :]) <= set(held)  # a row is a minute, a batch has twenty
    assert set(held) <= keys(users[-12 * 60 - 45 - 20 :])
    assert len(set(held)) < len(keys(users))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["period=soon"], "expected a time such as 1d"),
        (["periods=1d"], "Did you mean 'period'"),
        (["training.learning_rate=0"], "learning_rate"),
        (["period=12h"], "period=1d"),
        (["training.learning_rate=0.1"], "another job"),
        (["training.epochs=3"], "online training has epochs=1; leave this key out"),
    ],
)
def test_what_cannot_be_is_said(
    dhen_search: Run, bundle: Path, live: Path, logs: tuple[Path, Path], words: list[str], says: str
) -> None:
    before = read_bundle(live).version
    assert says in dhen_search("online", bundle, "--data", logs[1], "--out", live, *words, code=2).stderr
    assert read_bundle(live).version == before


def test_time_does_not_go_back_and_other_folders_stay(
    dhen_search: Run, bundle: Path, live: Path, logs: tuple[Path, Path], tmp_path: Path
) -> None:
    said = dhen_search("online", bundle, "--data", logs[0], "--out", live, code=2).stderr
    assert "time goes back" in said
    prepared = bundle.parent / "log"  # which has a manifest too
    assert "is not a bundle" in dhen_search("apply", bundle, "--out", prepared, code=2).stderr
    assert (prepared / "schema.yaml").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    for place in (other, other / "mine.txt"):
        said = dhen_search("online", bundle, "--data", logs[1], "--out", place, code=2).stderr
        assert "is not a bundle" in said
    assert (other / "mine.txt").read_text() == "mine"
    before = read_bundle(live).version
    said = dhen_search("apply", live, "--out", live, code=2).stderr
    assert "increments would be gone: give another --out" in said
    assert read_bundle(live).version == before
    said = dhen_search("apply", live, "--out", ".", code=2, cwd=live.parent).stderr
    assert "is the folder that this command runs in, or holds it" in said


def test_periods_may_be_of_one_class(
    dhen_search: Run, bundle: Path, logs: tuple[Path, Path], tmp_path: Path
) -> None:
    """NE of such a period is not known, and it is trained on all the same."""
    header, *rows = [line.split(",") for line in logs[1].read_text().splitlines()]
    label = header.index("click")
    for number, row in enumerate(rows):
        row[label] = str(int(number < 30))
    few, out = tmp_path / "few.csv", tmp_path / "live"
    few.write_text("\n".join(map(",".join, [header, *rows])) + "\n")
    said = dhen_search("online", bundle, "--data", few, "--out", out, "--json")
    assert "whose labels are all equal, so that no NE is known" in " ".join(said.stderr.split())
    assert [one["online"]["ne"] == "NaN" for one in json.loads(said.stdout)["increments"]] == [
        False,
        True,
        True,
    ]
    assert len(infos(out)) == 3
    assert "Warning" not in said.stderr


def test_one_process_at_a_time_adds_increments(
    dhen_search: Run, bundle: Path, live: Path, logs: tuple[Path, Path]
) -> None:
    before = read_bundle(live).version
    with only_trainer(live):
        for words in (
            ("online", bundle, "--data", logs[1], "--out", live),
            ("apply", live, live / "increments" / "000001"),
        ):
            said = dhen_search(*words, code=2).stderr
            assert "another process adds increments to this bundle" in said
    assert read_bundle(live).version == before
    assert "is in" in dhen_search("apply", live, live / "increments" / "000003", code=2).stderr


def test_what_was_learnt_before_a_period_diverges_is_kept(
    dhen_search: Run,
    bundle: Path,
    logs: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def diverges_later(*given: Any) -> int:
        calls.append(1)
        if len(calls) == 3:
            raise DivergenceError(1, float("nan"))
        return train_once(*given)

    monkeypatch.setattr(online, "train_once", diverges_later)
    said = dhen_search("online", bundle, "--data", logs[1], "--out", tmp_path / "live", code=2)
    assert [line[:16] for line in said.stdout.splitlines() if "as it was" in line] == PERIODS[:2]
    assert f"diverged in the period that begins at {PERIODS[2]}" in said.stderr
    assert "stays at version 2" in said.stderr
    assert read_bundle(tmp_path / "live").version.number == 2


def test_a_whole_copy_knows_what_it_was_trained_on(
    dhen_search: Run, live: Path, logs: tuple[Path, Path], tmp_path: Path
) -> None:
    whole, later = tmp_path / "whole", tmp_path / "later"
    dhen_search("apply", live, "--out", whole)
    said = dhen_search("online", whole, "--data", logs[1], "--out", later)
    assert "as it was" not in said.stdout
    assert "version 3" in said.stdout
    said = dhen_search("online", whole, "--data", logs[0], "--out", later, code=2).stderr
    assert "time goes back" in said


def test_a_log_that_is_left_for_another_one_is_not_gone_on_with(
    dhen_search: Run, bundle: Path, logs: tuple[Path, Path], tmp_path: Path
) -> None:
    """A log that was trained on whole, however, names its own increments."""
    header, *rows = logs[1].read_text().splitlines()
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    first.write_text("\n".join([header, *rows[:2400]]) + "\n")
    second.write_text("\n".join([header, *rows[2400:]]) + "\n")
    out = tmp_path / "live"
    with interrupted_in_second_period("_train"):
        dhen_search("online", bundle, "--data", first, "--out", out, code=130)
    dhen_search("online", bundle, "--data", second, "--out", out)
    before = read_bundle(out).version
    said = dhen_search("online", bundle, "--data", first, "--out", out, code=2).stderr
    assert "trained on 1 of the 2 periods of this log, and on another log since" in " ".join(said.split())
    assert read_bundle(out).version == before
    _, *of_second = infos(out)
    said = dhen_search("online", bundle, "--data", second, "--out", out, "--json").stdout
    assert [one["increment"] for one in json.loads(said)["increments"]] == [one.number for one in of_second]
