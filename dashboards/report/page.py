"""The report of a study: one HTML file that holds all it needs and opens without a network."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import plotly.io
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from dashboards.figures import FIGURES
from dashboards.names import duration, known
from dashboards.plans import accuracy_table, attempts_table
from dashboards.report.answers import answers, facts, next_commands
from dashboards.report.embed import as_json, study_data, thinned
from dashboards.rows import LOG_EXPLANATION, log_table
from dashboards.sentences.summary import progress, sentences
from dashboards.sentences.winners import explanation, winners_table
from dhen.atomic_write import write_atomically
from dhen.errors import UserError
from trials.records.study_record import StudyRecord

TEMPLATES = Path(__file__).parent / "templates"
STYLES = ("page.css", "overview.css", "tables.css", "candidate.css", "print.css")
SCRIPTS = (
    *("elements.js", "units.js", "state.js", "study.js", "plotly.js", "figures.js", "trials.js"),
    *("diagram.js", "ladder.js", "curve.js", "cost.js", "candidate.js", "copy.js", "live.js", "start.js"),
)
"""Scripts of the page in the order in which they are read; they share one scope."""
MARGIN_WITHOUT_TITLE = 40
"""Pixels above a drawing whose title stands beside it."""
MOST_DRAWN_POINTS = 10_000
"""Points of all curves together that are drawn; a figure is some 1,000 pixels wide."""
FEWEST_EACH = 6
PLOTLY_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtons": [["toImage", "resetScale2d"]]}


class LivePage(NamedTuple):
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


def render(record: StudyRecord, *, notes: Sequence[str] = (), live: LivePage | None = None) -> str:
    """Returns the page. Everything that comes from data is escaped: by Jinja in HTML, by `as_json` in scripts,
    which put it into the page as text.

    Args:
        record: all that the page is made from.
        notes: sentences on what the record cannot know; they stand on top.
        live: how the page follows a study that goes on; None for a page that stays as it is.
    """
    drawn = with_thin_curves(record)
    figures = {name: draw(drawn) for name, draw in FIGURES.items()}
    front, *others = [
        figure_data(name.replace("_", "-"), figure) for name, figure in figures.items() if figure is not None
    ]
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
            log_table=log_table(record.log.findings),
            log_explanation=LOG_EXPLANATION,
            attempts_table=attempts_table(record),
            accuracy_table=accuracy_table(record),
            winners_table=winners_table(record),
            winners_explanation=explanation(record),
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


class FigureData(NamedTuple):
    """A figure with its texts apart, so that they wrap and are read aloud."""

    name: str
    title: str
    subtitle: str
    height: int
    """Height of the drawing in pixels."""
    json: str | None
    """Traces and layout, to stand in a `<script>`; None if there is nothing to draw."""


def figure_data(name: str, figure: go.Figure) -> FigureData:
    """Returns a figure as the page carries it; one with nothing in it is its title and subtitle alone."""
    title = figure.layout.title
    plain = _plain(figure.to_dict())
    traces, layout = plain["data"], plain["layout"]
    height = layout.pop("height") - (layout["margin"]["t"] - MARGIN_WITHOUT_TITLE)
    layout["margin"]["t"] = MARGIN_WITHOUT_TITLE
    layout.pop("title", None)
    return FigureData(
        name=name,
        title=unescape(title.text or name),
        subtitle=unescape(title.subtitle.text or ""),
        height=round(height),
        json=as_json({"data": traces, "layout": layout}) if traces else None,
    )


def _plain(value: Any) -> Any:
    """Lists in place of arrays that Plotly has packed, None in place of NaN and infinity."""
    if isinstance(value, Mapping):
        if "bdata" in value:
            flat = np.frombuffer(base64.b64decode(value["bdata"]), dtype=value["dtype"])
            shape = [int(size) for size in str(value.get("shape", len(flat))).split(",")]
            return _plain(flat.reshape(shape).tolist())
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not known(value) else value


@cache
def packed_plotly() -> str:
    """Returns plotly.js, gzipped, in base64; the page's script unpacks it when the first figure is to be drawn."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def with_thin_curves(record: StudyRecord) -> StudyRecord:
    """Returns the record as figures draw it: if its curves have too many points together, those off the front
    have fewer, among them their first, their best and their last one.

    The front and the baseline, which others are compared with, keep all of theirs.
    """
    whole = {*record.front, record.baseline, record.best, record.knee}
    counts = [len(trial.result.curve) for trial in record.trials if trial.number not in whole]
    if sum(counts) <= MOST_DRAWN_POINTS:
        return record
    most = max(FEWEST_EACH, MOST_DRAWN_POINTS // len(counts))
    trials = []
    for trial in record.trials:
        curve = trial.result.curve
        if trial.number not in whole and len(curve) > most:
            best = min(curve, key=lambda point: point.validation.ne)
            kept = {point.examples: point for point in (*thinned(curve, most - 1), best)}
            trial = trial.with_result(curve=tuple(sorted(kept.values(), key=lambda point: point.examples)))
        trials.append(trial)
    return record.replace(trials=tuple(trials))
