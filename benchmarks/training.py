"""Training speed: examples a second of the baseline and of a 4-layer DHEN, as a share of the matmul peak.

Each model trains one pass over the demo log in a process of its own, as a candidate does; the median of
the repeats is given. A training step is counted as three forward passes of matmul FLOPs (forward, and
backward by inputs and by weights). The peak is this machine's own, measured in the same run.

    python benchmarks/training.py [--rows 200000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from common import machine, markdown

from dhen.config import ModelConfig
from dhen.model import named_model, parse_model
from search.config import DemoConfig, StudyConfig
from search.log import open_log
from search.objective import Trainer, new_record
from trials.hardware import matmul_peak, preferred_precision
from trials.job import TrainingConfig
from trials.launcher import Launcher
from trials.record import TrialKind

DHEN4 = {
    "embedding_dim": 16,
    "layers": [
        {
            "modules": [{"kind": "dlrm", "mlp": [256, 128]}, "attention"],
            "out_embeddings": 8,
            "ensemble": "concat",
        }
    ]
    * 4,
}
TRAINING_FLOPS = 3
"""Forward passes that a training step is worth."""


def models() -> dict[str, ModelConfig]:
    return {
        "AdvancedDLRM (baseline)": named_model("advanced_dlrm"),
        "4-layer DHEN (dlrm, attention; concat)": parse_model(DHEN4, "benchmark"),
        "DCN-V2": named_model("dcn_v2"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    log = open_log(StudyConfig(demo=DemoConfig(rows=arguments.rows)))
    peak = matmul_peak()
    precision = preferred_precision()
    at = peak.bf16 if precision == "bf16" else peak.fp32
    launcher = Launcher()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(launcher, log, Path(folder))
        for name, model in models().items():
            job = trainer.job(model, TrainingConfig(epochs=1), 0)
            record = new_record(0, TrialKind.CANDIDATE, {}, job)
            speeds = [
                trainer.train(record, job, lambda _record, _progress: None).examples_per_second or 0.0
                for _ in range(arguments.repeats)
            ]
            speed = statistics.median(speeds)
            flops = record.flops or 0.0
            share = TRAINING_FLOPS * flops * speed / at
            rows.append([name, f"{flops:,.0f}", f"{speed:,.0f}", f"{share:.1%}"])
    print(machine())
    print(
        f"matmul peak {peak.fp32 / 1e9:,.0f} GFLOP/s fp32, {peak.bf16 / 1e9:,.0f} bf16; trained in {precision}"
    )
    print(markdown(["model", "FLOPs an example", "examples/s", f"share of the {precision} peak"], rows))


if __name__ == "__main__":
    main()
