"""What a candidate may take: serving's limits on its forward time, its size and its FLOPs, and one on the bytes of
its embedding tables (torch-free).

Sizes and FLOPs follow from the model; the forward time is measured (`trials.training.scoring`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import Field, field_validator

from dhen.cost import CostRow, dense_parameters, embedding_parameters
from dhen.values import Value
from trials.cluster.cluster import byte_words, parse_bytes

BYTES_PER_WEIGHT = 4
"""Bytes per exported weight, which is fp32."""
MOST_BATCH, MOST_THREADS = 65_536, 1024
"""Most rows and threads of a request: `verify` builds and runs the one that a bundle names."""


class ServingConfig(Value):
    """A request to the exported model, and what it may take."""

    batch: int = Field(default=256, gt=0, le=MOST_BATCH)
    """Rows per request."""
    threads: int = Field(default=1, gt=0, le=MOST_THREADS)
    """CPU threads that serve a request; with more than one, candidates whose time is measured train one at a
    time."""
    max_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Limit on the forward time of a request, in milliseconds on this machine."""
    max_bytes: int | None = None
    """Limit on the size of the exported weights, such as 100MiB."""
    max_flops: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Limit on forward FLOPs per example."""

    @field_validator("max_bytes", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return value if value is None else parse_bytes(value)

    @property
    def limited(self) -> bool:
        """Whether there is any limit."""
        return self.limits != ""

    @property
    def limits(self) -> str:
        """The limits in words: `max_ms=5, max_bytes=100 MiB`."""
        words = {
            "max_ms": None if self.max_ms is None else _number(self.max_ms),
            "max_bytes": None if self.max_bytes is None else byte_words(self.max_bytes),
            "max_flops": None if self.max_flops is None else _number(self.max_flops),
        }
        return ", ".join(f"{key}={limit}" for key, limit in words.items() if limit is not None)

    @property
    def request(self) -> str:
        """The request in words: `256 rows, 1 thread`."""
        rows = "1 row" if self.batch == 1 else f"{self.batch:,} rows"
        return f"{rows}, {self.threads} thread{'' if self.threads == 1 else 's'}"

    def demands(self, *, flops: float, weights_bytes: int, ms: float | None = None) -> tuple[Demand, ...]:
        """Returns the quantities of a model that are known and have a limit."""
        candidates = (
            (ms, self.max_ms, f"forward takes {{}} ms for {self.request}, over serving.max_ms={{}}", _number),
            (weights_bytes, self.max_bytes, "weights take {}, over serving.max_bytes={}", byte_words),
            (flops, self.max_flops, "forward needs {} FLOPs per example, over serving.max_flops={}", _number),
        )
        return tuple(
            Demand(value / limit - 1.0, words.format(text(value), text(limit)))
            for value, limit, words, text in candidates
            if value is not None and limit is not None
        )


class Limits(Value):
    """All that a study's candidates may take, but for memory."""

    serving: ServingConfig = ServingConfig()
    max_table_bytes: int | None = None
    """Limit on the bytes of the embedding tables; None for no limit."""

    @property
    def limited(self) -> bool:
        """Whether there is any limit."""
        return self.serving.limited or self.max_table_bytes is not None

    @property
    def words(self) -> tuple[str, ...]:
        """The limits in words, those of serving together: `limit max_table_bytes=1 GiB`."""
        words = []
        if self.serving.limited:
            words.append(f"limits of serving ({self.serving.request}: {self.serving.limits})")
        if self.max_table_bytes is not None:
            words.append(f"limit max_table_bytes={byte_words(self.max_table_bytes)}")
        return tuple(words)

    def excess(
        self, *, flops: float, weights_bytes: int, table_bytes: int | None, ms: float | None = None
    ) -> float | None:
        """Returns by how much a model exceeds the worst of the limits, over that limit; None if no known
        quantity has one."""
        demands = self.demands(flops=flops, weights_bytes=weights_bytes, table_bytes=table_bytes, ms=ms)
        return max((demand.excess for demand in demands), default=None)

    def demands(
        self, *, flops: float, weights_bytes: int, table_bytes: int | None, ms: float | None = None
    ) -> tuple[Demand, ...]:
        """Returns the quantities of a model that are known and have a limit."""
        demands = self.serving.demands(flops=flops, weights_bytes=weights_bytes, ms=ms)
        limit = self.max_table_bytes
        if limit is None or table_bytes is None:
            return demands
        words = f"embedding tables take {byte_words(table_bytes)}, over max_table_bytes={byte_words(limit)}"
        return (*demands, Demand(table_bytes / limit - 1.0, words))


class Demand(NamedTuple):
    """One thing that a model takes and that has a limit."""

    excess: float
    """Part by which the demand exceeds the limit, over the limit; 0 or less if it meets the limit."""
    words: str
    """Sentence that says that the demand is over the limit."""


class ForwardTime(Value):
    """A measured forward pass."""

    ms: float = Field(gt=0)
    """Milliseconds of a request that nothing else disturbs."""
    batch: int = Field(gt=0, le=MOST_BATCH)
    """Rows per request."""
    threads: int = Field(gt=0, le=MOST_THREADS)
    machine: str
    """Name of the device that was measured."""

    def __str__(self) -> str:
        request = ServingConfig(batch=self.batch, threads=self.threads).request
        return f"{self.ms:.3g} ms for {request} ({self.machine})"


def weights_bytes(cost: Iterable[CostRow]) -> int:
    """Returns the size of the exported weights of a model with this cost; the file has some KiB of names on
    top."""
    rows = tuple(cost)
    return BYTES_PER_WEIGHT * (dense_parameters(rows) + embedding_parameters(rows))


def summed_ms(times: Iterable[float | None]) -> float | None:
    """Returns the forward time of a model that runs several networks one after another; None if a network's is
    not known."""
    all_times = list(times)
    return None if None in all_times else sum(ms for ms in all_times if ms is not None)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
