"""`export --int8-tables`: a smaller bundle whose cost in NE is measured; it scores and cannot be trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import Run

from dhen.batch import FeatureBatch
from dhen.inputs.features import EmbeddingTables
from dhen.inputs.int8_tables import Int8Tables
from dhen.schema import FeatureSchema, Table
from search.bundles.bundle import INFO, read_bundle
from trials.records.events import WEIGHTS

LARGEST_CHANGE = 0.02
"""Of a probability, when values of embeddings are rounded to 8 bits."""


@pytest.fixture(scope="module")
def bundle(study: Path, dhen_search: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of the study, with fp32 tables."""
    out = tmp_path_factory.mktemp("int8") / "fp32"
    dhen_search("export", study, "--pick", "knee", "--out", out)
    return out


@pytest.fixture(scope="module")
def small(bundle: Path, click_log: Path, dhen_search: Run) -> tuple[Path, str]:
    """The same with tables of 8 bits, and what the command said."""
    out = bundle.with_name("small")
    done = dhen_search("export", bundle, "--int8-tables", "--data", click_log, "--out", out)
    return out, done.stdout


def test_it_says_and_keeps_what_it_costs(small: tuple[Path, str], bundle: Path) -> None:
    out, said = small
    cost = json.loads((out / INFO).read_text())["int8_tables"]
    before = json.loads((bundle / INFO).read_text())
    assert cost["split"] == "validation"
    assert cost["fp32"]["ne"] == pytest.approx(before["validation"]["ne"], abs=1e-6)
    assert cost["int8"]["ne"] != cost["fp32"]["ne"]
    percent = 100 * (cost["int8"]["ne"] / cost["fp32"]["ne"] - 1)
    assert abs(percent) < 1
    assert f"NE on validation {cost['int8']['ne']:.5f}, {percent:+.4f} %" in said
    assert cost["fp32_table_bytes"] == 4 * before["embedding_parameters"]
    saved = (bundle / WEIGHTS).stat().st_size - (out / WEIGHTS).stat().st_size
    assert saved == pytest.approx(cost["fp32_table_bytes"] - cost["table_bytes"], abs=1000)


def test_it_scores_nearly_alike_and_is_verified_against_what_was_measured(
    small: tuple[Path, str], bundle: Path, click_log: Path, dhen_search: Run, tmp_path: Path
) -> None:
    scores = []
    for each in (bundle, small[0]):
        dhen_search("predict", each, "--data", click_log, "--out", tmp_path / "scores.csv")
        scores.append(np.loadtxt(tmp_path / "scores.csv", delimiter=",", skiprows=1)[:, 1])
    assert 0 < np.abs(scores[0] - scores[1]).max() < LARGEST_CHANGE
    said = dhen_search("verify", small[0], "--data", click_log).stdout
    assert "stored examples: scores within 0.0e+00" in said
    assert "log: the one that its tables were measured on" in said
    assert "at export NE" in said


def test_it_cannot_be_trained_and_says_so(
    small: tuple[Path, str], click_log: Path, dhen_search: Run, tmp_path: Path
) -> None:
    data = ("--data", click_log, "--out", tmp_path / "out")
    for words in (
        ("train", small[0], *data, "--from-weights"),
        ("online", small[0], *data),
        ("train", small[0], *data, "--from-weights", "growing.columns=[user]"),
        ("export", small[0], "--int8-tables", *data),
    ):
        assert "8 bits per value" in dhen_search(*words, code=2).stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "is a bundle already"),
        (("--int8-tables",), "needs --data"),
        (("--pick", "best", "--format", "pt2"), "leave it out"),
        (("--format", "pt2", "--data", "log.csv"), "leave it out"),
    ],
    ids=str,
)
def test_a_bundle_is_exported_in_another_form_alone(
    bundle: Path, words: tuple[str, ...], message: str, dhen_search: Run, tmp_path: Path
) -> None:
    assert message in dhen_search("export", bundle, *words, "--out", tmp_path / "out", code=2).stderr


def test_a_study_is_exported_with_small_tables_at_once(study: Path, dhen_search: Run, tmp_path: Path) -> None:
    said = dhen_search("export", study, "--pick", "knee", "--int8-tables", "--out", tmp_path / "out").stdout
    assert f"{tmp_path / 'out'}: tables of 8 bits" in said
    assert read_bundle(tmp_path / "out").info.int8_tables is not None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rows_are_rounded_to_the_nearest_of_256_values() -> None:
    torch.manual_seed(0)
    tables = (Table(name="a", rows=50), Table(name="b", rows=9), Table(name="m", rows=20, multi_hot=True))
    schema = FeatureSchema(tables=tables)
    exact = EmbeddingTables(schema, 8)
    ids, offsets = torch.randint(20, (7,)), torch.tensor([0, 3, 3])  # the second bag is empty
    batch = FeatureBatch(
        ids_BT=torch.randint(9, (3, 2)), bags=((ids, offsets),), numeric_BK=torch.zeros(3, 0)
    )
    largest_step = (exact.weight.amax(1) - exact.weight.amin(1)).max() / 255
    for rounded, e in zip(Int8Tables(exact)(batch), exact(batch), strict=True):
        assert rounded.shape == e.shape
        assert (rounded - e).abs().max() <= 0.51 * largest_step
    assert torch.equal(Int8Tables(exact)(batch)[1][1], torch.zeros(1, 8))
