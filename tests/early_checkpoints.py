"""The command, whose trainings write a checkpoint after each evaluation: `early_checkpoints.py WORDS...`."""

from __future__ import annotations


def main() -> None:
    from trials.records.task import Task

    Task.model_fields["checkpoint_seconds"].default = 0.0
    Task.model_rebuild(force=True)

    from search.cli import main

    main()


if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).parents[1])  # not `tests`, whose folders are named as the rooms
    main()
