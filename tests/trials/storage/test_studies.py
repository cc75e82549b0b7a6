"""Which studies a database holds, and whether one has changed, on both kinds of databases."""

from __future__ import annotations

import time
from random import Random

from records import trial

from trials.records.trial_record import Outcome
from trials.store.ledger import Ledger, Studies, StudySetting

CLUSTER = {"name": "x", "hosts": 1, "gpus_per_host": 1, "hbm": 1}
SETTING = StudySetting(directory="/runs/ads", log="0123", features={}, seed=0, version=1, cluster=CLUSTER)
TRIAL = trial(0, Random(0))


def test_a_version_changes_with_each_commit_to_the_study(url: str) -> None:
    ledger, other = Ledger(url, "ads"), Ledger(url, "news")
    reader = Studies(url)
    assert reader.all() == ()
    ledger.settle(SETTING)
    seen = [reader.version("ads")]

    def changed() -> bool:
        seen.append(reader.version("ads"))
        return seen[-1] != seen[-2]

    assert not changed()
    for commit in (
        lambda: ledger.change_facts(lambda _: {"record": 1}),
        lambda: ledger.save(TRIAL.with_result(outcome=Outcome.RUNNING)),
        lambda: ledger.save(TRIAL.with_result(outcome=Outcome.RUNNING)),  # the same row, written once more
        lambda: ledger.save(TRIAL),
    ):
        time.sleep(0.01)  # a file system's clock may tick no faster
        commit()
        assert changed()
    assert reader.running("ads") == ()
    ledger.save(TRIAL.replace(number=1).with_result(outcome=Outcome.RUNNING))
    assert reader.running("ads") == (1,)
    changed()
    other.settle(SETTING)
    other.save(TRIAL)
    assert [(study.name, study.directory) for study in reader.all()] == [
        ("ads", "/runs/ads"),
        ("news", "/runs/ads"),
    ]
    if url.startswith("postgresql"):
        assert not changed(), "another study's commit counts"
    for opened in (ledger, other, reader):
        opened.close()
