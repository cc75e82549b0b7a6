"""The contract between a training run and the driver: events, one JSON object per line, appended by rank 0.

The driver tails the file; nothing else passes between the two but the job and the exit.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from dhen.errors import UserError
from dhen.values import Value, omitted
from trials.records.serving_limits import ForwardTime
from trials.records.trial_record import CurvePoint, Measurements, Metrics

EVENTS, WEIGHTS = "events.jsonl", "weights.safetensors"
"""Name of the file of events that a training process leaves in its trial's directory."""
RENDEZVOUS, SERVERS_RENDEZVOUS = "rendezvous", "rendezvous.servers"
"""Name of the file in the trial's directory by which ranks find each other; fresh for every run, or they would
meet those that are gone."""


START_MARK = "=== begins: "
"""Mark that opens what one process has printed. Above it stands what an earlier process printed that did the same:
an attempt goes on in its file after a driver was killed, and so does a scoring that is done again."""


def logits_file(folder: Path, split: str) -> Path:
    """Returns where a trial's folder keeps its logits (N, fp32, not corrected) of a split, in the order of the
    log."""
    return folder / f"logits.{split}.npy"


class RankLogs(NamedTuple):
    """The log files of the ranks of one task."""

    folder: Path
    """The trial's directory."""
    name: str
    """What the ranks do: `attempt0`, `scoring-test`, `forward-time` (see `Task.logs`)."""
    ranks: int | None = None
    """Number of ranks, behind which servers of tables are numbered on; None: there are ranks alone."""

    def server(self, process: int) -> int | None:
        """Returns which server a process is; None for a rank."""
        return None if self.ranks is None or process < self.ranks else process - self.ranks

    def words(self, process: int) -> str:
        """Returns what a process is called in sentences."""
        server = self.server(process)
        return f"rank {process}" if server is None else f"server {server}"

    def path(self, process: int) -> Path:
        """Returns the file that takes all that a process prints and logs."""
        return self.folder / f"{self.name}.{self.words(process).replace(' ', '')}.log"


def last_words(rank: int) -> str:
    """Returns the name of the file in which one of several ranks says why it ended."""
    return f"rank{rank}.failed.json"


class WrapEvent(Value):
    """The model is wrapped and training begins."""

    event: Literal["wrapped"] = "wrapped"
    strategy: str
    """Name of the strategy that the model is held with, read from its modules and its optimizer
    (`trials.training.distributed_step`)."""


class Progress(Value):
    """Training goes on."""

    event: Literal["progress"] = "progress"
    examples: int
    """Training examples seen so far."""
    total_examples: int
    """Training examples at most (early stopping may end before)."""
    seconds: float
    unsaved_steps: int | None = omitted(None)
    """Number of steps since the newest checkpoint, or since the beginning, whose updates would be lost with a
    server of tables; None if no servers hold them."""
    lost_steps: int | None = omitted(None)
    """Number of steps whose updates were lost so far, see `Measurements.lost_steps`; None if none were."""


class ReplacementEvent(Value):
    """A process was killed and started anew, while the others went on; told by who watches them."""

    event: Literal["replaced"] = "replaced"
    process: str
    """The process, in words: `rank 2`, `server 0`."""
    how: str
    """How it had ended, in words that follow its name."""
    examples: int
    """Training examples done so far."""

    @property
    def words(self) -> str:
        """The same as a sentence."""
        return f"{self.process} {self.how} after {self.examples:,} examples, and another took its place"


class SlowRank(Value):
    """One of several ranks is a straggler: it takes much longer for its part of the steps than the others."""

    event: Literal["slow_rank"] = "slow_rank"
    rank: int
    times: float
    """How many times as long as the others it takes."""
    examples: int
    """Training examples that were done when it began to be slow."""
    seconds: float
    """Seconds of steps since then."""
    where: str = ""
    """The rank's host, and its device if it was given one, in words; from who watches the ranks."""
    then: str = ""
    """What comes of it, in words; from who watches the ranks."""
    moves: bool = False
    """Whether the ranks are ended to go on elsewhere; from who watches them."""

    @property
    def words(self) -> str:
        """The same as a sentence."""
        place = f" on {self.where}" if self.where else ""
        then = f", {self.then}" if self.then else ""
        return (
            f"rank {self.rank}{place} is slow: it takes {self.times:.1f} times as long for its part of a step as "
            f"the others, since {self.examples:,} examples, {self.seconds:.0f} s ago{then}"
        )


class EvaluationEvent(Value):
    """An evaluation on validation."""

    event: Literal["evaluated"] = "evaluated"
    point: CurvePoint


class TrainingEvent(Value):
    """Training ended well; the best weights are on disk."""

    event: Literal["trained"] = "trained"
    best: Metrics
    """Validation metrics of the weights that were kept."""
    measured: Measurements
    """What the training measured of itself."""


class DivergenceEvent(Value):
    """The loss was no longer finite."""

    event: Literal["diverged"] = "diverged"
    step: int
    """The first step (1-based) with a NaN or infinite loss."""
    loss: str


class ScoreEvent(Value):
    """A model's metrics on a split."""

    event: Literal["scored"] = "scored"
    split: str
    metrics: Metrics


class TimingEvent(Value):
    """How long a model's forward pass takes."""

    event: Literal["timed"] = "timed"
    forward: ForwardTime


class FailureEvent(Value):
    """An exception ended the run."""

    event: Literal["failed"] = "failed"
    error: str
    out_of_memory: bool = False
    killed: bool = False
    """Whether a signal from outside ended the run, as far as the kernel says not for want of memory: worth another
    try."""
    host_left: bool = False
    """Whether that was because a host left, which says nothing of memory."""
    stopped: bool = False
    """Whether a rank was stopped by a signal (SIGSTOP), and found by its silence: worth another try."""
    of_server: bool = omitted(False)
    """Whether it was a server of tables that failed, which says nothing of the ranks' memory."""
    slow: bool = omitted(False)
    """Whether the ranks were ended to go on elsewhere, because one of them was slow."""
    disk_full: bool = False
    """Whether a file could not be written for want of space: the trial goes on once there is some."""
    needed_bytes: int | None = None
    """Bytes that a rank out of memory would have held at that moment; it may need more later. None for other
    failures."""
    limit_bytes: int | None = None
    """Bytes that a rank out of memory may hold; None for other failures."""


class LastWords(Value):
    """One of several ranks says why it ends, before its peers can notice."""

    failed: FailureEvent
    unix_seconds: float
    """Time of the failure: the first rank to fail is the cause, the others have lost a peer."""

    def leave(self, folder: Path, rank: int) -> None:
        """Writes them where whoever watches the rank looks for them."""
        (folder / last_words(rank)).write_text(self.model_dump_json())


Event = Annotated[
    WrapEvent
    | Progress
    | ReplacementEvent
    | SlowRank
    | EvaluationEvent
    | TrainingEvent
    | DivergenceEvent
    | ScoreEvent
    | TimingEvent
    | FailureEvent,
    Field(discriminator="event"),
]
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


class EventWriter:
    """Appends events to a file, each handed to the operating system as it is written."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            # the rest of an event for which there was no space: what is written next would be a part of it
            with path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)

    def __call__(self, event: Event) -> None:
        """Writes one event as one line, in one write."""
        self._file.write(event.model_dump_json() + "\n")

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class EventReader:
    """Reads a growing file of events from where it last stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def __call__(self) -> list[Event]:
        """Returns the events appended since the last call; an unfinished last line waits for the next.

        Raises:
            UserError: for a line that is no event, with its number among those that were appended.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        complete_lines = data[: data.rfind(b"\n") + 1]
        self._position += len(complete_lines)
        events = []
        for number, line in enumerate(complete_lines.splitlines(), 1):
            try:
                events.append(_ADAPTER.validate_json(line))
            except ValidationError as error:
                raise UserError(
                    f"{self._path}: line {number} of what was appended is no event ({error.errors()[0]['msg']}); "
                    "the file was damaged, or is another version's."
                ) from None
        return events
