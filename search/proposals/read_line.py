"""What a line proposes: a point of the space, or a model with its training, and who proposes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dhen.config import DhenConfig
from dhen.errors import UserError, unknown_name
from dhen.model import parse_model
from search.proposals.lines import Line
from spaces.space import Candidate, Point, Space, first_label
from trials.record import Proposal

CREDIT = ("by", "why")
WHAT = ("point", "model", "training")
LONGEST = 2000
"""Number of characters of `by` and of `why` that are kept: reports and tags show them."""


@dataclass(frozen=True, kw_only=True)
class ReadProposal:
    """A proposal that is understood."""

    candidate: Candidate
    point: Point
    """The point of the space that it is; empty where it lies outside the space."""
    proposal: Proposal


def read_line(line: Line, space: Space, proven: Mapping[str, Any]) -> ReadProposal:
    """Returns what a line proposes.

    Args:
        line: the line.
        space: the study's space.
        proven: training settings of the tuned baseline, which stand for those that the proposal leaves out.

    Raises:
        UserError: saying what is wrong with the line.
    """
    data = _mapping(line.text)
    credit = {name: _words(name, data.pop(name, None)) for name in CREDIT}
    proposal = Proposal(line=line.number, key=line.key, **credit)
    if "layers" in data or "family" in data:
        data = {"model": data}
    elif not set(data) & set(WHAT):
        data = {"point": data}
    for name in data:
        if name not in WHAT:
            raise unknown_name("key of a proposal", name, (*WHAT, *CREDIT))
    if "point" in data:
        return _read_point(data, space, proven, proposal)
    return _read_model(data, space, proven, proposal)


def credit_of(line: Line) -> dict[str, str | None]:
    """Returns `by` and `why` of a line, as far as it can be read at all."""
    try:
        data = _mapping(line.text)
        return {name: _words(name, data.get(name)) for name in CREDIT}
    except UserError:
        return dict.fromkeys(CREDIT)


def _mapping(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(f"no JSON: {error}.") from None
    if not isinstance(data, dict):
        raise UserError(
            "expected a JSON object, of a point (axis name to value) or of a model configuration, received "
            f"{type(data).__name__}."
        )
    return data


def _words(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UserError(f"{name} is a text, received {value!r}.")
    # half of a character, where a text was cut inside of one, cannot be stored
    return value[:LONGEST].encode("utf-8", "replace").decode("utf-8") if value else None


def _read_point(
    data: dict[str, Any], space: Space, proven: Mapping[str, Any], proposal: Proposal
) -> ReadProposal:
    given = data["point"]
    if len(data) > 1 or not isinstance(given, dict) or not given:
        raise UserError(
            'a point stands alone and has a value for one axis at least, such as {"point": {"depth": 2}}; its '
            "training settings are axes, too."
        )
    axes = {axis.name: axis for axis in space.axes}
    for name in given:
        if name not in axes:
            raise unknown_name("axis of the space", name, axes)
    # axes that are left out: what has worked for the baseline, else what the space names first
    point: Point = {name: first_label(axis) for name, axis in axes.items()}
    point |= _proven_axes(space, proven) | given
    return ReadProposal(candidate=space.decode(point), point=point, proposal=proposal)


def _read_model(
    data: dict[str, Any], space: Space, proven: Mapping[str, Any], proposal: Proposal
) -> ReadProposal:
    if "model" not in data:
        raise UserError(
            "training settings need the model that they are for: give `model` as well, or a point."
        )
    given = data.get("training") or {}
    if not isinstance(given, dict):
        raise UserError(f"training is a mapping of settings, received {type(given).__name__}.")
    if "train_fraction" in given:
        raise UserError(
            "training.train_fraction is the study's own: candidates on different parts do not compare."
        )
    model = parse_model({"family": "dhen"} | _model(data["model"]), "model")
    if not isinstance(model, DhenConfig):
        raise UserError(
            f"a candidate is a model of the family dhen, received {model.family}; a model of another family can "
            "be the baseline of a study: baseline=FILE."
        )
    held = space.with_first(proven)
    try:
        point = space.encode(Candidate(model=model, training=held | given))
        return ReadProposal(candidate=space.decode(point), point=point, proposal=proposal)
    except UserError:  # outside the space: it is trained all the same, and the sampler is not told
        training = {key: proven[key] for key in space.training_axes} | given
        outside = proposal.replace(outside=True, training=training)
        return ReadProposal(candidate=Candidate(model=model, training=training), point={}, proposal=outside)


def _model(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise UserError(
            f"model is a mapping, as in a file that `train` takes, received {type(given).__name__}."
        )
    return given


def _proven_axes(space: Space, proven: Mapping[str, Any]) -> Point:
    return {
        axis.name: proven[key] for key, axis in space.training_axes.items() if axis.holds(proven.get(key))
    }
