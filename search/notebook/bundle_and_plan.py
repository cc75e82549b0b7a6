"""`plan`: what each memory technique costs a model on a cluster, as a notebook has it; no GPU is needed."""

from __future__ import annotations

import html
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from dashboards.names import byte_size, short_name, si
from dhen.errors import unknown_name
from dhen.values import parse
from search.bundles.bundle import Bundle, read_bundle
from search.bundles.scorer import Scorer
from search.config import HELD_KEYS, LOG_KEYS, StudyConfig, held_config
from search.execution.attempts import plan_options
from search.execution.plan_trial import declared_clusters
from search.plan_request import in_least_shape, log_to_read, read_request
from trials.cluster.this_machine import THIS
from trials.planner.plan import Plan

# A bundle as a notebook has it: what is in it, and the probabilities of rows.


def open_bundle(where: str | Path) -> BundleView:
    """Opens a bundle, such as the folder `best` of a run directory.

    Raises:
        UserError: if there is none, or its files are not whole.
    """
    return BundleView(read_bundle(Path(where)))


class BundleView:
    """A model that was taken away from a study. Made by `open_bundle`."""

    def __init__(self, bundle: Bundle) -> None:
        """Keeps the bundle; weights are read with the first row that is scored."""
        self._bundle = bundle
        self.directory = bundle.directory

    @property
    def model(self) -> str:
        """The architecture in short; of an average, that of each network."""
        return ", ".join(short_name(job.model.to_dict()) for job in self._bundle.info.jobs)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that rows must have; others are ignored."""
        return self._bundle.encoding.schema.inputs

    @property
    def metrics(self) -> pd.DataFrame:
        """Quality of the model and of the tuned baseline, on validation and test, as far as they were measured."""
        info = self._bundle.info
        measured = {
            ("model", "validation"): info.validation,
            ("model", "test"): info.test,
            ("baseline", "validation"): info.baseline_validation,
            ("baseline", "test"): info.baseline_test,
        }
        known = {place: metrics.model_dump() for place, metrics in measured.items() if metrics is not None}
        index = pd.MultiIndex.from_tuples(known, names=["of", "split"])
        return pd.DataFrame(list(known.values()), index=index)

    def score(self, rows: pd.DataFrame) -> pd.Series[float]:
        """The probability of a click of each row, encoded as in training; its index is that of the rows.

        Args:
            rows: raw values under the log's column names.

        Raises:
            UserError: if a column is missing that the model needs, or for a value that its role does not allow.
        """
        return pd.Series(self._scorer.score(rows), index=rows.index, name="probability")

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self._bundle)

    def __repr__(self) -> str:
        info = self._bundle.info
        ne = f"NE {info.validation.ne:.5f} on validation"
        return f"Bundle {self.directory}: {self.model}, {si(info.flops)} FLOPs, {ne}"

    def _repr_html_(self) -> str:
        said = f"{html.escape(self.model)}, {si(self._bundle.info.flops)} FLOPs per example"
        return f"<h3>{html.escape(str(self.directory))}</h3><p>{said}</p>{self.metrics.to_html(border=0)}"


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
        schema: the model's inputs, if neither the file nor a log gives them, such as
            `{"tables": [{"name": "site", "rows": 1_000_000}], "numeric": 13}`.
        training: training settings, such as `{"batch_size": 65536}`, the examples of a step over all ranks.
        member: which network of a bundle that is an average, 0 or above.
        settings: how the model is held, as in a study: `ranks="2x8"` (or several shapes, `"1x1,1x8"`),
            `hbm="24GiB"`, `prefer="fastest"`, `technique="zero1"`, `memory_margin="1GiB"`, `servers=2`; and how
            the log is read: `label="clicked"`, `format="csv"`, `split={"validation": 0.2}` ...

    Raises:
        UserError: for a key, a name or a file that is wrong, or if something needed is missing.
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
    return PlanView(in_least_shape(request, shapes, plan_options(config)))


class PlanView:
    """The ladder of memory techniques for a model, priced on a cluster. Made by `plan`."""

    def __init__(self, priced: Plan) -> None:
        """Keeps the plan."""
        self._plan = priced

    @property
    def technique(self) -> str | None:
        """The least technique that fits, by name; None if none does."""
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
        """What would make it fit if nothing does, why smaller shapes of ranks do not do, what would be faster,
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
