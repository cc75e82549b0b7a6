"""A bundle as a notebook has it: what is in it, and the probabilities of rows."""

from __future__ import annotations

import html
from functools import cached_property
from pathlib import Path

import pandas as pd

from dashboards.names import short_name
from dashboards.units import si
from search.bundles.bundle import Bundle, read_bundle
from search.bundles.scorer import Scorer


def open_bundle(where: str | Path) -> BundleView:
    """Opens a bundle, such as the folder `best` of a run directory.

    Raises:
        UserError: where there is none, or its files are not whole.
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
            UserError: where a column is missing that the model needs, or for a value that its role does not allow.
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
