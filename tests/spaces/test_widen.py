"""The next value beyond an end of an axis, and a space that has it: points keep their meaning."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhen.errors import UserError
from dhen.values import parse
from spaces.axes import ChoiceAxis, RangeAxis, first_label_beyond, read_axis, value_beyond
from spaces.space import Space, SpaceConfig, catalog, load_space


@pytest.mark.parametrize(
    ("name", "spec", "above", "below"),
    [
        ("depth", [1, 2, 3], 4, 0),
        ("layer.dcn_v2.layers", [1, 2], 3, 0),
        ("embedding_dim", [16, 8, 32], 64, 4),
        ("layer.conv.kernel", [3, 5], 7, 1),
        ("layer.dlrm.rank", [0, 8], 16, -8),
        ("dropout", [0.1, 0.2], 0.4, 0.05),
        ("dropout", [0.0, 0.1], 0.2, -0.1),
        ("dropout", [0.2, 0.3], 0.4, 0.1),
        ("training.table_decay", [0.0, 1e-4, 1e-3], 1e-2, -1e-4),
        ("layer.mlp.mlp", [[128, 64], [256, 128]], (512, 256), (64, 32)),
        ("head", [[1], [64]], (128,), None),
        ("head", [[], [64]], (128,), None),
        ("training.learning_rate", {"low": 0.001, "high": 0.1, "log": True}, 1.0, 0.0001),
        ("training.patience", {"low": 2, "high": 10, "step": 2}, 14, -2),
        ("training.warmup_share", {"low": 0.1, "high": 0.3}, 0.4, 0.0),
        ("embedding_dim", {"low": 8, "high": 64, "log": True}, 128, 4),
        ("depth", {"low": 2, "high": 6}, 7, 1),
    ],
)
def test_an_axis_goes_on_in_its_own_steps(name: str, spec: Any, above: Any, below: Any) -> None:
    axis = read_axis(name, spec)
    assert value_beyond(axis, highest=True) == pytest.approx(above)
    assert value_beyond(axis, highest=False) == (None if below is None else pytest.approx(below))
    numbers = spec if isinstance(spec, list) else [spec["low"]]
    if all(isinstance(number, int) for number in numbers):
        assert isinstance(value_beyond(axis, highest=True), int)


def test_the_first_beyond_a_range_is_half_way_to_its_new_end() -> None:
    rates = read_axis("training.learning_rate", {"low": 0.001, "high": 0.1, "log": True})
    assert first_label_beyond(rates, 1.0, highest=True) == pytest.approx(0.1**0.5)
    shares = read_axis("training.warmup_share", {"low": 0.1, "high": 0.3})
    assert first_label_beyond(shares, 0.0, highest=False) == pytest.approx(0.05)
    depth = read_axis("depth", {"low": 2, "high": 6})
    assert first_label_beyond(depth, 7, highest=True) == 7
    widths = read_axis("head", [[64], [128]])
    assert first_label_beyond(widths, (256,), highest=True) == "256"


@given(st.sampled_from(sorted(catalog())), st.integers(0, 10_000))
def test_points_of_before_mean_what_they_meant(name: str, seed: int) -> None:
    space, rng = load_space(name), random.Random(seed)
    before, points = load_space(name), [space.random_point(rng) for _ in range(3)]
    first, to_optuna = space.left_for_tuning, [space.for_optuna(point) for point in points]
    ordered = [axis for axis in space.axes if isinstance(axis, RangeAxis) or axis.ascending]
    axis = rng.choice([axis for axis in ordered if (name != "wide" or axis.name != "depth")])
    highest = rng.random() < 0.5
    value = value_beyond(axis, highest=highest)
    if value is None or value == 0:
        return
    prefix, _, key = axis.name.partition(".")
    setting = f"layer.{key}" if prefix.startswith("layer") else axis.name
    try:
        space.widen(setting, value)
    except UserError:  # a depth of 0
        assert axis.name == "depth"
        return
    wider = next(held for held in space.axes if held.name == axis.name)
    assert wider.size > axis.size or isinstance(wider, RangeAxis)
    assert wider.has(value)
    assert not axis.has(value)
    for point, numbers in zip(points, to_optuna, strict=True):
        assert space.for_optuna(point) == numbers
        try:
            expected = before.decode(point)
        except UserError:
            continue
        assert space.decode(point) == expected
    assert space.left_for_tuning == first


def test_a_setting_of_layers_is_widened_in_all_of_them_and_what_cannot_be_is_told() -> None:
    config = {"layers": "each", "depth": [1, 2], "modules": {"mlp": {"mlp": [[8], [16]]}}, "slots": 1}
    space = Space("mine", parse(SpaceConfig, config, "mine"))
    space.widen("layer.mlp.mlp", (32,))
    space.widen("layer.out_embeddings", 16)
    for layer in space.layer_axes.values():
        widths, embeddings = layer["mlp.mlp"], layer["out_embeddings"]
        assert isinstance(widths, ChoiceAxis)
        assert isinstance(embeddings, ChoiceAxis)
        assert widths.labels == ("8", "16", "32")
        assert embeddings.values == (4, 8, 16)
    with pytest.raises(UserError, match="each layer has axes of its own, so its depth cannot grow"):
        space.widen("depth", 3)
    with pytest.raises(UserError, match=r"unknown axis 'layer.out_embedings'. Did you mean 'layer1.out_"):
        space.widen("layer.out_embedings", 3)
    with pytest.raises(UserError, match="lists a value twice"):
        space.widen("layer.out_embeddings", 8)


def test_optuna_sees_ordered_choices_as_numbers_that_stay() -> None:
    axis = read_axis("embedding_dim", [16, 8, 32])
    assert [axis.for_optuna(value) for value in (8, 16, 32)] == [-1, 0, 1]
    wider = read_axis("embedding_dim", [16, 8, 32, 64, 4])
    assert [wider.for_optuna(value) for value in (4, 8, 16, 32, 64)] == [-2, -1, 0, 1, 2]
    words = read_axis("layer.norm", ["layer", "none"])
    assert words.for_optuna("none") == "none"
