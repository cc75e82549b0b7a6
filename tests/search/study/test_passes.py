"""A small log through the command line: real trainings find that one pass, a dozen steps, is not enough."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from command_line import Run

WORDS = ("space=tiny", "trials=1", "baseline_trials=1", "threads=1", "parallel=1", "training.precision=fp32")


SENTENCE = (
    r"Trainings have (?:up to (?P<most>\d+) passes|\d+ passes, with learning rates that fall to zero,) "
    r"over the training rows: with the baseline, NE on validation was (?P<first>\S+) within one pass and "
    r"(?P<lowest>\S+) after (?P<after>\S+) of up to 32"
    r"(?: at constant rates and (?P<falling_ne>\S+) with falling ones)?, "
    r"with training\.table_decay=0\.01( training\.frequency_decay=0\.1)?\."
)


def test_a_study_finds_how_many_passes_help(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    """With so few steps a pass, rates that fall are tried, from as many passes as helped, and are no better."""
    out = tmp_path / "study"
    shown = " ".join(dhen_search("run", "--data", click_log, "--out", out, *WORDS).stdout.split())
    sentence = re.search(SENTENCE, shown)
    assert sentence, shown
    passes, first, lowest, after = (float(sentence[key]) for key in ("most", "first", "lowest", "after"))
    assert lowest < first
    assert after < passes <= 1.5 * after + 1
    assert sentence[0] in " ".join(dhen_search("status", out).stdout.split())
    assert sentence[0] in (out / "report.html").read_text()
    assert sentence[0] in (out / "driver.log").read_text()
    record = json.loads(dhen_search("status", out, "--json").stdout)
    assert record["passes"]["passes"] == passes
    assert [trial["kind"] for trial in record["trials"]] == ["baseline"] * (len(record["trials"]) - 1) + [
        "candidate"
    ]
    shapes = [(t["job"]["training"]["epochs"], t["job"]["training"]["schedule"]) for t in record["trials"]]
    assert shapes[:4] == [(1, "linear"), (32, "constant"), (32, "constant"), (math.ceil(after), "cosine")]
    assert shapes[-1] == (passes, "constant")
    fallen = [trial["result"]["validation"]["ne"] for trial in record["trials"][3:-1]]
    assert min(fallen) > lowest


@pytest.mark.parametrize("technique", ["dp", pytest.param("ssd_tables", marks=pytest.mark.slow)])
def test_train_keeps_the_better_of_one_pass_and_many(
    dhen_search: Run, click_log: Path, tmp_path: Path, technique: str
) -> None:
    words = ("train", "dlrm", "--data", click_log, "--out", tmp_path / "bundle", "training.precision=fp32")
    shown = dhen_search(*words, *([] if technique == "dp" else [f"technique={technique}"])).stdout
    assert ("training.table_decay is left out of what is tried" in shown) == (technique == "ssd_tables")
    assert "kept: the training with up to 32 passes" in shown
    curve = [float(ne) for ne in re.findall(r"validation NE (\S+)  AUC", shown)]
    kept = re.search(r"validation NE (\S+), test NE", shown)
    assert kept
    assert float(kept[1]) == min(curve) < min(curve[:4])  # the first four are those of one pass
    assert not [path for path in tmp_path.iterdir() if "training" in path.name]
