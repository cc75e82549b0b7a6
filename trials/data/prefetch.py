"""Batches on an accelerator ahead of their step: prepared by a thread, copied from pinned memory meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import torch

from trials.data.loader import Batch

AHEAD = 3
"""Number of batches prepared ahead."""


def on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yields the batches on `device`; for the CPU as they are, since there preparing competes with the step.

    On CUDA a thread prepares and pins them, and the copy does not wait for the step before it. An error
    while a batch is prepared is raised where the batch would have come.
    """
    if device.type == "cpu":
        yield from batches
        return
    for batch in ahead(batches, pin=True):
        yield batch.to(device, non_blocking=True)


def ahead(batches: Iterator[Batch], *, pin: bool) -> Iterator[Batch]:
    """Yields the same batches, prepared by a thread, in page-locked memory if `pin` (needs an accelerator)."""
    ready: queue.Queue[Batch | Exception | None] = queue.Queue(AHEAD)
    stopped = threading.Event()

    def put(item: Batch | Exception | None) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def prepare() -> None:
        try:
            for batch in batches:
                put(batch.pinned() if pin else batch)
                if stopped.is_set():
                    return
            put(None)
        except Exception as error:
            put(error)

    thread = threading.Thread(target=prepare, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
