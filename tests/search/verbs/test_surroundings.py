"""What a command meets besides its words: closed streams, terminals, damaged files, the end of its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dhen.errors import UserError
from search.config import StudyConfig, check_directory, write_config


def test_closed_streams_are_opened_before_anything_can_take_their_place(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    program = (
        "import os, subprocess, sys\n"
        "from search.cli import main\n"
        "main(['--version'])\n"
        "print('lost', flush=True)\n"
        "inherited = \"import os; print(*(os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 2)))\"\n"
        "said = subprocess.run([sys.executable, '-c', inherited], stdout=subprocess.PIPE).stdout.decode()\n"
        f"open({str(shown)!r}, 'w').write(os.readlink('/proc/self/fd/1') + ' ' + said)\n"
    )
    closed = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", program]
    subprocess.run(closed, check=True)
    assert shown.read_text().split() == ["/dev/null"] * 3


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"storage": "postgresql://ada:hidden@db/studies"}, 0o600),
        ({"optuna": "mysql://ada:hidden@db/optuna"}, 0o600),
        ({"ledger": "postgresql://db/ledger?password=hidden"}, 0o600),
        ({"data": ("https://store/log.csv?X-Amz-Signature=hidden",)}, 0o600),
        ({"storage": "postgresql://ada@db/studies"}, 0o644),
    ],
)
def test_settings_with_a_secret_are_their_owners_alone(
    tmp_path: Path, settings: dict[str, Any], mode: int
) -> None:
    before = os.umask(0o022)
    try:
        write_config(tmp_path, StudyConfig(**settings))
    finally:
        os.umask(before)
    assert (tmp_path / "study.yaml").stat().st_mode & 0o777 == mode
    with pytest.raises(UserError, match="holds another study") as error:
        check_directory(tmp_path, StudyConfig(**{key: None for key in settings if key != "data"}, seed=7))
    assert "hidden" not in str(error.value)
