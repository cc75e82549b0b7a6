"""A study as a notebook has it: data frames, figures, and a short summary that it shows of itself."""

from __future__ import annotations

import html
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from dashboards.sentences.summary import progress, sentences
from dhen.errors import UserError
from search.notebook.frames import attempts_frame, curves_frame, points_frame, trials_frame, winners_frame
from search.read_study import read_stored_study, read_study, run_directory_of, stored_studies
from trials.storage.database import masked

if TYPE_CHECKING:
    import plotly.graph_objects as go

SHORT = ["model", "ne", "ne_vs_baseline_percent", "flops", "outcome", "marks"]
"""Columns of the front that a study shows of itself."""


def open_study(where: str | Path, name: str | None = None) -> Study:
    """Reads a study, running or finished.

    Args:
        where: its run directory, or the URL of its database (`sqlite:////path/study.db`,
            `postgresql://user@host/studies`), wherever it runs.
        name: the study's name in a database that holds several.

    Raises:
        UserError: where there is no study, or it has not trained anything yet.
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
        """Run directory; None where it is on another machine."""
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
        """Number of the best trial; None where there is no result yet."""
        return self.record.best

    @cached_property
    def trials(self) -> pd.DataFrame:
        """A row per trial, by number, the baseline's own among them."""
        return trials_frame(self.record)

    @property
    def front(self) -> pd.DataFrame:
        """The trials on the Pareto front of NE and FLOPs, by FLOPs."""
        return self.trials.loc[list(self.record.front)]

    @cached_property
    def points(self) -> pd.DataFrame:
        """What the sampler chose: a row per candidate, a column per axis of the space."""
        return points_frame(self.record)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """A row per evaluation on validation."""
        return curves_frame(self.record)

    @cached_property
    def attempts(self) -> pd.DataFrame:
        """A row per attempt to train a trial: memory technique, predicted and measured bytes and times."""
        return attempts_frame(self.record)

    @cached_property
    def winners(self) -> pd.DataFrame:
        """A row per winner that was compared with the baseline on test, with a 95 % interval; empty before
        `dhen-search confirm`."""
        return winners_frame(self.record)

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
