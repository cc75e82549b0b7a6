"""What is fuzzed: every place where the program reads what others have written.

A target takes bytes, and either returns or raises `UserError`, whatever they are. Its seeds are good inputs, with
which the fuzzer begins.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import yaml
from command_line import ROOT, run_here, write_log

from dhen.model import catalog as models
from dhen.values import file_hash
from search.bundles.bundle import read_bundle
from search.bundles.increments import INCREMENTS, MANIFEST, file_hashes
from search.config import read_study_config
from search.execution.proposals import ProposalLine, credit_of, read_line
from search.plan_request import read_request
from search.serving.requests import CSV, JSON, rows_of
from spaces.space import load_space
from trials.cluster.this_machine import load_cluster
from trials.data.prepare.prepare_log import prepare
from trials.data.schema_yaml import read_schema
from trials.records.events import (
    DivergenceEvent,
    Event,
    EventReader,
    EventWriter,
    FailureEvent,
    Progress,
    ScoreEvent,
    WrapEvent,
)
from trials.records.job import TrainingConfig
from trials.records.trial_record import Metrics

ROWS, LATER = 300, 420
"""Rows that the bundle is trained on, and of those and the later ones, which its increment is trained on."""
MODEL = "model: {family: dhen, embedding_dim: 4, layers: [{modules: [{kind: dlrm}, {kind: linear}]}]}"
GROWING = "user: {role: categorical, table: {growing: {capacity: 12, evict: lru}}}"
METRICS = Metrics(ne=0.9, log_loss=0.5, auc=0.6, calibration=1.0, examples=10)
EVENTS: tuple[Event, ...] = (
    WrapEvent(strategy="dp"),
    Progress(examples=1, total_examples=2, seconds=0.5),
    ScoreEvent(split="test", metrics=METRICS),
    DivergenceEvent(step=3, loss="nan"),
    FailureEvent(error="RuntimeError: no", out_of_memory=True, needed_bytes=3, limit_bytes=2),
)
PLAN = """schema: {tables: [{name: site, rows: 1000000, multi_hot: true, mean_ids: 2.0}], numeric: 13}
training: {batch_size: 64}
"""
SPREADSHEET = b"seen at;until;price;click\n" + b"".join(
    b"%d.03.2026 17:05;3/%d/2026 5:05 PM;1.234,5%d;%d\n" % (day, day, day % 10, day % 2)
    for day in range(1, 29)
)
"""A log as a spreadsheet writes it where the comma is decimal."""


class Target(NamedTuple):
    """One place that reads."""

    seeds: Sequence[bytes]
    read: Callable[[bytes], object]


def targets(folder: Path) -> dict[str, Target]:
    """Returns all targets by name.

    Args:
        folder: where the log and the bundle that seeds are taken from lie; what is fuzzed is written there too.
    """
    if not (folder / "live").exists():
        _make(folder)
    shipped = {
        kind: [path.read_bytes() for path in sorted((ROOT / place / "catalog").glob("*.yaml"))]
        for kind, place in (("space", "spaces"), ("cluster", "trials/cluster"), ("model", "dhen"))
    }
    schema = read_schema(folder / "log" / "schema.yaml")
    space = load_space("tiny")
    raw = b"".join((folder / "earlier.csv").read_bytes().splitlines(keepends=True)[:80])
    records = json.dumps({"dataframe_records": [{"site": "a", "price": 3.5, "tags": ["x"]}, {"user": None}]})
    split = json.dumps({"dataframe_split": {"columns": ["site", "visits"], "data": [["a", 1], [None, 2.5]]}})
    return {
        "schema": Target(
            [(folder / "log" / "schema.yaml").read_bytes()], _of_file(folder, "schema.yaml", read_schema)
        ),
        "study": Target(
            [(folder / "study.yaml").read_bytes()],
            _of_file(folder, "study.yaml", lambda path: read_study_config(path, ()).to_dict()),
        ),
        "cluster": Target(
            shipped["cluster"], _of_file(folder, "cluster.yaml", lambda path: load_cluster(str(path)))
        ),
        "space": Target(shipped["space"], _of_file(folder, "space.yaml", lambda path: load_space(str(path)))),
        "plan": Target(
            [f"{PLAN}model: {name}".encode() for name in models()]
            + [
                PLAN.encode() + b"model:\n  " + b"\n  ".join(model.splitlines()) for model in shipped["model"]
            ],
            _of_file(folder, "plan.yaml", lambda path: read_request(str(path), None, ())),
        ),
        "proposals": Target(
            [
                json.dumps({"point": {"depth": 1}, "by": "me"}).encode(),
                json.dumps(yaml.safe_load(MODEL)).encode(),
            ],
            lambda data: [_proposed(text, space) for text in data.decode(errors="replace").split("\n")],
        ),
        "json_request": Target([records.encode(), split.encode()], lambda data: rows_of(data, JSON, schema)),
        "csv_request": Target([raw], lambda data: rows_of(data, CSV, schema)),
        "events": Target(
            [(folder / "events.jsonl").read_bytes()],
            _of_file(folder, "fuzzed.jsonl", lambda path: EventReader(path)()),
        ),
        "log": Target([raw, gzip.compress(raw), SPREADSHEET], _of_file(folder, "fuzzed.csv", _prepared)),
        "parquet": Target(
            [(folder / "log.parquet").read_bytes()], _of_file(folder, "fuzzed.parquet", _prepared)
        ),
        "bundle": _files_of(folder / "bundle", folder / "bundle"),
        "increment": _files_of(folder / "live", folder / "live" / INCREMENTS / "000001"),
    }


def together(parts: dict[str, Target]) -> Target:
    """Returns the target whose first byte says which one reads the others."""
    every = list(parts.values())
    seeds = [bytes([index]) + seed for index, part in enumerate(every) for seed in part.seeds]
    return Target(seeds, lambda data: every[data[0] % len(every)].read(data[1:]) if data else None)


def _make(folder: Path) -> None:
    """Writes a log, and what the commands make of it."""
    environment = {"DHEN_SEARCH_CACHE": str(folder / "cache")}

    def command(*words: object) -> None:
        ended = run_here(words, environment, folder)
        assert ended.returncode == 0, ended.stderr

    header, *rows = write_log(folder / "all.csv", LATER).read_text().splitlines()
    (folder / "earlier.csv").write_text("\n".join([header, *rows[:ROWS]]) + "\n")
    (folder / "later.csv").write_text("\n".join([header, *rows[ROWS:]]) + "\n")
    (folder / "model.yaml").write_text(MODEL)
    command("prepare", "earlier.csv", "--out", "inferred")
    schema = (folder / "inferred" / "schema.yaml").read_text()
    (line,) = (line for line in schema.splitlines() if line.strip().startswith("user:"))
    (folder / "log").mkdir()
    (folder / "log" / "schema.yaml").write_text(
        schema.replace(line.strip(), GROWING).replace(", hash_buckets: auto", "")
    )
    command("prepare", "earlier.csv", "--out", "log")
    command("train", "model.yaml", "--data", "log", "--out", "bundle", "training.epochs=1")
    command("online", "bundle", "--data", "later.csv", "--out", "live", "period=1000")
    study = read_study_config(None, (), data=["earlier.csv"], trials=3)
    (folder / "study.yaml").write_text(json.dumps(study.to_dict()))
    with EventWriter(folder / "events.jsonl") as write:
        for event in EVENTS:
            write(event)
    pq.write_table(pacsv.read_csv(folder / "earlier.csv"), folder / "log.parquet")


def _of_file(folder: Path, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Returns what reads bytes as a file."""

    def read_file(data: bytes) -> object:
        (folder / "fuzzed" / name).write_bytes(data)
        return read(folder / "fuzzed" / name)

    (folder / "fuzzed").mkdir(exist_ok=True)
    return read_file


def _prepared(path: Path) -> None:
    out = path.with_suffix(".prepared")
    shutil.rmtree(out, ignore_errors=True)
    prepare([path], out=out)


def _proposed(text: str, space: object) -> None:
    line = ProposalLine(number=1, text=text)
    credit_of(line)
    read_line(line, space, dict(TrainingConfig()))


def _files_of(bundle: Path, place: Path) -> Target:
    """Returns the target of a bundle in which one file of a folder is another, and the manifest says so.

    The first byte says which file; one from 128 on leaves the manifest as it was.
    """
    names = [*file_hashes(place), MANIFEST]
    good = {name: (place / name).read_bytes() for name in names}

    def read(data: bytes) -> None:
        fuzzed = names[data[0] % 128 % len(names)] if data else MANIFEST
        try:
            (place / fuzzed).write_bytes(data[1:])
            if fuzzed != MANIFEST and data[0] < 128:
                hashes = json.loads(good[MANIFEST]) | {fuzzed: file_hash(place / fuzzed)}
                (place / MANIFEST).write_text(json.dumps(hashes))
            found = read_bundle(bundle)
            found.check(found.model())
            found.check(found.model(mapped=True))
        finally:
            for name in (fuzzed, MANIFEST):
                (place / name).write_bytes(good[name])

    return Target([bytes([index]) + good[name] for index, name in enumerate(names)], read)
