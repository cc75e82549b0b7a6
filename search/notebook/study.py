"""A study as a notebook has it: data frames, figures, and a short summary that it shows of itself.

Columns of the frames have units in their names; NE is on validation if nothing else is said. What is not known
is missing.
"""

from __future__ import annotations

import html
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from dashboards.rows import TrialRow, trial_rows
from dashboards.sentences.summary import progress, sentences
from dhen.errors import UserError
from search.read_study import read_stored_study, read_study, run_directory_of, stored_studies
from trials.records.trial_record import Attempt, Metrics
from trials.store.database import masked

if TYPE_CHECKING:
    import plotly.graph_objects as go

SHORT = ["model", "ne", "ne_vs_baseline_percent", "flops", "outcome", "marks"]
"""Columns of the front that a study shows of itself."""
METRICS = tuple(Metrics.model_fields)[:-1]
COMPARED = (
    *("trial", "ne", "baseline_ne", "difference_percent", "low_percent", "high_percent"),
    *("p", "p_adjusted", "better", "seeds", "detectable_percent"),
)
JOB = ("flops", "parameters", "table_bytes", "weights_bytes")
ATTEMPT = tuple(name for name in Attempt.model_fields if name != "plan")
CURVE = ("trial", "examples", "epoch", "seconds", "train_loss", "learning_rate", *METRICS)


def open_study(where: str | Path, name: str | None = None) -> Study:
    """Reads a study, running or finished.

    Args:
        where: its run directory, or the URL of its database (`sqlite:////path/study.db`,
            `postgresql://user@host/studies`), wherever it runs.
        name: the study's name in a database that holds several.

    Raises:
        UserError: if there is no study, or it has not trained anything yet.
    """
    if "://" not in str(where):
        if name is not None:
            raise UserError(f"name={name!r} names a study of a database; {where} holds one alone.")
        return Study(Path(where))
    studies = stored_studies(str(where), name)
    if len(studies) > 1:
        names = ", ".join(repr(study.name) for study in studies)
        raise UserError(f"{masked(str(where))} holds several studies; say which with name=: {names}.")
    return Study(run_directory_of(str(where), studies[0]), (str(where), studies[0].name))


class Study:
    """A study as it stood when it was read; `refresh` reads it again. Made by `open_study` and `run_study`."""

    def __init__(self, directory: Path | None, stored: tuple[str, str] | None = None) -> None:
        """Reads the study in a run directory, or that of a database's URL and a name there."""
        self._stored = stored
        self.directory = directory
        """Run directory; None if it is on another machine."""
        if stored is not None:
            self.record = read_stored_study(*stored, directory)
        else:
            assert directory is not None
            self.record = read_study(directory)
        """All of it, with the fields that `dhen-search status --json` prints (docs/formats.md)."""

    def refresh(self) -> Study:
        """The study as it stands now."""
        return Study(self.directory, self._stored)

    @property
    def name(self) -> str:
        """Name of the study."""
        return self.record.name

    @property
    def finished(self) -> bool:
        """Whether the budget is spent and the winners are chosen and scored."""
        return self.record.finished

    @property
    def best(self) -> int | None:
        """Number of the best trial; None if there is no result yet."""
        return self.record.best

    @cached_property
    def trials(self) -> pd.DataFrame:
        """A row per trial, by number, the baseline's own among them."""
        return pd.DataFrame(map(_trial, trial_rows(self.record))).set_index("number")

    @property
    def front(self) -> pd.DataFrame:
        """The trials on the Pareto front of NE and FLOPs, by FLOPs."""
        return self.trials.loc[list(self.record.front)]

    @cached_property
    def points(self) -> pd.DataFrame:
        """What the sampler chose: a row per candidate, a column per axis of the space."""
        points = {trial.number: dict(trial.point or {}) for trial in self.record.candidates}
        return pd.DataFrame.from_dict(points, orient="index").rename_axis("number")

    @cached_property
    def curves(self) -> pd.DataFrame:
        """A row per evaluation on validation."""
        rows = [
            {name: getattr(point, name) for name in CURVE[1:6]}
            | {name: getattr(point.validation, name) for name in METRICS}
            | {"trial": trial.number}
            for trial in self.record.trials
            for point in trial.result.curve
        ]
        return pd.DataFrame(rows, columns=list(CURVE))

    @cached_property
    def attempts(self) -> pd.DataFrame:
        """A row per attempt to train a trial: memory technique, predicted and measured bytes and times."""
        rows = [
            {"trial": trial.number, "attempt": index}
            | {name: _plain(getattr(attempt, name)) for name in ATTEMPT}
            for trial in self.record.trials
            for index, attempt in enumerate(trial.attempts)
        ]
        return pd.DataFrame(rows, columns=["trial", "attempt", *ATTEMPT])

    @cached_property
    def winners(self) -> pd.DataFrame:
        """A row per winner that was compared with the baseline on test, with its 95 % interval, by FLOPs; empty
        before `dhen-search confirm`."""
        trials = {row.trial.number: row for row in trial_rows(self.record)}
        rows = [
            {
                **{name: _plain(getattr(comparison, name)) for name in COMPARED},
                "model": trials[comparison.trial].name,
                "flops": trials[comparison.trial].trial.job.flops,
            }
            for comparison in self.record.comparisons
        ]
        return pd.DataFrame(rows, columns=["trial", "model", "flops", *COMPARED[1:]]).set_index("trial")

    @property
    def summary(self) -> tuple[str, ...]:
        """What was found, in sentences, the most important first."""
        return sentences(self.record)

    @cached_property
    def figures(self) -> dict[str, go.Figure]:
        """The report's figures that have something to show, by name, as Plotly has them."""
        from dashboards.figures import FIGURES  # late: with Plotly, which nothing else here needs

        figures = ((name, draw(self.record)) for name, draw in FIGURES.items())
        return {name: figure for name, figure in figures if figure is not None and figure.data}

    def __repr__(self) -> str:
        return "\n".join((f"Study {self.name}: {progress(self.record)}", *self.summary))

    def _repr_html_(self) -> str:
        """What a notebook shows: how far the study is, what was found, and the front."""
        said = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.summary)
        front = self.front[SHORT].to_html(border=0, na_rep="") if self.record.front else ""
        heading, state = html.escape(self.name), html.escape(progress(self.record))
        return f"<h3>{heading}</h3><p>{state}</p><ul>{said}</ul>{front}"


def _trial(row: TrialRow) -> dict[str, Any]:
    trial, quality = row.trial, row.quality
    plan, result = trial.plan, trial.result
    return {
        "number": trial.number,
        "kind": trial.kind.value,
        "outcome": result.outcome.value,
        "model": row.name,
        "ne": row.ne,
        "ne_vs_baseline_percent": row.relative_percent,
        **{name: getattr(quality, name, None) for name in ("auc", "calibration")},
        "test_ne": result.test.ne if result.test else None,
        **{name: getattr(trial.job, name) for name in JOB},
        "serving_ms": plan.serving_ms,
        "planned_technique": plan.technique,
        "predicted_peak_bytes": plan.peak_bytes,
        "executed_technique": result.technique,
        **dict(result.measured),
        "seconds": result.seconds,
        "started_at": trial.origin.started_at,
        "marks": ", ".join(row.marks),
        "remark": row.remark,
    }


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
