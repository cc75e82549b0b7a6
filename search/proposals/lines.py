"""Where proposals come from: lines of a file that may grow while the study runs, or a function that is asked.

A line is a JSON object. An axis name -> value mapping is a point of the space, a mapping with `layers` a model
configuration; `{"point": ...}` and `{"model": ..., "training": ...}` say which of the two is meant. `by` and
`why` say who proposes it and why.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhen.errors import UserError
from dhen.fingerprint import fingerprint
from trials.record import TrialRecord

WRITING_SECONDS = 30.0
"""Seconds after a file has changed for which a last line that is no JSON may be one that is being written."""
Proposer = Callable[[Sequence[TrialRecord]], Iterable[Mapping[str, Any]]]
"""A function that is given the trials so far, and returns what it proposes next: mappings as in lines of a file,
none where it has nothing to propose now."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One proposal as it was received."""

    number: int
    """Number of the line in its file, from 1 on; of the proposals of a function, in their order."""
    text: str

    @property
    def key(self) -> str:
        """Identity of the line, by which a resumed study knows that it has answered it."""
        return fingerprint([self.number, self.text.strip()])


Lines = Callable[[Sequence[TrialRecord]], Sequence[Line]]
"""A function that returns all lines there are so far, given the trials so far."""


def lines_of_file(path: Path) -> Lines:
    """Returns what reads the file's lines, anew each time.

    Raises:
        UserError: where there is no such file.
    """
    if not path.is_file():
        raise UserError(
            f"proposals={path}: no such file. It holds a JSON object per line; an empty one will do, since lines "
            "may be added while the study runs."
        )

    def read(trials: Sequence[TrialRecord]) -> list[Line]:
        try:
            text = path.read_text(encoding="utf-8-sig", errors="replace")
            old = time.time() - path.stat().st_mtime > WRITING_SECONDS
        except OSError:  # moved away for a moment, perhaps by an editor that writes it anew
            return []
        lines = [Line(number=number, text=line) for number, line in enumerate(text.split("\n"), 1)]
        # behind the last newline stands nothing, or a line that somebody is writing at this moment
        written = lines if old or _is_json(lines[-1].text) else lines[:-1]
        return [line for line in written if line.text.strip()]

    return read


def lines_of_function(propose: Proposer, answered: int) -> Lines:
    """Returns what asks the function; `answered` proposals of it had an answer in earlier sessions."""
    received: list[Line] = []

    def ask(trials: Sequence[TrialRecord]) -> list[Line]:
        for proposal in propose(trials):
            text = json.dumps(dict(proposal), sort_keys=True)
            received.append(Line(number=answered + len(received) + 1, text=text))
        return received

    return ask


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
