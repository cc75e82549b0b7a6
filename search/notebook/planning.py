"""`plan`: what each memory technique costs a model on a cluster, as a notebook has it; no GPU is needed."""

from __future__ import annotations

import html
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from dashboards.units import byte_size
from dhen.errors import unknown_name
from dhen.values import parse
from search.config import HELD_KEYS, LOG_KEYS, StudyConfig, held_config
from search.plan_request import in_least_shape, log_to_read, read_request
from search.planning.attempts import plan_options
from search.planning.plan_trial import declared_clusters
from search.planning.step_correction import StepCorrections
from trials.cluster.load import THIS
from trials.planner.plan import Plan

LADDER = ["technique", "fits", "peak_bytes", "lacking_bytes", "step_ms", "examples_per_second", "reason"]


def plan(
    model: str | Path | Mapping[str, Any],
    *,
    cluster: str | Path = THIS,
    data: str | Path | None = None,
    schema: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    member: int | None = None,
    **settings: Any,
) -> PlanView:
    """Prices every memory technique for a model on a cluster.

    Args:
        model: a configuration file, a bundle, the name of a shipped model, or a model's configuration (a mapping).
        cluster: a name (`dhen-search clusters`), a YAML file, or `"this"`, this machine.
        data: a log that gives the model's inputs.
        schema: the model's inputs, where neither the file nor a log gives them, such as
            `{"tables": [{"name": "site", "rows": 1_000_000}], "numeric": 13}`.
        training: training settings, such as `{"batch_size": 65536}`, the examples of a step over all ranks.
        member: which network of a bundle that is an average, 0 or above.
        settings: how the model is held, as in a study: `ranks="2x8"` (or several shapes, `"1x1,1x8"`),
            `hbm="24GiB"`, `prefer="fastest"`, `technique="zero1"`, `memory_margin="1GiB"`, `servers=2`; and how
            the log is read: `label="clicked"`, `format="csv"`, `split={"validation": 0.2}` ...

    Raises:
        UserError: for a key, a name or a file that is wrong, or where something needed is missing.
    """
    # a key that is wrong is said before anything is read; whether servers are wanted, the request says
    for unknown in sorted(set(settings) - {*HELD_KEYS, *LOG_KEYS}):
        raise unknown_name("key", unknown, (*HELD_KEYS, *LOG_KEYS))
    log_config = log_to_read(() if data is None else (str(data),), settings)
    parse(StudyConfig, {key: value for key, value in settings.items() if key != "servers"}, "plan")
    beside = {"schema": schema, "training": training}
    request = read_request(
        str(model) if isinstance(model, str | Path) else {"model": model},
        log_config,
        (),
        member,
        given={key: value for key, value in beside.items() if value is not None},
    )
    config = held_config(settings, request.training, "plan")
    shapes = declared_clusters(str(cluster), config.shapes, config.hbm)
    found = in_least_shape(request, shapes, plan_options(config))
    return PlanView(StepCorrections.here(shapes).of_plan(found) if found.cluster == THIS else found)


class PlanView:
    """The ladder of memory techniques for a model, priced on a cluster. Made by `plan`."""

    def __init__(self, priced: Plan) -> None:
        """Keeps the plan."""
        self._plan = priced

    @property
    def technique(self) -> str | None:
        """The least technique that fits, by name; None where none does."""
        return self._plan.chosen.name if self._plan.chosen else None

    @cached_property
    def ladder(self) -> pd.DataFrame:
        """A row per technique, fewer first: bytes of a rank, milliseconds of a step, why it is not the one."""
        rows = [
            {
                "technique": priced.strategy.name,
                "fits": priced.fits,
                "peak_bytes": priced.memory.total,
                "lacking_bytes": priced.lacking_bytes,
                "step_ms": 1000.0 * priced.time.total,
                "examples_per_second": self._plan.batch_size / priced.seconds_per_batch,
                "reason": priced.reason,
            }
            for priced in self._plan.strategies
        ]
        return pd.DataFrame(rows, columns=LADDER).set_index("technique")

    @property
    def memory(self) -> pd.DataFrame:
        """Bytes by item of every technique."""
        items = {priced.strategy.name: priced.memory.to_dict() for priced in self._plan.strategies}
        frame = pd.DataFrame.from_dict(items, orient="index").rename_axis("technique")
        return frame.drop(columns=["activations_by_layer", "peak_at"], errors="ignore")

    @property
    def sentences(self) -> tuple[str, ...]:
        """What would make it fit where nothing does, why smaller shapes of ranks do not do, what would be faster,
        and notes."""
        smaller = self._plan.other_shapes if self._plan.chosen else ()
        return tuple(filter(None, (self._plan.remedy, *smaller, self._plan.faster, *self._plan.notes)))

    def __repr__(self) -> str:
        return "\n".join((self._heading(), *self.sentences))

    def _repr_html_(self) -> str:
        said = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.sentences)
        shown = self.ladder[["fits", "peak_bytes", "step_ms", "reason"]].to_html(border=0, na_rep="")
        return f"<h3>{html.escape(self._heading())}</h3><ul>{said}</ul>{shown}"

    def _heading(self) -> str:
        plan = self._plan
        ranks = f"{plan.cluster}, {plan.hosts} x {plan.gpus_per_host} ranks of {byte_size(plan.hbm)}"
        return f"{ranks}: {self.technique or 'nothing fits'}"
