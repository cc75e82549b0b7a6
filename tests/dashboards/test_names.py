from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dashboards.names import short_name, trial_name
from trials.records.trial_record import TrialKind, TrialRecord


def layer(*kinds: str, ensemble: str = "concat") -> dict:
    return {"modules": [{"kind": kind, "heads": 2} for kind in kinds], "ensemble": {"kind": ensemble}}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"layers": [layer("attention", "dlrm")] * 3, "embedding_dim": 16}, "3x[attention+dlrm] concat d16"),
        (
            {"layers": [layer("linear"), *[layer("cross", "dlrm")] * 2], "embedding_dim": 8},
            "[linear] > 2x[cross+dlrm] concat d8",
        ),
        (
            {"layers": [layer("conv", "dlrm"), layer("conv", "dlrm", ensemble="sum")]},
            "[conv+dlrm] concat > [conv+dlrm] sum",
        ),
        (
            {"layers": [layer("linear")], "embedding_dim": 4, "buckets": "apart", "members": 2},
            "[linear] d4 buckets apart 2 members",
        ),
        ({"layers": [{"modules": ["attention", "cross"], "ensemble": "sum"}]}, "[attention+cross] sum"),
        ({"family": "advanced_dlrm", "mlp": [64], "experts": 4}, "advanced_dlrm 64 4 experts"),
        ({}, "model"),
        ({"layers": "?", "family": "new"}, "new"),
        ({"layers": [{"modules": [{}]}]}, "[?]"),
    ],
)
def test_names_in_short(model: dict, name: str) -> None:
    assert short_name(model) == name


words = st.text("ab<[+", max_size=3)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
unhurried = settings(suppress_health_check=[HealthCheck.too_slow])


@unhurried
@given(st.dictionaries(st.sampled_from(["family", "layers", "mlp", "experts", "embedding_dim"]), json_values))
def test_takes_anything_a_configuration_may_hold(model: dict) -> None:
    assert short_name(model)


def test_an_average_is_named_after_its_members() -> None:
    average = TrialRecord(number=9, kind=TrialKind.AVERAGE).with_origin(members=(3, 5, 7))
    assert trial_name(average) == "average of trials 3, 5 and 7"
    assert (
        trial_name(average.with_origin(members=(3,), retrained_members=(0,)))
        == "average of trial 3 and retraining 0"
    )
    assert (
        trial_name(average.with_origin(members=(), retrained_members=(0, 1)))
        == "average of retraining 0 and retraining 1"
    )
