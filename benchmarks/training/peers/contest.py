"""What a peer is told and what it hands back: two JSON files between beside_peers.py and a peer's own process.

Nothing but the standard library is needed here: a peer runs in an environment of its own.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "dcn_v2": {"embedding_dim": 10, "cross_layers": 4, "mlp": [400, 400, 400]},
    "dhen3": {
        "embedding_dim": 16,
        "layers": 3,
        "mlp": [256, 128],
        "cross_layers": 2,
        "out_embeddings": 8,
        "head": [64],
    },
}
"""dcn_v2: cross layers beside an MLP. dhen3: in each layer pairwise dots under an MLP beside cross layers."""
LEARNING_RATE = 1e-3
"""Of Adam, for every contestant (AdamW without decay is Adam)."""
WARM_UP_STEPS = 5
"""At the start of each pass, left out of the speed."""

Lap = tuple[int, float]
"""Examples of a step, seconds from the end of the step before it."""


def steady_speed(passes: list[list[Lap]]) -> float:
    """Examples a second of the steps after the warm-up of their pass."""
    steady = [lap for laps in passes for lap in laps[WARM_UP_STEPS:]]
    if not steady:
        raise SystemExit(f"a pass needs more than {WARM_UP_STEPS} steps: give more rows or a smaller --batch")
    return sum(examples for examples, _ in steady) / sum(seconds for _, seconds in steady)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One training of a peer. Its folder holds train.npz, validation.npz and test.npz with c0, c1 ... label."""

    folder: str
    tables: list[int]
    """Rows of the table of c0, c1 ..."""
    architecture: str
    batch_size: int
    epochs: int
    dropout: float
    seed: int
    threads: int
    bf16: bool
    """Whether this machine multiplies bf16 matrices faster."""
    loader: str
    """How FuxiCTR reads: npz or parquet."""

    @staticmethod
    def from_command_line() -> Contest:
        """The contest whose file is the only argument."""
        return Contest(**json.loads(Path(sys.argv[1]).read_text()))

    @property
    def shape(self) -> dict[str, Any]:
        """Widths of the architecture."""
        return ARCHITECTURES[self.architecture]

    def save(self) -> Path:
        """Writes the file."""
        path = Path(self.folder) / "contest.json"
        path.write_text(json.dumps(asdict(self)))
        return path


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a training took."""

    passes: list[list[Lap]]
    """Steps of each pass over the training rows."""
    epoch_seconds: float
    """Of a pass with its evaluation, mean over the passes."""
    flops: float
    """Matmul FLOPs of a forward pass, an example."""

    @property
    def examples_per_second(self) -> float:
        """See `steady_speed`."""
        return steady_speed(self.passes)

    def save(self, folder: str) -> None:
        """Writes the file; the predictions for the test rows go to test.npy beside it."""
        (Path(folder) / "result.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> Result:
        """What a peer has written."""
        return Result(**json.loads((folder / "result.json").read_text()))


class Stopwatch:
    """Laps of a training loop: one a step; what lies between the end of a pass and `begin` is not counted."""

    def __init__(self) -> None:
        self.passes: list[list[Lap]] = []
        self._last = 0.0

    def begin(self) -> None:
        """A pass starts."""
        self.passes.append([])
        self._last = time.perf_counter()

    def lap(self, examples: int) -> None:
        """A step ended."""
        now = time.perf_counter()
        self.passes[-1].append((examples, now - self._last))
        self._last = now
