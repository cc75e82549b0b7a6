"""`split.KEY`: a study on the official split of a public set, by one command."""

from __future__ import annotations

from pathlib import Path

from command_line import SMALL, Run

from search.read_study import read_study


def test_a_given_test_file_beside_a_fraction_for_validation(
    dhen_search: Run, click_log: Path, tmp_path: Path
) -> None:
    head, *rows = click_log.read_text().splitlines()
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    train.write_text("\n".join((head, *rows[100:])) + "\n")
    test.write_text("\n".join((head, *rows[:100])) + "\n")
    out = tmp_path / "study"
    command = ("run", "--data", train, "--data", test, "--out", out, *SMALL, "trials=1")
    words = ("split.validation=0.2", "split.test=[test.csv]")
    dhen_search(*command, *words)
    others = len(rows) - 100
    expected = {"train": others - round(0.2 * others), "validation": round(0.2 * others), "test": 100}
    assert read_study(out).log.rows == expected
    dhen_search(*command, *words)  # goes on
    assert "split" in dhen_search(*command, "split.validation=0.3", words[1], code=2).stderr

    new = ("run", "--data", train, "--data", test, "--out", tmp_path / "no", *SMALL)
    assert "names stand in a list" in dhen_search(*new, "split.test=test.csv", code=2).stderr
    assert "unknown file 'tset.csv'" in dhen_search(*new, "split.test=[tset.csv]", code=2).stderr
    assert "give one of them: split.by, split.validation" in dhen_search(*new, "split=0.2", code=2).stderr
    assert "(received 1.5, 0.1)" in dhen_search(*new, "split.validation=1.5", code=2).stderr
    assert "Did you mean 'split.test'" in dhen_search(*new, "split.tests=[test.csv]", code=2).stderr
    dhen_search("prepare", train, "--out", tmp_path / "prepared")
    prepared = ("run", "--data", tmp_path / "prepared", "--out", tmp_path / "no", *SMALL)
    assert "prepared already" in dhen_search(*prepared, "split.validation=0.2", code=2).stderr
