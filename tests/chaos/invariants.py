"""What has to hold of a study after a fault, held against the ledger, the disk and an undisturbed study."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from chaos import processes
from chaos.scenes import Scene

from search.bundles.increments import first_fault
from search.mlflow.contents import study_contents, trial_contents
from search.mlflow.store import open_client, store_uri
from search.read_study import read_study
from search.selection import eligible, front_of
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

Key = tuple[str, str | None]
"""Fingerprint of a job, and the technique that it was trained under."""
SAME_TO_THE_BIT = 0.0
SEVERAL_RANKS = 1e-9
"""Difference of metrics of several ranks, whose sums may be taken in another order."""
NAMED_BY_THE_MODEL = ("model", "configuration", "mlflow.runName")
LEFTOVERS = ("**/*.tmp", "**/*.partial", "**/rendezvous", ".hosts", "trials/*/checkpoints")
END_SECONDS = 60.0


class Verdict(NamedTuple):
    lost: int
    """Results that were there before the fault, or proposals, and are not there afterwards."""
    doubled: int
    """Proposals that were trained to an end twice."""
    compared: int
    """Trainings whose metrics were held against an undisturbed one."""
    problems: list[str]


def reference_of(record: StudyRecord) -> dict[Key, TrialRecord]:
    """The trainings of an undisturbed study, by what is compared."""
    return {_key(trial): trial for trial in record.trials}


def judge(
    scene: Scene,
    before: Mapping[int, TrialRecord],
    reference: Mapping[Key, TrialRecord],
    shared_memory: set[str],
) -> Verdict:
    """Holds a finished study against what it had finished before the fault and against an undisturbed one."""
    problems = scene.left(END_SECONDS)
    problems += processes.shared_memory_left(shared_memory)
    record = read_study(scene.out)
    numbers = [trial.number for trial in record.trials]
    if numbers != list(range(scene.candidates + 1)) or not record.finished:
        problems.append(f"trials {numbers} of a study that {'is' if record.finished else 'is not'} finished")
    lost = doubled = compared = 0
    for trial in record.trials:
        earlier = before.get(trial.number)
        if trial.result.outcome is not Outcome.COMPLETED:
            problems.append(f"trial {trial.number}: {trial.result.outcome}, {trial.result.error}")
            lost += 1
            continue
        if earlier is not None and earlier.result.validation != trial.result.validation:
            problems.append(f"trial {trial.number} had another result before the fault")
            lost += 1
        ends = [attempt for attempt in trial.attempts if attempt.outcome is Outcome.COMPLETED]
        again = earlier is not None and len(earlier.attempts) != len(trial.attempts)
        if len(ends) > 1 or again:
            problems.append(f"trial {trial.number} was trained to an end twice")
            doubled += 1
        same = reference.get(_key(trial))
        if same is None:
            problems.append(f"trial {trial.number}: no such job in the undisturbed study")
        else:
            compared += 1
            problems += _differences(trial, same)
    lost += len(before.keys() - set(numbers))
    jobs = [trial.job.fingerprint for trial in record.trials if not trial.shared]
    doubled += len(jobs) - len(set(jobs))
    problems += [f"a job was trained twice: {sorted(jobs)}"] * (len(jobs) != len(set(jobs)))
    return Verdict(
        lost, doubled, compared, problems + _front(scene, record) + _mlflow(scene, record) + _files(scene)
    )


def _key(trial: TrialRecord) -> Key:
    return trial.job.fingerprint, trial.result.technique


def _differences(trial: TrialRecord, same: TrialRecord) -> list[str]:
    allowed = SAME_TO_THE_BIT if len(trial.attempts) and trial.result.technique == "dp" else SEVERAL_RANKS
    pairs = [("validation", trial.result.validation, same.result.validation)]
    if trial.result.test is not None and same.result.test is not None:
        pairs.append(("test", trial.result.test, same.result.test))
    curves = [
        [(point.examples, point.validation.ne) for point in each.result.curve] for each in (trial, same)
    ]
    found = (
        [f"trial {trial.number}: another curve than undisturbed"] if len(curves[0]) != len(curves[1]) else []
    )
    for name, mine, other in pairs:
        gap = max(abs(value - getattr(other, key)) for key, value in mine.to_dict().items()) if mine else 1.0
        if gap > allowed:
            found.append(f"trial {trial.number}: {name} is off by {gap:.2g} from undisturbed")
    return found


def _front(scene: Scene, record: StudyRecord) -> list[str]:
    """The front and the exported best are those that the ledger's trials imply."""
    implied = front_of(eligible(trial for trial in record.trials if trial.kind is TrialKind.CANDIDATE))
    problems = []
    if record.networks_front != tuple(trial.number for trial in implied):
        problems.append(f"the front is {record.networks_front}")
    best = scene.out / "best"
    if (fault := first_fault(best)) is not None:
        problems.append(f"the bundle of the best: {fault}")
    exported = json.loads((best / "bundle.json").read_text())["trial"]
    if exported != record.best:
        problems.append(f"the bundle is of trial {exported}, the best is {record.best}")
    if not (scene.out / "report.html").exists():
        problems.append("there is no report")
    return problems


def _mlflow(scene: Scene, record: StudyRecord) -> list[str]:
    """Each trial has one run, whose tags and metrics are those of the ledger; the study's run says the front."""
    client = open_client(scene.mlflow() or store_uri(scene.out))
    experiment = client.get_experiment_by_name(record.name)
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    wanted = {str(trial.number): trial_contents(trial, record) for trial in record.trials}
    wanted["study"] = study_contents(record)
    problems, seen = [], list[str]()
    for run in runs:
        key = run.data.tags.get("trial.number", run.data.tags.get("kind", ""))
        seen.append(key)
        contents = wanted.get(key)
        if contents is None:
            problems.append(f"MLflow has a run of {key!r}")
            continue
        for name, text in contents.tags.items():
            if name not in NAMED_BY_THE_MODEL and run.data.tags.get(name) != text:
                problems.append(f"MLflow's run {key}: {name} is {run.data.tags.get(name)!r}, not {text!r}")
        for name, readings in contents.series.items():
            if readings and run.data.metrics.get(name) != readings[-1].value:
                problems.append(f"MLflow's run {key}: {name} is {run.data.metrics.get(name)}")
        if run.info.status != contents.status:
            problems.append(f"MLflow's run {key} is {run.info.status}, not {contents.status}")
    if sorted(seen) != sorted(wanted):
        problems.append(f"MLflow has runs of {sorted(seen)}")
    return problems


def _files(scene: Scene) -> list[str]:
    left = [path for pattern in LEFTOVERS for path in scene.out.glob(pattern)]
    allowed = ("torchinductor_*", *scene.cannot_tidy_up)
    left += [path for path in scene.temporary.iterdir() if not any(map(path.match, allowed))]
    left += [Path(each) for each in scene.out.glob("trials/*/.*.partial")]
    return [f"{path} is left" for path in sorted(set(left))]
