"""Named spaces and their points: every point decodes, encodes back, and is counted."""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spaces
from dhen.blocks import BLOCKS
from dhen.blocks.conv import ConvConfig
from dhen.blocks.dcn import DcnConfig
from dhen.ensembles import ENSEMBLES
from dhen.errors import UserError
from dhen.schema import FeatureSchema, Table
from dhen.values import fingerprint, parse
from spaces.axes import ChoiceAxis, random_value, read_axis
from spaces.nearest import space_size
from spaces.space import Space, SpaceConfig, catalog, load_space

NAMES = sorted(catalog())
every_space = pytest.mark.parametrize("name", NAMES)

TINY = Path(spaces.__file__).parent / "catalog" / "tiny.yaml"


@settings(deadline=None)  # the largest space takes long on a busy machine
@given(st.sampled_from(NAMES), st.integers(0, 10_000))
def test_points_decode_and_encode_back(name: str, seed: int) -> None:
    space = load_space(name)
    candidate = space.decode(space.random_point(random.Random(seed)))
    assert space.decode(space.encode(candidate)) == candidate


@every_space
def test_sampling_by_optuna_gives_points_of_the_space(name: str) -> None:
    import optuna

    assert catalog()[name].description
    space = load_space(name)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    points = [space.sample(study.ask()) for _ in range(20)]
    assert all(set(point) == {axis.name for axis in space.axes} for point in points)
    for point in points:
        space.decode(point)


def test_the_size_is_counted_exactly() -> None:
    data = {
        "layers": "each",
        "depth": [1, 2],
        "slots": 2,
        "modules": {"linear": {}, "conv": {"channels": [2, 4]}},
        "ensemble": ["sum", "concat"],
        "out_embeddings": [2],
        "raw_numeric": False,
        "norm": ["layer", "none"],
        "norm_placement": ["post", "pre"],
        "model": {"embedding_dim": [4]},
    }
    assert_counted(data)


def test_one_member_parts_nowhere_and_a_modules_own_dropout_is_an_axis() -> None:
    """A dropout of null is the model's, and so is the same number; a point with either is the same network."""
    members = {"members": [1, 2], "members_from": [0, 1, 3]}
    assert_counted({"depth": [1, 2], "slots": 1, "modules": {"linear": {}}, "model": members})
    data = {
        "depth": [1, 2],
        "slots": 2,
        "modules": {"mlp": {"dropout": [None, 0.0, 0.2]}, "dcn_v2": {}},
        "out_embeddings": [2],
        "model": {"dropout": [0.0, 0.1]},
    }
    assert_counted(data)


def assert_counted(data: dict[str, object]) -> None:
    space = Space("test", parse(SpaceConfig, data, "test"))
    axes = [axis for axis in space.axes if isinstance(axis, ChoiceAxis)]
    assert len(axes) == len(space.axes)
    points = itertools.product(*(axis.labels for axis in axes))
    names = [axis.name for axis in axes]
    candidates = [space.decode(dict(zip(names, point, strict=True))) for point in points]
    assert all(space.decode(space.encode(candidate)) == candidate for candidate in candidates)
    distinct = {fingerprint(candidate.model.to_dict()) for candidate in candidates}
    assert space_size(space).architectures == len(distinct)


def test_one_space_has_every_module_and_ensemble() -> None:
    config = load_space("beyond").config
    assert set(config.modules) == set(BLOCKS)
    assert set(config.ensemble) == set(ENSEMBLES)


def test_the_papers_space_has_the_papers_modules() -> None:
    space = load_space("paper_table1")
    candidates = [space.decode(space.random_point(random.Random(seed))) for seed in range(50)]
    modules = {block for each in candidates for layer in each.model.layers for block in layer.modules}
    assert {block.kind for block in modules} == {"dlrm", "attention", "dcn", "linear", "conv"}
    assert DcnConfig(layers=3) in modules
    assert ConvConfig(channels=1, activation="none") in modules
    assert len(modules) == 5


def test_spaces_from_before_norm_and_shortcut_were_axes_are_the_same() -> None:
    """A study keeps to its space by fingerprint."""
    assert not {"norm", "norm_placement", "shortcut"} & set(load_space("tiny").config.to_dict())
    varied = parse(SpaceConfig, {"modules": {"linear": {}}, "norm": ["layer", "rms"]}, "test")
    assert varied.to_dict()["norm"] == ["layer", "rms"]


def test_a_space_is_named_or_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("modules: {linear: {}}\ndepth: 2\n")
    space = load_space(str(file))
    assert space.name == "mine"
    assert len(space.decode(space.random_point(random.Random(0))).model.layers) == 2
    (tmp_path / "tiny").mkdir()  # which hides none of the same name
    monkeypatch.chdir(tmp_path)
    assert load_space("tiny").name == "tiny"
    with pytest.raises(UserError, match=r"Did you mean 'default'\? Known: beyond, default, paper_table1"):
        load_space("defualt")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("modules: {}", "at least 1"),
        ("modules: {linar: {}}", "Did you mean 'linear'"),
        ("modules: {conv: {kernal: [3]}}", "Did you mean 'kernel'"),
        ("modules: {linear: {dropout: [0.1]}}", "'linear' has no dropout.*those that have: attention, dlrm"),
        ("modules: {linear: {}}\ndepht: 3", "Did you mean 'depth'"),
        ("modules: {linear: {}}\nnorm: [batch]", "impossible.*'layer', 'rms' or 'none'"),
        ("modules: {linear: {}}\nensemble: [mean]", "unknown ensemble 'mean'"),
        ("modules: {linear: {}}\nmodel: {dim: [3]}", "unknown model field 'dim'"),
        ("modules: {linear: {}}\ndepth: []", "no values"),
        ("modules: {linear: {}}\nout_embeddings: [4, 4]", "a value twice"),
        ("modules: {linear: {}}\ndepth: {low: 3, high: 1}", "low must not exceed high"),
        ("modules: {linear: {}}\ndepth: {low: 1, hihg: 3}", "depth .*needs finite numbers `low` and `high`"),
        ("modules: {linear: {}}\ndepth: {low: 1, high: .inf}", "depth .*finite numbers.*received.*inf"),
        (
            "modules: {linear: {}}\ntraining: {weight_decay: {low: .nan, high: 1}}",
            "weight_decay .*finite numbers",
        ),
        (
            "modules: {linear: {}}\ndepth: {low: 1, high: 3, log: maybe}",
            "depth has log='maybe'; true or false",
        ),
        ("modules: {linear: {}}\ndepth: {low: 1, high: 3, step: 0}", "depth: `step`.*above 0.*'step': 0"),
        ("modules: {linear: {}}\ndepth: {low: 1, high: 3, step: x}", "depth: `step`.*above 0"),
        (
            "modules: {linear: {}}\ndepth: {low: 1, high: 9, step: 2, log: true}",
            "`step`.*no logarithmic scale",
        ),
        (
            "modules: {linear: {}}\ntraining: {weight_decay: {low: 0.1, high: 0.9, step: 1}}",
            "`step`.*whole `low` and `high`",
        ),
        (
            "modules: {attention: {heads: [3]}}\nmodel: {embedding_dim: [8, 16]}",
            "impossible.*does not divide",
        ),
        ("modules: {conv: {kernel: [2, 4]}}", "impossible.*odd kernel"),
        (
            "modules: {linear: {}}\nlayers: each\ndepth: {low: 1, high: 1000000}",
            "1 or more, 1,000 at most; received 1000000",
        ),
        (
            "modules: {linear: {}}\ndepth: [0]",
            "depth is a whole number of layers, 1 or more, 1,000 at most; received 0",
        ),
        ("modules: {linear: {}}\ndepth: [a, b]", "number of layers.*received 'a'"),
        ("modules: {linear: {}}\ndepth: [1, 2.5]", "number of layers.*received 2.5"),
        ("modules: {linear: {}}\ndepth: {low: 1.0, high: 2.5}", "number of layers.*received 1.0"),
        (
            "modules: {linear: {}}\nmodel: {members_from: [a]}",
            "members_from is a whole number of layers, 0 or",
        ),
        ("modules: {linear: {}}\nensemble: {low: 1, high: 2}", "unknown ensemble.*'low': 1"),
        ("modules: {linear: {}}\nensemble: [[sum]]", "unknown ensemble.*Did you mean 'sum'"),
        (
            "modules: {linear: {}}\nout_embeddings: [{a: 1}]",
            r"layer.out_embeddings may be.*received \[{'a': 1}]",
        ),
        ("modules: {linear: {}}\nmodel: {head: [[8, [4]]]}", "head may be finite numbers.*lists of these"),
        ("modules: {linear: {}}\nstart: [{dept: 1}]", "Did you mean 'depth'"),
        ("modules: {linear: {}}\nstart: [{depth: 9}]", "9 is not one of"),
        ("[1, 2]", "expected a mapping"),
    ],
)
def test_impossible_spaces(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=says):
        load_space(str(file))


def test_axes_that_change_nothing_on_a_log_are_left_out(tmp_path: Path) -> None:
    numbers = FeatureSchema(tables=(Table(name="n__bucket", rows=9, buckets=True),), numeric=("n",))
    whole, without = load_space("beyond", numbers), load_space("beyond", FeatureSchema(numeric=("n",)))
    assert {axis.name for axis in whole.axes} - {axis.name for axis in without.axes} == {
        "buckets",
        "table_dim_exponent",
    }
    assert without.decode(without.random_point(random.Random(0))).model.buckets == "summed"
    file = tmp_path / "mine.yaml"
    file.write_text(
        "modules: {mlp: {}}\nmodel: {numeric_mlp: [[8], [16]]}\nstart: [{numeric_mlp: '16', depth: 2}]"
    )
    ids = load_space(str(file), FeatureSchema(tables=(Table(name="a", rows=9),)))
    assert ids.start_point(0, {}) == {"depth": 2}
    assert ids.decode(ids.random_point(random.Random(0))).model.numeric_mlp == (8,)


def test_start_points_come_first_and_begin_where_the_baseline_is() -> None:
    space = load_space("default")
    known = {"learning_rate": 0.002, "embedding_learning_rate": 9.0}
    first = space.start_point(0, known)
    assert first["training.learning_rate"] == 0.002
    assert "training.embedding_learning_rate" not in first  # outside this space
    assert first.items() >= space.config.start[0].items()
    assert space.start_point(len(space.config.start), known) == {}


def test_an_absurd_depth_has_a_size_and_points(tmp_path: Path) -> None:
    """More architectures than a float can hold, each layer with axes of its own."""
    file = tmp_path / "deep.yaml"
    file.write_text(
        "layers: each\ndepth: {low: 1, high: 500}\nslots: 2\nmodules: {cross: {}, linear: {}}\n"
        "out_embeddings: [2, 4]"
    )
    space = load_space(str(file))
    size = space_size(space)
    assert size.architectures > 10**400
    assert re.match(r"\d\.\d\de\+\d{3,} architectures", str(size))
    rng = random.Random(0)
    depths = [len(space.decode(space.random_point(rng)).model.layers) for _ in range(20)]
    assert max(depths) > 300


def test_points_of_another_space_are_refused() -> None:
    space = load_space("tiny")
    point = space.random_point(random.Random(0))
    with pytest.raises(UserError, match="not of space"):
        space.decode(point | {"layer.block9": "linear"})
    with pytest.raises(UserError, match="not one of"):
        space.decode(point | {"layer.block0": "none"})


def test_a_range_between_equal_bounds_is_a_constant(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "modules: {mlp: {}}\ntraining: {learning_rate: {low: 0.002, high: 0.002, log: true}}\n"
    )
    space = load_space(str(tmp_path / "mine.yaml"))
    assert space.training_axes["learning_rate"].size == 1
    assert not [axis for axis in space.axes if axis.name == "training.learning_rate"]
    candidate = space.decode(space.random_point(random.Random(0)))
    assert candidate.training["learning_rate"] == 0.002
    assert space.decode(space.encode(candidate)) == candidate


def test_a_log_without_numbers_has_no_axis_for_them() -> None:
    features = FeatureSchema(tables=(Table(name="site", rows=9),), numeric=())
    for name in ("default", "tiny", "wide"):
        space, whole = load_space(name, features), load_space(name)
        assert not [axis.name for axis in space.axes if axis.name.endswith("raw_numeric")]
        assert not [key for point in space.config.start for key in point if key.endswith("raw_numeric")]
        assert [axis.name for axis in whole.axes if axis.name.endswith("raw_numeric")]


def test_settings_that_no_module_may_have_are_said_where_the_space_is_counted(tmp_path: Path) -> None:
    text = TINY.read_text().replace("conv:", "sparse_attention: {block_size: [8, 0]}\n  conv:")
    (tmp_path / "mine.yaml").write_text(text)
    space = load_space(str(tmp_path / "mine.yaml"))
    with pytest.raises(UserError, match=r"space: module sparse_attention: block_size: .* greater than"):
        space_size(space)


def test_rates_are_numbers_also_without_a_point(tmp_path: Path) -> None:
    text = TINY.read_text().replace("{low: 0.001, high: 0.01, log: true}", "[1e-3, 2e-3]")
    (tmp_path / "mine.yaml").write_text(text)
    axes = {axis.name: axis for axis in load_space(str(tmp_path / "mine.yaml")).axes}
    rates = axes["training.learning_rate"]
    assert isinstance(rates, ChoiceAxis)
    assert rates.values == (0.001, 0.002)


def test_whole_numbers_are_drawn_on_their_logarithmic_scale() -> None:
    axis = read_axis("width", {"low": 8, "high": 4096, "log": True})
    rng = random.Random(0)
    drawn = [random_value(axis, rng) for _ in range(2000)]
    assert {type(value) for value in drawn} == {int}
    assert 8 <= min(drawn) < 12
    assert 3000 < max(drawn) <= 4096
    assert statistics.median(drawn) == pytest.approx(math.sqrt(8 * 4096), rel=0.15)
