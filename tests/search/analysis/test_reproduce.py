"""`reproduce`: rows and claims as data, intervals against values by hand, and the public command line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from command_line import TIMEOUT_SECONDS, Run, wait_until
from warm_process import WarmProcess

from dhen.config import DhenConfig
from dhen.cost import headline_flops
from dhen.errors import UserError
from dhen.model import model_cost
from dhen.schema import FeatureSchema, Table
from search.analysis.reproduce import TableResult, finding, findings, markdown, rich_table
from search.analysis.reproduce_tables import Claim, read_table_config, table_of
from search.analysis.reproduce_tables import PaperTable as PaperTable
from search.analysis.statistics import compared, t_interval

SCHEMA = FeatureSchema(
    tables=tuple(Table(name=f"c{n}", rows=1000) for n in range(20)), numeric=("a", "b", "c")
)
TINY = ("embedding_dim=4", "out_embeddings=2", "mlp=[8,4]", "head=[4]", "milestones=2", "threads=1")
"""With a table's own `layers` and `experts`: trainings of a fraction of a second."""


def table(name: str, *words: str) -> PaperTable:
    return table_of(read_table_config(name, words, ("demo",)), SCHEMA)


def test_table_1_has_the_papers_rows() -> None:
    five = table("table1")
    assert {row.name: row.paper_percent for row in five.rows} == {
        "DCN": None,
        "attention": -1.044,
        "convolution": -1.534,
        "linear": -1.538,
        "DCN+linear": -0.004,
        "attention+linear": -1.576,
        "attention+convolution": -1.508,
    }
    models = [row.model for row in five.rows]
    assert all(isinstance(model, DhenConfig) and len(model.layers) == 5 for model in models)
    kinds = [
        {block.kind for block in model.layers[0].modules} for model in models if isinstance(model, DhenConfig)
    ]
    assert kinds[0] == {"dcn"}
    assert kinds[-1] == {"attention", "conv"}
    assert all(row.paper_percent is None for row in table("table1", "layers=3").rows)


def test_table_3_has_like_flops() -> None:
    rows = table("table3").rows
    flops = {row.name: headline_flops(model_cost(row.model, SCHEMA)) for row in rows}
    for experts, layers in ((4, 2), (8, 4), (16, 6)):
        moe = flops[f"MoE, {experts} experts"]
        assert flops[f"DHEN dlrm+linear, {layers} layers"] == pytest.approx(moe, rel=0.01)
    assert {(row.paper_flops, row.paper_percent) for row in rows[1:]} == {
        (1.3e9, -0.06),
        (3.3e9, -0.09),
        (6e9, -0.10),
        (1.44e9, -0.11),
        (3e9, -0.21),
        (4.6e9, -0.26),
    }


def test_norms_are_where_they_are_wanted_and_a_warm_up_is_said_once() -> None:
    """In examples it takes the place of the share that there is by default."""
    two = table("table2", "norm_placement=pre")
    (model,) = (
        row.model for row in two.rows if row.name.startswith("DHEN") and row.name.endswith("8 layers")
    )
    assert isinstance(model, DhenConfig)
    assert {layer.norm_placement for layer in model.layers} == {"pre"}
    assert two.title.endswith("; pre-norm")
    assert read_table_config("table1", (), ("demo",)).training.warmup_share == 0.1
    given = read_table_config("table1", ("training.warmup_examples=64",), ("demo",)).training
    assert (given.warmup_share, given.warmup_examples) == (0.0, 64)


@pytest.mark.parametrize("name", ["table1", "table2", "table3"])
def test_claims_are_about_rows(name: str) -> None:
    made = table(name)
    names = [row.name for row in made.rows]
    assert len(set(names)) == len(names)
    for claim in made.claims:
        assert claim.pairs
        assert {row for pair in claim.pairs for row in pair} <= set(names)
    paper = {row.name: row.paper_percent or 0.0 for row in made.rows}
    for claim in made.claims:
        if claim.in_paper:
            assert all(paper[better] < paper[worse] for better, worse in claim.pairs), claim.text


def test_intervals_by_hand() -> None:
    """t(2) at 97.5 % is 4.3027, t(1) is 12.7062 (any table of Student's distribution).

    Differences are paired by seed: both here vary by 10 % from seed to seed, their difference does not.
    """
    three = t_interval([1.0, 2.0, 3.0], 0.95)
    assert three.mean == 2.0
    assert three.half_width == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    two = t_interval([0.0, 1.0], 0.95)
    assert [two.low, two.high] == pytest.approx([0.5 - 6.3531, 0.5 + 6.3531], rel=1e-4)
    assert t_interval([0.7], 0.95).high is None
    relative = compared([0.99, 1.089], [1.0, 1.1], 0.95)
    assert relative is not None
    assert relative.mean == pytest.approx(-1.0)
    assert relative.half_width == pytest.approx(0.0, abs=1e-9)
    assert compared([0.99, None], [1.0, 1.1], 0.95) is None


@pytest.mark.parametrize(
    ("better", "holds"),
    [
        ([0.80, 0.89, 0.98], "yes"),
        ([1.00, 1.11, 1.22], "no"),
        ([0.80, 1.11, 0.98], "cannot tell"),
        ([0.80, 0.89, None], "cannot tell"),
        ([0.80], "cannot tell"),
    ],
)
def test_a_finding_needs_an_interval_without_zero(better: list[float | None], holds: str) -> None:
    ne = {"a": better, "b": [0.9, 1.0, 1.1][: len(better)]}
    assert finding(Claim("a is better", (("a", "b"),)), ne, 0.95).holds == holds
    twice = finding(Claim("a is better, and b", (("a", "b"), ("b", "a"))), ne, 0.95)
    assert twice.holds == ("cannot tell" if holds == "cannot tell" else "no")


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("table4", (), "Known: table1, table2, table3"),
        ("table1", ("experts=4",), "unknown key 'experts'"),
        ("table1", ("seeds=1", "confidence=0.9"), "needs seeds=2 or more"),
        ("table1", ("layers=[2,4]",), "layers"),
        ("table2", ("layers=[2,4,2]",), "layers: 2 is given twice"),
        ("table3", ("experts=[4,8]",), "as many of the one as of the other"),
        ("table3", ("layers=[2,4]", "experts=[8,8]"), "experts: 8 is given twice"),
        ("table3", ("modules=linear",), "must be one of modules"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_settings(name: str, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError) as error:
        table(name, *words)
    assert says in str(error.value)


def finished(out: Path) -> dict[str, int]:
    """Trainings that are done, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in (out / "trainings").glob("*.json")}


def test_a_table_goes_on_after_ctrl_c(dhen_search: Run, environment: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "r"
    tiny = [word for word in TINY if not word.startswith("mlp")]
    data = ("--data", "demo", "demo.rows=2000")
    words = ("reproduce", "table1", *data, "--out", out, "seeds=2", "layers=1", *tiny)
    process = WarmProcess(words, environment)
    wait_until(lambda: finished(out), process)
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130, said + errors
    assert "the same command goes on" in said
    before = finished(out)
    assert 0 < len(before) < 14
    told = dhen_search(*words, "--json")
    after = finished(out)
    assert len(after) == 14
    assert {name: after[name] for name in before} == before
    assert told.stderr.count("seed") == 14 - len(before)
    assert not list((out / "trainings").glob("*/"))
    result = TableResult.model_validate(json.loads(told.stdout))
    assert json.loads((out / "table1.json").read_text()) == json.loads(told.stdout)
    assert (out / "table1.md").read_text() == markdown(result)
    assert "Plotly.newPlot" in (out / "table1.html").read_text()
    check(result)


def check(result: TableResult) -> None:
    """Of two seeds and two milestones."""
    assert result.seeds == (0, 1)
    assert len(result.milestones) == 2
    assert result.confidence == 0.95
    assert "secondary source" in result.source
    for row in result.rows:
        assert len(row.ne) == 2
        relative = row.relative[-1]
        assert relative is not None
        assert relative.low is not None
        by_seed = [
            100 * (a[-1] / b[-1] - 1)
            for a, b in zip(row.ne, result.rows[0].ne, strict=True)
            if a[-1] and b[-1]
        ]
        assert relative.mean == pytest.approx(sum(by_seed) / 2)
    assert result.rows[0].relative[-1] == t_interval([0.0, 0.0], 0.95)
    assert len(list(findings(result))) == len(result.findings)
    assert len(rich_table(result, width=200).columns) == len(rich_table(result, width=60).columns) + 1


def test_equal_jobs_are_trained_once(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    """A mixture of one expert is AdvancedDLRM; the next table in the folder has that for nothing."""
    out = tmp_path / "r"
    words = ("--data", click_log, "--out", out, "seeds=1", "layers=1", *TINY)
    log = ("--data", click_log, "--out", tmp_path / "too-small")
    too_small = dhen_search("reproduce", "table1", *log, "milestones=100", code=2).stderr
    assert "the log is too small" in too_small
    said = dhen_search("reproduce", "table3", *words, "experts=1", "--json")
    assert len(finished(out)) == 2
    result = TableResult.model_validate_json(said.stdout)
    assert result.confidence is None
    assert [row.relative[-1].mean for row in result.rows[:2] if row.relative[-1]] == [0.0, 0.0]
    assert result.rows[1].relative[-1] == t_interval([0.0], 0.95)
    assert {each.holds for each in result.findings} == {"cannot tell"}
    before = finished(out)
    printed = dhen_search("reproduce", "table2", *words).stdout
    assert printed.endswith((out / "table2.md").read_text() + "\n")
    assert len(finished(out)) == 4
    assert {name: finished(out)[name] for name in before} == before
