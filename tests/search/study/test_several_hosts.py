"""A study over two hosts through the command line, both of them here: a host is lost, then the driver."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from command_line import COMMAND, Run, start, wait_for_trials
from faulty_hosts import free_address
from faulty_ranks import all_gone

from dhen.errors import UserError
from search.config import read_study_config
from search.read_study import read_study
from trials.events import START_MARK
from trials.record import Outcome

FEW = ("ranks=2x1", "training.epochs=1")


def join(address: str, environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(COMMAND), "join", address, "--host", "1", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def rank_of(folder: Path, rank: int) -> int:
    """Its process, as its log says."""
    log = (folder / f"attempt0.rank{rank}.log").read_text()
    return int(log.rpartition(f"{START_MARK}process ")[2].partition(",")[0])


def test_a_host_is_lost_and_joins_again(
    dhen_search: Run, click_log: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    out, address = tmp_path / "study", free_address()
    environment = environment | {"DHEN_SEARCH_SECRET": "of this test"}
    lost = join(address, environment)
    driver = start(click_log, out, environment, "trials=1", *FEW, f"address={address}")
    wait_for_trials(out, 0)
    folder = out / "trials" / "00000"
    rank = rank_of(folder, 1)
    lost.kill()
    lost.communicate()
    assert all_gone([rank], 10.0)
    joined = join(address, environment, "--out", str(tmp_path / "logs"))
    said, errors = driver.communicate(timeout=300)
    assert driver.returncode == 0, errors
    assert "left the study: its connection is lost" in said
    assert said.count(f"waiting for host 1: dhen-search join {address} --host 1") == 2
    told, errors = joined.communicate(timeout=60)
    assert joined.returncode == 0, errors
    assert "the study has ended: all trials are done" in told
    record = read_study(out)
    assert [trial.result.outcome for trial in record.trials] == [Outcome.COMPLETED] * 2
    first = record.trials[0].attempts[0]
    assert first.outcome is Outcome.INTERRUPTED
    assert "host 1 (" in str(first.error)
    log = (out / "driver.log").read_text()
    for line in ("INFO trials.hosts.hosts: host 1 (", "WARNING trials.hosts.hosts: host 1 ("):
        assert line in log
    assert (tmp_path / "logs" / "00001" / "attempt0.rank1.log").exists()


def test_ranks_elsewhere_do_not_outlive_the_driver(
    click_log: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    out, address = tmp_path / "study", free_address()
    joined = join(address, environment)
    driver = start(click_log, out, environment, "trials=9", *FEW, f"address={address}")
    wait_for_trials(out, 0)
    ranks = [rank_of(out / "trials" / "00000", rank) for rank in range(2)]
    began = time.monotonic()
    driver.send_signal(signal.SIGKILL)
    _, errors = joined.communicate(timeout=60)
    assert joined.returncode == 2
    assert "the first host is gone, and the ranks here were ended" in errors
    assert all_gone(ranks, 10.0)
    assert time.monotonic() - began < 30
    driver.communicate()


def test_the_command_line_says_what_would_work(dhen_search: Run, tmp_path: Path) -> None:
    said = dhen_search("join", "10.0.0.1", "--host", "1", code=2).stderr
    assert "expected host:port of the first host, such as 10.0.0.1:29500" in said
    assert "Missing option '--host'" in dhen_search("join", "127.0.0.1:29500", code=2).stderr
    said = dhen_search("run", "address=203.0.113.7:29500", "ranks=2x1", code=2, cwd=tmp_path).stderr
    assert "with an address of this machine" in said  # it is a documentation network's


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("address=127.0.0.1", "ranks=2x1"), "address: expected host:port of the first host"),
        (("address=127.0.0.1:29500",), "say with ranks= how many hosts"),
        (("address=127.0.0.1:29500", "ranks=1x2"), "say with ranks= how many hosts"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_keys_that_do_not_go_together(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_study_config(None, words)
