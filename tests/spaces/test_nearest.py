"""The point of a space that comes nearest to a model: what the space has is taken, the rest is the nearest."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhen.model import named_model, parse_model
from dhen.values import parse
from spaces.axes import read_axis
from spaces.nearest import nearest_label, nearest_point
from spaces.space import Space, SpaceConfig, catalog, load_space
from trials.records.job import TrainingConfig

NAMES = sorted(catalog())
TUNED = dict(TrainingConfig(learning_rate=0.0031, embedding_learning_rate=0.9))


@pytest.mark.parametrize(
    ("spec", "value", "nearest"),
    [
        ([8, 16, 32], 16, 16),
        ([8, 16, 32], 24, 32),
        ([8, 16, 32], 64, 32),
        ([0.0, 0.2], 0.15, 0.2),
        ([0.0, 0.1], 0.04, 0.0),
        ([None, 0.0, 0.2], None, None),
        ([None, 0.0, 0.2], 0.19, 0.2),
        ([[128, 64], [256, 128]], (256, 128), "256-128"),
        ([[128, 64], [256, 128]], (512, 256), "256-128"),
        ([[512, 64], [256], [256, 128]], (300,), "256"),
        ([[], [64]], (), "none"),
        (["auto", "constant"], "constant", "constant"),
        (["auto", "cosine"], "constant", "auto"),
        ([True, False], False, False),
        ({"low": 0.001, "high": 0.006, "log": True}, 0.0031, 0.0031),
        ({"low": 0.001, "high": 0.006, "log": True}, 0.9, 0.006),
        ({"low": 1e-6, "high": 1e-3, "log": True}, 0.0, 1e-6),
        ({"low": 1, "high": 8}, 12, 8),
        ({"low": 2, "high": 9, "step": 3}, 7, 8),
        ({"low": 2, "high": 9, "step": 3}, 9, 8),
    ],
)
def test_the_nearest_value_of_an_axis(spec: object, value: object, nearest: object) -> None:
    axis = read_axis("some", spec)
    label = nearest_label(axis, value)
    assert label == nearest
    axis.decode(label)


def test_the_shipped_baseline_is_one_layer_of_dlrm_with_its_own_values() -> None:
    space = load_space("default")
    given_model = named_model("advanced_dlrm").to_dict()
    model = parse_model(given_model | {"embedding_dim": 32, "dropout": 0.1, "buckets": "apart"}, "tuned")
    point = nearest_point(space, model, TUNED)
    candidate = space.decode(point | space.left_for_tuning)
    (layer,) = candidate.model.layers
    (block,) = layer.modules
    assert (block.kind, block.mlp, block.rank) == ("dlrm", (256, 128), 0)
    assert (layer.norm, layer.out_embeddings) == ("none", 4)  # 4 x 32 numbers, as many as the MLP ends with
    found = candidate.model
    assert (found.embedding_dim, found.dropout, found.buckets) == (32, 0.1, "apart")
    assert candidate.training["learning_rate"] == 0.0031
    assert candidate.training["embedding_learning_rate"] == 0.3  # the axis ends there
    assert candidate.training["embedding_decay"] == 1e-6
    assert not set(point) & set(space.left_for_tuning)
    # `warmup_share` is 0 unless it is given, as the baseline's is; the first value of the axis is another
    point = nearest_point(load_space("wide"), named_model("advanced_dlrm"), TUNED)
    assert point["training.warmup_share"] == 0.0


@given(st.sampled_from(NAMES), st.integers(0, 1000))
def test_a_candidate_of_the_space_is_nearest_to_itself(name: str, seed: int) -> None:
    """But for what waits for the tuning stage, and members' parting, which has several points for one network."""
    space = load_space(name)
    config = space.config.replace(tuning=())
    whole = Space(name, config)
    candidate = whole.decode(whole.random_point(random.Random(seed)))
    point = nearest_point(whole, candidate.model, candidate.training)
    assert whole.decode(point) == candidate


def test_a_space_without_dlrm_takes_the_mlp_or_its_own_first_start_point() -> None:
    mlps = load_space("techniques")
    model = mlps.decode(nearest_point(mlps, named_model("advanced_dlrm"), TUNED)).model
    assert [block.kind for block in model.layers[0].modules] == ["mlp"]
    spec = {
        "modules": {"cross": {}, "linear": {}},
        "model": {"embedding_dim": [4, 16], "dropout": [0.0, 0.3]},
        "training": {"learning_rate": {"low": 0.001, "high": 0.006}},
        "start": [{"depth": 2, "layer.block0": "linear", "embedding_dim": 4}],
    }
    crosses = Space("mine", parse(SpaceConfig, spec, "mine"))
    point = nearest_point(crosses, named_model("advanced_dlrm"), TUNED)
    assert point == {
        "depth": 2,
        "layer.block0": "linear",
        "embedding_dim": 16,
        "dropout": 0.0,
        "training.learning_rate": 0.0031,
    }


def test_layers_that_one_recipe_cannot_hold_are_left_to_the_space() -> None:
    layers = [{"modules": ["dlrm"]}, {"modules": ["linear"]}]
    model = parse_model({"layers": layers, "embedding_dim": 8}, "mine")
    assert "layer.block0" not in nearest_point(load_space("tiny"), model, TUNED)
    wide = load_space("wide")
    found = wide.decode(nearest_point(wide, model, TUNED) | wide.left_for_tuning).model
    assert [[block.kind for block in layer.modules] for layer in found.layers] == [["dlrm"], ["linear"]]


def test_modules_that_do_not_stand_at_the_spaces_embedding_lengths_are_left_to_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "modules: {attention: {heads: [3, 6]}, linear: {}}\nslots: 1\nmodel: {embedding_dim: [8, 16]}\n"
        "start: [{layer.block0: linear}]"
    )
    space = load_space(str(file))
    model = parse_model({"layers": [{"modules": ["attention"]}], "embedding_dim": 16}, "mine")
    assert nearest_point(space, model, TUNED) == {"layer.block0": "linear", "embedding_dim": 16}
