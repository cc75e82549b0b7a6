"""The ordinary road under model parallelism: a killed rank, scores on test, retrainings, parts, a bundle."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import Run, write_log

from search.read_study import read_study
from trials.records.trial_record import Outcome

SPACE = """
layers: shared
depth: [2]
slots: 1
modules: {dcn_v2: {layers: [1]}}
model: {embedding_dim: [4], numeric_mlp: [[16]], head: [[]]}
"""
WORDS = (
    *("trials=1", "baseline_trials=1", "sampler=random", "averages=0"),
    *("threads=1", "parallel=1", "ranks=1x2"),
    *("training.epochs=2", "training.batch_size=128", "training.precision=fp32"),
)
CANDIDATE = 1
STARTED = re.compile(r"trials/00001/attempt0\.rank0\.log: ranks and servers 0, 1 are processes \d+, (\d+)")


@contextmanager
def last_rank_killed(out: Path) -> Iterator[None]:
    """Kills the last rank of the first candidate as soon as it has begun to train."""

    def kill() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            log, events = out / "driver.log", out / "trials" / "00001" / "events.jsonl"
            started = STARTED.search(log.read_text()) if log.exists() else None
            if started is not None and events.exists() and events.stat().st_size:
                os.kill(int(started[1]), signal.SIGKILL)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize(
    "technique", ["tensor2", pytest.param("pipeline2+micro_batches=2", marks=pytest.mark.slow)]
)
def test_all_that_follows_a_training_works(dhen_search: Run, tmp_path: Path, technique: str) -> None:
    log, space = write_log(tmp_path / "log.csv", 2500), tmp_path / "space.yaml"
    space.write_text(SPACE)
    out, bundle, scores = tmp_path / "study", tmp_path / "bundle", tmp_path / "scores.csv"
    with last_rank_killed(out):
        dhen_search("run", "--data", log, "--out", out, *WORDS, f"space={space}", f"technique={technique}")
    (candidate,) = read_study(out).candidates
    killed, after = candidate.attempts
    assert (killed.outcome, after.outcome) == (Outcome.INTERRUPTED, Outcome.COMPLETED)
    assert after.executed == killed.strategy == technique
    assert candidate.result.test is not None

    dhen_search("ablate", out, "--pick", CANDIDATE, "--seeds", 2)
    retrainings = read_study(out).retrainings
    retrained = {trial.origin.removed: trial for trial in retrainings}
    assert retrained.keys() == {None, "layer0"}
    assert retrained[None].attempts[-1].executed == technique
    # a part of one layer is no pipeline of two stages
    alone = "tensor2" if technique == "tensor2" else "dp+micro_batches=2"
    assert retrained["layer0"].attempts[-1].executed == alone
    assert all(trial.result.outcome is Outcome.COMPLETED for trial in retrainings)

    dhen_search("export", out, "--pick", CANDIDATE, "--out", bundle)
    verified = json.loads(dhen_search("verify", bundle, "--data", log, "--json").stdout)
    assert verified["same_log"]
    assert verified["scores_within"] < 1e-5
    dhen_search("predict", bundle, "--data", log, "--out", scores)
    assert len(scores.read_text().splitlines()) == 2501
