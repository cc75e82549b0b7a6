"""A study that widens its space, run as a user does, and interrupted after that."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from command_line import SMALL, TIMEOUT_SECONDS, Run, start

from search.read_study import read_study
from search.run_directory import DRIVER_LOG, REPORT

SPACE = """
modules: {linear: {}, mlp: {mlp: [[4], [8]]}}
slots: 2
depth: [1, 2]
out_embeddings: [2, 4]
raw_numeric: false
ensemble: [sum, concat]
model: {embedding_dim: [2, 4], head: [[4], [8]]}
training: {learning_rate: {low: 0.001, high: 0.01, log: true}}
"""
WORDS = ("trials=14", "training.epochs=1", "sampler=tpe")


def test_a_study_that_has_widened_its_space_is_gone_on_with(
    dhen_search: Run, click_log: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    space, out = tmp_path / "narrow.yaml", tmp_path / "study"
    space.write_text(SPACE)
    words = (f"space={space}", *WORDS)
    process = start(click_log, out, environment, *words)
    deadline, log = time.monotonic() + 2 * TIMEOUT_SECONDS, out / DRIVER_LOG
    while not (log.exists() and "the space is widened" in log.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    shown, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "the space is widened: " in shown
    (step,) = read_study(out).grown
    assert step.completed == 12

    assert f"space: {space}" in (out / "study.yaml").read_text()
    dhen_search("run", "--data", click_log, "--out", out, *SMALL, *words)
    record = json.loads(dhen_search("status", out, "--json").stdout)
    assert record["grows"] is True
    assert [grown["axis"] for grown in record["grown"]] == [step.axis]
    first, last = record["trials"][-2:]
    assert first["point"] == step.first
    assert {first["result"]["outcome"], last["result"]["outcome"]} == {"completed"}
    (axis,) = [axis for axis in record["axes"] if axis["name"] == step.axis]
    assert step.end in (*axis["values"], axis["low"], axis["high"])
    assert "Axes of the space were widened" in dhen_search("status", out).stdout
    assert "Axes of the space were widened" in (out / REPORT).read_text()
    said = dhen_search(
        "run", "--data", click_log, "--out", tmp_path / "no", *WORDS, "grow=maybe", code=2
    ).stderr
    assert "grow" in said
    assert "maybe" in said
