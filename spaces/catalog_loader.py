"""Named spaces (`spaces/catalog/*.yaml`) and a user's own YAML file beside them."""

from __future__ import annotations

import random
from importlib import resources
from pathlib import Path

from dhen.errors import UserError, unknown_name
from dhen.schema import FeatureSchema
from dhen.values import load_yaml, parse
from spaces.space import Space, SpaceConfig, first_label

PROBES = 64
"""Random points tried before a space is called impossible."""


def catalog() -> dict[str, SpaceConfig]:
    """The named spaces."""
    with resources.as_file(resources.files("spaces") / "catalog") as folder:
        files = sorted(Path(folder).glob("*.yaml"))
        return {file.stem: parse(SpaceConfig, load_yaml(file), file.name) for file in files}


def load_space(name: str, features: FeatureSchema | None = None) -> Space:
    """A space by its name in the catalog or by the path of a YAML file.

    Where the inputs of a log are given, axes that change nothing on that log are constants.

    Raises:
        UserError: when there is no such space, a key or value is wrong, or no point of it decodes.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):
        space = _read(path)
    elif name in (named := catalog()):
        space = Space(name, named[name])
    elif path.exists():
        space = _read(path)
    else:
        raise unknown_name("space", name, named)
    if features is not None:
        space = Space(space.name, _with_effect(space, features))
    _check_possible(space)
    return space


def _with_effect(space: Space, features: FeatureSchema) -> SpaceConfig:
    """The space in which settings of inputs that the log lacks keep their first value: they change no network."""
    acts_on = {
        "buckets": features.bucketed,
        "numeric_mlp": features.numeric,
        "table_dim_exponent": features.tables,
        "capacity_share": features.growing,
    }
    idle = [key for key in space.config.model if key in acts_on and not acts_on[key]]
    first = {key: [space.model_axes[key].decode(first_label(space.model_axes[key]))] for key in idle}
    raw = space.config.raw_numeric
    if not features.numeric and isinstance(raw, list):
        raw = raw[:1]
        idle.append("raw_numeric")
    start = tuple(
        {name: value for name, value in point.items() if name.rpartition(".")[2] not in idle}
        for point in space.config.start
    )
    return space.config.replace(model=space.config.model | first, start=start, raw_numeric=raw)


def _check_possible(space: Space) -> None:
    rng, reason = random.Random(0), ""
    for _ in range(PROBES):
        try:
            space.decode(space.random_point(rng))
        except UserError as error:
            reason = str(error)
        else:
            return
    raise UserError(f"space {space.name!r} is impossible: no point of it gives a model. {reason}")


def _read(path: Path) -> Space:
    config = parse(SpaceConfig, load_yaml(path), str(path))
    try:
        return Space(path.stem, config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
