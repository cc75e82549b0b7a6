"""A figure as the page carries it: its texts, and its drawing as plain data."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dashboards.report.embed import as_json
from dashboards.units import known

MARGIN_WITHOUT_TITLE = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureData:
    """A figure with its texts apart, so that they wrap and are read aloud."""

    name: str
    title: str
    subtitle: str
    height: int
    """Height of the drawing in pixels."""
    json: str | None
    """Traces and layout, to stand in a `<script>`; None where there is nothing to draw."""


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
