"""How large a report of very many candidates is, how long it takes to make, and when a browser has it ready.

    python -m benchmarks.dashboards.report_at_scale runs/demo

The candidates are those of a finished study, again and again, each with FLOPs and NE of its own; their learning
curves have as many points as asked for. A browser is ready when the page's scripts have read the study and made
the table of trials, so that it can be sorted, searched and opened; figures are drawn after that, as they come
into view.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.shared.machine_and_tables import machine, markdown
from dashboards.names import byte_size
from dashboards.report.page import render
from dhen.errors import UserError
from search.read_study import read_finished_study
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Curve, CurvePoint, TrialRecord

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1440,900", "--dump-dom")
PROBE = "<script>document.documentElement.dataset.ready = performance.now();</script>"
"""It stands behind the page's own scripts, so it runs when they have come to their end."""
READY = re.compile(r'<html[^>]*data-ready="([0-9.]+)"')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="run directory of a finished study")
    parser.add_argument("--candidates", type=int, default=1000)
    parser.add_argument("--points", type=int, default=100, help="points of each learning curve")
    parser.add_argument("--repeats", type=int, default=5, help="times that the page is made and opened")
    options = parser.parse_args()
    record = enlarged(read_finished_study(options.directory), options.candidates, options.points)
    made = [timed_page(record) for _ in range(options.repeats)]
    page = made[-1][1]
    ready = [ready_ms(page) for _ in range(options.repeats)]
    print(machine())
    table = markdown(
        ("candidates", "points", "size", "made in, s", "ready in, ms", "slowest, ms"),
        [
            (
                str(len(record.candidates)),
                str(options.points),
                byte_size(len(page.encode())),
                f"{median(seconds for seconds, _ in made):.1f}",
                f"{median(ready):.0f}",
                f"{max(ready):.0f}",
            )
        ],
    )
    print(table)


def enlarged(record: StudyRecord, candidates: int, points: int) -> StudyRecord:
    """Returns the study with as many candidates, whose curves have as many points."""
    random = Random(0)
    baseline = record.trial(record.baseline or 0)
    models = [trial for trial in record.candidates if trial.result.curve]
    if not models:
        raise UserError("the study has no candidate with a learning curve; give one of more trials.")
    trials = [stretched(baseline, baseline.number, points, 1.0)]
    trials += [
        stretched(models[place % len(models)], 10_000 + place, points, random.lognormvariate(0.0, 0.7))
        for place in range(candidates)
    ]
    first = trials[1].number
    chosen = {"best": first, "knee": first, "front": (first,), "networks_front": (), "choice": None}
    return record.replace(trials=tuple(trials), comparisons=(), retrainings=(), **chosen)


def stretched(trial: TrialRecord, number: int, points: int, times: float) -> TrialRecord:
    """Returns a trial with FLOPs that differ by a factor, and a curve of as many points."""
    flops = (trial.job.flops or 1.0) * times
    curve = trial.result.curve
    longer = [_at(curve, place / max(1, points - 1), place + 1, times) for place in range(points)]
    return trial.replace(number=number).with_job(flops=flops).with_result(curve=tuple(longer))


def _at(curve: Curve, share: float, place: int, times: float) -> CurvePoint:
    point = curve[round(share * (len(curve) - 1))]
    ne = point.validation.ne * (1 + 0.01 / place + 0.002 * (times - 1))
    return point.replace(examples=1000 * place, validation=point.validation.replace(ne=ne))


def timed_page(record: StudyRecord) -> tuple[float, str]:
    """Returns the seconds that the page took, and the page."""
    began = time.perf_counter()
    page = render(record)
    return time.perf_counter() - began, page


def ready_ms(page: str) -> float:
    """Returns the milliseconds from the start of the page's loading until its scripts have run."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise UserError(f"no browser here; one of {', '.join(BROWSERS)} is needed.")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        file.write_text(page.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
        profile = f"--user-data-dir={folder}/profile"
        done = subprocess.run(
            [browser, *FLAGS, profile, file.as_uri()], capture_output=True, text=True, check=True, timeout=300
        )
    found = READY.search(done.stdout)
    assert found is not None, done.stdout[:500]
    return float(found[1])


if __name__ == "__main__":
    main()
