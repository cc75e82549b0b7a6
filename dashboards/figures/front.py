"""NE on validation against FLOPs, and the Pareto front between them."""

from __future__ import annotations

import plotly.graph_objects as go

from dashboards.figures.plane_drawing import drawn_against
from dashboards.figures.plane_points import FLOPS, FrontInfo, info_against
from dashboards.figures.style import empty
from dashboards.units import ratio
from trials.study_record import StudyRecord


def front_info(record: StudyRecord) -> FrontInfo:
    """What the figure shows; which trials are on the front is read from the record, not worked out here."""
    return info_against(FLOPS, record, record.front, networks=record.networks_front, knee=record.knee)


def front_figure(info: FrontInfo) -> go.Figure:
    """The figure, with FLOPs on a logarithmic axis; lower left is better."""
    if info.frame is None:
        reason = "Shown as soon as a trial has an NE on validation."
        return empty(reason, title="NE against FLOPs")
    figure = drawn_against(
        info, title=_title(info), subtitle="NE on validation against FLOPs per example; lower left is better."
    )
    figure.update_xaxes(title_text="forward FLOPs per example", tickformat=".2~s", dtick="D2")
    return figure


def _title(info: FrontInfo) -> str:
    best, baseline = info.best, info.baseline
    relative = best.row.relative_percent if best is not None else None
    if best is None or relative is None or baseline is None:
        return "NE against FLOPs"
    if best.number == baseline.number:
        return "No candidate is better than the baseline beyond the noise of choosing"
    where = "below" if relative < 0 else "above"
    times = ratio(best.price / baseline.price)
    return f"The best candidate is {abs(relative):.2f} % {where} the baseline at {times} its FLOPs"
