"""Three candidates train at once on three nodes of a real Ray cluster, each with another memory technique, when
one of the nodes is killed, which comes back."""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from chaos import processes
from chaos.invariants import judge, reference_of
from chaos.on_ray import OnRay
from chaos.scenes import Scene
from faulty_hosts import MARKS, add_node
from tools import needs

from search.read_study import read_study
from trials.records.trial_record import Outcome, TrialRecord

pytestmark = [*MARKS, needs("ray")]
SPACE = """\
layers: shared
depth: [1, 2]
slots: 1
modules: {mlp: {mlp: [[64], [512], [1024]]}}
ensemble: [sum]
out_embeddings: [4]
raw_numeric: [false]
model: {embedding_dim: [16], numeric_mlp: [[16]], head: [[]]}
start: [{depth: 2, layer.mlp.mlp: "1024"}, {depth: 2, layer.mlp.mlp: "512"}]
"""
WORDS = ("demo.rows=4000", "ranks=1x1", "hbm=9000KiB", "training.batch_size=256", "training.epochs=2")
"""Of the three networks each fits so much memory by another technique."""
NODES = (1, 1, 1)
LOST = 2
"""The trial whose node is lost: its network is the largest."""


@pytest.mark.slow
def test_three_candidates_train_on_while_a_node_is_lost_and_comes_back(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lost")  # a short name: fork servers have sockets below it
    space = folder / "space.yaml"
    space.write_text(SPACE)
    words = (f"space={space}", *WORDS, "training.evaluate_every=1600")
    before = processes.shared_memory()
    with closing(OnRay(folder / "ray", Path("demo"), 0, environment, cpus=NODES)) as scene:
        scene.words = (*words, "launcher=ray", "parallel=null")
        scene.begin()
        stopped = three_stopped(scene)
        lost = node_of(scene, LOST)
        scene.cluster.remove_node(lost, allow_graceful=False)
        add_node(scene.cluster, 1)
        assert scene.wait(lambda: scene.said().count("takes part") == 4), scene.said()
        for trial in stopped.keys() - {LOST}:
            os.kill(stopped[trial], signal.SIGCONT)
        scene.finish()
        assert scene.drivers[0].returncode == 0, scene.said()
        assert "up to 3 candidates train at once on the cluster's nodes" in scene.said()

        with closing(Scene(folder / "alone", Path("demo"), 0, environment)) as undisturbed:
            undisturbed.words = (*words, "parallel=2")
            undisturbed.begin()
            undisturbed.finish()
            reference = reference_of(read_study(undisturbed.out))
        verdict = judge(scene, {}, reference, before)
        assert verdict.problems == []
        assert verdict.compared == 4

        _, *candidates = read_study(scene.out).trials
        assert len({trial.result.technique for trial in candidates}) == 3
        assert max(map(began, candidates)) < min(map(first_attempt_ended, candidates))
        for trial in candidates:
            *interrupted, last = (attempt.outcome for attempt in trial.attempts)
            assert interrupted == [Outcome.INTERRUPTED] * (trial.number == LOST)
            assert last is Outcome.COMPLETED
            whole = trial.attempts[-1]  # also of a training that goes on
            assert whole.measured_bytes == pytest.approx(whole.predicted_bytes, rel=0.01)
        trial = candidates[LOST - 1]
        assert f"node 127.0.0.1 ({lost.node_id[:8]})" in str(trial.attempts[0].error)
        log = (scene.out / "trials" / f"{LOST:05d}" / "attempt1.rank0.log").read_text()
        assert "goes on from" in log


def three_stopped(scene: Scene) -> dict[int, int]:
    """The ranks of three candidates by their trials, each stopped after its first checkpoint: so all three are
    under way together."""
    stopped = dict[int, int]()

    def all_are() -> bool:
        for rank, trial in processes.ranks(scene.mark).items():
            log = scene.out / "trials" / f"{trial:05d}" / "attempt0.rank0.log"
            if trial and trial not in stopped and "written in" in log.read_text():
                os.kill(rank, signal.SIGSTOP)
                stopped[trial] = rank
        return len(stopped) == 3

    assert scene.wait(all_are), scene.said()
    return stopped


def node_of(scene: OnRay, trial: int) -> object:
    """The node that a trial's rank is on, as the driver's log says."""
    log = (scene.out / "driver.log").read_text()
    (beginning,) = re.findall(rf"/{trial:05d}: ranks and servers 0 are on node 127.0.0.1 \((\w+)\)", log)
    (node,) = (node for node in scene.cluster.worker_nodes if node.node_id.startswith(beginning))
    return node


def began(trial: TrialRecord) -> datetime:
    return datetime.fromisoformat(str(trial.origin.started_at))


def first_attempt_ended(trial: TrialRecord) -> datetime:
    return began(trial) + timedelta(seconds=trial.attempts[0].seconds or 0.0)
