"""The fidelity audit: its figures against known ones, its words, and a finished study at the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from command_line import SMALL, TIMEOUT_SECONDS, Run, wait_until
from warm_process import WarmProcess

from dhen.errors import UserError
from search.analysis.fidelity import check_log, drawn, studied, taken
from search.analysis.fidelity_result import (
    FidelityConfig,
    FidelityResult,
    FractionResult,
    cheapest,
    key,
    read_fidelity_config,
    verdict,
)
from search.analysis.statistics import (
    RankCorrelation,
    regret_percent,
    tau_b,
    tau_interval,
    tau_of_best,
)
from search.config import StudyConfig
from search.dataset import open_log
from search.log_config import LogConfig
from search.read_study import read_study
from trials.data.prepared_log import PreparedLog


@pytest.fixture(scope="module")
def log(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedLog:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DHEN_SEARCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        return open_log(LogConfig(data=(str(click_log),)))


def test_tau_by_hand() -> None:
    """One of six pairs is in the wrong order; a tie counts for neither; what diverged is last."""
    assert tau_b([0.1, 0.2, 0.4, 0.3], [1, 2, 3, 4]) == pytest.approx(4 / 6)
    assert tau_b([0.1, 0.2, 0.3, 0.3], [1, 2, 3, 4]) == pytest.approx(5 / 30**0.5)
    assert tau_b([0.1, 0.2, float("inf")], [1, 2, 3]) == 1.0
    assert tau_b([0.1, 0.2], [1, 2]) is None
    assert tau_of_best([1, 3, 2, 9, 8, 7, 6, 5, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9], 1 / 3) == pytest.approx(
        1 / 3
    )
    assert regret_percent([0.1, 0.2], [0.55, 0.5]) == pytest.approx(10.0)
    assert regret_percent([0.1, 0.2], [float("inf"), 0.5]) is None


def test_the_interval_holds_the_tau_it_is_of() -> None:
    """Of normal variables with correlation r, tau is 2 / pi arcsin r (Kendall 1949)."""
    rng, inside = np.random.default_rng(0), 0
    for _ in range(20):
        x = rng.normal(size=20)
        y = 0.8 * x + 0.6 * rng.normal(size=20)
        found = tau_interval(x, y, 0.95, 0)
        assert found is not None
        assert found.low < found.value < found.high
        inside += found.low <= 2 / np.pi * np.arcsin(0.8) <= found.high
    assert inside >= 16
    assert tau_interval([1, 1, 1], [1, 2, 3], 0.95, 0) is None


def row(fraction: float, tau: float, low: float) -> FractionResult:
    return FractionResult(
        fraction=fraction,
        rows=round(1000 * fraction),
        flops_share=fraction,
        seconds=9.0,
        seconds_share=fraction,
        tau=RankCorrelation(value=tau, low=low, high=0.99),
        tau_of_best_third=None,
        regret_percent=0.0,
    )


def audit(*rows: FractionResult) -> FidelityResult:
    return FidelityResult(
        log="l",
        space="tiny",
        train_rows=1000,
        validation_rows=100,
        seed=0,
        reference_seed=1,
        wanted_tau=0.8,
        confidence=0.95,
        fractions=rows,
        candidates=(),
        cheapest=cheapest(rows, 0.8),
        cheapest_surely=cheapest(rows, 0.8, surely=True),
    )


def test_the_verdict_is_honest() -> None:
    good = audit(row(0.1, 0.5, 0.2), row(0.25, 0.83, 0.6), row(0.5, 0.9, 0.81), row(1.0, 0.92, 0.82))
    assert key(good) == "training.train_fraction=0.25"
    assert "with its whole interval there: 50 %" in verdict(good)
    poor = audit(row(0.25, 0.6, 0.1), row(0.5, 0.7, 0.2), row(1.0, 0.75, 0.4))
    assert key(poor) is None
    assert "None of the fractions" in verdict(poor)
    assert "50 % comes nearest, 0.70" in verdict(poor)
    assert "No fraction can be expected to" in verdict(poor)
    assert "Two seeds on the whole log agree with 0.75" in verdict(audit(row(1.0, 0.75, 0.4)))


@pytest.mark.parametrize(
    ("words", "study", "given", "says"),
    [
        *(
            ((), None, given, says)
            for given, says in (
                ({"fractions": "0.5,1.5"}, "1.5 lies outside (0, 1]"),
                ({"fractions": "0"}, "0 lies outside (0, 1]"),
                ({"fractions": ""}, "no fraction is given"),
                ({"fractions": "0.5,0.1,.5"}, "0.5 is given twice"),
                ({"fractions": "half"}, "half"),
                ({"candidates": "4"}, "greater than or equal to 5"),
                ({"tau": "0"}, "tau"),
                ({"tau": "1.1"}, "less than or equal to 1"),
            )
        ),
        (("training.train_fraction=0.5",), None, {}, "with --fractions"),
        (("spaces=tiny",), None, {}, "Did you mean 'space'"),
        (("tau=0.7",), None, {"tau": "0.8"}, "--tau is given too"),
        (("space=tiny",), StudyConfig(), {}, "the study's own candidates"),
        (("candidates=9",), StudyConfig(), {}, "the study's own candidates"),
    ],
)
def test_wrong_settings(
    words: tuple[str, ...], study: StudyConfig | None, given: dict[str, str], says: str
) -> None:
    with pytest.raises(UserError) as error:
        read_fidelity_config(words, study, **given)
    assert says in str(error.value)


def test_candidates_differ_fit_and_are_drawn_alike(log: PreparedLog, tmp_path: Path) -> None:
    config = FidelityConfig(space="tiny", candidates=5, seed=3)
    subjects = drawn(config, log, "fp32")
    assert len({(each.model, each.training) for each in subjects}) == 5
    more = drawn(config.replace(candidates=7), log, "fp32")
    assert more[:5] == subjects  # so that more candidates train the new ones alone
    with pytest.raises(UserError, match=r"nothing fits 10.0 KiB per rank.* would with hbm=1MiB"):
        drawn(config.replace(hbm=10 * 2**10), log, "fp32")
    small = tmp_path / "six.yaml"
    small.write_text(
        "modules: {linear: {}}\nslots: 1\ndepth: 1\nensemble: sum\nout_embeddings: [1, 2, 3, 4, 5, 6]\n"
    )
    with pytest.raises(UserError, match="give --candidates"):
        drawn(FidelityConfig(space=str(small)), log, "fp32")


def test_a_study_must_be_of_the_log_and_large_enough(study: Path, log: PreparedLog) -> None:
    its = studied(study)
    with pytest.raises(UserError, match="4 candidates completed, an audit needs 5"):
        taken(its, log, "fp32")
    check_log(its, log)
    moved = its.record.log.replace(fingerprint="0123", name="older.csv")
    with pytest.raises(UserError, match=rf"is 0123 \(older.csv\), that of --data {log.fingerprint}"):
        check_log(its._replace(record=its.record.replace(log=moved)), log)


def finished(out: Path) -> set[str]:
    """Trainings that are done."""
    return {path.name for path in (out / "trainings").glob("*.json")}


def test_a_finished_study_is_audited(
    dhen_search: Run, environment: dict[str, str], study: Path, click_log: Path, tmp_path: Path
) -> None:
    larger = tmp_path / study.name
    shutil.copytree(study, larger)
    dhen_search("run", "--data", click_log, "--out", larger, "trials=5", *SMALL)
    out = tmp_path / "audit"
    words = ["fidelity", "--from", larger, "--fractions", "0.5", "--out", out, "parallel=1", "threads=1"]
    process = WarmProcess(words, environment)
    wait_until(lambda: finished(out), process)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130, said
    before = finished(out)
    told = dhen_search(*words, "--json")
    check(FidelityResult.model_validate(json.loads(told.stdout)), larger)
    assert before
    assert told.stderr.count("seed") == 10 - len(before)
    assert (out / "fidelity.md").read_text().startswith("# Ranking on a part of the log")


def check(result: FidelityResult, study: Path) -> None:
    """Five candidates; what the study knows was not trained again."""
    record = read_study(study)
    known = [trial.result.validation.ne for trial in record.candidates if trial.result.validation]
    assert [each.ne[-1] for each in result.candidates] == known
    assert [each.fraction for each in result.fractions] == [0.5, 1.0]
    assert result.log == record.log.fingerprint
    half, whole = result.fractions
    assert half.rows == round(record.log.rows["train"] / 2)
    assert 0.3 < half.flops_share < 0.7
    assert whole.flops_share == 1.0
    references = [each.reference_ne for each in result.candidates]
    assert None not in references
    for place, each in enumerate(result.fractions):
        assert each.tau is not None
        own = [candidate.ne[place] or 0.0 for candidate in result.candidates]
        assert each.tau.value == tau_b(own, [ne or 0.0 for ne in references])
