"""Every sampler of the registry: valid points, no twins where it says so, and it learns; the ranker's parts."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from functools import cache

import numpy as np
import pytest
from fake_processes import evaluated
from records import bare

from dhen.schema import FeatureSchema, Table
from search.samplers import SAMPLERS, check_sampler, make_sampler
from search.samplers import context as static_cost
from search.samplers.ask_tell import Proposals
from search.samplers.context import CandidatePricer, PricedCandidate, SamplerContext, evenly
from search.samplers.optuna_samplers import FIRST_GENERATION, GP_MOST_TRIALS
from search.samplers.ranker.ensemble import MOST_LEARNED, MOST_TESTED, PairComparisons, Pairs, train
from search.samplers.ranker.propose import (
    MOST_TRIED,
    DescriptionEncoder,
    describe,
    expected_gain,
    hypervolume,
    likely_in_time,
)
from spaces.space import Candidate, Point, Space, SpaceConfig, load_space
from trials.records.trial_record import CurvePoint, Outcome, TrialRecord

FEATURES = FeatureSchema(tables=(Table(name="c0", rows=100), Table(name="c1", rows=100)), numeric=("n0",))
EFFORT = {"gp": (30, 1), "ranker": (30, 2)}
"""Trials and searches that show it: those that ask for longer need fewer."""
USUAL_EFFORT = (100, 6)
LEARNED = [
    pytest.param(sampler, marks=[pytest.mark.slow] if sampler == "gp" else [])
    for sampler in sorted(set(SAMPLERS) - {"random"})
]
"""Samplers that learn; fitting Gaussian processes takes as long as all the others."""


def pricer_of(space: Space) -> CandidatePricer:
    return CandidatePricer(space, FEATURES, lambda _: True)


def made_up_ne(priced: PricedCandidate) -> float:
    """Best with cross and attention together, two layers, and a learning rate of 0.004."""
    candidate = priced.candidate
    kinds = {block.kind for block in candidate.model.layers[0].modules}
    worth = 0.02 * len(kinds & {"cross", "attention"}) + 0.01 * (len(candidate.model.layers) - 1)
    return 0.8 - worth + 0.01 * math.log(candidate.training["learning_rate"] / 0.004) ** 2


def record_of(number: int, point: Point, ne: float, *, flops: float = 1e5, **more: object) -> TrialRecord:
    return bare(number, ne=ne, flops=flops, point=point, **more)


@cache
def found_by(sampler: str, trials: int, seed: int = 0) -> float:
    """Hypervolume of the front."""
    space = load_space("tiny")
    proposals = Proposals(sampler=sampler, seed=seed, pricer=pricer_of(space))
    found = []
    for number in range(trials):
        point, notes = proposals.ask(number, {}, space.left_for_tuning)
        priced = pricer_of(space).price(point)
        assert priced is not None
        ne = made_up_ne(priced)
        found.append((math.log10(priced.flops), ne))
        proposals.tell(record_of(number, point, ne, flops=priced.flops, sampler_notes=notes))
    return hypervolume(found, (5.0, 0.80))


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_every_point_is_of_the_space(sampler: str) -> None:
    space = load_space("tiny")
    proposals = Proposals(sampler=sampler, seed=1, pricer=pricer_of(space))
    for number in range(15):
        point, _ = proposals.ask(number, {})
        assert {axis.name: axis.decode(point[axis.name]) for axis in space.axes}
        assert len(point) == len(space.axes)
        proposals.tell(record_of(number, point, 0.7 + 0.001 * number, flops=10.0 ** (4 + number % 3)))


@pytest.mark.parametrize("sampler", LEARNED)
def test_it_learns(sampler: str) -> None:
    """Its front covers more than that of random search with as many candidates."""
    trials, searches = EFFORT.get(sampler, USUAL_EFFORT)
    by_chance, found = (
        statistics.mean(found_by(name, trials, seed) for seed in range(searches))
        for name in ("random", sampler)
    )
    assert found > 1.04 * by_chance


def test_the_ranker_learns_from_few() -> None:
    """Thirty of its candidates are ahead of a hundred random ones."""
    assert found_by("ranker", 30) > found_by("random", 100)


def few_networks() -> Space:
    """Twelve networks."""
    config = {"modules": {"cross": {}, "linear": {}, "conv": {}}, "slots": 1, "depth": [1, 2]}
    fixed = {"out_embeddings": [2, 4], "raw_numeric": False, "ensemble": "sum", "model": {"embedding_dim": 4}}
    return Space("few", SpaceConfig.model_validate(config | fixed))


def test_the_ranker_proposes_no_network_twice_and_goes_on_when_there_is_none_left() -> None:
    space = few_networks()
    proposals = Proposals(sampler="ranker", seed=0, pricer=pricer_of(space))
    networks = []
    for number in range(16):
        point, _ = proposals.ask(number, {})
        priced = pricer_of(space).price(point)
        assert priced is not None
        networks.append(priced.fingerprint)
        if number % 2:  # the others still train
            proposals.tell(record_of(number, point, 0.7 + 0.01 * len(priced.candidate.model.layers)))
    assert len(set(networks[:12])) == 12
    assert set(networks[12:]) < set(networks[:12])


def test_the_ranker_proposes_what_fits() -> None:
    space = load_space("tiny")

    def fits(candidate: Candidate) -> bool:
        return all(block.kind != "dlrm" for layer in candidate.model.layers for block in layer.modules)

    proposals = Proposals(sampler="ranker", seed=0, pricer=CandidatePricer(space, FEATURES, fits))
    for number in range(20):
        point, _ = proposals.ask(number, {})
        assert fits(space.decode(point))
        proposals.tell(record_of(number, point, 0.7 + 0.01 * (number % 3)))


def test_gaussian_processes_hand_over_to_tpe() -> None:
    context = SamplerContext(pricer_of(load_space("tiny")))
    names = []
    for count in (0, GP_MOST_TRIALS):
        context.points = {number: {} for number in range(count)}
        names.append(type(make_sampler("gp", 0, {}, context)).__name__)
    assert names == ["GPSampler", "TPESampler"]


def test_an_unknown_sampler_is_told_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 'ranker'\?.*auto, gp, nsga2, random, ranker, tpe"):
        check_sampler("rankers")


def test_points_of_the_same_network_have_the_same_features() -> None:
    space, rng = load_space("default"), random.Random(0)
    pricer = pricer_of(space)
    point = space.random_point(rng) | {
        "layer.block0": "dcn_v2",
        "layer.block1": "linear",
        "layer.block2": "none",
    }
    twin = point | {
        "layer.block0": "linear",
        "layer.block1": "none",
        "layer.block2": "dcn_v2",
        "layer.conv.channels": 6 - int(point["layer.conv.channels"] or 0),
    }
    first, second = pricer.price(point), pricer.price(twin)
    assert first is not None
    assert second is not None
    assert describe(first) == describe(second)
    others = (pricer.price(space.random_point(rng)) for _ in range(20))
    described = [describe(each) for each in (first, *(other for other in others if other))]
    x_NF = DescriptionEncoder(described).matrix(described)
    assert np.isfinite(x_NF).all()
    assert np.allclose(x_NF.mean(axis=0), 0.0, atol=0.5)


def curve(*ne: float) -> tuple[CurvePoint, ...]:
    return tuple(evaluated(100 * n, each, epoch=0.1 * n).point for n, each in enumerate(ne, 1))


def test_candidates_are_compared_at_the_latest_examples_that_both_have_seen() -> None:
    finished = [record_of(n, {}, 0.70 + 0.01 * n, curve=curve(0.9, 0.80 + 0.01 * n)) for n in range(8)]
    stopped = record_of(8, {}, 0.0, outcome=Outcome.STOPPED, validation=None, curve=curve(0.9, 0.835))
    diverged = record_of(9, {}, 0.0, outcome=Outcome.DIVERGED, validation=None)
    numbers = np.arange(10)
    comparison = PairComparisons([*finished, stopped, diverged], temperature=0.01)
    pairs = comparison.among(numbers, numbers)
    logit_NN = pairs.logit_LR
    assert np.allclose(logit_NN, -logit_NN.T)
    assert logit_NN[0, 1] == pytest.approx(1.0)
    # at 200 examples it stood between the fourth and the fifth, who kept their distance to the end
    assert logit_NN[8, 3] == pytest.approx(-0.5)
    assert logit_NN[8, 4] == pytest.approx(0.5)
    assert (logit_NN[9] <= 0).all()
    assert (np.diag(pairs.weight_LR) == 0).all()
    some = comparison.among(np.array([8, 9]), np.array([3, 8]))
    assert np.array_equal(some.logit_LR, logit_NN[[8, 9]][:, [3, 8]])
    assert np.array_equal(some.weight_LR, pairs.weight_LR[[8, 9]][:, [3, 8]])


def test_pairs_of_one_that_was_stopped_early_weigh_less() -> None:
    rng = random.Random(0)
    finished = [
        record_of(n, {}, 0.70 + 0.01 * n, curve=curve(0.80 + 0.01 * n + rng.gauss(0, 0.02)))
        for n in range(12)
    ]
    stopped = record_of(12, {}, 0.0, outcome=Outcome.STOPPED, validation=None, curve=curve(0.85))
    numbers = np.arange(13)
    weight_NN = PairComparisons([*finished, stopped], temperature=0.01).among(numbers, numbers).weight_LR
    assert weight_NN[0, 1] == 1.0
    assert 0.0 < weight_NN[0, 12] < 0.5


def test_the_expected_gain_is_the_mean_over_draws() -> None:
    front, reference = [(4.0, 0.78), (5.0, 0.75), (6.0, 0.74)], (7.0, 0.80)
    flops_N, ne_N, error_N = (
        np.array([4.5, 5.5, 3.0]),
        np.array([0.76, 0.74, 0.85]),
        np.array([0.01, 0.005, 0.02]),
    )
    draws = np.random.default_rng(0).normal(size=4000)
    before = hypervolume(front, reference)
    for index, gain in enumerate(expected_gain(flops_N, ne_N, error_N, front, reference)):
        drawn = [(flops_N[index], ne_N[index] + error_N[index] * draw) for draw in draws]
        mean = statistics.mean(hypervolume([*front, each], reference) - before for each in drawn)
        assert gain == pytest.approx(mean, rel=0.1, abs=1e-5)


def test_a_proposal_compares_no_more_pairs_the_more_candidates_are_known() -> None:
    """All pairs of thousands of candidates would fill gigabytes."""
    rng = np.random.default_rng(0)
    x_NF = rng.normal(size=(900, 3))
    asked: list[tuple[int, int]] = []

    def among(left: np.ndarray, right: np.ndarray) -> Pairs:
        asked.append((len(left), len(right)))
        ahead_LR = x_NF[left, 0][:, None] - x_NF[right, 0]
        return Pairs(ahead_LR, (ahead_LR != 0).astype(float))

    rankers = train(x_NF, among, rng)
    assert max(asked) == (MOST_TESTED, MOST_LEARNED)
    score_N = rankers[0].scores(x_NF)
    assert np.corrcoef(score_N, x_NF[:, 0])[0, 1] > 0.9
    assert len(rankers[0].held_out) == 900 - MOST_LEARNED


def test_costs_of_few_of_the_networks_that_were_priced_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study draws hundreds of networks for each proposal."""
    monkeypatch.setattr(static_cost, "MOST_COSTS", 5)
    space, rng = load_space("default"), random.Random(0)
    pricer = CandidatePricer(space, FEATURES, lambda candidate: True)
    points = [space.random_point(rng) for _ in range(20)]
    first = [pricer.price(point) for point in points]
    assert len(pricer._costs) == 5
    assert [pricer.price(point) for point in points] == first


@pytest.mark.parametrize("trials", [3, 20])
def test_a_proposal_ends_where_nothing_fits(trials: int) -> None:
    """No point may fit of one architecture that is tuned, and a learning rate has points without end."""
    space = load_space("tiny")
    asked: list[Candidate] = []

    def never(candidate: Candidate) -> bool:
        asked.append(candidate)
        return False

    proposals = Proposals(sampler="ranker", seed=0, pricer=CandidatePricer(space, FEATURES, never))
    rng = random.Random(0)
    for number in range(trials):
        point = space.random_point(rng)
        proposals.remember([record_of(number, point, 0.7 + 0.001 * number)])
    architecture = {name: value for name, value in point.items() if not name.startswith("training.")}
    proposed, _ = proposals.ask(trials, {}, architecture)
    assert 0 < len(asked) <= MOST_TRIED
    assert proposed.items() >= architecture.items()


def test_a_point_that_is_given_whole_may_be_a_parent() -> None:
    space = load_space("tiny")
    proposals = Proposals(sampler="nsga2", seed=0, pricer=pricer_of(space))
    _, notes = proposals.ask(0, space.random_point(random.Random(0)))
    assert notes == FIRST_GENERATION


def test_forward_times_are_expected_of_a_pool_that_is_larger_than_what_was_timed() -> None:
    """Times follow FLOPs; the smaller half of the networks was timed, and the limit is in the other half."""
    pool = itertools.islice(evenly(pricer_of(load_space("default")), set(), random.Random(0), {}), 120)
    by_flops = sorted(pool, key=lambda drawn: drawn.flops)
    ms = [math.sqrt(drawn.flops) / 1e3 for drawn in by_flops]
    timed = [(describe(drawn), each) for drawn, each in zip(by_flops[:60], ms, strict=False)]
    limit = ms[90]
    kept = likely_in_time(timed, by_flops[60:], limit)
    within = [math.sqrt(drawn.flops) / 1e3 <= limit for drawn in kept]
    assert len(kept) < 50
    assert sum(within) > 0.7 * len(kept)
