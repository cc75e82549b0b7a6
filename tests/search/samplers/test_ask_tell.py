"""Proposals depend on the study's seed and what is known, not on when the study was interrupted."""

from __future__ import annotations

import gc
import tracemalloc
from random import Random

import pytest
from records import bare

from dhen.schema import FeatureSchema, Table
from search.samplers import SAMPLERS
from search.samplers.ask_tell import MEMORY, Proposals
from search.samplers.context import CandidatePricer
from spaces.space import Point, Space, load_space
from trials.records.trial_record import Outcome, TrialRecord

TRIALS = {"nsga2": 50, "tpe": 30, "random": 15, "gp": 18, "ranker": 24}
"""More than two generations of NSGA-II, and than the random start of the others."""
FEATURES = FeatureSchema(tables=(Table(name="c0", rows=100), Table(name="c1", rows=100)), numeric=("n0",))


def ended(number: int, point: Point, notes: dict[str, int]) -> TrialRecord:
    """A made-up result that depends on the point alone; a few diverge, fail or have no NE."""
    random = Random(repr(sorted(point.items())))
    outcome = random.choices((Outcome.COMPLETED, Outcome.DIVERGED, Outcome.FAILED), weights=(8, 1, 1))[0]
    ne = random.choice((float("nan"), *[random.uniform(0.7, 0.8)] * 9))
    return bare(
        number,
        ne=ne,
        flops=10 ** random.uniform(4, 6),
        outcome=outcome,
        point=point,
        sampler_notes=notes,
    )


def proposals(space: Space, sampler: str) -> Proposals:
    pricer = CandidatePricer(space, FEATURES, lambda candidate: candidate.model.embedding_dim < 8)
    return Proposals(sampler=sampler, seed=3, pricer=pricer)


def as_read(record: TrialRecord) -> TrialRecord:
    """As the ledger gives it back."""
    return TrialRecord.model_validate_json(record.model_dump_json())


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_a_resumed_study_proposes_what_an_undisturbed_one_would(sampler: str) -> None:
    space = load_space("tiny")
    undisturbed, resumed = proposals(space, sampler), proposals(space, sampler)
    records: list[TrialRecord] = []
    for number in range(7, 7 + TRIALS[sampler]):  # the first numbers are the baseline's
        point, notes = undisturbed.ask(number, {})
        assert resumed.ask(number, {}) == (point, notes)
        record = ended(number, point, notes)
        undisturbed.tell(record)
        if number % 3 == 0:  # its driver died while it trained
            running = record.with_result(outcome=Outcome.INTERRUPTED, validation=None)
            resumed = proposals(space, sampler)
            resumed.remember(map(as_read, [*records, running]))
        resumed.tell(record)
        records.append(record)
        if number % 4 == 0:  # its driver died between two trials
            resumed = proposals(space, sampler)
            resumed.remember(map(as_read, records))


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_a_study_whose_space_was_widened_proposes_what_a_resumed_one_would(sampler: str) -> None:
    """Widened twice, above and below, with candidates that still train; new values are proposed."""
    space = load_space("tiny")
    undisturbed = proposals(space, sampler)
    records: list[TrialRecord] = []
    steps = {
        TRIALS[sampler] // 2: ("embedding_dim", 16),
        TRIALS[sampler] // 2 + 4: ("layer.out_embeddings", 1),
    }
    for number in range(TRIALS[sampler] + 12):
        if number in steps:
            space.widen(*steps[number])
            space.widen("training.learning_rate", 0.05)
            undisturbed.take_wider_space()
        start: Point = {"embedding_dim": 16} if number == max(steps) else {}
        point, notes = undisturbed.ask(number, start)
        if number > min(steps):
            resumed = proposals(space, sampler)
            resumed.remember(map(as_read, records))
            assert resumed.ask(number, start) == (point, notes)
        record = ended(number, point, notes)
        undisturbed.tell(record)
        records.append(record)
    later = [record.point for record in records[max(steps) + 1 :]]
    assert records[max(steps)].point["embedding_dim"] == 16
    assert any(
        point["layer.out_embeddings"] == 1 or point["training.learning_rate"] > 0.01 for point in later
    )


def test_a_candidate_that_was_taken_in_while_it_ran_does_not_fit_once_it_has_shown_so() -> None:
    """As a resumed study and another driver take it in, with what was planned."""
    space = load_space("default")
    proposed = proposals(space, "tpe")
    records = [ended(number, *proposed.ask(number, {})) for number in range(2)]
    runs = records[1].with_plan(memory_excess=-0.3)
    runs = runs.with_result(outcome=Outcome.RUNNING, validation=None)
    resumed = proposals(space, "tpe")
    resumed.remember([records[0], runs])
    resumed.tell(runs.with_plan(memory_excess=0.5).with_result(outcome=Outcome.OUT_OF_MEMORY))
    resumed.ask(2, {})
    known = resumed._known(1)
    assert known.constraints == {MEMORY: 0.5}
    assert known.state.name == "COMPLETE"


def test_start_points_are_proposed_as_they_are() -> None:
    space = load_space("tiny")
    start: Point = {"depth": 2, "layer.block0": "conv", "embedding_dim": 8}
    point, _ = proposals(space, "tpe").ask(0, start)
    assert point | start == point


@pytest.mark.parametrize("sampler", ["nsga2", "ranker", "tpe"])
def test_what_other_drivers_train_is_told_one_by_one(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that take turns propose what one would, and none puts all trials into a new study of Optuna, whose time
    grows with them."""
    space = load_space("tiny")
    one, *two = (proposals(space, sampler) for _ in range(3))
    monkeypatch.setattr(Proposals, "_new_study", lambda self: pytest.fail("a study is made anew"))
    before: list[TrialRecord] = []  # of the turn before, which has ended by now
    for number in range(TRIALS[sampler]):
        mine, other = two[number % 2], two[1 - number % 2]
        for record in before:
            one.tell(record)
            other.tell(record)  # who proposed it, two turns ago
            mine.tell(record)
            mine.tell(as_read(record))  # its processes have gone
        point, notes = mine.ask(number, {})
        assert one.ask(number, {}) == (point, notes)
        record = ended(number, point, notes)
        running = as_read(record).with_result(outcome=Outcome.RUNNING, validation=None)
        other.remember([running])
        other.tell(running)  # it has come further
        before = [record]


KIB_OF_A_CANDIDATE = 5.0
"""What the sampler may keep of a candidate of the space `default` beside its record, in KiB; it is 3.7. With
axes of its own each candidate takes 13, with its network 20."""


def test_what_a_sampler_keeps_of_a_candidate_is_little() -> None:
    space, random = load_space("default"), Random(0)
    points = [space.random_point(random) for _ in range(60)]
    known = [bare(n, ne=0.7 + n / 1e4, flops=1e5, point=point) for n, point in enumerate(points)]

    def asked() -> Proposals:
        pricer = CandidatePricer(space, FEATURES, lambda candidate: True)
        proposals = Proposals(sampler="ranker", seed=3, pricer=pricer)
        proposals.remember(known)
        proposals.ask(len(known), {})
        return proposals

    asked()  # what is imported and kept once
    tracemalloc.start()
    try:
        learned = asked()
        learned._context.pricer._costs.clear()  # as many whatever the study has
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken / 1024 / len(known) < KIB_OF_A_CANDIDATE
