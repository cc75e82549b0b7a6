"""The report's figures: each is a function from a study's record to its drawing.

A function returns None if the figure has no place in a study, and a figure without traces, whose subtitle tells
why, if there is nothing to draw yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import plotly.graph_objects as go

from dashboards.figures.course import gain_figure, time_figure, timeline_figure
from dashboards.figures.curves import curves_figure, depth_figure
from dashboards.figures.memory import ladder_figure, predictions_figure
from dashboards.figures.modules import axes_figure, modules_figure
from dashboards.figures.plane import front_figure, table_bytes_figure
from dashboards.figures.worth import ablations_figure, averages_figure, slices_figure
from trials.records.study_record import StudyRecord

FIGURES: Mapping[str, Callable[[StudyRecord], go.Figure | None]] = {
    "front": front_figure,
    "table_bytes": table_bytes_figure,
    "curves": curves_figure,
    "modules": modules_figure,
    "averages": averages_figure,
    "ablations": ablations_figure,
    "slices": slices_figure,
    "ladder": ladder_figure,
    "predictions": predictions_figure,
    "depth": depth_figure,
    "gain": gain_figure,
    "timeline": timeline_figure,
    "time": time_figure,
    "axes": axes_figure,
}
"""By name, in the order of the page. The first is on its first screen."""
