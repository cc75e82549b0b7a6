"""Reads the command blocks of documents and runs them, made small: what `tests/docs/test_commands.py` rests on.

docs/testing.md has the conventions of the documents: what a block's language means, and how a block is left out.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from command_line import free_port, run_here
from output_shape import missing_lines

from search.cli import INTERRUPTED

REPRODUCED = ("seeds=2", "layers=1", "embedding_dim=4", "out_embeddings=4", "threads=1", "parallel=1")
SMALLER: Mapping[str, tuple[str, ...]] = {
    "demo": ("rows=4000",),
    "run": ("trials=2", "space=tiny", "training.epochs=1", "baseline_trials=1", "threads=1", "parallel=1"),
    "train": ("training.epochs=1",),
    "confirm": ("--seeds", "2"),
    "ablate": ("--seeds", "2"),
    "average": ("--seeds", "1"),
    "fidelity": ("--space", "tiny", "--candidates", "5", "--fractions", "0.5", "training.epochs=1"),
    "reproduce": REPRODUCED,
    "reproduce table3": (*REPRODUCED, "experts=2"),
}
"""Words behind those of a command, by its verb. The last one wins where a key or an option is given twice."""
SERVERS = ("ui", "serve")
"""Verbs that go on until Ctrl-C: they run beside what follows on their page."""
REASON = re.compile(r"<!-- not run: (.+?) -->")
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a document."""

    language: str
    text: str
    line: int
    not_run: str = ""
    """Why its commands are not run, where they are not."""


def blocks(document: Path) -> list[Block]:
    """All fenced blocks, in order; a comment on the line before says why one is not run."""
    found: list[Block] = []
    lines = document.read_text(encoding="utf-8").splitlines()
    opened: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        reason = REASON.fullmatch(lines[opened - 1])
        found.append(
            Block(
                language=lines[opened].removeprefix("```").strip(),
                text="\n".join(lines[opened + 1 : number]) + "\n",
                line=opened + 1,
                not_run=reason[1] if reason else "",
            )
        )
        opened = None
    assert opened is None, f"{document}:{opened}: a block does not end"
    return found


def commands(block: Block) -> list[str]:
    """Commands of a block, one a line; a line that ends with a backslash goes on."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def smaller(words: list[str]) -> tuple[str, ...]:
    """Words that make a command small; a space of its own that it names stays."""
    added = SMALLER.get(" ".join(words[:2]), SMALLER.get(words[0], ()))
    own_space = any(word.startswith("space=") for word in words)
    return tuple(word for word in added if not (own_space and word.startswith("space=")))


@dataclass(kw_only=True)
class Page:
    """A document whose commands are run in a folder, one after another."""

    folder: Path
    environment: dict[str, str]
    said: str = ""
    """What the last command block printed."""
    servers: list[subprocess.Popen[str]] = field(default_factory=list)
    ports: dict[str, str] = field(default_factory=dict)
    """Of servers: the port that the page says, and the free one that was taken."""

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.terminate()  # as Ctrl-C, which processes started in a background do not hear
        for server in self.servers:
            server.communicate(timeout=TIMEOUT_SECONDS)
            assert server.returncode in (0, INTERRUPTED)

    def run(self, block: Block) -> None:
        """Runs a block of commands or of Python, compares an output, writes a file that is shown."""
        shown_file = re.match(r"# ([\w./-]+\.\w+)\n", block.text)
        if block.language == "sh":
            self._run_commands(block)
        elif block.language == "text":
            missing = "\n".join(missing_lines(block.text, self.said))
            assert not missing, f"not printed:\n{missing}\n\nprinted:\n{self.said}"
        elif block.language == "python":
            self.said = self._run_program([sys.executable, "-"], block.text)
        elif shown_file:
            (self.folder / shown_file[1]).write_text(block.text)

    def _run_commands(self, block: Block) -> None:
        self.said = ""
        for command in commands(block):
            for said, taken in self.ports.items():
                command = command.replace(f":{said}", f":{taken}") if said else command
            self.said += self._run_command(command)

    def _run_command(self, command: str) -> str:
        words = [os.path.expandvars(word) for word in shlex.split(command, comments=True)]
        if words[0] != "dhen-search":
            return self._run_program(["bash", "-euc", command])
        words, into = (words[1:-2], words[-1]) if words[-2:-1] == [">"] else (words[1:], "")
        # a word with a star is the files that it matches, as a shell has it
        files = [sorted(glob.glob(word, root_dir=self.folder)) if "*" in word else [word] for word in words]
        words = list(itertools.chain.from_iterable(files))
        if words[0] in SERVERS:
            return self._start(words)
        done = run_here((*words, *smaller(words)), self.environment, self.folder)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        if into:
            (self.folder / into).write_text(done.stdout)
        return "" if into else done.stdout + done.stderr

    def _run_program(self, command: list[str], text: str = "") -> str:
        """What a program prints that reads this text."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{self.environment['PATH']}"
        done = subprocess.run(
            command,
            input=text,
            cwd=self.folder,
            env={**self.environment, "PATH": path},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert done.returncode == 0, f"{command} {text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _start(self, words: list[str]) -> str:
        """Starts a server, and waits until it says where it is."""
        said = words[words.index("--port") + 1] if "--port" in words else ""
        port = self.ports.setdefault(said, str(free_port()))
        without = [word for word in words if word not in ("--port", said)]
        server = subprocess.Popen(
            [sys.executable, "-c", "from search.cli import main; main()", *without, "--port", port],
            cwd=self.folder,
            env={**self.environment, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.servers.append(server)
        assert server.stdout is not None
        for line in server.stdout:
            if f":{port}" in line:
                return line
        raise AssertionError(f"{words} ended with {server.wait()}")
