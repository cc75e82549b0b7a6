"""Each script runs on a case of seconds and prints its tables; of some the numbers are looked at."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from command_line import run_here
from postgresql import served
from running_benchmarks import FOLDER, ROOT, number, run_benchmark, run_benchmark_process, tables
from tools import needs

from benchmarks.search.same_study import differences

CANDIDATES = FOLDER / "search" / "demo_candidates.json"
SMALL = "space=tiny training.epochs=2 baseline_trials=1 threads=1 parallel=1"
STEPS = "--steps 2 --batch 64 --threads 1"
OVERHEAD = "benchmarks.search.overhead_per_candidate"

HERE = (
    "benchmarks.data.preparation_speed --rows 2000 --cores 1 2",
    "benchmarks.models.ensembles_over_mixes {log} --out {out} --seeds 1 --mixes 2",
    "benchmarks.models.modules_and_norms {log} --seeds 2 --groups alone --networks linear --raw {out}",
    "benchmarks.models.number_buckets {log} --seeds 2 --counts 4 --networks 1",
    "benchmarks.models.sparse_attention speed --embeddings 24 48 --examples 2 --repeats 1 --dim 8 --block-size 2"
    " --layouts sliding_window --precisions fp32",
    "benchmarks.models.sparse_attention ne --columns 6 --rows 1000 --seeds 2 --block-size 1 --shuffled"
    " --layouts bigbird",
    "benchmarks.planner.corrected_seconds --rows 600 --candidates 8 space=tiny baseline_trials=1",
    "benchmarks.planner.memory_and_latency latency --repeats 1 --candidates 3",
    "benchmarks.planner.depth_and_width --cluster h100 --ranks 2x8 --depths 1 8 --widths 64 32768",
    "benchmarks.planner.servers --rows 1000 --dimension 8 --batch 64",
    f"benchmarks.search.best_beside_usual_models {{log}} {SMALL} --out {{out}} --trials 2 --seeds 2",
    f"benchmarks.search.beside_boosting {{log}} {SMALL} trials=1 --minutes 0.5 --seeds 2 --libraries sklearn"
    " --out {out}",
    "benchmarks.search.candidates_per_hour {log} trials=2 space=tiny training.epochs=1 baseline_trials=1"
    " --settings 'parallel=1 threads=1'",
    "benchmarks.search.growing_space low-rank trials=2 baseline_trials=1 training.epochs=1 parallel=1 threads=1"
    " --seeds 0 --out {out}",
    f"benchmarks.search.minutes_kept {{log}} {SMALL} training.epochs=1 --minutes 0.01",
    "benchmarks.search.passes_found demo demo.rows=1000 --most 2 --networks dlrm",
    "benchmarks.search.picks_under_drift --out {out} --seeds 1 --origins 1 demo.rows=2000 trials=2 space=tiny"
    " averages=2 baseline_trials=1 training.epochs=1",
    "benchmarks.search.samplers_live {study} --marks 2 3",
    "benchmarks.search.samplers_on_surrogate --synthetic --samplers random tpe --trials 12 --repeats 2"
    " --out {out}",
    f"benchmarks.search.stopping_replayed {CANDIDATES} --orders 1 --candidates 20",
    "benchmarks.search.wide_log {out} training.epochs=1 --rows 600 --categorical 8 --numeric 30 --minutes 0.01",
    "benchmarks.servers.pull_and_push --rows 200 --batches 64 --dims 4 --servers 1 2 --steps 3",
    "benchmarks.servers.staleness {log} --out {out} --seeds 2 --batch-size 64",
    "benchmarks.training.accelerator_step --device cpu --steps 1 --layers 1 --width 16 --batch 32",
    "benchmarks.training.beside_peers --rows 4000 --repeats 1 --batch 128 --threads 1 --architectures dcn_v2",
    "benchmarks.training.delayed_update --rows 2000 --repeats 2 --layers 1 --dim 4",
    "benchmarks.training.growing_tables steps --batches 32 --rows 50 --repeats 3",
    "benchmarks.training.growing_tables ids --distinct 200000 --capacity 1000",
    "benchmarks.training.growing_tables ne {log} --columns user --shares 1.0 --seeds 2",
    "benchmarks.training.increments --capacities 500 --shares 0.01 0.5",
    "benchmarks.training.one_bit_adam ne --rows 3000 --repeats 2 --layers 1 --batch 32 --ranks 1x1",
    "benchmarks.training.one_bit_adam links --layers 2 --width 512",
    "benchmarks.training.online_beside_frozen --rows 4000 --seeds 2",
    "benchmarks.training.paper_optimisations --rows 2000 --ranks 1x1 --repeats 1 --batch 128 --layers 1"
    " --only '' table_precision=fp16",
    "benchmarks.training.paper_optimisations --rows 2000 --ranks 2x1 --repeats 1 --batch 128 --layers 1"
    " --only '' table_precision=fp16",
    "benchmarks.training.refit_gain {study} --seeds 2",
    f"benchmarks.training.scaling --axis layers --points 1 2 {STEPS}",
    f"benchmarks.training.scaling --axis rows --points 2000 4000 {STEPS}",
    f"benchmarks.training.scaling --axis tables --points 2 4 {STEPS}",
    f"benchmarks.training.scaling --axis table-rows --points 100 1000 {STEPS}",
    f"benchmarks.training.scaling --axis widths --points 16 {STEPS}",
    "benchmarks.training.table_levels --rows 300 --batch 32 --shares 1.0 0.3 --exponents 1.1 --warm-up 5"
    " --steps 5",
)
"""Scripts that run in this process, which saves the imports."""
ALONE = (
    "benchmarks.processes.rank_start_time --repeats 1",
    "benchmarks.processes.engines --repeats 2 --starts 1",
    "benchmarks.search.one_command trees --rows 2000 --minutes 0.5 --libraries sklearn --previous {root}"
    " --out {out}",
    "benchmarks.search.samplers_on_surrogate {few} --samplers random random+curve --trials 12 --repeats 2",
    f"{OVERHEAD} --marks 2 --rows 1000",
    f"{OVERHEAD} --known 5 --marks 2 --rows 1000",
    f"{OVERHEAD} --known 5 --status --repeats 1 --rows 1000",
    "benchmarks.servers.recovery --rows 3000 --kills 1",
    "benchmarks.servers.slow_rank --rows 3000 --repeats 1 --dense light",
    "benchmarks.serving.half_open {study}/best {log} --half-open 50 --clients 2 --seconds 2",
    "benchmarks.training.pipeline_bubble --stages 2 --per-stage 2 --schedules gpipe zero_bubble --pass-ms 5"
    " --steps 2",
)
"""Scripts that change the process that they run in."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        *HERE,
        *ALONE,
        pytest.param(
            "benchmarks.dashboards.report_at_scale {study} --candidates 20 --points 30 --repeats 1",
            marks=needs("chromium"),
        ),
        pytest.param(
            "benchmarks.serving.load {study}/best {log} --workers 1 --rows 1 4 --seconds 1",
            marks=needs("wrk"),
        ),
    ],
)
def test_it_runs_and_prints_its_tables(
    command: str, log: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    places = {"log": log, "out": tmp_path / "out", "root": ROOT, "few": tmp_path / "few.json"}
    if "{few}" in command:
        table = json.loads(CANDIDATES.read_text())
        places["few"].write_text(json.dumps(table | {"candidates": table["candidates"][:80]}))
    if "{study}" in command:
        places["study"] = Path(shutil.copytree(request.getfixturevalue("study"), tmp_path / "study"))
    module, *words = (word.format(**places) for word in shlex.split(command))
    said = (run_benchmark if command in HERE else run_benchmark_process)(module, *words)
    found = tables(said)
    assert found, said
    assert all(found), said


@pytest.mark.slow
def test_rates_that_fall_stand_beside_constant_ones(log: Path, tmp_path: Path) -> None:
    """Of a study whose passes were found."""
    words = ("space=tiny", "trials=1", "baseline_trials=1", "threads=1", "parallel=1")
    assert run_here(("run", "--data", log, "--out", tmp_path / "study", *words), {}, None).returncode == 0
    more = ("--passes", 2, 3, "--networks", 2, "--seeds", 2)
    (rows,) = tables(run_benchmark("benchmarks.training.falling_rates", tmp_path / "study", *more))
    assert [row["network"] for row in rows][0::2] == ["advanced_dlrm 256-128 d16", "all"]


@pytest.mark.slow
@needs("postgresql")
def test_drivers_share_a_study_whose_trainings_are_made_up() -> None:
    words = ("--drivers", 2, "--candidates", 12, "--marks", 6, "--space", "tiny", "--sampler", "random")
    with served() as server:
        said = run_benchmark_process("benchmarks.drivers.many_drivers", "--storage", server.url, *words)
    (rows,) = tables(said)
    assert [row["candidates"] for row in rows] == ["6", "12"]
    found = re.search(r"(\d+) numbers, each once", said)
    assert found
    assert int(found[1]) >= 12


@pytest.mark.slow
def test_techniques_train_to_the_losses_of_one_process() -> None:
    (rows,) = tables(run_benchmark("benchmarks.processes.technique_equality", "--ranks", 1))
    assert len(rows) >= 3
    assert {row["as it should be"] for row in rows} == {"yes"}


@pytest.mark.slow
def test_a_killed_rank_loses_nothing() -> None:
    words = ("--studies", 1, "--seed", 1)
    (rows,) = tables(run_benchmark_process("benchmarks.processes.killed_processes", *words))
    assert [row["killed"] for row in rows] == ["rank", "all"]
    for row in rows:
        assert [row[name] for name in ("lost", "doubled", "different", "left behind")] == ["0"] * 4


@pytest.mark.slow
def test_mapped_tables_take_no_memory_of_the_worker() -> None:
    words = ("--gb", 0.1, "--requests", 3)
    (rows,) = tables(run_benchmark_process("benchmarks.serving.memory", *words))
    memory, mapped = rows
    assert (memory["served"], mapped["served"], mapped["scores"]) == ("in memory", "--mmap", "equal")
    own = [number(row["after 3 requests: MiB of its own"]) for row in rows]
    assert own[0] - own[1] > 75  # 0.1 GB are 95 MiB


@pytest.mark.slow
def test_the_table_of_a_study_holds_its_candidates(study: Path, tmp_path: Path) -> None:
    said = run_benchmark("benchmarks.search.candidate_table", study, "--out", tmp_path / "table.json")
    assert "'completed': 3" in said


@pytest.mark.slow
def test_the_walk_of_a_candidate_is_followed() -> None:
    said = run_benchmark_process("benchmarks.search.candidate_walk")
    for name in ("trials/store/ledger.py", "search/mlflow/fill_in.py", "search/samplers/ask_tell.py"):
        assert f" {name} " in said


def test_fields_of_two_checkouts_are_compared_by_their_new_names() -> None:
    old = {"log": {"status": {"trials": [{"ne": 0.8, "old": {"a": 1}}, {"ne": 0.9}], "created_at": "1"}}}
    new = {"log": {"status": {"trials": [{"ne": 0.8, "new": {"a": 1}}, {"ne": 0.9000000000000001}]}}}
    off = "log: status.trials.ne [1]: 0.9 -> 0.9000000000000001"
    assert [*differences(old, new, {"status.trials.old": "status.trials.new"})] == [off]
    assert [*differences(old, new, {})] == [
        "log: status.trials.old.a [0]: 1 -> missing",
        off,
        "log: status.trials.new.a [0]: missing -> 1",
    ]


@pytest.mark.slow
def test_a_checkout_finds_the_same_as_itself(tmp_path: Path) -> None:
    words = (ROOT, ROOT, "--logs", "stamped", "--trials", 1, "--rows", 600, "--keep", tmp_path / "kept")
    assert "no difference" in run_benchmark("benchmarks.search.same_study", *words)
