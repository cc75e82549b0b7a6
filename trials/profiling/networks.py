"""Whole networks that are timed beside their parts: a step takes more than its parts alone.

Python runs between the parts, gradients are found for more tensors, and what a part needs is in no cache. What
that takes is fitted on a few networks of the paper's modules, which are always the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import cycle, islice
from statistics import median
from typing import NamedTuple

from dhen.blocks.cross import CrossConfig
from dhen.blocks.dcn import DcnConfig
from dhen.blocks.dlrm import DlrmConfig
from dhen.blocks.linear import LinearConfig
from dhen.blocks.mlp import MlpConfig
from dhen.config import LayerConfig
from dhen.ensembles.paper import SumConfig
from dhen.model import build_model
from trials.cluster.machine import Precision
from trials.job import TrainingConfig
from trials.planner.segments import Segment, segments
from trials.profiling.cases import SEVERAL
from trials.profiling.inputs import Inputs, labelled_batch
from trials.training.local_step import TrainStep

INPUTS = Inputs(26, 13, 2, 39, 16)
LAYERS = (
    LayerConfig(modules=(LinearConfig(),)),
    LayerConfig(modules=(DlrmConfig(), LinearConfig())),
    LayerConfig(modules=(MlpConfig(), DcnConfig(), CrossConfig()), ensemble=SumConfig()),
)
DEPTHS = (1, 3)
BATCH = 256
"""Examples of a step: few, so that what lies between the parts is much of it."""
WARM_UP, STEPS = 3, 11
ROWS = 100_000
"""Rows of a log for which settings are resolved; none of them that is left open matters to a step's time."""


class Network(NamedTuple):
    """A whole step that was timed, of tables without decay."""

    segments: tuple[Segment, ...]
    seconds: float


def timed_networks(precision: Precision) -> Iterator[Network]:
    """Yields each network with its seconds for a step, a median."""
    schema = INPUTS.schema()
    training = TrainingConfig(batch_size=BATCH).resolved(ROWS, precision)
    batches = [labelled_batch(schema, BATCH) for _ in range(SEVERAL)]
    for layer in LAYERS:
        for depth in DEPTHS:
            model = INPUTS.model((layer,) * depth)
            step = TrainStep(build_model(model, schema).train(), training)
            seconds = []
            for batch in islice(cycle(batches), WARM_UP + STEPS):
                began = time.perf_counter()
                step(batch)
                seconds.append(time.perf_counter() - began)
            its_segments = segments(model, schema, precision, "cpu", BATCH)
            yield Network(its_segments, median(seconds[WARM_UP:]))
