"""No number in a bundle is believed unchecked, and no score is given that is no probability."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from command_line import Run, write_log
from starlette.requests import Request
from starlette.routing import Route

from dhen.blocks import BLOCKS
from dhen.cost import headline_flops
from dhen.errors import ScoreError, UserError
from dhen.inputs.int8_tables import ROW_EXTRA_BYTES, Int8Tables
from dhen.model import build_model, model_cost, parse_model
from dhen.values import file_hash
from search.bundles import bundle as bundles
from search.bundles.bundle import INFO, BundleInfo, Member, read_bundle, weights_names, write_bundle
from search.bundles.export import write_int8
from search.bundles.increments import MANIFEST
from search.bundles.scorer import Scorer
from search.serving.app import LiveModel, ServedVersion, make_app
from search.serving.requests import FORMS
from search.verbs import verify
from trials.data.encoding import Encoding
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.data.vocabulary import UNKNOWN_ID
from trials.records.job import Job, TrainingConfig
from trials.records.trial_record import Metrics
from trials.store.weights import read_weights, save_weights

SMALL: dict[str, Any] = {"embedding_dim": 4, "layers": [{"modules": [{"kind": "linear"}]}]}
EVERY_PART: tuple[dict[str, Any], ...] = (
    {
        "embedding_dim": 4,
        "members": 2,
        "layers": [{"modules": [{"kind": kind} for kind in BLOCKS], "ensemble": "gated"}],
    },
    {"family": "advanced_dlrm", "embedding_dim": 4, "experts": 2, "rank": 2, "mlp": [8]},
)
METRICS = Metrics(ne=0.9, log_loss=0.5, auc=0.6, calibration=1.0, examples=10)
MEMORY_BYTES = 2**30
"""Memory that a hostile bundle may take beside that of the process; sizes of 10^9 take more."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> PreparedLog:
    folder = tmp_path_factory.mktemp("log")
    return prepare([write_log(folder / "log.csv", 200)], out=folder / "prepared")


def write(folder: Path, log: PreparedLog, *models: dict[str, Any]) -> Path:
    """Writes a bundle with the mean of fresh networks."""
    training = TrainingConfig().resolved(160, "fp32")
    networks, files = [], []
    for number, data in enumerate(models):
        model = parse_model(data, "model")
        job = Job(model=model, features=log.features, log=log.fingerprint, training=training, seed=number)
        networks.append(Member(trial=number, job=job))
        files.append(folder / f"{number}.safetensors")
        save_weights(build_model(model, log.features).state_dict(), files[-1])
    costs = [model_cost(each.job.model, log.features) for each in networks]
    info = BundleInfo(
        study="fresh",
        trial=0,
        members=tuple(networks),
        log=log.summary(),
        flops=sum(map(headline_flops, costs)),
        parameters=sum(row.parameters for cost in costs for row in cost),
        embedding_parameters=0,
        cost=costs[0],
        validation=METRICS,
        versions={},
    )
    return write_bundle(folder / "bundle", info, files, log)


@pytest.fixture(scope="module")
def small(log: PreparedLog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("small"), log, SMALL, SMALL)


@pytest.fixture(scope="module")
def every_part(log: PreparedLog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of models with every kind of part."""
    return write(tmp_path_factory.mktemp("every"), log, *EVERY_PART)


@pytest.fixture
def copied(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "copied"))


def numbers(value: Any, path: tuple[Any, ...] = (), name: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every number below a value: the name of its field, and its path."""
    if isinstance(value, dict):
        name += f".{value.get('kind', value.get('family', ''))}"
        for key, inner in value.items():
            yield from numbers(inner, (*path, key), f"{name}.{key}")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from numbers(inner, (*path, place), name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, path


def with_file(bundle: Path, name: str, text: str) -> None:
    """Writes one file, and its hash into the manifest."""
    (bundle / name).write_text(text)
    say_whole(bundle, name)


def say_whole(bundle: Path, name: str) -> None:
    hashes = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_text(json.dumps(hashes | {name: file_hash(bundle / name)}))


@contextmanager
def bounded_memory() -> Iterator[None]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


FILES = (INFO, "encoding/numeric.json", "encoding/tables.json", "encoding/schema.yaml")


VALUES = (0, -1, math.nan, 10**9, 10**18)


@pytest.mark.parametrize("count", [2, pytest.param(len(VALUES), marks=pytest.mark.slow)])
def test_any_number_is_refused_or_scores_are_probabilities(
    copied: Path,
    every_part: Path,
    tmp_path: Path,
    log: PreparedLog,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each field once: of the models with every part those that the small one lacks, and so many in turn."""
    rows = log.split("validation").inputs.slice(0, 2)
    large = Path(shutil.copytree(every_part, tmp_path / "every"))
    tried, refused, load = set[str](), 0, Encoding.load
    for bundle, name in (*((copied, name) for name in FILES), (large, INFO)):
        text = json.dumps(yaml.safe_load((bundle / name).read_text()))  # JSON is YAML, read in less time
        # read once where it stays as it is
        monkeypatch.setattr(Encoding, "load", load if name != INFO else lambda _: log.encoding)
        for field, path in numbers(json.loads(text), name=name):
            if field in tried:
                continue
            tried.add(field)
            first = len(tried) if bundle is large else 0
            for place in range(first, first + (count if bundle is large else len(VALUES))):
                changed = json.loads(text)
                *above, last = path
                reduce(getitem, above, changed)[last] = VALUES[place % len(VALUES)]
                with_file(bundle, name, json.dumps(changed))
                with bounded_memory():
                    try:
                        scores = Scorer(read_bundle(bundle)).score_encoded(rows)
                    except UserError:
                        refused += 1
                    else:
                        assert ((scores >= 0) & (scores <= 1)).all(), field
        with_file(bundle, name, text)
    assert len(tried) > 100
    assert refused > 100


def spoil(bundle: Path, *, everywhere: bool) -> str:
    """Puts NaN into the row of unknown sites, which no stored example uses, or into each tensor."""
    name = weights_names(read_bundle(bundle).info)[0]
    weights = read_weights(bundle / name)
    (tables,) = (key for key in weights if key.endswith("tables.weight"))
    for key in list(weights) if everywhere else [tables]:
        weights[key][UNKNOWN_ID if key == tables else 0] = math.nan
    save_weights(weights, bundle / name)
    say_whole(bundle, name)
    return tables


def test_a_rate_that_is_none_is_refused(copied: Path) -> None:
    info = json.loads((copied / INFO).read_text())
    with_file(copied, INFO, json.dumps(info | {"negative_sampling_rate": -5}))
    with pytest.raises(UserError, match=r"negative_sampling_rate: .*greater than 0 \(received -5\)"):
        read_bundle(copied)


def test_nothing_is_built_of_a_model_that_is_larger_than_its_weights(
    every_part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = Path(shutil.copytree(every_part, tmp_path / "copied"))
    info = json.loads((copied / INFO).read_text())
    info["members"][1]["job"]["model"]["experts"] = 4096
    with_file(copied, INFO, json.dumps(info))
    monkeypatch.setattr(bundles, "build_model", lambda *_: pytest.fail("built"))
    with pytest.raises(UserError, match="numbers, and the model in bundle"):
        read_bundle(copied).model()


def test_an_encoding_that_is_anothers_is_refused(copied: Path) -> None:
    """Its ids would name other rows, or none."""
    schema = (copied / "encoding" / "schema.yaml").read_text()
    with_file(copied, "encoding/schema.yaml", schema.replace("hash_buckets: null}", "hash_buckets: 9}", 1))
    with pytest.raises(UserError, match="others than those of encoding/"):
        read_bundle(copied)


def test_predict_names_the_row_whose_score_is_no_probability(
    dhen_search: Run, copied: Path, tmp_path: Path
) -> None:
    spoil(copied, everywhere=True)
    raw, out = write_log(tmp_path / "raw.csv", 9), tmp_path / "scores.csv"
    said = dhen_search("predict", copied, "--data", raw, "--out", out, code=1).stderr
    assert "row 1: the score is nan, which is no probability" in said
    assert not out.exists()


def test_rows_before_count_in_the_message(copied: Path, log: PreparedLog) -> None:
    scorer, rows = Scorer(read_bundle(copied)), log.split("validation").inputs.slice(0, 3)
    numeric = rows.numeric.copy()
    numeric[1] = math.nan
    rows = dataclasses.replace(rows, numeric=numeric)
    with pytest.raises(ScoreError, match="row 12: the score is nan"):
        scorer.score_encoded(rows, first=10)


def test_serve_answers_500_in_place_of_no_probability(copied: Path, tmp_path: Path) -> None:
    spoil(copied, everywhere=True)
    bundle = read_bundle(copied)

    class Model:
        served = ServedVersion(Scorer(bundle), bundle.version)

    app = make_app(cast(LiveModel, Model()), max_body_bytes=10**6, token=None)
    (route,) = (each for each in app.routes if isinstance(each, Route) and each.path == "/invocations")
    rows = write_log(tmp_path / "raw.csv", 3).read_bytes()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": rows, "more_body": False}

    headers = [(b"content-type", b"text/csv")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    answer = asyncio.run(route.endpoint(request))
    assert answer.status_code == 500
    assert "row 1: the score is nan" in json.loads(answer.body)["message"]


def test_verify_reads_weights_that_no_stored_example_uses(dhen_search: Run, copied: Path) -> None:
    tables = spoil(copied, everywhere=False)
    read_bundle(copied).check()  # the stored examples are as they were
    assert f"{tables} hold NaN or an infinity" in dhen_search("verify", copied, code=2).stderr


def test_verify_reads_the_scales_of_tables_of_8_bits(copied: Path, log: PreparedLog, tmp_path: Path) -> None:
    write_int8(read_bundle(copied), tmp_path / "int8", log)
    small = read_bundle(tmp_path / "int8")
    model = small.model()
    small.check_finite(model)
    table = next(module for module in model.modules() if isinstance(module, Int8Tables))
    table.packed[-1, -ROW_EXTRA_BYTES:] = 255
    with pytest.raises(UserError, match="packed hold NaN"):
        small.check_finite(model)


@pytest.mark.parametrize(
    ("now", "exported", "held"),
    [
        (0.9, 0.9, True),
        (0.9, 0.90004, False),
        (0.9, 0.900004, True),
        (math.nan, 0.9, False),
        (0.9, math.nan, False),
        (math.nan, math.nan, True),
    ],
)
def test_two_different_nes_never_pass(copied: Path, now: float, exported: float, held: bool) -> None:
    was, is_now = METRICS.replace(ne=exported), METRICS.replace(ne=now)
    tolerance = verify.tolerance_of(read_bundle(copied))
    assert (verify.ne_gap(is_now, was) <= tolerance) == held
    line = verify.split_line("test", is_now, was, tolerance)
    assert (f"at export NE {exported:.5f}" in line) == (not held or f"{now:.5f}" == f"{exported:.5f}")


@pytest.mark.parametrize("form", ["dataframe_records", "dataframe_split", "inputs"])
def test_only_columns_of_the_model_are_built(form: str) -> None:
    names = [f"unknown {number}" for number in range(50)]
    content = {
        "dataframe_records": [{"site": "a"}, *({name: 1} for name in names)],
        "dataframe_split": {"columns": ["site", *names], "data": [[0] * 51] * 51},
        "inputs": {name: [0] * 51 for name in ("site", *names)},
    }[form]
    table, rows = FORMS[form](content, form, ("site", "price"))
    assert rows == 51
    assert list(table) == ["site"]
