"""Configurations are valid from birth, canonical, and their errors teach."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhen.blocks import BLOCKS
from dhen.config import DhenConfig, LayerConfig
from dhen.ensembles import ENSEMBLES
from dhen.errors import UserError
from dhen.model import parse_model
from dhen.values import fingerprint

layers = st.builds(
    lambda modules, ensemble, out, raw: {
        "modules": modules,
        "ensemble": ensemble,
        "out_embeddings": out,
        "raw_numeric": raw,
    },
    st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=4),
    st.sampled_from(sorted(ENSEMBLES)),
    st.integers(1, 9),
    st.booleans(),
)
models = st.builds(
    lambda dim, layers, head: {"embedding_dim": dim, "layers": layers, "head": head},
    st.sampled_from([4, 16]),
    st.lists(layers, min_size=1, max_size=4),
    st.lists(st.integers(1, 64), max_size=2),
)


@given(models)
def test_round_trip(data: dict[str, object]) -> None:
    config = parse_model(data, "test")
    assert parse_model(config.to_dict(), "test") == config


@given(st.permutations(["attention", "cross", "linear", "cross"]), st.sampled_from(sorted(ENSEMBLES)))
def test_the_order_of_modules_has_no_meaning(modules: list[str], ensemble: str) -> None:
    data = {"layers": [{"modules": modules, "ensemble": ensemble}]}
    reference = {"layers": [{"modules": sorted(modules), "ensemble": ensemble}]}
    assert parse_model(data, "a") == parse_model(reference, "b")


@pytest.mark.parametrize("ensemble", sorted(ENSEMBLES))
def test_one_module_needs_no_ensemble(ensemble: str) -> None:
    plain = parse_model({"layers": [{"modules": ["linear"]}]}, "a")
    other = parse_model({"layers": [{"modules": ["linear"], "ensemble": ensemble}]}, "b")
    assert fingerprint(plain.to_dict()) == fingerprint(other.to_dict())


def test_a_norm_that_is_none_has_no_place() -> None:
    data = {"modules": ["linear"], "norm": "none"}
    assert LayerConfig(**data) == LayerConfig(**data, norm_placement="pre")  # type: ignore[arg-type]


def test_plain_data_says_only_what_is_not_as_it_was() -> None:
    """Networks from before a setting came keep their fingerprints."""
    layer = LayerConfig(modules=("dcn_v2",))  # type: ignore[arg-type]
    assert set(layer.to_dict()) == {
        "modules",
        "ensemble",
        "out_embeddings",
        "raw_numeric",
        "norm",
        "shortcut",
    }
    assert layer.to_dict()["modules"] == [{"kind": "dcn_v2", "layers": 1}]
    conv = LayerConfig(modules=("conv",))  # type: ignore[arg-type]
    assert conv.to_dict()["modules"] == [{"kind": "conv", "channels": 4, "kernel": 3}]
    other = LayerConfig(modules=({"kind": "dcn_v2", "rank": 4},), norm_placement="pre")  # type: ignore[arg-type]
    assert LayerConfig.model_validate(other.to_dict()) == other
    assert other != layer


def test_networks_that_differ_have_other_fingerprints() -> None:
    texts = [
        {"layers": [{"modules": ["linear", "cross"], "ensemble": "sum"}]},
        {"layers": [{"modules": ["linear", "cross"], "ensemble": "weighted_sum"}]},
        {"layers": [{"modules": ["linear", "cross"], "ensemble": "concat"}]},
        {"layers": [{"modules": ["linear", "linear"], "ensemble": "sum"}]},
        {"layers": [{"modules": ["linear"]}]},
        {"layers": [{"modules": ["linear"]}, {"modules": ["linear"]}]},
        {"layers": [{"modules": ["linear"], "out_embeddings": 4}]},
        {"layers": [{"modules": ["linear"], "norm": "rms"}]},
        {"layers": [{"modules": ["linear"], "norm_placement": "pre"}]},
        {"layers": [{"modules": ["linear"], "shortcut": False}]},
        {"layers": [{"modules": ["linear"]}], "embedding_dim": 8},
    ]
    assert len({fingerprint(parse_model(text, "t").to_dict()) for text in texts}) == len(texts)


def test_concat_widens_and_sum_does_not() -> None:
    def embeddings(ensemble: str) -> int:
        data = {"layers": [{"modules": ["linear", "cross"], "ensemble": ensemble, "out_embeddings": 5}]}
        config = parse_model(data, "t")
        assert isinstance(config, DhenConfig)
        return config.layers[0].embeddings

    assert embeddings("concat") == 10
    assert embeddings("sum") == embeddings("weighted_sum") == 5


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"layers": [{"modules": ["atention"]}]}, "Did you mean 'attention'"),
        ({"layers": [{"modules": [{"kind": "dlrm", "mpl": [3]}]}]}, "Did you mean 'mlp'"),
        ({"layer": []}, "Did you mean 'layers'"),
        ({"layers": [{"modules": ["linear"], "ensembl": "sum"}]}, "Did you mean 'layers.0.ensemble'"),
        ({"layers": [{"modules": ["linear"], "ensemble": "mean"}]}, "unknown ensemble 'mean'"),
        ({"layers": [{"modules": [{"kind": "conv", "kernel": 2}]}]}, "1 or 3 would work"),
        (
            {"layers": [{"modules": [{"kind": "attention", "heads": 3}]}]},
            r"heads that do: \[1, 2, 4, 8, 16\]",
        ),
        ({"layers": [{"modules": [{"kind": "token_mixing", "tokens": 3}]}]}, r"tokens that do: \[1, 2, 4, 8"),
        (
            {"layers": [{"modules": [{"kind": "two_stream", "heads": 3}]}]},
            r"heads that do: \[1, 2, 4, 8, 16, 32",
        ),
        ({"layers": [{"modules": [{"kind": "sparse_moe", "active": 5}]}]}, "active of 1 to 4 would work"),
        ({"layers": [{"modules": ["linear"], "norm": "batch"}]}, "'layer', 'rms' or 'none'"),
        ({"layers": []}, "at least 1"),
        ({"layers": [{"modules": []}]}, "at least 1"),
        ({"layers": [{"modules": ["linear"]}], "dropout": 1.0}, "less than 1"),
        ({"layers": [{"modules": ["linear"], "out_embeddings": 0}]}, "greater than 0"),
        ({"layers": [{"modules": [{"kind": ["conv"]}]}]}, "unknown interaction module.*Did you mean 'conv'"),
        ({"layers": [{"modules": ["linear"], "ensemble": {"kind": ["sum"]}}]}, "unknown ensemble"),
        ({"family": "transformer"}, "Known: advanced_dlrm, dhen"),
        ({"family": ["dhen"]}, "unknown family.*Did you mean 'dhen'"),
        ("dhen", "expected a model configuration, received str"),
    ],
)
def test_errors_say_what_would_work(data: object, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        parse_model(data, "model.yaml")
    assert str(caught.value).startswith("model.yaml")


def test_configs_are_frozen() -> None:
    layer = LayerConfig(modules=("linear",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="frozen"):
        layer.out_embeddings = 3  # type: ignore[misc]


def test_a_dropout_that_is_the_models_is_said_once() -> None:
    """Then networks are equal, and those of before modules had their own are what they were."""

    def model(dropout: float, *owns: float | None) -> DhenConfig:
        modules = [{"kind": "mlp", "dropout": own} for own in owns]
        found = parse_model({"layers": [{"modules": [*modules, "dcn_v2"]}], "dropout": dropout}, "test")
        assert isinstance(found, DhenConfig)
        return found

    assert model(0.1, 0.1) == model(0.1, None)
    assert model(0.1, 0.1, 0.2) == model(0.1, 0.2, None)  # sorted as what is left
    assert "dropout" not in model(0.1, 0.1).to_dict()["layers"][0]["modules"][1]
    assert model(0.1, 0.0) != model(0.1, None)
    assert model(0.0, 0.2).uses_dropout
    assert not model(0.0, 0.0).uses_dropout
