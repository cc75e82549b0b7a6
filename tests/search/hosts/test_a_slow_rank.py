"""One of two ranks is slow: the study says which one, and on a Ray cluster with a third node the candidate goes on
there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from chaos import kills, processes
from chaos.invariants import judge, reference_of
from chaos.on_ray import OnRay
from chaos.scenes import Scene
from faulty_hosts import MARKS
from tools import needs

from search.mlflow.store import open_client, store_uri
from search.read_study import read_study
from trials.records.events import EVENTS, EvaluationEvent, EventReader
from trials.records.trial_record import MOVED, CurvePoint, Outcome

pytestmark = MARKS
BATCH_SIZE = 128
WORDS = (
    *("demo.rows=10000", f"training.batch_size={BATCH_SIZE}", "training.epochs=4"),
    *("training.evaluate_every=8000", "training.learning_rate=1e-4", "training.embedding_learning_rate=1e-3"),
    "trials=1",
)
"""A candidate of 250 steps with few evaluations, which learns too little to end early."""
SLOW = 1
"""The rank that is slow."""
CHECKED_STEPS = 25
"""Steps after which ranks tell each other how long they took themselves; a slow one is named after three to six
such times of more than a second."""
CHECKED_SECONDS = 5.0
"""What the slow rank makes of them on any machine, with room for one that was busy before."""
NODES = (1, 1, 1)


def slow_until(scene: Scene, there: str) -> None:
    """Slows a rank of the candidate down, once there is a checkpoint, until the study has said something.

    How fast the candidate trained before tells how slow the rank must be, so that the candidate lasts long enough.
    """
    points, reader = list[CurvePoint](), EventReader(scene.out / "trials" / "00001" / EVENTS)

    def is_evaluated() -> bool:
        points.extend(event.point for event in reader() if isinstance(event, EvaluationEvent))
        return bool(points)

    def ranks() -> dict[int | None, int]:
        found = processes.ranks(scene.mark).items()
        return {processes.rank_of(pid): pid for pid, trial in found if trial == 1}

    assert scene.wait(lambda: SLOW in ranks()), scene.said()
    pid = ranks()[SLOW]
    assert scene.wait(is_evaluated), scene.said()
    step_seconds = points[0].seconds / (points[0].examples / BATCH_SIZE)
    share = min(kills.SHARE, CHECKED_STEPS * step_seconds / CHECKED_SECONDS)
    kills.slow_down(pid, lambda: there in scene.said(), share)
    assert there in scene.said(), scene.said()


@pytest.fixture(scope="module")
def on_one_machine(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A finished study, of whose candidate a rank was slow, and trained on."""
    folder = tmp_path_factory.mktemp("slow")  # a short name: fork servers have sockets below it
    with closing(Scene(folder / "local", Path("demo"), 0, environment)) as scene:
        scene.words = (*WORDS, "ranks=1x2")
        scene.begin()
        slow_until(scene, f"trial 1: rank {SLOW} on ")
        scene.finish()
        assert scene.drivers[0].returncode == 0, scene.said()
        yield scene


def test_a_slow_rank_on_one_machine_is_named(on_one_machine: Scene) -> None:
    record = read_study(on_one_machine.out)
    (attempt,) = record.trials[1].attempts
    assert attempt.outcome is Outcome.COMPLETED
    words = str(attempt.slow_rank)
    assert words.startswith(f"rank {SLOW} on ")
    assert words.endswith("and trains on, as there is no other machine to go on at")
    assert re.search(
        r"takes [0-9.]+ times as long for its part of a step as the others, since [0-9,]+ ex", words
    )
    assert f"trial 1: {words}" in on_one_machine.said()
    assert record.trials[0].attempts[0].slow_rank is None
    client = open_client(store_uri(on_one_machine.out))
    experiment = client.get_experiment_by_name(record.name)
    (run,) = client.search_runs([experiment.experiment_id], "tags.`trial.number` = '1'")
    assert run.data.tags["attempt.0.slow_rank"] == words
    assert words in (on_one_machine.out / "report.html").read_text()


@pytest.mark.slow
@needs("ray")
def test_a_candidate_with_a_slow_rank_goes_on_on_another_node(
    on_one_machine: Scene, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("slow")
    before = processes.shared_memory()
    with closing(OnRay(folder / "ray", Path("demo"), 0, environment, cpus=NODES)) as scene:
        scene.words = (*WORDS, "ranks=2x1", "launcher=ray")
        scene.candidates = 1
        scene.begin()
        slow_until(scene, MOVED)
        scene.finish()
        assert scene.drivers[0].returncode == 0, scene.said()

        # there the candidate was slow too, and nothing broke it off
        verdict = judge(scene, {}, reference_of(read_study(on_one_machine.out)), before)
        assert verdict.problems == []
        assert verdict.compared == 2

        interrupted, last = read_study(scene.out).trials[1].attempts
        assert (interrupted.outcome, last.outcome) == (Outcome.INTERRUPTED, Outcome.COMPLETED)
        assert interrupted.was_moved
        (slow_node,) = re.findall(rf"rank {SLOW} on node 127.0.0.1 \((\w+)\) is slow", str(interrupted.error))
        assert f"node 127.0.0.1 ({slow_node}) is avoided for 10 minutes" in scene.said()
        first, second = nodes_of_attempts(scene)
        assert slow_node in first
        assert slow_node not in second
        assert "goes on from" in (scene.out / "trials" / "00001" / "attempt1.rank0.log").read_text()


def nodes_of_attempts(scene: Scene) -> list[set[str]]:
    """The nodes that the two ranks of each attempt of the candidate were on, as the driver's log says."""
    log = (scene.out / "driver.log").read_text().partition("is scored on")[0]
    nodes = re.findall(r"/00001: ranks and servers \d are on node 127.0.0.1 \((\w+)\)", log)
    return [set(nodes[at : at + 2]) for at in range(0, len(nodes), 2)]
