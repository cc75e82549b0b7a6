"""`export --format pt2`: what is compiled gives the bundle's probabilities; `inputs.json` says what it takes."""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from command_line import Run
from safetensors.torch import load_file
from tools import needs

from search.bundles.bundle import ENCODING, read_bundle
from search.bundles.pt2 import EXAMPLES, INPUTS, MODEL, PROBABILITY
from search.bundles.scorer import Scorer, record_batch
from trials.data.encoding import transform
from trials.data.loader import feature_batch
from trials.data.vocabulary import hash64

SPARSE = "model: {family: dhen, embedding_dim: 4, layers: [{modules: [{kind: sparse_moe}]}]}"


def test_tables_that_grow_are_to_be_made_static_first(
    study: Path, click_log: Path, dhen_search: Run, tmp_path: Path
) -> None:
    growing, out = tmp_path / "growing", tmp_path / "out"
    words = ("--data", click_log, "--from-weights", "--out", growing, "growing.columns=[user]")
    dhen_search("train", study / "best", *words, "training.epochs=1")
    said = dhen_search("export", growing, "--format", "pt2", "--out", out, code=2).stderr
    assert f"dhen-search train {growing} --from-weights --data LOG growing.columns=[] --out STATIC" in said
    assert not out.exists()


@needs("g++")
def test_operators_in_python_are_named(click_log: Path, dhen_search: Run, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(SPARSE)
    bundle, out = tmp_path / "sparse", tmp_path / "out"
    dhen_search("train", tmp_path / "model.yaml", "--data", click_log, "--out", bundle, "training.epochs=1")
    said = dhen_search("export", bundle, "--format", "pt2", "--out", out, code=2).stderr
    assert "operators that are written in Python (dhen.expert_linear" in said
    assert not out.exists()


def test_raw_rows_become_inputs_by_the_rules_of_the_guide(study: Path, click_log: Path) -> None:
    """docs/guide/serving.md, "From raw values to the inputs", as a program that uses nothing of ours."""
    bundle = read_bundle(study / "best")
    with click_log.open() as file:
        rows = list(csv.DictReader(file))[:300]
    batch = feature_batch(
        transform(record_batch({name: [row[name] for row in rows] for name in rows[0]}), bundle.encoding)
    )
    for text in ("a", "u17", "späť", ""):
        assert int(hash64(pa.array([text]))[0]) == hash_of(text)
    rules = Rules(study / "best" / ENCODING)
    features = bundle.encoding.features
    for place, table in enumerate(features.categorical):
        assert batch.ids_BT[:, place].tolist() == [rules.id(table.name, row) for row in rows], table.name
    for place, name in enumerate(features.numeric):
        expected = [rules.number(name, row) for row in rows]
        assert batch.numeric_BK[:, place].tolist() == pytest.approx(expected, abs=1e-6), name
    assert batch.share_BN is not None
    for place, table in enumerate(features.bucketed):
        expected = [rules.share(table.name, row) for row in rows]
        assert batch.share_BN[:, place].tolist() == pytest.approx(expected, abs=1e-6), table.name
    for (ids, offsets), table in zip(batch.bags, features.multi_hot, strict=True):
        bags = [rules.bag(table.name, row) for row in rows]
        assert ids.tolist() == [one for bag in bags for one in bag]
        assert offsets.tolist() == [0, *itertools.accumulate(map(len, bags))][:-1]


MARKS = {"", "NA", "N/A", "<NA>", "NaN", "nan", "NULL", "null", "None", "none", "?", "\\N"}


def hash_of(text: str) -> int:
    data, wrap = text.encode(), 2**64
    h = sum((byte + 1) * pow(0x9E3779B97F4A7C15, place + 1, wrap) for place, byte in enumerate(data)) % wrap
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 % wrap
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB % wrap
    return h ^ (h >> 31)


class Rules:
    """The rules of the guide, on the files of `encoding/`."""

    def __init__(self, folder: Path) -> None:
        self.scales = json.loads((folder / "numeric.json").read_text())
        self.columns = yaml.safe_load((folder / "schema.yaml").read_text())["columns"]
        files = json.loads((folder / "tables.json").read_text())["vocabularies"]
        self.ids = {
            name: {
                value: row + 2
                for row, value in enumerate(pq.read_table(folder / "vocabulary" / file)["value"].to_pylist())
            }
            for name, file in files.items()
        }

    def id(self, table: str, row: dict[str, str]) -> int:
        if table in ("hour_of_day", "day_of_week"):
            stamp = datetime.datetime.fromisoformat(row["time"]).replace(tzinfo=datetime.UTC)
            ms = int(stamp.timestamp() * 1000)
            hour, day = ms // 3_600_000 % 24, (ms // 86_400_000 + 3) % 7
            return 2 + (hour if table == "hour_of_day" else day)
        if table.endswith("__bucket"):
            x = self.value(table, row)
            return 0 if x is None else 2 + sum(begin <= x for begin in self.begins(table))
        return self.of_text(table, row[table].strip())

    def of_text(self, column: str, text: str) -> int:
        if text in MARKS:
            return 0
        if column in self.ids:
            return self.ids[column].get(text, 1)
        return hash_of(text) % self.columns[column]["hash_buckets"] + 2

    def bag(self, column: str, row: dict[str, str]) -> list[int]:
        values = row[column].split(self.columns[column]["separator"])
        ids = [self.of_text(column, value.strip(" \t\r\n[](){}'\"")) for value in values]
        return [one for one in ids if one]

    def value(self, name: str, row: dict[str, str]) -> float | None:
        text = row[name.removesuffix("__bucket").removesuffix("__missing")].strip()
        return None if text in MARKS else float(text)

    def begins(self, table: str) -> list[float]:
        return list(self.scales[table.removesuffix("__bucket")]["buckets"]["begins"])

    def number(self, name: str, row: dict[str, str]) -> float:
        x = self.value(name, row)
        if name.endswith("__missing"):
            return float(x is None)
        scale = self.scales[name]
        if x is None:
            return 0.0
        return max(-100.0, min(100.0, (self.scaled(name, x) - scale["mean"]) / scale["std"]))

    def scaled(self, name: str, x: float) -> float:
        is_log = self.scales[name.removesuffix("__bucket")]["transform"] == "log"
        return math.copysign(math.log1p(abs(x)), x) if is_log else x

    def share(self, table: str, row: dict[str, str]) -> float:
        x, begins = self.value(table, row), self.begins(table)
        if x is None:
            return 0.0
        i, d = sum(begin <= x for begin in begins), 0.0
        if 1 <= i < len(begins):
            low, high = self.scaled(table, begins[i - 1]), self.scaled(table, begins[i])
            d = (self.scaled(table, x) - low) / (high - low)
        return 1 - d if i % 2 else d


@pytest.mark.slow
@needs("g++")
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
def test_what_is_compiled_gives_the_probabilities_of_the_bundle(
    study: Path, click_log: Path, dhen_search: Run, tmp_path: Path, int8: bool
) -> None:
    bundle, out = study / "best", tmp_path / "out"
    if int8:
        bundle = tmp_path / "int8"
        dhen_search("export", study / "best", "--int8-tables", "--data", click_log, "--out", bundle)
    dhen_search("export", bundle, "--format", "pt2", "--out", out)
    described = json.loads((out / INPUTS).read_text())
    examples = load_file(out / EXAMPLES)
    for one in described["inputs"]:
        tensor = examples[one["name"]]
        assert str(tensor.dtype) == f"torch.{one['dtype']}"
        assert len(tensor.shape) == len(one["shape"])
    opened = read_bundle(bundle)
    features = opened.encoding.features
    ids = next(one for one in described["inputs"] if one["name"] == "ids")
    assert [(column["name"], column["rows"]) for column in ids["columns"]] == [
        (table.name, table.rows) for table in features.categorical
    ]
    compiled = torch._inductor.aoti_load_package(str(out / MODEL))
    inputs = [examples[one["name"]] for one in described["inputs"]]
    expected = torch.from_numpy(Scorer(opened).score_encoded(opened.examples()))
    torch.testing.assert_close(compiled(*inputs), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(examples[PROBABILITY], expected, atol=1e-6, rtol=0)
