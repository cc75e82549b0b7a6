"""A cluster as a value: what a planner must know of hosts, accelerators and the links between them.

Bandwidths are of one direction and for one accelerator; data sheets often state both directions together.
Every number has a source; numbers from data sheets stay unverified until a run has measured them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from dhen.errors import UserError, unknown_name
from dhen.values import Value, parse

# Quantities as people write them: `80GiB`, `300GB/s`, `200Gb/s`, `312TFLOP/s`, `5us`, `0.1%`, or a plain number.
#
# Plain numbers are bytes, bytes/s, FLOP/s and seconds. `B` is a byte, `b` a bit; `G` is 10**9, `Gi` is 2**30.
# The annotated types are what pydantic fields are declared with.

NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+\.)\s*([^\s0-9.]\S*)?\s*")
THOUSANDS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
SIZES = {f"{prefix}B": scale for prefix, scale in (THOUSANDS | BINARY).items()}
RATES = {f"{size}/s": scale for size, scale in SIZES.items()} | {
    f"{prefix}{bit}/s": scale / 8 for prefix, scale in THOUSANDS.items() for bit in ("b", "bit")
}
FLOPS = {f"{prefix}{word}": scale for prefix, scale in THOUSANDS.items() for word in ("FLOP/s", "FLOPS")}
PERCENT = {"%": 0.01}
AMBIGUOUS_SHARE = 0.01
"""Plain number from which a share of 1 could be meant in percent, and is refused."""
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_quantity(value: object, units: Mapping[str, float], example: str, *, least: float = 0.0) -> float:
    """Returns the number in its plain unit.

    Raises:
        ValueError: for anything that is not a finite number of at least 0, alone or with one of the units, and for
            one below `least`.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    else:
        match = NUMBER.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f"expected a number of at least 0, alone or with its unit, such as {example}")
        number, unit = float(match[1]), match[2]
        if unit is not None and unit not in units:
            raise ValueError(f"unknown unit {unit!r}; write it as in {example}; known: {', '.join(units)}")
        if unit is not None:
            number = float(f"{number * units[unit]:.15g}")  # 3.4us is 3.4e-06, not 3.3999999999999996e-06
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"expected a finite number of at least 0, such as {example}")
    if number < least:
        raise ValueError(f"must be greater than 0, such as {example}")
    return number


def parse_bytes(value: object) -> int:
    """Returns whole bytes, at least one."""
    return round(parse_quantity(value, SIZES, "80GiB", least=1.0))


def parse_signed_bytes(value: object) -> int:
    """Returns whole bytes; a minus in front takes them off."""
    sign = 1
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
        sign, value = -1, -value
    elif isinstance(value, str) and value.strip().startswith("-"):
        sign, value = -1, value.strip()[1:]
    return sign * round(parse_quantity(value, SIZES, "512MiB or -512MiB"))


parse_rate = partial(parse_quantity, units=RATES, example="300GB/s", least=1.0)
"""Returns bytes per second, at least one."""
parse_flops = partial(parse_quantity, units=FLOPS, example="312TFLOP/s", least=1.0)
"""Returns FLOP/s, at least one."""
parse_time = partial(parse_quantity, units=TIMES, example="5us")
"""Returns seconds; 0 is allowed."""


def parse_share(value: object) -> float:
    """Returns a small share of 1: `0.1%` is 0.001; 0.001 alone is read so too.

    Raises:
        ValueError: for a plain number of 0.01 or more, which could be meant in percent, and for shares above 1.
    """
    share = parse_quantity(value, PERCENT, "0.1%")
    if not str(value).strip().endswith("%") and share >= AMBIGUOUS_SHARE:
        raise ValueError(
            f"{share:g} could be {share:g} % or {100 * share:g} %; write the sign, such as {share:g}%"
        )
    if share > 1.0:
        raise ValueError(f"{100 * share:g}% is more than all there is; write it as in 0.1%")
    return share


def byte_words(count: float) -> str:
    """Returns bytes as people write them, with about three digits: `512 B`, `1.25 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
SignedBytes = Annotated[int, BeforeValidator(parse_signed_bytes)]
BytesPerSecond = Annotated[float, BeforeValidator(parse_rate)]
FlopsPerSecond = Annotated[float, BeforeValidator(parse_flops)]
Seconds = Annotated[float, BeforeValidator(parse_time)]
Share = Annotated[float, BeforeValidator(parse_share)]


RANKS = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)")
"""A shape: number of hosts, and of ranks per host."""
CUDA_CONTEXT_BYTES = 700 * 2**20
"""What a process takes of a GPU beside what torch's allocator holds, CUDA's context and the kernels loaded into
it: 685 to 740 MiB on an H100 with CUDA 13, 2026-11-26."""
Count = Annotated[int, Field(strict=True, gt=0)]
Words = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class Link(Value):
    """What joins accelerators: alpha (latency) and beta (bandwidth) of the alpha-beta model."""

    bandwidth: BytesPerSecond
    """Bytes/s for one accelerator, in one direction."""
    latency: Seconds
    """Seconds for one hop from an accelerator to the next."""


class PeakFlops(Value):
    """Peak FLOP/s of one accelerator by precision, dense (without structured sparsity)."""

    fp32: FlopsPerSecond
    """FLOP/s in fp32, outside tensor cores."""
    bf16: FlopsPerSecond
    """FLOP/s in bf16 with fp32 accumulation."""


class Cluster(Value):
    """Hosts that are alike, each with accelerators that are alike; without a GPU the CPU is the accelerator."""

    name: str = ""
    """Its name; by default that of its file, without the ending."""
    description: str = ""
    """What it is, in a sentence."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What kind of accelerator it has."""
    verified: bool = False
    """Whether its numbers were measured on it; false for data sheets."""
    hosts: Count
    """Number of hosts."""
    gpus_per_host: Count
    """Number of accelerators, and so of ranks, per host."""
    hbm: Bytes
    """Memory of one accelerator in bytes, as its driver reports it."""
    host_memory_bytes: Bytes
    """Memory of one host in bytes."""
    memory_bandwidth: BytesPerSecond
    """Bytes/s between one accelerator and its memory, reads and writes together."""
    peak_flops: PeakFlops
    """Peak FLOP/s of one accelerator by precision."""
    host_link_bandwidth: BytesPerSecond
    """Bytes/s between one accelerator and its host's memory (PCIe), in one direction: what offload pays."""
    nvlink: Link | None = None
    """Link between the accelerators of a host (NVLink, or what there is instead); needed with two or more per
    host."""
    network: Link | None = None
    """Link between hosts, for one accelerator; needed with two or more hosts."""
    sources: dict[str, Words] = Field(default_factory=dict)
    """Where each number is from, by its key (`nvlink.bandwidth`), and whether it counts one direction or both."""

    @model_validator(mode="after")
    def _is_joined(self) -> Cluster:
        if self.gpus_per_host > 1 and self.nvlink is None:
            raise ValueError(
                "nvlink is missing: with gpus_per_host above 1 give nvlink: {bandwidth, latency}"
            )
        if self.hosts > 1 and self.network is None:
            raise ValueError("network is missing: with hosts above 1 give network: {bandwidth, latency}")
        numbers = list(self.numbers())
        for key in self.sources:
            if key not in numbers:
                raise ValueError(f"sources: {unknown_name('key', key, numbers)}")
        return self

    def __hash__(self) -> int:
        """Hashes name and numbers: `sources` cannot be hashed."""
        return hash((self.name, *self.numbers().values()))

    @property
    def ranks(self) -> int:
        """Accelerators of all hosts together: the world size."""
        return self.hosts * self.gpus_per_host

    @property
    def shape(self) -> str:
        """Hosts x ranks per host, as `ranks=` has them: `2x4`."""
        return f"{self.hosts}x{self.gpus_per_host}"

    def numbers(self) -> dict[str, float]:
        """Every number of the cluster, by the dotted key that `sources` has for it."""
        numbers: dict[str, float] = {}
        for name in NUMBERS:
            value = getattr(self, name)
            if isinstance(value, Value):
                fields = value.to_dict().items()
                numbers |= {f"{name}.{field}": number for field, number in fields if number is not None}
            elif value is not None:
                numbers[name] = value
        return numbers

    def with_ranks(self, ranks: str) -> Cluster:
        """Returns the same cluster with as many hosts and accelerators per host as `2x4` says.

        Raises:
            UserError: when the text is not HOSTSxRANKS, or the cluster declares no link that it then needs.
        """
        match = RANKS.fullmatch(ranks.strip())
        if match is None:
            raise UserError(f"ranks: expected hosts x ranks per host such as 2x4, received {ranks!r}.")
        return self._declared(f"ranks={match[0]}", hosts=int(match[1]), gpus_per_host=int(match[2]))

    def with_hbm(self, hbm: int) -> Cluster:
        """Returns the same cluster with a declared memory per rank, in bytes.

        Raises:
            UserError: when the memory is not above 0.
        """
        return self._declared(f"hbm={byte_words(hbm)}", hbm=hbm)

    def _declared(self, how: str, **numbers: int | str) -> Cluster:
        """Returns a copy with these numbers, checked again, whose source is what was declared."""
        sources = self.sources | dict.fromkeys(numbers, f"declared: {how}")
        return parse(Cluster, self.to_dict() | numbers | {"sources": sources}, f"cluster {self.name}, {how}")


NUMBERS = (
    "hosts",
    "gpus_per_host",
    "hbm",
    "host_memory_bytes",
    "memory_bandwidth",
    "peak_flops",
    "host_link_bandwidth",
    "nvlink",
    "network",
)
"""The fields that hold numbers, in the order they are shown."""
