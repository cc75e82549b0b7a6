"""The ladder executed: several memory techniques really hold candidates of one study, and some run out of memory.

What was executed is what the ranks have read from their wrapped modules, not what the driver asked for.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from command_line import Run
from servers.listening import noted_listeners

from dashboards.plans import attempts_table
from search.read_study import read_study
from search.run_directory import trial_folder
from trials.records.strategy import named
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, TrialKind

WORDS = (
    "demo.rows=4000",
    "space=techniques",
    "ranks=1x2",
    "hbm=7MiB",
    "trials=4",
    "baseline_trials=1",
    "sampler=random",
    "training.epochs=1",
    "training.batch_size=256",
    "training.precision=fp32",
    "threads=1",
    "parallel=1",
)
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
SPACES = Path(__file__).parents[3] / "spaces" / "catalog"
TOO_SURE = "memory_margin=-1MiB"


@pytest.fixture(scope="module")
def listened() -> set[str]:
    """Addresses that processes of the study have listened on, once it has ended."""
    return set()


@pytest.fixture(scope="module")
def techniques(dhen_search: Run, tmp_path_factory: pytest.TempPathFactory, listened: set[str]) -> Path:
    out = tmp_path_factory.mktemp("techniques") / "study"
    with noted_listeners() as addresses:
        shown = dhen_search("run", "-v", "--out", out, *WORDS, TOO_SURE).stderr
    listened |= addresses
    out.with_name("shown.txt").write_text(shown)
    return out


@pytest.fixture(scope="module")
def record(techniques: Path) -> StudyRecord:
    return read_study(techniques)


def test_several_techniques_are_really_executed(record: StudyRecord) -> None:
    executed = set()
    for trial in record.trials:
        last = trial.attempts[-1]
        assert last.outcome is Outcome.COMPLETED
        assert last.executed is not None
        assert named(last.executed).held_as == named(last.strategy).held_as
        assert trial.result.technique == last.executed
        executed.add(named(last.executed).held_as)
    assert len(executed) >= 3


def test_ranks_of_one_machine_listen_on_its_loopback_address_alone(
    techniques: Path, listened: set[str]
) -> None:
    assert listened == {"127.0.0.1"}


def test_what_runs_out_of_memory_climbs_and_every_plan_stays(techniques: Path, record: StudyRecord) -> None:
    climbed = [trial for trial in record.trials if len(trial.attempts) > 1]
    assert climbed
    for trial in climbed:
        first, *_, last = trial.attempts
        assert (first.outcome, last.outcome) == (Outcome.OUT_OF_MEMORY, Outcome.COMPLETED)
        plans = [attempt.plan for attempt in trial.attempts]
        assert [plan.strategy if plan else None for plan in plans] == [a.strategy for a in trial.attempts]
        assert trial.first_plan == plans[0]
        assert first.plan is not None
        assert first.plan.memory_margin == -(2**20)
        assert last.plan is not None
        assert first.strategy in last.plan.ran_out
    told = [json.loads(path.read_text()) for path in techniques.glob("artifacts/**/plan.json")]
    in_mlflow = {tuple(attempt["strategy"] for attempt in plan["attempts"]) for plan in told}
    assert {tuple(attempt.strategy for attempt in trial.attempts) for trial in record.trials} <= in_mlflow


def test_the_report_tells_what_was_tried_and_what_was_forced(techniques: Path, record: StudyRecord) -> None:
    page = re.sub(r"<[^>]+>", "", (techniques / "report.html").read_text())
    assert "Forced: 1.0 MiB are taken off every predicted peak (memory_margin)." in page
    rows = attempts_table(record).rows
    assert len(rows) == len(record.trials)
    assert any("dp lacks " in row[2] for row in rows)
    assert any(": out of memory (" in row[3] and "; then " in row[3] for row in rows)
    for row in rows:
        assert all(cell in page for cell in row)
        assert row[6].endswith("iB")  # measured


def test_each_attempt_leaves_the_log_of_each_rank(techniques: Path, record: StudyRecord) -> None:
    climbed = next(trial for trial in record.trials if len(trial.attempts) > 1)
    folder = trial_folder(techniques, climbed.number)
    for number, attempt in enumerate(climbed.attempts):
        for rank in range(2):
            log = (folder / f"attempt{number}.rank{rank}.log").read_text()
            worker = rf"{STAMP} INFO rank {rank} trials\.runtime\.worker: "
            begins = rf"attempt{number}: strategy {re.escape(attempt.strategy)}, rank {rank} of 2 "
            assert len(re.findall(f"^{worker}{begins}", log, re.MULTILINE)) == 1
            assert log.count("INFO") == len(re.findall(f"^{STAMP} INFO rank {rank} ", log, re.MULTILINE))
            assert ("ERROR" in log) == (attempt.outcome is Outcome.OUT_OF_MEMORY)
            assert ("training ended: best NE" in log) == (attempt.outcome is Outcome.COMPLETED)
            assert "DEBUG" not in log
    shown = techniques.with_name("shown.txt").read_text()
    error = str(climbed.attempts[0].error)  # which ends as the exception does, not with lines of a log
    assert f"({error})" in shown
    assert re.search(r"MemoryLimitError: out of memory: .*\)$", error)
    for text in (shown, (techniques / "driver.log").read_text()):
        for number, attempt in enumerate(climbed.attempts):
            line = f"trial {climbed.number}: attempt {number} as {attempt.strategy}"
            trainer = rf"^{STAMP} INFO search\.execution\.trainer: {re.escape(line)}$"
            assert len(re.findall(trainer, text, re.MULTILINE)) == 1
    scored = trial_folder(techniques, record.front[-1]) / "scoring-test.rank0.log"
    assert re.search(r"trials\.runtime\.worker: test: NE \d\.\d+ of", scored.read_text())


def test_a_pipeline_can_be_forced_and_a_baseline_goes_without(dhen_search: Run, tmp_path: Path) -> None:
    space = yaml.safe_load((SPACES / "techniques.yaml").read_text())
    del space["start"]
    (tmp_path / "deep.yaml").write_text(yaml.safe_dump(space | {"depth": [2, 4]}))
    words = [word for word in WORDS if not word.startswith(("trials=", "hbm=", "ranks=", "space="))]
    words += ["ranks=1x2", f"space={tmp_path / 'deep.yaml'}", "hbm=64MiB", "averages=0"]
    out, technique = tmp_path / "study", "pipeline2+micro_batches=4"
    dhen_search("run", "--out", out, *words, "trials=1", f"technique={technique}")
    forced = read_study(out)
    for trial in forced.candidates:
        (attempt,) = trial.attempts
        assert attempt.outcome is Outcome.COMPLETED
        assert attempt.strategy == attempt.executed == named(technique).name
        assert trial.plan.summary is not None
        assert trial.plan.summary.restricted_to == named(technique).name
        assert trial.result.measured is not None
        peak, planned = trial.result.measured.peak_memory_bytes, attempt.predicted_bytes
        assert planned is not None
        assert 0.97 * planned < peak < 1.02 * planned
    (baseline,) = (trial for trial in forced.trials if trial.kind is TrialKind.BASELINE)
    assert baseline.attempts[0].executed == "dp"
    said = " ".join(dhen_search("status", out).stdout.split())
    assert f"Forced: the ladder is restricted to technique={named(technique).name}." in said
    said = dhen_search("run", "--out", tmp_path / "other", *words, "technique=pipeline4", code=2).stderr
    assert "ranks=1x2 are 2, which pipelines of 4 do not divide" in said


def test_what_is_forced_is_kept_by_a_climb_and_the_end_of_one_says_what_would_fit(
    dhen_search: Run, tmp_path: Path
) -> None:
    words = [word for word in WORDS if not word.startswith(("trials=", "hbm=", "ranks="))]
    words += ["trials=1", "ranks=1x2", "averages=0", "technique=tensor2"]
    dhen_search("run", "--out", tmp_path / "study", *words, "hbm=5MiB", TOO_SURE)
    (baseline,) = (
        trial for trial in read_study(tmp_path / "study").trials if trial.kind is TrialKind.BASELINE
    )
    first, *_, last = baseline.attempts
    assert (first.outcome, last.outcome) == (Outcome.OUT_OF_MEMORY, Outcome.COMPLETED)
    assert last.executed is not None
    assert named(last.executed).tensor == 2
    assert named(last.executed).micro_batches > named(first.strategy).micro_batches
    ended = dhen_search("run", "--out", tmp_path / "less", *words, "hbm=4MiB", code=2)
    said = " ".join(ended.stderr.split())
    assert "out of memory" in said
    assert "technique=tensor2 is kept, with more recomputation or micro-batches, of which tensor2+" in said
    assert re.search(r"without technique= \S*cpu_offload\S* would fit by prediction", said)
    (baseline,) = read_study(tmp_path / "less").trials
    assert named(baseline.attempts[0].strategy).tensor == 2  # not plain DP, though nothing fits by prediction


def test_other_techniques_are_refused(dhen_search: Run, tmp_path: Path) -> None:
    words = ("run", "--out", tmp_path / "study", *WORDS)
    said = dhen_search(*words, "technique=zero9", code=2).stderr
    assert "'zero9' is no memory technique" in said
    assert "full_checkpointing" in said
    said = dhen_search(*words, "technique=hsdp", code=2).stderr
    assert "technique=hsdp is not on the ladder of 1 x 2 ranks" in said
    words = (*words, "ranks=2x2")
    said = dhen_search(*words, "technique=tensor3", code=2).stderr
    assert "technique=tensor3: 2 x 2 ranks are not made of groups of 3" in said
    assert "would work: tensor2, tensor4" in said
    said = dhen_search(*words, "technique=tensor2+fsdp", code=2).stderr
    assert "tensor2+zero1 would work" in said
    assert "expected a number" in dhen_search(*words, "memory_margin=some", code=2).stderr


NE_OF_A_DELAY = 0.03
"""By how much a delay may change the NE of the small training below; seeds change it by as much."""


def test_a_delayed_training_runs_from_the_command_line_and_costs_little_ne(
    dhen_search: Run, click_log: Path, tmp_path: Path
) -> None:
    """Where nothing is planned zero_offload executes it, since no other engine can delay."""
    words = ("train", "dcn_v2", "--data", click_log, "training.epochs=2", "training.precision=fp32")
    words = (*words, "training.batch_size=64")  # for more steps than are not delayed
    delay = "training.delayed_update=true"
    ne = []
    for name, word in (("at once", "technique=zero_offload"), ("delayed", delay)):
        said = dhen_search(*words, "--out", tmp_path / name, word).stdout
        found = re.search(r"validation NE ([0-9.]+), test NE", said)
        assert found is not None
        ne.append(float(found[1]))
    at_once, delayed = ne
    assert delayed != at_once
    assert abs(delayed / at_once - 1) < NE_OF_A_DELAY
    refused = dhen_search(*words, "--out", tmp_path / "no", "technique=fsdp+cpu_offload", delay, code=2)
    assert "delayed_update=true is planned with zero_offload alone" in " ".join(refused.stderr.split())
