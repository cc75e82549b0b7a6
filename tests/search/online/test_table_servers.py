"""`online` with the tables on servers: the increments are those of training without, however it was broken off."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import FIXED, LATER, TIMEOUT_SECONDS, Run, wait_until, write_log
from faulty_ranks import lives
from torch import Tensor
from warm_process import WarmProcess

from search.bundles.bundle import Bundle, read_bundle
from search.bundles.increments import IncrementInfo
from search.bundles.online import CHECKPOINTS, OnlineTraining
from search.bundles.table_servers import SERVERS, START
from trials.data.periods import Period
from trials.data.prepared_log import PreparedLog
from trials.optim.adamw import embedding_tables
from trials.records.places import checkpoints_in
from trials.store.weights import GONE, KEYS, ROWS
from trials.training.embeddings.growing import growing_rows

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = """model: {family: dhen, embedding_dim: 4, table_dim_exponent: 0.5, \
layers: [{modules: [{kind: dlrm}, {kind: linear}]}]}"""
"""With tables of several lengths, and so several matrices."""
ROUNDING = 1e-4
SYNC = ("servers=2", "training.tables.synchrony=sync")
SEMI = ("servers=2", "training.tables.synchrony=semi", "training.tables.staleness=2")
SLOWLY = ("training.learning_rate=0.0005", "training.embedding_learning_rate=0.01")
"""Rates that do not amplify rounding."""
AHEAD = ("objective=next_period", "period=12h")
KINDS = ("static", "growing")


@pytest.fixture(scope="module")
def bundles(
    dhen_search: Run, logs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A network with static tables, whose optimizers' state is beside it, and one whose users' table grows, with
    room for all ids that occur, some of which give their rows back."""
    folder = tmp_path_factory.mktemp("bundles")
    (folder / "model.yaml").write_text(MODEL)
    schema = (logs[0].parent / "inferred" / "schema.yaml").read_text()
    growing = "user: {role: categorical, table: {growing: {capacity: 900, ttl: 12h}}}"
    made = {}
    for kind, text in (("static", schema), ("growing", schema.replace(FIXED, growing))):
        (folder / kind).mkdir()
        (folder / kind / "schema.yaml").write_text(text)
        dhen_search("prepare", logs[0], "--out", folder / kind)
        made[kind] = folder / f"{kind}-bundle"
        words = ("training.order=log", "training.epochs=1", "training.precision=fp32", *AHEAD)
        dhen_search("train", folder / "model.yaml", "--data", folder / kind, "--out", made[kind], *words)
    return made


@dataclasses.dataclass(frozen=True)
class Scene:
    """The bundles, and the logs that they are trained on."""

    run: Run
    logs: tuple[Path, Path]
    bundles: dict[str, Path]

    def online(self, kind: str, out: Path, *words: str, log: Path | None = None, code: int = 0) -> str:
        """Trains a bundle online, on the later rows where nothing else is said; returns what the command says."""
        given = ("--data", log or self.logs[1], "--out", out, *SLOWLY, "period=1d", *words)
        done = self.run("online", self.bundles[kind], *given, code=code)
        assert not servers_of(out)
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def scene(dhen_search: Run, logs: tuple[Path, Path], bundles: dict[str, Path]) -> Scene:
    return Scene(dhen_search, logs, bundles)


@pytest.fixture(scope="module")
def alone(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles that were trained online without servers."""
    out = tmp_path_factory.mktemp("alone")
    for kind in KINDS:
        scene.online(kind, out / kind)
    return {kind: out / kind for kind in KINDS}


@pytest.fixture(scope="module")
def served(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles that were trained online with two servers in the mode sync."""
    out = tmp_path_factory.mktemp("served")
    for kind in KINDS:
        scene.online(kind, out / kind, *SYNC)
    return {kind: out / kind for kind in KINDS}


def servers_of(out: Path) -> list[int]:
    """Returns the processes that run as servers of a bundle's tables, as their logs have them."""
    alive = []
    for log in (out / CHECKPOINTS / SERVERS).glob("*.log"):
        for pid in re.findall(r"process (\d+),", log.read_text()):
            alive += [int(pid)] if lives(int(pid)) else []
    return alive


def infos(folder: Path) -> list[IncrementInfo]:
    return [one.info for one in read_bundle(folder).increments]


def by_key(bundle: Bundle, number: int) -> dict[str, Tensor]:
    """Returns the weights after so many increments: rows of growing tables by their key, all else by its name."""
    model = dataclasses.replace(bundle, increments=bundle.increments[:number]).model()
    found = {name: values for name, values in model.state_dict().items() if name != KEYS}
    rows = growing_rows(model)
    if rows is None:
        return found
    for matrix in embedding_tables(model):
        for table, start in zip(matrix.tables, matrix.starts, strict=False):
            if table.growing:
                keys, its = rows.held([one.name for one in rows.tables].index(table.name))
                weight_RD = matrix.weight.detach()
                for key, row in zip(keys, its, strict=True):
                    found[f"{table.name}:{int(key)}"] = weight_RD[start + int(row)].clone()
                weight_RD[start + 1 : start + table.rows] = 0.0
    return found


def assert_alike(out: Path, other: Path, tolerance: float = ROUNDING) -> None:
    """Checks that two bundles have the same increments: of the same periods, with the same rows and values."""
    mine, others = read_bundle(out), read_bundle(other)
    assert len(mine.increments) == len(others.increments) == 3
    for number, (one, its) in enumerate(zip(mine.increments, others.increments, strict=True), start=1):
        assert (one.info.begun, one.info.gone, one.info.steps) == (
            its.info.begun,
            its.info.gone,
            its.info.steps,
        )
        assert one.info.period.online.ne == pytest.approx(its.info.period.online.ne, abs=1e-5)
        assert one.info.period.frozen == its.info.period.frozen
        weights, expected = by_key(mine, number), by_key(others, number)
        assert weights.keys() == expected.keys()
        for name, values in weights.items():
            assert torch.allclose(values, expected[name], atol=tolerance), (number, name)


def rows_of(bundle: Bundle, number: int) -> dict[str, set[int]]:
    """Returns the numbers of the rows of weights in an increment."""
    changes = bundle.increments[number].changes()
    names = [name for name in changes if name.endswith(ROWS) and not name.startswith(KEYS)]
    return {name: set(changes[name].tolist()) for name in names}


@pytest.mark.parametrize("kind", KINDS)
def test_sync_gives_the_increments_of_training_without_servers(
    scene: Scene, alone: dict[str, Path], served: dict[str, Path], kind: str
) -> None:
    out = served[kind]
    assert_alike(out, alone[kind])
    mine, others = read_bundle(out), read_bundle(alone[kind])
    for number in range(3):
        assert mine.increments[number].changes().keys() == others.increments[number].changes().keys()
        its, expected = rows_of(mine, number), rows_of(others, number)
        if kind == "static":
            assert its == expected
        else:  # a row that was given and given back within a period has changed, and is nobody's
            assert all(
                len(expected[name]) - 10 < len(rows) <= len(expected[name]) for name, rows in its.items()
            )
    if kind == "growing":
        assert all(one.begun and one.gone for one in infos(out))
        assert any(f"{KEYS}{GONE}" in one.changes() for one in mine.increments)
    said = scene.run("verify", out, "--data", scene.logs[0]).stdout
    assert "version 3" in said


def test_decay_and_half_precision_are_in_the_increments(scene: Scene, tmp_path: Path) -> None:
    """Decay changes all rows at each step; servers round all rows to fp16 when they take the tables over."""
    decays, half = "training.table_decay=0.01", "training.table_precision=fp16"
    for name, words in (("decays", (*SYNC, decays)), ("alone", (decays,)), ("half", (*SYNC, half))):
        scene.online("static", tmp_path / name, *words)
    assert_alike(tmp_path / "decays", tmp_path / "alone")
    assert "version 3" in scene.run("verify", tmp_path / "half", "--data", scene.logs[0]).stdout
    first = by_key(read_bundle(tmp_path / "half"), 1)
    tables = [values for name, values in first.items() if name.startswith("features.tables")]
    assert all(torch.equal(values, values.half().float()) for values in tables)


def test_semi_trains_with_rows_that_are_behind(
    scene: Scene, alone: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Increments of semi bring a copy of the bundle to the same version."""
    behind = Counter[int]()
    whole = OnlineTraining._train

    def counted(self: OnlineTraining, period: Period) -> None:
        whole(self, period)
        behind.update(self._step.staleness)

    monkeypatch.setattr(OnlineTraining, "_train", counted)
    out, served = tmp_path / "live", tmp_path / "served"
    delayed = (*SEMI, "training.tables.deterministic_delay=true")
    for kind, words in (("growing", SEMI), ("static", delayed)):
        scene.online(kind, out / kind, *words)
        mine, others = read_bundle(out / kind), read_bundle(alone[kind])
        assert mine.increments[-1].info.period.online.ne == pytest.approx(
            others.increments[-1].info.period.online.ne, abs=0.02
        )
        assert "version 3" in scene.run("verify", out / kind, "--data", scene.logs[0]).stdout
    assert behind[2] > behind[0]
    with pytest.raises(AssertionError):
        assert_alike(out / "static", alone["static"], 1e-7)
    shutil.copytree(scene.bundles["growing"], served)
    scene.run("apply", served, *(out / "growing" / "increments" / f"{number:06d}" for number in (1, 2, 3)))
    assert_alike(served, out / "growing", 0.0)


@pytest.mark.parametrize(("kind", "when"), [("static", "_serve"), ("growing", "_train")])
def test_it_goes_on_after_ctrl_c(
    scene: Scene,
    alone: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    when: str,
) -> None:
    """In the second period, or when it has been trained on and its increment has not been asked for. With another
    number of servers growing tables count anew which ids occur often; static ones do not mind. With as many they
    go on alike after a server was killed, too."""
    out = tmp_path / "live"
    in_second_period(monkeypatch, when, raise_interrupt)
    said = scene.online(kind, out, *SYNC, code=130)
    assert "the same command goes on" in said
    assert len(infos(out)) == 1
    monkeypatch.undo()
    scene.online(kind, out, "servers=3", SYNC[1])
    if kind == "static":
        assert_alike(out, alone[kind])
    assert "version 3" in scene.run("verify", out).stdout


def in_second_period(monkeypatch: pytest.MonkeyPatch, name: str, then: Callable[[], None]) -> None:
    whole, calls = getattr(OnlineTraining, name), []

    def called(self: OnlineTraining, given: object) -> object:
        calls.append(given)
        if len(calls) == 2:
            then()
        return whole(self, given)

    monkeypatch.setattr(OnlineTraining, name, called)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["_train", "_save"])
def test_a_killed_server_ends_the_command_which_then_goes_on(
    scene: Scene,
    alone: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    out = tmp_path / "live"
    if when == "_save":
        whole = OnlineTraining._save

        def killed_first(self: OnlineTraining, log: PreparedLog, number: int) -> None:
            if number == 1:
                kill_one(out)
            whole(self, log, number)

        monkeypatch.setattr(OnlineTraining, "_save", killed_first)
    else:
        in_second_period(monkeypatch, when, lambda: kill_one(out))
    said = " ".join(scene.online("growing", out, *SYNC, code=2).split())
    assert "server 1 of the tables was killed by signal 9 (SIGKILL)" in said
    assert "stays at version 1; the same command goes on from there" in said
    assert "attempt0.server1.log" in said
    monkeypatch.undo()
    scene.online("growing", out, *SYNC)
    assert_alike(out, alone["growing"])


def kill_one(out: Path) -> None:
    log = (out / CHECKPOINTS / SERVERS / "attempt0.server1.log").read_text()
    os.kill(int(re.findall(r"process (\d+),", log)[-1]), signal.SIGKILL)


def test_no_server_is_left_by_a_command_that_is_killed(
    scene: Scene, environment: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "live"
    words = ("online", scene.bundles["static"], "--data", scene.logs[1], "--out", out, "period=6h")
    process = WarmProcess((*words, "training.batch_size=1", *SLOWLY, *SYNC), environment)
    wait_until((out / "increments" / "000001").exists, process)
    assert len(servers_of(out)) == 2
    process.send_signal(signal.SIGKILL)
    process.communicate(TIMEOUT_SECONDS)
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: not servers_of(out))
    assert not (out / CHECKPOINTS / SERVERS / START).exists()
    scene.run("verify", out)


def test_without_its_checkpoint_servers_begin_with_the_newest_version(
    scene: Scene, served: dict[str, Path], tmp_path: Path
) -> None:
    """Also where the checkpoint is older than the newest increment."""
    out, old = (Path(shutil.copytree(served["growing"], tmp_path / name)) for name in ("live", "old"))
    shutil.rmtree(out / CHECKPOINTS)
    shutil.rmtree(out / "increments" / "000003")
    shutil.rmtree(checkpoints_in(old / CHECKPOINTS)[0])
    header, *rows = write_log(tmp_path / "more.csv", LATER + 300).read_text().splitlines()
    (tmp_path / "more.csv").write_text("\n".join([header, *rows[LATER:]]) + "\n")
    scene.online("growing", old, *SYNC, log=tmp_path / "more.csv")
    scene.online("growing", out, *SYNC)
    for folder, count in ((out, 3), (old, 4)):
        assert len(infos(folder)) == count
        assert f"version {count}" in scene.run("verify", folder).stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("servers=0", SYNC[1]), "servers: Input should be greater than 0 (received 0)"),
        (("servers=2",), "training.tables.synchrony=local has them in the trainer"),
        ((SYNC[1],), "give servers=1 or more too"),
        (("servers=1", "training.tables.synchrony=async"), "give training.tables.synchrony=semi or sync"),
        ((*SYNC, "training.tables.staleness=1"), "has none that are old"),
        ((*SYNC, "synchrony=sync"), "unknown key 'synchrony'"),
        (
            ("servers=901", SYNC[1]),
            "servers=901: table 'user' has 900 row(s) to share; give servers=900 at most",
        ),
    ],
)
def test_what_cannot_be_is_said(scene: Scene, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    out = tmp_path / "live"
    said = scene.online("growing", out, *words, code=2)
    assert says in " ".join(said.split())
    assert not out.exists()


def test_the_tables_may_not_change_places(scene: Scene, alone: dict[str, Path]) -> None:
    """What was trained without servers goes on without, as it does with the same other settings."""
    said = scene.online("static", alone["static"], *SYNC, code=2)
    assert "another job" in said
    assert len(infos(alone["static"])) == 3
