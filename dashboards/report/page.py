"""The report of a study: one HTML file that holds all it needs and opens without a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
import plotly.io
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dashboards import accuracy, attempts, log_columns
from dashboards.figures.axes import axes_figure, axes_info
from dashboards.figures.course.gain import gain_figure, gain_info
from dashboards.figures.course.timeline import timeline_figure, timeline_info
from dashboards.figures.curves import curves_figure, curves_info
from dashboards.figures.front import front_figure, front_info
from dashboards.figures.memory.depth import depth_figure, depth_info
from dashboards.figures.memory.ladder import ladder_figure, ladder_info
from dashboards.figures.memory.predictions import predictions_figure, predictions_info
from dashboards.figures.table_bytes import table_bytes_differ, table_bytes_figure, table_bytes_info
from dashboards.figures.time import time_figure, time_info
from dashboards.figures.worth.ablations import ablations_figure, ablations_info
from dashboards.figures.worth.averages import averages_figure, averages_info
from dashboards.figures.worth.modules import modules_figure, modules_info
from dashboards.figures.worth.slices import slices_figure, slices_info
from dashboards.report.about import facts
from dashboards.report.answers import answers
from dashboards.report.commands import next_commands
from dashboards.report.embed import as_json, study_data
from dashboards.report.figure_data import figure_data
from dashboards.report.plotly_source import packed_plotly
from dashboards.report.thin_curves import with_thin_curves
from dashboards.sentences import winners
from dashboards.sentences.summary import progress, sentences
from dashboards.units import duration
from dhen.atomic_write import write_atomically
from dhen.errors import UserError
from trials.study_record import StudyRecord

TEMPLATES = Path(__file__).parent / "templates"
STYLES = ("page.css", "overview.css", "tables.css", "candidate.css", "print.css")
SCRIPTS = (
    *("elements.js", "units.js", "state.js", "study.js", "plotly.js", "figures.js", "trials.js"),
    *("diagram.js", "ladder.js", "curve.js", "cost.js", "candidate.js", "copy.js", "live.js", "start.js"),
)
"""Scripts of the page in the order in which they are read; they share one scope."""
PLOTLY_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtons": [["toImage", "resetScale2d"]]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What a server says of a page that it serves, so that the page follows the study."""

    url: str
    """Address that answers with JSON: `{"version": "..."}`. Once that differs from `version`, the page is fetched
    again from its own address, and what has changed is put in place."""
    version: str
    """Version of the study that the page was made from."""


def write_report(record: StudyRecord, path: Path, *, notes: Sequence[str] = ()) -> None:
    """Writes the report of a study.

    Args:
        record: all that the report is made from.
        path: the file to write.
        notes: sentences on what the record cannot know, such as lost files; they stand on top.

    Raises:
        UserError: when the path is a folder.
        OSError: when the file cannot be written.
    """
    write_page(path, lambda: render(record, notes=notes))


def write_figure(figure: go.Figure, path: Path) -> None:
    """Writes one figure as a page of its own, plotly.js inside.

    Raises:
        UserError: when the path is a folder.
        OSError: when the file cannot be written.
    """
    page = plotly.io.to_html
    write_page(path, lambda: page(figure, include_plotlyjs=True, full_html=True, config=PLOTLY_CONFIG))


def write_page(path: Path, page: Callable[[], str]) -> None:
    """Writes a page so that a reader sees either the old one or the new one whole.

    Raises:
        UserError: when the path is a folder.
        OSError: when the file cannot be written.
    """
    if path.is_dir():
        raise UserError(f"{path}: a folder; name the file to write, e.g. {path / 'report.html'}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page())


def render(record: StudyRecord, *, notes: Sequence[str] = (), live: Live | None = None) -> str:
    """Returns the page. Everything that comes from data is escaped: by Jinja in HTML, by `as_json` in scripts,
    which put it into the page as text.

    Args:
        record: all that the page is made from.
        notes: sentences on what the record cannot know; they stand on top.
        live: how the page follows a study that goes on; None for a page that stays as it is.
    """
    front, *others = [figure_data(name, figure) for name, figure in _figures(with_thin_curves(record))]
    return (
        environment()
        .get_template("report.html")
        .render(
            record=record,
            notes=notes,
            live=live,
            progress=progress(record),
            elapsed=duration(record.elapsed_seconds),
            answers=answers(record),
            commands=next_commands(record),
            sentences=sentences(record),
            front=front,
            figures=others,
            facts=facts(record),
            log_notes=record.log.notes,
            log_columns=log_columns.headings(record.log.findings),
            log_left=log_columns.left_aligned(record.log.findings),
            log_rows=log_columns.rows(record.log.findings),
            log_explanation=log_columns.EXPLANATION,
            attempt_columns=attempts.COLUMNS,
            attempt_text_columns=attempts.TEXT_COLUMNS,
            attempt_rows=attempts.attempt_rows(record),
            accuracy_columns=accuracy.COLUMNS,
            accuracy_rows=[accuracy.cells(row) for row in accuracy.accuracy(record)],
            winners_columns=winners.COLUMNS,
            winners_left=winners.LEFT,
            winners_rows=winners.rows(record),
            winners_explanation=winners.explanation(record),
            data=Markup(as_json(study_data(record))),
            plotly=packed_plotly(),
            scripts=scripts(SCRIPTS),
        )
    )


def environment() -> Environment:
    """Returns Jinja with our templates; what is put into them is escaped."""
    jinja = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    jinja.globals["styles"] = scripts(STYLES)
    return jinja


def scripts(names: Sequence[str]) -> Markup:
    """Returns our own scripts, or styles, in a row, as they are."""
    return Markup("\n".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names))


def _figures(record: StudyRecord) -> tuple[tuple[str, go.Figure], ...]:
    """The report's figures by name, the first of which is on the first screen.

    A point whose hover text begins with `trial N` opens that trial's panel.
    """
    axes = (("axes", axes_figure(axes_info(record))),) if record.axes else ()
    averages = (("averages", averages_figure(averages_info(record))),)
    tables = (("table-bytes", table_bytes_figure(table_bytes_info(record))),)
    return (
        ("front", front_figure(front_info(record))),
        *(tables if table_bytes_differ(record) else ()),
        ("curves", curves_figure(curves_info(record))),
        ("modules", modules_figure(modules_info(record))),
        *(averages if record.averages else ()),
        ("ablations", ablations_figure(ablations_info(record))),
        ("slices", slices_figure(slices_info(record))),
        ("ladder", ladder_figure(ladder_info(record))),
        ("predictions", predictions_figure(predictions_info(record))),
        ("depth", depth_figure(depth_info(record))),
        ("gain", gain_figure(gain_info(record))),
        ("timeline", timeline_figure(timeline_info(record))),
        ("time", time_figure(time_info(record))),
        *axes,
    )
