"""What all hosts of a study must have alike, as this host has it."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version


@cache
def versions_here() -> dict[str, str]:
    """Returns the versions of what makes a training the same everywhere."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"dhen-search": version("dhen-search"), "torch": version("torch"), "python": python}


@cache
def devices_here() -> int | None:
    """Returns the number of CUDA devices; None where ranks train on the CPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else None
