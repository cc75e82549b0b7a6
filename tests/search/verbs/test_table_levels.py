"""Studies whose tables are larger than the declared memory: they lie below the device, and the record says what it
cost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import SMALL, Run

from search.read_study import read_study
from trials.records.strategy import KIB, named
from trials.records.study_record import StudyRecord

ROWS = 300_000
LARGE = (f"growing.capacity={ROWS}", "growing.columns=[user]")
HBM = "hbm=4MiB"


def studied(run: Run, log: Path, out: Path, *words: str) -> StudyRecord:
    run("run", "--data", log, "--out", out, *SMALL, "trials=1", "sampler=random", *LARGE, *words)
    return read_study(out)


@pytest.fixture(scope="module")
def in_memory(dhen_search: Run, click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study whose largest tables are more than five times the memory that is declared."""
    out = tmp_path_factory.mktemp("levels") / "study"
    studied(dhen_search, click_log, out, HBM)
    return out


def test_tables_five_times_the_declared_memory_train(in_memory: Path) -> None:
    record = read_study(in_memory)
    largest = max(trial.job.model["embedding_dim"] for trial in record.trials)
    assert ROWS * 4 * largest > 4 * 4 * 2**20
    for trial in record.trials:
        (attempt,) = trial.attempts
        assert attempt.executed is not None
        planned, executed = named(attempt.strategy), named(attempt.executed)
        assert (planned.tables, executed.tables) == ("host", "host")
        assert 0 <= planned.table_cache - executed.table_cache <= 1
        summary, measured = trial.plan.summary, trial.result.measured
        assert summary is not None
        assert summary.memory_bytes["embedding_shards"] <= planned.table_cache * KIB
        assert summary.host_bytes > ROWS * 4 * trial.job.model["embedding_dim"]
        assert any("Tables on the device" in note for note in summary.notes)
        assert measured.peak_memory_bytes is not None
        assert measured.peak_memory_bytes <= 4 * 2**20
        assert measured.table_hit_rate is not None
        assert 0.5 < measured.table_hit_rate < 1  # rows are brought in at least once
        assert measured.table_hit_rate == pytest.approx(summary.table_hit_rate, abs=0.05)
        assert measured.table_rows_copied


def test_where_tables_lie_changes_no_result(
    dhen_search: Run, click_log: Path, in_memory: Path, tmp_path: Path
) -> None:
    on_ssd = studied(dhen_search, click_log, tmp_path / "ssd", HBM, "technique=ssd_tables")
    records = (read_study(in_memory), on_ssd)
    scores = [[trial.result.validation for trial in record.trials] for record in records]
    assert scores[0] == scores[1]
    levels = [{named(str(trial.plan.technique)).tables for trial in record.trials} for record in records]
    assert levels == [{"host"}, {"ssd"}]


def test_its_bundle_is_as_any_other(
    dhen_search: Run, click_log: Path, in_memory: Path, tmp_path: Path
) -> None:
    dhen_search("export", in_memory, "--pick", "lowest", "--out", tmp_path / "bundle")
    assert "as at export" in dhen_search("verify", tmp_path / "bundle", "--data", click_log).stdout
    planned = dhen_search("plan", tmp_path / "bundle", HBM, "--all").stdout
    assert "host_tables=" in planned
    assert "Tables on the device: table 'user' fits on no rank" in re.sub(r"\s+", " ", planned)
