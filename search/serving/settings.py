"""What the processes of a server tell each other: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

GRACE_SECONDS = 30.0
"""Seconds that requests which are being answered may still take when the server ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How a bundle is served."""

    bundle: Path
    mapped: bool
    """Whether the weights stay in their files."""
    threads: int
    """Torch's threads in each worker."""
    max_body_bytes: int
    token: str | None
    """What clients must show; None where this machine alone is answered."""


class Ready(NamedTuple):
    """A worker has the model, and is about to answer."""

    version: str


class Refused(NamedTuple):
    """A worker cannot serve the bundle."""

    reason: str
