"""The folders of a training's checkpoints: each is named after the number of steps that it is made after."""

from __future__ import annotations

from pathlib import Path

PREFIX = "after-"


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, the newest first; one that is still being made is none."""
    made = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(made, key=steps_of, reverse=True)


def steps_of(checkpoint: Path) -> int:
    """Returns the number of steps that a checkpoint is made after."""
    return int(checkpoint.name.removeprefix(PREFIX))
