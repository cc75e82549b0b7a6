"""Proposals from outside: read, checked, trained in turn with the sampler's, credited, and never taken twice."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL, Run
from fake_processes import (
    PLANNED_ELSEWHERE,
    FakeLauncher,
    FakeRun,
    evaluated,
    progress,
    scored,
    trained,
    well,
)

from dashboards.rows import trial_rows
from dashboards.sentences.summary import sentences
from dhen.errors import UserError
from search.config import read_study_config
from search.mlflow.contents import trial_contents
from search.samplers.ask_tell import Proposals
from search.study import open_study as opening
from search.study.driver import StudyDriver
from search.study_state import StudyState
from spaces.space import load_space
from trials.data.prepared_log import PreparedLog
from trials.records.study_record import StudyRecord
from trials.records.task import Task
from trials.records.trial_record import TrialRecord

pytestmark = pytest.mark.usefixtures("unsynced")
WORDS = (
    "space=tiny",
    "sampler=random",
    "baseline_trials=1",
    "trials=4",
    *PLANNED_ELSEWHERE,
    "training.epochs=1",
)
OUTSIDE = {"embedding_dim": 24, "layers": [{"modules": [{"kind": "mlp"}]}]}
"""A model that space `tiny` does not have."""


Open = Callable[..., StudyDriver]


@pytest.fixture
def opened(tmp_path: Path, log: PreparedLog) -> Open:
    def open_it(
        *words: str,
        proposer: Any = None,
        script: Callable[[Task], FakeRun] = well,
        watcher: Callable[[StudyState], None] = lambda state: None,
    ) -> StudyDriver:
        (tmp_path / "study").mkdir(exist_ok=True)
        config = read_study_config(None, [*WORDS, *words])
        return opening.open_study(
            config, tmp_path / "study", log, FakeLauncher(script), [watcher], proposer=proposer
        )

    return open_it


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "proposals.jsonl"


def written(file: Path, *lines: Any) -> str:
    with file.open("a") as stream:
        stream.writelines(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    return f"proposals={file}"


def credited(record: StudyRecord) -> list[int | None]:
    """Numbers of the lines that candidates came from, None for the sampler's, in the order of trials."""
    return [trial.origin.proposal.line if trial.origin.proposal else None for trial in record.candidates]


def a_point(**values: Any) -> dict[str, Any]:
    return load_space("tiny").random_point(random.Random(1)) | values


def test_proposals_and_the_sampler_take_turns_and_proposals_come_first(opened: Open, file: Path) -> None:
    lines = [a_point(), {"model": OUTSIDE, "by": "ada", "why": "wider"}]
    record = opened(written(file, *lines)).run()
    assert credited(record) == [1, None, 2, None]
    assert record.candidates[0].point == lines[0]
    assert record.candidates[2].job.model["embedding_dim"] == 24


def test_a_model_of_the_space_is_its_point_and_the_sampler_is_told(
    opened: Open, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    result = Proposals._result
    monkeypatch.setattr(
        Proposals, "_result", lambda self, record: (told.append(record.number), result(self, record))[1]
    )
    space = load_space("tiny")
    model = space.decode(a_point()).model.to_dict()
    record = opened(written(file, {"model": model}, {"model": OUTSIDE}), "trials=3").run()
    within, sampled, outside = record.candidates
    assert space.decode(within.point).model.to_dict() == model
    assert not within.outside_space
    assert outside.outside_space
    assert outside.point == {}
    assert told == [within.number, sampled.number], "a trial without a point is kept from the sampler"


def test_axes_and_settings_that_are_left_out_are_the_baselines(opened: Open, file: Path) -> None:
    record = opened(written(file, {"depth": 2}), "trials=1", "training.learning_rate=0.004").run()
    (candidate,) = record.candidates
    assert len(candidate.job.model["layers"]) == 2
    assert set(candidate.point) == {axis.name for axis in load_space("tiny").axes}
    assert candidate.job.training["learning_rate"] == record.trial(0).job.training["learning_rate"]


REFUSED: tuple[tuple[Any, str], ...] = (
    ("{broken", "no JSON"),
    ([1], "expected a JSON object"),
    ({"depth": 99}, "99"),
    ({"dept": 2}, "unknown axis of the space 'dept'. Did you mean 'depth'"),
    ({"model": {"layers": [{"modules": [{"kind": "nonesuch"}]}]}}, "nonesuch"),
    ({"model": OUTSIDE, "training": {"learning_rat": 1}}, "learning_rat"),
    ({"model": OUTSIDE, "training": {"train_fraction": 0.5}}, "the study's own"),
    ({"model": {"family": "advanced_dlrm"}}, "family dhen"),
    ({"training": {"learning_rate": 0.1}}, "need the model"),
    ({"point": {"depth": 2}, "model": OUTSIDE}, "a point stands alone"),
    ({"depth": 2, "by": 7}, "by is a text"),
    (
        {"model": {"embedding_dim": 4096, "layers": [{**OUTSIDE["layers"][0], "out_embeddings": 64}]}},
        "lacks",
    ),
)
"""Lines, and a part of the answer to each."""


def test_what_cannot_be_trained_is_answered_and_the_study_goes_on(opened: Open, file: Path) -> None:
    begun: list[Task] = []
    said: list[str] = []

    def watched(task: Task) -> FakeRun:
        begun.append(task)
        return well(task)

    word = written(file, *(line for line, _ in REFUSED), a_point())
    words = (word, "trials=1", "hbm=1100MiB")
    record = opened(*words, script=watched, watcher=lambda state: said.extend(state.notices)).run()
    assert credited(record) == [len(REFUSED) + 1]
    assert [refusal.line for refusal in record.refused] == [*range(1, len(REFUSED) + 1)]
    summary = sentences(record)
    for refusal, (_, reason) in zip(record.refused, REFUSED, strict=True):
        assert reason in refusal.reason, refusal.reason
        assert any(sentence.startswith(f"proposal {refusal.line} is not trained:") for sentence in said)
        assert any(f"Proposal {refusal.line} was not trained: {refusal.reason}" == each for each in summary)
    assert sum(task.score_split is None for task in begun) == 2, (
        "the baseline and the one that can be trained"
    )


def test_a_proposal_over_a_limit_is_told_which(opened: Open, file: Path) -> None:
    record = opened(written(file, {"model": OUTSIDE}), "trials=1", "serving.max_flops=10").run()
    (refusal,) = record.refused
    assert "max_flops" in refusal.reason


def test_an_old_last_line_is_answered_though_nothing_ends_it(opened: Open, file: Path) -> None:
    word = written(file, a_point())
    file.write_text("\ufeff" + file.read_text() + "{broken", encoding="utf-8")
    os.utime(file, (0, 0))
    record = opened(word).run()
    assert credited(record) == [1, None, None, None]
    assert [(refusal.line, "no JSON" in refusal.reason) for refusal in record.refused] == [(2, True)]


def test_an_equal_training_is_named(opened: Open, file: Path) -> None:
    record = opened(written(file, a_point(), {**a_point(), "by": "ada"}, {"model": OUTSIDE}, OUTSIDE)).run()
    assert credited(record) == [1, None, 3, None]
    first, _, third, _ = record.candidates
    assert [(refusal.line, refusal.by) for refusal in record.refused] == [(2, "ada")]
    assert f"the same as trial {first.number}" in record.refused[0].reason
    again = opened(f"proposals={file}", "trials=5").run()
    assert f"the same as trial {third.number}" in again.refused[1].reason


def test_who_proposed_it_and_why_is_shown_everywhere(opened: Open, file: Path) -> None:
    record = opened(written(file, {"point": a_point(), "by": "ada", "why": "deep is good"}), "trials=1").run()
    (trial,) = record.candidates
    remark = next(row.remark for row in trial_rows(record) if row.trial.number == trial.number)
    assert remark == "proposed by ada (deep is good)"
    tags = trial_contents(trial, record).tags
    assert (tags["proposed.by"], tags["proposed.why"]) == ("ada", "deep is good")
    ((said),) = [sentence for sentence in sentences(record) if sentence.startswith("Proposals from outside")]
    assert f"trial {trial.number} by ada, NE 0." in said
    assert '"by":"ada"' in record.model_dump_json()


def test_lines_that_are_added_while_the_study_runs_are_taken(opened: Open, file: Path) -> None:
    written(file)

    def later(state: StudyState) -> None:
        if len(state.candidates) == 1 and not file.read_text():
            file.write_text(json.dumps(a_point())[:20])
        elif len(state.candidates) == 2:
            file.write_text(json.dumps(a_point()) + "\n")

    record = opened(f"proposals={file}", watcher=later).run()
    assert credited(record) == [None, None, 1, None], "half a line is left until it is whole"
    assert record.refused == ()


def test_a_line_is_answered_once_over_all_sessions(opened: Open, file: Path) -> None:
    word = written(file, {"model": OUTSIDE}, "{broken")
    first = opened(word, "trials=2").run()
    assert (credited(first), len(first.refused)) == ([1, None], 0)
    second = opened(word, "trials=4").run()
    assert (credited(second)[:2], len(second.refused)) == ([1, None], 1)
    written(file, a_point())
    third = opened(word, "trials=6").run()
    assert credited(third).count(1) == 1
    assert credited(third).count(3) == 1
    assert len(third.refused) == 1


def test_a_proposal_outside_the_space_that_was_cut_short_goes_on(opened: Open, file: Path) -> None:
    def interrupt(state: StudyState) -> None:
        if state.candidates:
            raise KeyboardInterrupt

    line = {"model": OUTSIDE, "training": {"weight_decay": 0.01}, "by": "ada"}
    with pytest.raises(KeyboardInterrupt):
        opened(written(file, line), "trials=1", watcher=interrupt).run()
    record = opened(f"proposals={file}", "trials=1").run()
    (trial,) = record.candidates
    assert trial.result.outcome == "completed"
    assert trial.outside_space
    assert trial.job.model["embedding_dim"] == 24
    assert trial.job.training["weight_decay"] == 0.01
    assert trial.origin.proposal is not None
    assert trial.origin.proposal.by == "ada"


def test_tuning_and_promotion_know_what_lies_outside_the_space(opened: Open, file: Path) -> None:
    def best(task: Task) -> FakeRun:
        if task.score_split is not None:
            return FakeRun([scored(task.score_split)])
        ne = 0.5 if task.job.model.to_dict().get("embedding_dim") == 24 else 0.8
        return FakeRun([progress(10)], [evaluated(10, ne), trained(ne)])

    word = written(file, {"model": OUTSIDE})
    record = opened(word, "training.train_fraction=0.5", "tune=1", "trials=2", script=best).run()
    outside = next(trial for trial in record.candidates if trial.outside_space)
    tuned = [trial.origin.tuned_from for trial in record.candidates if trial.origin.tuned_from is not None]
    assert len(tuned) == 1
    assert outside.number not in tuned, "the space does not say what of it is to be tuned"
    promoted = [trial for trial in record.trials if trial.origin.promoted_from == outside.number]
    assert [trial.job.model["embedding_dim"] for trial in promoted] == [24]
    assert record.best == promoted[0].number


def test_a_function_is_asked_in_turn_and_given_the_trials(opened: Open) -> None:
    seen: list[int] = []

    def propose(trials: Sequence[TrialRecord]) -> Iterable[Mapping[str, Any]]:
        seen.append(len(trials))
        return [{**a_point(), "by": "model"}] if len(trials) == 1 else [{"model": OUTSIDE}]

    record = opened(proposer=propose).run()
    assert credited(record)[:2] == [1, None]
    assert record.candidates[0].origin.proposal is not None
    assert record.candidates[0].origin.proposal.by == "model"
    assert record.candidates[2].outside_space
    assert seen[:2] == [1, 3]
    assert any("the same as trial" in refusal.reason for refusal in record.refused) == (len(seen) > 2)


def test_a_file_that_is_not_there_is_said_at_once(opened: Open, file: Path) -> None:
    with pytest.raises(UserError, match=r"no such file\. It holds a JSON object per line"):
        opened(f"proposals={file}")


def test_the_command_line_takes_proposals_and_credits_them(
    dhen_search: Run, click_log: Path, tmp_path: Path, file: Path
) -> None:
    """On real processes: a point, a model outside the space, a broken line, then a resumed study."""
    model = {"embedding_dim": 12, "layers": [{"modules": [{"kind": "linear"}]}]}
    word = written(file, {"depth": 1, "by": "ada"}, "{broken", {"model": model, "by": "eve", "why": "small"})
    command = ("run", "--data", click_log, "--out", tmp_path / "study", word, *SMALL)
    said = dhen_search(*command, "trials=3", "training.epochs=1").stdout
    assert "proposal 2 is not trained: no JSON" in said
    record = json.loads(dhen_search("status", tmp_path / "study", "--json").stdout)
    origins = [trial["origin"].get("proposal") for trial in record["trials"] if trial["kind"] == "candidate"]
    assert [origin and origin["by"] for origin in origins] == ["ada", None, "eve"]
    assert [trial["result"]["outcome"] for trial in record["trials"]] == ["completed"] * 4
    assert [refusal["line"] for refusal in record["refused"]] == [2]
    report = (tmp_path / "study" / "report.html").read_text()
    assert "proposed by eve (small)" in report
    assert "Proposal 2 was not trained: no JSON" in report
    again = dhen_search(*command, "trials=4", "training.epochs=1").stdout
    assert "proposal 2" not in again.partition("Proposals from outside")[0]
    status = dhen_search("status", tmp_path / "study").stdout
    assert "Proposals from outside that were taken: trial 1 by ada" in status
    after = json.loads(dhen_search("status", tmp_path / "study", "--json").stdout)
    assert len(after["refused"]) == 1
    assert after["trials"][4]["origin"].get("proposal") is None


def test_settings_that_a_model_leaves_out_are_the_baselines_or_the_spaces(
    opened: Open, file: Path, tmp_path: Path
) -> None:
    """The ledger leaves out settings that have their default, and the baseline may have a value that the space has
    not."""
    (tmp_path / "mine.yaml").write_text(
        "modules: {mlp: {mlp: [[16], [32]]}}\nslots: 1\ndepth: [1, 2]\nout_embeddings: 2\nraw_numeric: false\n"
        "ensemble: sum\nmodel: {embedding_dim: [4, 8], head: [[8]]}\n"
        "training: {frequency_decay: [0.1, 0.0], learning_rate: {low: 0.004, high: 0.008}, "
        "warmup_share: [0.1, 0.2]}\n"
    )
    space = load_space(str(tmp_path / "mine.yaml"))
    model = space.decode(space.random_point(random.Random(0))).model.to_dict()
    words = (f"space={tmp_path / 'mine.yaml'}", "trials=1", "training.learning_rate=0.002")
    record = opened(written(file, {"model": model, "by": "x\ud83d"}), *words).run()
    (candidate,) = record.candidates
    assert not record.refused
    assert not candidate.outside_space
    training = record.trial(0).job.training
    assert "frequency_decay" not in training
    assert candidate.point["training.frequency_decay"] == 0.0
    assert candidate.point["training.learning_rate"] == 0.004
    assert candidate.point["training.warmup_share"] == 0.1
    assert candidate.origin.proposal is not None
    assert candidate.origin.proposal.by == "x?"
