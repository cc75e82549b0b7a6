"""Averages of a study's networks by the command line: on the front, confirmed, exported, verified, predicted."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from command_line import SMALL, Run, looks_at_test, write_log

from dhen.errors import UserError
from search.bundles.bundle import read_bundle
from search.config import read_study_config
from search.read_study import read_study
from search.run_directory import folder_of
from search.study.finalize import SEED_STRIDE
from search.verbs.average import command as average
from search.verbs.export import command as export
from search.verbs.plan import command as plan
from search.verbs.predict import command as predict
from search.verbs.train import command as train
from search.verbs.verify import command as verify
from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialKind, TrialRecord


@pytest.fixture(autouse=True)
def _cache(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in this process has the log prepared where the command has it."""
    monkeypatch.setenv("DHEN_SEARCH_CACHE", environment["DHEN_SEARCH_CACHE"])


def done(command: click.Command, *words: object) -> str:
    """What a verb says."""
    result = CliRunner().invoke(command, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def bundle(averaged: Path) -> Path:
    """The bundle of the lowest NE, which is an average; the best may be another within the noise of choosing."""
    out = averaged.parent / "lowest"
    if not out.exists():
        done(export, averaged, "--pick", "lowest", "--out", out)
    return out


def averages_of(record: StudyRecord) -> list[TrialRecord]:
    return [trial for trial in record.trials if trial.kind is TrialKind.AVERAGE]


def test_averages_are_trials_on_the_front(averaged: Path) -> None:
    record = read_study(averaged)
    assert len(record.candidates) == 3
    found = averages_of(record)
    assert found
    assert {each.number for each in found} <= set(record.front)
    for each in found:
        networks = record.networks(each)
        assert 2 <= len(networks) <= 3
        assert each.job.flops == sum(network.job.flops or 0 for network in networks)
        assert each.job.embedding_parameters == sum(
            network.job.embedding_parameters or 0 for network in networks
        )
        assert sum(row.flops for row in each.job.cost) == sum(r.flops for n in networks for r in n.job.cost)
        assert each.result.validation is not None
        assert each.result.validation.ne < min(
            n.result.validation.ne for n in networks if n.result.validation and n.job.flops
        )
    assert record.front[-1] in {each.number for each in found}
    assert record.choice is not None
    numbers = (record.choice.baseline, *(winner.trial for winner in record.choice.winners))
    winners = [record.trial(number) for number in numbers]
    scored = {each.number for each in winners} | {m.number for w in winners for m in record.networks(w)}
    retrained = {each.job.fingerprint for each in record.retrainings}
    assert looks_at_test(averaged) == len(scored) + len(retrained)


def test_the_average_is_compared(averaged: Path, bundle: Path) -> None:
    """Retrained members' mean: better than their own means over seeds."""
    record = read_study(averaged)
    assert record.choice is not None
    assert [each.trial for each in record.comparisons] == [winner.trial for winner in record.choice.winners]
    comparison = record.comparison(record.front[-1])
    assert comparison is not None
    members = set(record.trial(comparison.trial).origin.members)
    own = [
        each.result.test.ne for each in record.retrainings if each.origin.of in members and each.result.test
    ]
    assert len(own) == 2 * len(members)
    assert comparison.ne < sum(own) / len(own)
    assert read_bundle(bundle).info.comparison == comparison


def test_the_bundle_predicts_the_mean_of_its_members(
    averaged: Path, bundle: Path, click_log: Path, tmp_path: Path
) -> None:
    record, log = read_study(averaged), write_log(tmp_path / "new.csv", 300, seed=3, label=False)

    def scores(of: Path) -> list[float]:
        done(predict, of, "--data", log, "--out", tmp_path / "scores.csv")
        with (tmp_path / "scores.csv").open() as file:
            return [float(row["score"]) for row in csv.DictReader(file)]

    alone = []
    for number in record.trial(record.front[-1]).origin.members:
        done(export, averaged, "--pick", number, "--out", tmp_path / str(number))
        alone.append(scores(tmp_path / str(number)))
    means = [sum(each) / len(each) for each in zip(*alone, strict=True)]
    assert scores(bundle) == pytest.approx(means, abs=1e-6)


def test_a_member_is_named_to_train_or_plan_it(bundle: Path, click_log: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is an average of . networks .*--member 0"):
        done(train, bundle, "--data", click_log, "--out", tmp_path / "again")
    with pytest.raises(UserError, match="has no member 7"):
        done(plan, bundle, "--member", 7)
    assert json.loads(done(plan, bundle, "--member", 1, "--json"))[0]["chosen"] == "dp"


def test_online_training_says_which_network_to_take(
    dhen_search: Run, averaged: Path, bundle: Path, click_log: Path, tmp_path: Path
) -> None:
    words = ("--data", click_log, "--out", tmp_path / "live")
    said = dhen_search("online", bundle, *words, code=2).stderr
    number = re.search(r"--pick (\d+)", said)
    assert number, said
    dhen_search("export", averaged, "--pick", number[1], "--out", tmp_path / "network")
    dhen_search("online", tmp_path / "network", *words)


def test_each_member_is_removed_in_turn(dhen_search: Run, averaged: Path) -> None:
    """From the retrainings that the comparison was made of: none is trained, and test is not looked at again."""
    before, looked = read_study(averaged), looks_at_test(averaged)
    compared = [before.trial(each.trial) for each in before.comparisons]
    whole = next(each for each in compared if len(each.origin.members) == 2)
    said = dhen_search("ablate", averaged, "--pick", whole.number, "--seeds", 2, "--json").stdout
    found, comparison = json.loads(said), before.comparison(whole.number)
    assert comparison is not None
    assert (found["split"], found["blocked_by"], found["seeds"]) == ("test", "site", [1 + 3, 2 + 3])
    first, second = before.networks(whole)
    left = {f"trial {first.number}": second, f"trial {second.number}": first}
    assert {part["removed"] for part in found["parts"]} == set(left)
    for part in found["parts"]:
        rest = left[part["removed"]]
        ne = [
            each.result.test.ne
            for each in before.retrainings
            if each.origin.of == rest.number and each.result.test
        ]
        percent = 100 * (sum(ne) / len(ne) / comparison.ne - 1)
        assert part["ne_percent"]["low"] <= part["ne_percent"]["mean"] <= part["ne_percent"]["high"]
        assert part["ne_percent"]["mean"] == pytest.approx(percent, abs=0.05)  # which is a ratio of means
        assert (part["flops"], found["flops"]) == (rest.job.flops, whole.job.flops)
    assert read_study(averaged).retrainings == before.retrainings
    assert looks_at_test(averaged) == looked


def test_further_seeds_later(dhen_search: Run, averaged: Path) -> None:
    """What there is stays as it is."""
    before = read_study(averaged)
    dhen_search("average", averaged, "--most", 2, "--seeds", 2)
    record = read_study(averaged)
    (seed,) = (trial for trial in record.retrainings if trial.job.seed >= SEED_STRIDE)
    best = min(
        record.candidates, key=lambda trial: trial.result.validation.ne if trial.result.validation else 9.0
    )
    assert (seed.job.model, seed.job.training, seed.job.flops) == (
        best.job.model,
        best.job.training,
        best.job.flops,
    )
    assert seed.result.validation != best.result.validation
    assert record.trials[: len(before.trials)] == before.trials
    assert (folder_of(averaged, seed) / "weights.safetensors").exists()


def test_one_candidate_is_averaged_with_its_further_seeds(
    dhen_search: Run, click_log: Path, tmp_path: Path
) -> None:
    """A study of one candidate has no other network for its averages; they are exported and compared as others."""
    out = tmp_path / "study"
    dhen_search("run", "--data", click_log, "--out", out, "trials=1", "confirm=2", "seed=2", *SMALL)
    dhen_search("average", out, "--seeds", 3)
    record = read_study(out)
    average = record.trial(record.front[-1])
    assert average.origin.retrained_members
    networks = record.networks(average)
    assert len({network.job.seed for network in networks}) == len(networks) >= 2
    assert record.comparison(average.number) is not None
    done(export, out, "--pick", "lowest", "--out", tmp_path / "lowest")
    assert len(read_bundle(tmp_path / "lowest").info.members) == len(networks)
    assert "the one it was trained on" in done(verify, tmp_path / "lowest", "--data", click_log)


def test_bad_input(averaged: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="an average is of two networks at least"):
        read_study_config(None, ["averages=1"])
    for options, message in (
        ((averaged, "--most", 1), "two networks at least"),
        ((averaged, "--seeds", 0), "1 takes the best network as it is"),
        ((tmp_path,), "no study here"),
    ):
        with pytest.raises(UserError, match=message):
            done(average, *options)
