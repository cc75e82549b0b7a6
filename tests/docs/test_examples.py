"""Each example runs as a reader runs it: a plain file, from another folder, with SMALL=1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dhen.blocks import BLOCKS
from dhen.blocks.own_files import OWN_FILES, OwnFileError, blocks_of_own_files

FOLDER = Path(__file__).parents[2] / "examples"
GATE = FOLDER / "own_block_gate.py"
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if path != GATE)
SAID = {
    "csv_to_served_model.py": ("Name: probability", "3,000 rows scored", "{'predictions': [0."),
    "own_block.py": ("[gate+linear]", "Bundle "),
    "plan_for_a_cluster.py": ("fsdp+full_checkpointing", "131,072 examples: zero_offload"),
}
"""What each prints, among other things."""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_it_runs_and_prints_what_it_is_about(program: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, program, tmp_path / "out"],
        cwd=tmp_path,
        env={**os.environ, "SMALL": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for words in SAID[program.name]:
        assert words in done.stdout


def test_the_readme_lists_every_file() -> None:
    readme = (FOLDER / "README.md").read_text()
    for path in filter(Path.is_file, FOLDER.iterdir()):
        assert path.name == "README.md" or path.name in readme or path.suffix == ".jsonl", path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no Python file"),
        ("x = 1", "defines no subclass of BlockConfig"),
        ("x = 1 / 0", "cannot be imported: ZeroDivisionError"),
        (GATE.read_text().replace('"gate"', '"dcn_v2"'), "needs a `kind` of its own"),
    ],
)
def test_a_file_of_ones_own_that_is_no_block_is_said(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv(OWN_FILES, str(path))
    with pytest.raises(OwnFileError, match=said):
        blocks_of_own_files(known=BLOCKS)
    path.write_text(GATE.read_text().replace('"gate"', '"wide_gate"'))
    monkeypatch.setenv(OWN_FILES, f"{GATE}{os.pathsep}{path}")  # two are taken in together
    assert list(blocks_of_own_files(known=BLOCKS)) == ["gate", "wide_gate"]
