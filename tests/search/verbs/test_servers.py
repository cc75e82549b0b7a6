"""Studies whose tables are on servers: each way to keep ranks together, from the command line to the bundle."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import SMALL, Run

from search.read_study import read_study
from trials.records.strategy import named

SERVED = (*SMALL, "trials=1", "sampler=random", "ranks=1x2", "servers=2", "stopping=none")
SYNC = ("training.tables.synchrony=sync",)


def test_a_study_trains_its_candidates_on_servers(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    """Ranks go each at its own pace; that others wait for one another changes nothing of this road."""
    out, log = tmp_path / "study", click_log
    growing = ("growing.columns=[user]", "growing.capacity=500")
    dhen_search("run", "--data", log, "--out", out, *SERVED, "training.tables.synchrony=async", *growing)
    record = read_study(out)
    assert len(record.trials) == 2
    for trial in record.trials:
        assert trial.result.outcome == "completed", trial.result.error
        executed = named(trial.attempts[-1].executed or "")
        assert executed.servers == 2
        assert trial.job.training["tables"]["synchrony"] == "async"
        assert trial.result.measured.staleness is not None
        assert trial.plan.summary is not None
        assert trial.plan.summary.memory_bytes["embedding_shards"] == 0
    bundle = tmp_path / "bundle"
    dhen_search("export", out, "--out", bundle)
    dhen_search("verify", bundle, "--data", log)


def test_one_process_that_trains_what_is_planned_elsewhere_has_a_server(
    dhen_search: Run, click_log: Path, tmp_path: Path
) -> None:
    out, words = tmp_path / "study", ("trials=1", "training.epochs=1", "training.tables.synchrony=semi")
    dhen_search("run", "--data", click_log, "--out", out, *SMALL, "cluster=zionex", *words)
    for trial in read_study(out).trials:
        assert trial.attempts[-1].executed == "dp+servers1"
        assert trial.result.measured.staleness is not None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("servers=2",), "training.tables.synchrony=local has them on the ranks"),
        (("training.tables.synchrony=sync", "training.tables.staleness=1"), "has none that are old"),
        (("training.tables.synchrony=sync", "technique=tensor2", "ranks=1x2"), "leave one of the two out"),
        (("training.tables.synchrony=sync", "training.weight_average=3"), "weight_average=3"),
        (("training.tables.synchrony=async", "training.optimizer=onebit_adam"), "each pushes its own"),
        (("training.tables.synchrony=semi", "objective=next_period"), "objective=next_period"),
        (("training.tables.synchrony=async", "technique=fsdp", "ranks=1x2"), "give technique=dp"),
        ((*SYNC, "technique=zero2", "training.optimizer=onebit_adam", "ranks=1x2"), "technique=zero2"),
        (("servers=0", "training.tables.synchrony=sync"), "servers"),
        (("training.tables.synchrony=sync", "ranks=1x64", "training.batch_size=8"), "less than one example"),
    ],
)
def test_what_servers_cannot_do_is_said_before_anything_starts(
    dhen_search: Run, click_log: Path, tmp_path: Path, words: tuple[str, ...], expected: str
) -> None:
    said = dhen_search(
        "run", "--data", click_log, "--out", tmp_path / "out", *SMALL, "trials=1", *words, code=2
    )
    assert expected in said.stderr
