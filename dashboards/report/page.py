"""The report of a study: one HTML file that holds all it needs and opens without a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from dashboards import accuracy, attempts
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
from dashboards.names import trial_name
from dashboards.rows import TrialRow, find, trial_rows
from dashboards.sentences import winners
from dashboards.sentences.summary import IN_WORDS, progress, sentences
from dashboards.units import byte_size, decimals, duration, milliseconds, percent, si, word
from dhen.atomic_write import write_atomically
from dhen.cost import ATTENTION, MATMUL, CostRow
from dhen.errors import UserError
from trials.record import TrialRecord
from trials.study_record import StudyRecord

TEMPLATES = Path(__file__).parent / "templates"
PLOTLY_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtons": [["toImage", "resetScale2d"]]}
MARGIN_WITHOUT_TITLE = 40
COUNTED = (MATMUL, ATTENTION)
"""Kinds of cost rows that make up the FLOPs that are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the table of trials."""

    title: str
    help: str
    value: str
    """Path of the value from a `TrialRow`; rows are sorted by it, unknown values go last either way."""
    text: Callable[[Any], str]
    """The value as shown."""
    numeric: bool = True

    def of(self, row: TrialRow) -> Any:
        """The column's value in a row; None where it is not known."""
        value: Any = row
        for name in self.value.split("."):
            value = getattr(value, name) if value is not None else None
        return value


SERVING_MS = "trial.plan.serving_ms"
TABLE_BYTES = "trial.job.table_bytes"
# what a study is about comes first, so that it is seen without scrolling; a model's name may be long
COLUMNS = (
    Column(title="Trial", help="in the order of starting", value="trial.number", text=str),
    Column(title="NE", help="normalized entropy on validation", value="ne", text=partial(decimals, digits=5)),
    Column(
        title="vs baseline",
        help="NE in percent of the tuned baseline's; negative is better",
        value="relative_percent",
        text=percent,
    ),
    Column(title="FLOPs", help="forward, per example", value="trial.job.flops", text=si),
    Column(title="Model", help="modules, ensemble, dimension", value="name", text=str, numeric=False),
    Column(
        title="Outcome",
        help="how it ended",
        value="trial.result.outcome",
        text=IN_WORDS.__getitem__,
        numeric=False,
    ),
    Column(title="AUC", help="on validation", value="quality.auc", text=partial(decimals, digits=4)),
    Column(
        title="Calibration",
        help="sum of predictions over sum of labels; 1 is calibrated",
        value="quality.calibration",
        text=partial(decimals, digits=3),
    ),
    Column(title="Parameters", help="dense ones", value="trial.job.parameters", text=si),
    Column(title="Weights", help="size exported, fp32", value="trial.job.weights_bytes", text=byte_size),
    Column(
        title="Tables",
        help="size of embedding tables as training stores them",
        value=TABLE_BYTES,
        text=byte_size,
    ),
    Column(title="Forward", help="measured time of a request", value=SERVING_MS, text=milliseconds),
    Column(title="Examples/s", help="trained", value="trial.result.measured.examples_per_second", text=si),
    Column(title="Time", help="wall clock", value="trial.result.seconds", text=duration),
    Column(
        title="Planned",
        help="memory technique for the cluster: the least that fits",
        value="trial.plan.technique",
        text=word,
        numeric=False,
    ),
    Column(
        title="Memory", help="predicted peak of a rank there", value="trial.plan.peak_bytes", text=byte_size
    ),
    Column(
        title="Executed",
        help="memory technique it was trained with, as its ranks read it from the wrapped modules",
        value="trial.result.technique",
        text=word,
        numeric=False,
    ),
    Column(title="Remark", help="why it did not complete", value="remark", text=word, numeric=False),
)


def write_report(record: StudyRecord, path: Path) -> None:
    """Writes the report of a study.

    Raises:
        UserError: when the path is a folder.
        OSError: when the file cannot be written.
    """
    _write(path, lambda: render(record))


def write_figure(figure: go.Figure, path: Path) -> None:
    """Writes one figure as a page of its own, plotly.js inside.

    Raises:
        UserError: when the path is a folder.
        OSError: when the file cannot be written.
    """
    page = plotly.io.to_html
    _write(path, lambda: page(figure, include_plotlyjs=True, full_html=True, config=PLOTLY_CONFIG))


def _write(path: Path, render: Callable[[], str]) -> None:
    """Writes a page so that a reader sees either the old one or the new one whole."""
    if path.is_dir():
        raise UserError(f"{path}: a folder; name the file to write, e.g. {path / 'report.html'}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render())


def render(record: StudyRecord) -> str:
    """The page. Everything that comes from data is escaped: by Jinja in HTML, by Plotly in its JSON."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.globals |= {"si": si, "decimals": decimals, "byte_size": byte_size, "trial_name": trial_name}
    best = find(record, record.best)
    return environment.get_template("report.html").render(
        record=record,
        progress=progress(record),
        elapsed=duration(record.elapsed_seconds),
        sentences=sentences(record),
        figures=[_html(name, figure) for name, figure in _figures(record)],
        columns=columns_of(record),
        rows=trial_rows(record),
        attempt_columns=attempts.COLUMNS,
        attempt_text_columns=attempts.TEXT_COLUMNS,
        attempt_rows=attempts.attempt_rows(record),
        accuracy_columns=accuracy.COLUMNS,
        accuracy_rows=[accuracy.cells(row) for row in accuracy.accuracy(record)],
        winners_columns=winners.COLUMNS,
        winners_left=winners.LEFT,
        winners_rows=winners.rows(record),
        winners_explanation=winners.explanation(record),
        best=best,
        cost=_cost(best),
        plotly=Markup(get_plotlyjs()),
    )


def columns_of(record: StudyRecord) -> tuple[Column, ...]:
    """Columns of the table of trials, without the forward time where none was measured, and without table bytes
    where all candidates have the same."""
    left_out = set()
    if all(trial.plan.serving_ms is None for trial in record.trials):
        left_out.add(SERVING_MS)
    if not table_bytes_differ(record):
        left_out.add(TABLE_BYTES)
    return tuple(column for column in COLUMNS if column.value not in left_out)


def _figures(record: StudyRecord) -> tuple[tuple[str, go.Figure], ...]:
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


def _html(name: str, figure: go.Figure) -> dict[str, Markup]:
    """A figure's title and subtitle as text that wraps; its drawing as a div and a script, without plotly.js.

    A figure with nothing in it is its title and subtitle alone.
    """
    title = figure.layout.title
    texts = {"title": Markup(title.text), "subtitle": Markup(title.subtitle.text), "drawing": Markup()}
    if not figure.data:
        return texts
    bare = go.Figure(figure).update_layout(title=None, margin_t=MARGIN_WITHOUT_TITLE)
    bare.layout.height -= figure.layout.margin.t - MARGIN_WITHOUT_TITLE
    html = plotly.io.to_html(
        bare,
        include_plotlyjs=False,
        full_html=False,
        config=PLOTLY_CONFIG,
        div_id=f"figure-{name}",
        default_height=f"{bare.layout.height}px",
    )
    return texts | {"drawing": Markup(html)}


def _cost(best: TrialRecord | None) -> list[tuple[CostRow, float | None]]:
    """Rows of the cost table, dearest first, with their share in percent of the FLOPs that are reported.

    What is outside that number (elementwise work, look-ups) has no share and stands below.
    """
    rows = sorted(best.job.cost, key=lambda row: (row.kind not in COUNTED, -row.flops)) if best else []
    total = sum(row.flops for row in rows if row.kind in COUNTED)
    return [(row, 100 * row.flops / total if total and row.kind in COUNTED else None) for row in rows]
