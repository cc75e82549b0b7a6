"""What an increment costs beside all weights: bytes and milliseconds, by the size of tables and the rows touched.

    python -m benchmarks.training.increments --capacities 100000 1000000 --shares 0.001 0.01 0.1

A network with two growing tables is trained and goes on online for a period, so that its bundle is real; then a
share of the tables' rows, drawn at random, is changed as a period's training would change them, with all dense
weights. Timed are: finding and writing what changed, beside writing all weights; reading and applying it, beside
reading all weights into a network that serves. Medians.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.shared.machine_and_tables import machine, markdown
from benchmarks.training.online_beside_frozen import halves, median_seconds, prepared, trained
from search.bundles.bundle import Bundle
from search.bundles.increments import read_increment, write_increment
from trials.store.weights import apply_changes, changes, read_weights, save_weights

ROWS = 4000
"""Rows of the log."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a bundle for each capacity, and prints a row for each share of its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capacities", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.01, 0.1, 0.5])
    options = parser.parse_args(arguments)
    print(f"{machine()}\n")
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, second = halves(folder, ROWS)
        for capacity in options.capacities:
            growing = (f"growing.capacity={capacity}", "growing.evict=lru")
            log = prepared(folder / str(capacity), first, growing)
            bundle = trained(folder / str(capacity), log, second, 0)
            for share in options.shares:
                lines.append([f"{capacity:,}", f"{share:.1%}", *row(bundle, capacity, share, folder)])
    header = ["rows of each table", "of them changed", "MiB", "of all weights", "found and written, ms"]
    header += ["all written, ms", "read and applied, ms", "all read, ms"]
    print(markdown(header, lines))


def row(bundle: Bundle, capacity: int, share: float, folder: Path) -> list[str]:
    """Returns what an increment costs that changes a share of the rows of all tables, beside all weights."""
    newest, whole = bundle.increments[-1], folder / "whole.safetensors"
    old = {name: tensor.detach() for name, tensor in bundle.model().state_dict().items()}
    new = {name: _learnt(tensor, share if len(tensor) > capacity else 1.0) for name, tensor in old.items()}
    scores = newest.scores()

    served = {name: tensor.clone() for name, tensor in old.items()}

    def write() -> None:
        write_increment(folder / "again", newest.info, changes(old, new), scores)

    def read() -> None:
        apply_changes(served, read_increment(written.directory).changes())

    def read_whole() -> None:
        for name, tensor in read_weights(whole).items():
            served[name].copy_(tensor)

    seconds = [median_seconds(write), median_seconds(lambda: save_weights(new, whole))]
    written = write_increment(folder / "again", newest.info, changes(old, new), scores)
    read()
    assert all(torch.equal(tensor, new[name]) for name, tensor in served.items())
    seconds += [median_seconds(read), median_seconds(read_whole)]
    part = written.bytes / whole.stat().st_size
    return [f"{written.bytes / 2**20:.2f}", f"{part:.1%}", *(f"{1e3 * took:.1f}" for took in seconds)]


def _learnt(tensor: torch.Tensor, share: float) -> torch.Tensor:
    """The tensor with a share of its rows changed, where it holds weights."""
    new = tensor.clone()
    if tensor.is_floating_point():
        row_N = torch.randperm(len(tensor))[: max(1, round(share * len(tensor)))]
        new[row_N] += 0.01 * torch.randn_like(new[row_N])
    return new


if __name__ == "__main__":
    main()
