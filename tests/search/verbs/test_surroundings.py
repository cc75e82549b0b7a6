"""What a command meets besides its words: closed streams, terminals, damaged files, the end of its parent."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import click
import pytest
from command_line import Run
from pydantic import ValidationError
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dashboards.terminal.tables import plain_table
from dhen.errors import UserError
from search.cli import cli, main
from search.config import REMOVED, StudyConfig, check_directory, read_study_config, write_config
from search.logs import show_logs
from search.terminal import print_table
from trials.records.job import REMOVED as OF_TRAINING
from trials.records.job import TrainingConfig
from trials.runtime.fork_server import server_environment


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
        ({"tracking": "postgresql://db/mlflow?password=hidden"}, 0o600),
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


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("n" * 300, "File name too long. Choose a shorter name"),
        ("locked", "Is a directory. Move it away"),
        ("locked/.lock/file/run", "Not a directory. Move it away"),
    ],
)
def test_folders_that_cannot_be_used(dhen_search: Run, tmp_path: Path, out: str, says: str) -> None:
    (tmp_path / "locked" / ".lock").mkdir(parents=True)
    (tmp_path / "locked" / ".lock" / "file").touch()
    words = ("run", "--data", tmp_path / "none.csv", "--out", tmp_path / out, "trials=1")
    assert says in dhen_search(*words, code=2).stderr


def test_a_temporary_folder_with_a_long_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trials.runtime.fork_server.util.get_temp_dir", lambda: f"/tmp/{'t' * 200}")
    with pytest.raises(UserError, match="Set TMPDIR to a folder with a shorter path"), server_environment():
        pass


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_impatient_interrupts_do_not_cut_short_what_the_first_has_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first: signal.Signals
) -> None:
    ended = list[bool]()

    @click.command()
    def work() -> None:
        try:
            os.kill(os.getpid(), first)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
                os.kill(os.getpid(), number)
            ended.append(True)

    monkeypatch.setattr(cli, "get_command", lambda context, name: work)
    monkeypatch.setattr(sys, "argv", ["dhen-search", "work"])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(SystemExit):
        main(["work"])
    assert before == {number: signal.getsignal(number) for number in before}, "this process goes on"
    try:
        with pytest.raises(SystemExit) as exit_code:
            main()
        os.kill(os.getpid(), signal.SIGINT)  # while the interpreter ends
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert exit_code.value.code == 130
    assert ended == [True, True]
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("key", [*REMOVED, *(f"training.{key}" for key in OF_TRAINING)])
def test_a_removed_key_is_answered_by_what_decides_now(dhen_search: Run, tmp_path: Path, key: str) -> None:
    *section, last = key.split(".")
    default, decides = (OF_TRAINING if section else REMOVED)[last]
    said = dhen_search("run", "--out", tmp_path / "out", f"{key}=7", code=2).stderr
    assert f"the key '{last}' was removed: {decides}" in " ".join(said.split())
    word = f"{key}={'' if default is None else default}"
    assert read_study_config(None, [word]) == read_study_config(None, [])


def test_a_job_of_before_is_read_with_what_was_made_of_its_steps() -> None:
    resolved = TrainingConfig(optimizer="onebit_adam").resolved(5000, "fp32")
    before = resolved.to_dict() | {"variance_lag": 9, "power_sgd_start": 50}
    assert TrainingConfig.model_validate(before) == resolved
    with pytest.raises(ValidationError, match="the key 'variance_ratio' was removed"):
        TrainingConfig.model_validate(before | {"variance_ratio": 0.9})
