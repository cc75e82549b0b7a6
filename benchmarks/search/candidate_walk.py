"""The files that one candidate goes through in the driver, from its proposal to its run in MLflow.

A real study runs in this process (a small demo log, one trial of the baseline, three candidates, of which the
last is followed), and Python's profiler notes calls of our functions, in all threads: from the moment the
sampler is asked for the candidate until the driver has taken it in, and again while MLflow is brought up to
date with it. What counts is calls: a file that is merely imported does not count, nor does the body of a
class. `dhen/`, `trials/planner/` and `search/samplers/ranker/`, whose insides are subjects of their own,
count once each.

Of the files that take the candidate as it passes (one of their functions was given, or gave back, its point,
record, job, plan, task, processes, events, or its MLflow run) two lists are printed. *The walk* is those
that make it, change it or keep it: a function there gave back a form of the candidate that it had not been
given, or the file is one of the three in which the candidate stays (`KEEPERS`). *Files that are asked or told*
took it and left it as it was: a rule that lets it go on, a limit that it meets, the folder it has. After them
stand the files that look on (the terminal, the report), and those that were called meanwhile without being
handed the candidate: units, the clock, the machine's cores. What the ranks do is not here: they are other
processes, which know a task and write events (docs/architecture.md has their walk).

    python -m benchmarks.search.candidate_walk
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from search.cli import main as command
from search.execution.running import Training
from search.mlflow.contents import RunContents
from spaces.space import Candidate
from trials.planner.plan import Plan
from trials.records.events import EvaluationEvent, Progress, TrainingEvent
from trials.records.job import Job
from trials.records.task import Task
from trials.records.trial_record import Attempt, JobSummary, Result, TrialKind, TrialPlan, TrialRecord
from trials.runtime.launcher import Run

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("dhen", "spaces", "trials", "dashboards", "search")
ONE_EACH = ("dhen", "trials/planner", "search/samplers/ranker")
"""Folders that count as one file."""
WORDS = (
    "run",
    "space=tiny",
    "grow=no",
    "demo.rows=4000",
    "training.epochs=1",
    "baseline_trials=1",
    "trials=3",
    "parallel=1",
)
FOLLOWED = 3
"""Number of the trial that is followed: the last candidate. The first ones start from settings that are given."""
PARTS = (Job, JobSummary, Candidate, Plan, TrialPlan, Task, Training, Run, Result, Attempt, RunContents)
EVENTS = (Progress, EvaluationEvent, TrainingEvent)
KEEPERS = ("trials/store/ledger.py", "search/study_state.py", "search/mlflow/fill_in.py")
"""Files in which the candidate stays."""
ASKED, TAKEN_IN, WATCHED, IN_MLFLOW = (
    "Proposals.ask",
    "TrialRunner.take_in",
    "StudyState.tell",
    "StudyRuns.fill_in",
)
"""Functions at which the walk begins and ends in the driver's thread, turns aside, and goes on in another."""


class Walk:
    """Which files are called between a candidate's proposal and its run in MLflow, in order, with a function."""

    def __init__(self) -> None:
        self.passed: dict[str, str] = {}
        """Files that took the candidate."""
        self.makers: dict[str, str] = {}
        """Files of these that made it or changed it."""
        self.watched: dict[str, str] = {}
        """Files that were called to show the study meanwhile."""
        self.called: dict[str, str] = {}
        """Files that were called at all, those two included."""
        self._point: dict[str, Any] | None = None
        """The candidate's point, once it is proposed."""
        self._drawn: list[tuple[str, str, dict[str, Any]]] = []
        """Before that: files that gave back a dictionary, by which function, and what it was."""
        self._state = threading.local()

    def profile(self, frame: FrameType, event: str, value: Any) -> None:
        """Notes one call or return: `sys.setprofile` calls this, and `value` is what a function gives back."""
        if event not in ("call", "return"):
            return
        stop = _stop(frame.f_code.co_filename)
        if stop is None:
            return
        if event == "call":
            self._turn(frame)
        if getattr(self._state, "on", False) and not _is_class_body(frame):
            self._note(stop, frame, event, value)
        if event == "return":
            self._turn_back(frame, value)

    def _note(self, stop: str, frame: FrameType, event: str, value: Any) -> None:
        name = frame.f_code.co_qualname
        self.called.setdefault(stop, name)
        if self._point is None:
            if event == "return" and isinstance(value, dict):
                self._drawn.append((stop, name, dict(value)))
        elif self._state.aside:
            self.watched.setdefault(stop, name)
        elif not frame.f_code.co_name.startswith("<"):
            self._note_passing(stop, name, frame, event, value)

    def _note_passing(self, stop: str, name: str, frame: FrameType, event: str, value: Any) -> None:
        given: dict[int, list[Any]] = self._state.given
        if event == "call":
            given[id(frame)] = list(_arguments(frame))
            if stop not in self.passed and any(map(self._is_candidate, given[id(frame)])):
                self.passed[stop] = name
            return
        handed = given.pop(id(frame), [])
        if stop in self.makers or not self._is_candidate(value):
            return
        self.passed.setdefault(stop, name)
        parts = value if type(value) in (tuple, list) else (value,)
        if all(part is not each for part in parts if self._is_candidate(part) for each in handed):
            self.makers[stop] = name

    def _turn(self, frame: FrameType) -> None:
        name, given = frame.f_code.co_qualname, frame.f_locals
        begins = name == ASKED and given["number"] == FOLLOWED
        if begins or (
            name == IN_MLFLOW and any(trial.number == FOLLOWED for trial in given["record"].trials)
        ):
            self._state.on, self._state.aside, self._state.given = True, 0, {}
        elif name == WATCHED and getattr(self._state, "on", False):
            self._state.aside += 1

    def _turn_back(self, frame: FrameType, value: Any) -> None:
        if not getattr(self._state, "on", False):
            return
        name = frame.f_code.co_qualname
        if name == ASKED:
            self._point = value[0]
            proposed = {stop: by for stop, by, drawn in reversed(self._drawn) if drawn == self._point}
            self.makers = {"search/samplers/ask_tell.py": ASKED} | dict(reversed(proposed.items()))
            self.passed = dict(self.makers)
        elif name == WATCHED:
            self._state.aside -= 1
        elif name == IN_MLFLOW or (name == TAKEN_IN and frame.f_locals["record"].number == FOLLOWED):
            self._state.on = False

    def _is_candidate(self, value: Any) -> bool:
        """Whether a value is the candidate in one of its forms, a tuple with it, or what its processes said."""
        if isinstance(value, TrialRecord):
            return value.kind is TrialKind.CANDIDATE and value.number == FOLLOWED
        if type(value) is tuple:
            return any(self._is_candidate(each) for each in value[:2])
        if type(value) is list:
            return bool(value) and isinstance(value[0], EVENTS)
        if isinstance(value, dict):
            return value == self._point
        return isinstance(value, (*PARTS, *EVENTS))  # while it goes its way, no other trial does


def _arguments(frame: FrameType) -> Iterator[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04)  # 0x04: it takes *args
    return (frame.f_locals[name] for name in code.co_varnames[:count] if name in frame.f_locals)


def _stop(file: str) -> str | None:
    """The file as it is listed; None for what is not ours."""
    if not file.startswith(f"{ROOT}/"):
        return None
    name = file.removeprefix(f"{ROOT}/")
    if name.partition("/")[0] not in ROOMS:
        return None
    return next((f"{folder}/" for folder in ONE_EACH if name.startswith(f"{folder}/")), name)


def _is_class_body(frame: FrameType) -> bool:
    """Bodies of modules and classes run when they are imported; those of functions alone have fast locals."""
    return not frame.f_code.co_flags & 0x02


def main() -> None:
    """Runs the study, then prints what was found."""
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DHEN_SEARCH_CACHE"] = str(Path(folder) / "cache")
        threading.setprofile(walk.profile)
        sys.setprofile(walk.profile)
        try:
            command([*WORDS, "--out", str(Path(folder) / "study")])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    watchers = {stop: name for stop, name in walk.watched.items() if stop not in walk.passed}
    others = {stop: name for stop, name in walk.called.items() if stop not in walk.passed | watchers}
    passed, makers = walk.passed, walk.makers
    kept = {stop: makers.get(stop, passed[stop]) for stop in passed if stop in makers or stop in KEEPERS}
    asked = {stop: name for stop, name in walk.passed.items() if stop not in kept}
    _print("The walk: files that make the candidate, change it or keep it", kept)
    _print("Files that are asked about it or told of it", asked)
    _print("Files that look on: the terminal and the report", watchers)
    _print("Files that are called meanwhile and are not handed the candidate", others)


def _print(title: str, stops: dict[str, str]) -> None:
    print(f"\n{title}: {len(stops)}")
    for place, (stop, name) in enumerate(stops.items(), start=1):
        print(f"{place:3}. {stop:45} {name}")


if __name__ == "__main__":
    main()
