"""Users and items of the demo log recur, come and go, and mean what the settings say; nothing else moves."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from dhen.errors import UserError
from dhen.values import parse
from trials.data.demo import SHARES, TIME, DemoLog
from trials.data.demo.generate import (
    CATEGORICAL,
    COUNTER,
    COUNTS,
    MULTI_HOT,
    Examples,
    Floats,
    Ints,
    Teacher,
    generate,
)

ROWS = 70_000  # more than one group of rows
RECURRING = DemoLog(rows=ROWS, seed=3, users=2_000, items=300, own=0.1, affinity=0.5)
DRIFTING = RECURRING.replace(lifetime_days=3.0)
PLAIN_SHA256 = "fee0dc8945b18a7867a38565ded41dfe098c84dda55503ac61ba39f9eed7a473"
"""Hash of the first 5,000 rows of the log as it was before there were users and items."""
DAY = 86_400


def table_of(spec: DemoLog, folder: Path) -> pa.Table:
    return pq.read_table(generate(spec, folder / "log.parquet"))


@pytest.fixture(scope="module")
def recurring(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    return table_of(RECURRING, tmp_path_factory.mktemp("recurring"))


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    return table_of(DRIFTING, tmp_path_factory.mktemp("drifting"))


def id_logits(teacher: Teacher, day: float, ids: dict[str, Ints]) -> Floats:
    """Logits by user and item of examples at one moment that are alike in all else."""
    size = len(next(iter(ids.values())))
    alike = teacher.draw_examples(np.random.default_rng(0), np.zeros(1))
    examples: Examples = {name: np.repeat(alike[name], size) for name in (*COUNTS, COUNTER, *CATEGORICAL)}
    for name in MULTI_HOT:
        values, _ = alike[name]
        examples[name] = np.tile(values, size), np.arange(size + 1) * len(values)
    parts = teacher.by_order(examples | {TIME: np.full(size, round(day * DAY))} | ids)
    return np.sum([parts["own"], parts["affinity"]], axis=0)


def content_hash(table: pa.Table) -> str:
    """A hash of every value, with probabilities to nine digits: the last one differs between CPUs."""
    oracle = table["oracle_probability"].to_numpy().round(9).tobytes()
    rest = table.drop_columns(["oracle_probability"])
    texts = repr([rest[name].to_pylist() for name in rest.column_names])
    return hashlib.sha256(texts.encode() + oracle).hexdigest()


def test_the_log_without_users_and_items_is_what_it_always_was(tmp_path: Path) -> None:
    path = generate(DemoLog(rows=5_000), tmp_path / "plain.parquet")
    assert content_hash(pq.read_table(path)) == PLAIN_SHA256
    assert pq.read_schema(path).metadata[b"demo_log"] == (
        b'{"base_rate": 0.22, "generator": 1, "logit_deviation": 1.75, "rows": 5000, "seed": 0, "shares": '
        b'{"drift": 0.05, "first": 0.25, "fourth": 0.15, "second": 0.3, "third": 0.25}}'
    )


def test_the_other_columns_are_those_of_the_log_without_users_and_items(
    recurring: pa.Table, tmp_path: Path
) -> None:
    plain = table_of(DemoLog(rows=ROWS, seed=3), tmp_path)
    shared = [name for name in plain.column_names if name not in ("label", "oracle_probability")]
    assert recurring.select(shared).equals(plain.select(shared))
    assert recurring.column_names == [*plain.column_names[:-1], "user", "item", "oracle_probability"]


def test_users_and_items_recur_as_often_as_there_are_few_of_them_and_all_stay(recurring: pa.Table) -> None:
    half = ROWS // 2
    early, late = (set(recurring["user"].slice(at, half).to_pylist()) for at in (0, half))
    assert early == late
    for name, number in (("user", RECURRING.users), ("item", RECURRING.items)):
        counts = pc.value_counts(recurring[name]).field("counts").to_numpy()
        assert len(counts) == number
        assert recurring[name].null_count == 0
        expected = ROWS / number
        assert counts.std() == pytest.approx(np.sqrt(expected), rel=0.15), "all come equally often"
        assert counts.min() > expected - 5 * np.sqrt(expected)


def test_most_of_a_million_users_come_once_or_twice(tmp_path: Path) -> None:
    rare = table_of(DemoLog(rows=50_000, users=50_000), tmp_path)  # as a million of each
    counts = pc.value_counts(rare["user"]).field("counts").to_numpy()
    poisson = np.exp(-1) / np.array([1, 2, 6])
    for times, share in zip((1, 2, 3), poisson / (1 - np.exp(-1)), strict=True):
        assert (counts == times).mean() == pytest.approx(share, abs=0.01)
    assert (counts <= 2).mean() > 0.85


def variance_shares(spec: DemoLog) -> dict[str, float]:
    """Shares of the logit's variance by order, on fresh examples: covariances of the parts with the whole."""
    teacher = Teacher(spec)
    parts = teacher.by_order(teacher.draw_examples(np.random.default_rng(0), np.linspace(0, 1, 1 << 16)))
    whole = np.sum(list(parts.values()), axis=0)
    return {order: float(np.cov(part, whole)[0, 1] / whole.var(ddof=1)) for order, part in parts.items()}


@pytest.mark.parametrize(
    "spec", [DemoLog(seed=5), RECURRING, DRIFTING], ids=["plain", "recurring", "drifting"]
)
def test_every_order_has_the_share_asked_for(spec: DemoLog) -> None:
    given = {"own": spec.own, "affinity": spec.affinity} if spec.populations else {}
    left = 1 - sum(given.values())
    expected = {order: left * share for order, share in SHARES.items()} | given
    assert variance_shares(spec) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("log", ["recurring", "drifting"])
def test_the_floor_is_the_entropy_of_the_probabilities(log: str, request: pytest.FixtureRequest) -> None:
    table = request.getfixturevalue(log)
    label, oracle = table["label"].to_numpy(), table["oracle_probability"].to_numpy()
    loss = -np.where(label == 1, np.log(oracle), np.log1p(-oracle))
    expected = -(oracle * np.log(oracle) + (1 - oracle) * np.log1p(-oracle))
    assert loss.mean() == pytest.approx(expected.mean(), abs=4.5 * (loss - expected).std() / np.sqrt(ROWS))
    assert oracle.mean() == pytest.approx(RECURRING.base_rate, abs=0.01)
    for part in np.array_split(np.argsort(oracle), 10):
        error = np.sqrt((oracle[part] * (1 - oracle[part])).sum()) / len(part)
        assert label[part].mean() == pytest.approx(oracle[part].mean(), abs=4.5 * error)


def test_affinity_is_of_two_tastes_and_stays() -> None:
    """All logits of users by items, less their rows' and columns' means, are a matrix of rank 2."""
    teacher = Teacher(RECURRING)
    user, item = np.divmod(np.arange(40 * 30), 30)
    logit_B = id_logits(teacher, 0, {"user": user, "item": item})
    np.testing.assert_array_equal(logit_B, id_logits(teacher, 8, {"user": user, "item": item}))
    logit_UI = logit_B.reshape(40, 30)
    rest_UI = logit_UI - logit_UI.mean(axis=0) - logit_UI.mean(axis=1, keepdims=True) + logit_UI.mean()
    strengths = np.linalg.svd(rest_UI, compute_uv=False)
    assert strengths[1] > 0.1 * strengths[0]
    assert strengths[2] < 1e-6 * strengths[0]


def test_users_come_and_go(drifting: pa.Table) -> None:
    seconds = drifting["timestamp"].to_numpy().astype("datetime64[s]").astype(int)
    user = pc.dictionary_encode(drifting["user"].combine_chunks()).indices.to_numpy()
    first, last = np.full(user.max() + 1, seconds.max()), np.zeros(user.max() + 1, dtype=int)
    np.minimum.at(first, user, seconds)
    np.maximum.at(last, user, seconds)
    assert (last - first).max() <= 3 * DAY
    assert np.median((last - first)[np.bincount(user) > 10]) > 2 * DAY
    days = (seconds - seconds[0]) // DAY
    assert not set(user[days == 0]) & set(user[days == 4]), "none of the first day is there on the fifth"
    new = [np.isin(user[days == day], user[days < day], invert=True).mean() for day in (2, 5, 8)]
    assert all(share > 0.05 for share in new), "every day has rows of users whom no earlier day has"
    at_noon = ((first <= 5.5 * DAY + seconds[0]) & (last >= 5.5 * DAY + seconds[0])).sum()
    assert 0.75 * 2000 < at_noon <= 2000, "as many at a time as asked for, but for those yet to be seen"


def test_examples_of_a_seed_have_the_same_visits_again() -> None:
    teacher, position = Teacher(RECURRING), np.linspace(0, 1, 500)
    first, again, other = (
        teacher.draw_examples(np.random.default_rng(0), position, stream)["user"] for stream in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"affinity": 0.5}, "affinity is about users and items: give users=, items= or both"),
        ({"users": 10, "affinity": 0.5}, "give both users= and items="),
        ({"users": 10, "items": 5, "own": 0.5, "affinity": 0.6}, "at most 1 together, received 1.1"),
        ({"users": 5_000_000, "lifetime_days": 0.5}, "105,000,000 users or items would come and go"),
        ({"users": -1}, "users"),
    ],
)
def test_settings_that_cannot_be_are_explained(data: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(DemoLog, data, "demo")
