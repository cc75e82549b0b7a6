"""What a reader should know of tables in fp16 and of quantized all-to-all, where they do less than they could."""

from __future__ import annotations

from trials.job import TrainingConfig
from trials.planner.placement import Placement


def table_notes(training: TrainingConfig, placement: Placement, device: str) -> tuple[str, ...]:
    """Sentences, on a device that is `cpu` or `cuda`."""
    notes = []
    if training.table_precision == "fp16" and placement.shards and device == "cpu":
        notes.append(
            "training.table_precision=fp16: FBGEMM's kernels for CPUs round updates of sharded tables to the "
            "nearest, and lose those below 1/2048 of a weight; on GPUs, on one rank, and for tables that all "
            "ranks hold whole, rounding is stochastic."
        )
    if training.all_to_all_precision != "fp32" and not placement.shards:
        notes.append(
            f"training.all_to_all_precision={training.all_to_all_precision} changes nothing here: every rank has "
            "all tables, and sends no embeddings."
        )
    return tuple(notes)
