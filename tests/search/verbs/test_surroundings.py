"""What a command meets besides its words: closed streams, terminals, damaged files, the end of its parent."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dashboards.terminal.tables import plain_table
from dhen.errors import UserError
from search.cli import cli, main
from search.config import StudyConfig, check_directory, write_config
from search.logs import show_logs
from search.terminal import print_table


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


def test_no_way_to_the_terminal_passes_control_characters_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "\x1b[2J\x9b1A\x07\x08\r\x7f[bold]"

    @click.command()
    def say() -> None:
        click.echo(value)
        click.echo(json.dumps({"value": value}, ensure_ascii=False))
        console = Console(force_terminal=True, width=200)
        console.print(value, markup=False, highlight=False, style="red")
        print_table(plain_table(("Value",), [(value,)], ("Value",)))
        with Live(console=console) as live:
            live.update(Text(value))
        logging.getLogger("search").warning("%s", value)
        raise UserError(value)

    monkeypatch.setattr(cli, "get_command", lambda context, name: say)
    show_logs(1)
    with pytest.raises(SystemExit):
        main(["say"])
    show_logs(0)
    printed, errors = capsys.readouterr()
    own_sequences = r"\x1b\[(0|31|\?25[lh]|1A|2K)?m?|\r"
    for text, times in ((re.sub(own_sequences, "", printed), 5), (errors, 2)):
        assert not [sign for sign in text if unicodedata.category(sign) == "Cc" and sign != "\n"]
        assert text.count(r"\u001b[2J\u009b1A\u0007") == times
    assert json.loads(printed.splitlines()[1]) == {"value": value}
