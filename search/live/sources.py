"""The study that a page shows: its record, how far its trainings are, and whether anything has changed."""

from __future__ import annotations

import threading
from pathlib import Path

from search.read_study import ledger_of, read_stored_study, read_study
from search.run_directory import STUDY_FILE, is_driven, trial_folder
from trials.events import EVENTS, Evaluated, EventReader, Progress
from trials.storage.studies import Studies
from trials.study_record import StudyRecord


class StudySource:
    """A study in a run directory, or in a database; several threads may ask."""

    def __init__(self, directory: Path | None, stored: tuple[str, str] | None = None) -> None:
        """Opens nothing yet: the study may begin later.

        Args:
            directory: run directory of the study, where it is on this machine.
            stored: the database's URL and the study's name there; None for what `study.yaml` says.
        """
        self._directory, self._stored = directory, stored
        self._place_found = stored
        self._studies: Studies | None = None
        self._events: dict[int, _Events] = {}
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the study, as far as it is known before anything is read."""
        if self._stored is not None:
            return self._stored[1]
        assert self._directory is not None
        return self._directory.resolve().name

    def record(self) -> StudyRecord:
        """The study as it stands.

        Raises:
            UserError: where there is none, it has not begun, or its database cannot be read.
        """
        if self._stored is not None:
            return read_stored_study(*self._stored, self._directory)
        assert self._directory is not None
        return read_study(self._directory)

    def version(self) -> str:
        """A text that is another one as soon as the record is: after a commit, an evaluation, the end of a driver.

        Raises:
            UserError: where there is no study yet, or its database cannot be read.
        """
        with self._lock:
            url, name = self._place()
            self._studies = self._studies or Studies(url)
            committed = self._studies.version(name)
            self._follow(self._studies.running(name))
            evaluations = {number: events.evaluations for number, events in self._events.items()}
        driven = self._directory is not None and is_driven(self._directory)
        return repr((committed, evaluations, driven))

    def progress(self) -> dict[int, Progress]:
        """The last progress of each running training, by number of the trial, as of the last `version`."""
        with self._lock:
            return {number: events.last for number, events in self._events.items() if events.last is not None}

    def _place(self) -> tuple[str, str]:
        """The database and the study's name in it."""
        if self._directory is not None and self._stored is None:
            if not (self._directory / STUDY_FILE).exists():  # maybe removed since the last time
                self._place_found = self._studies = None
            self._place_found = self._place_found or ledger_of(self._directory)
        assert self._place_found is not None
        return self._place_found

    def _follow(self, running: tuple[int, ...]) -> None:
        """Reads on in the events of the trials that run, and forgets those of others."""
        if self._directory is None:
            return
        self._events = {
            number: self._events.get(number) or _Events(trial_folder(self._directory, number) / EVENTS)
            for number in running
        }
        for events in self._events.values():
            events.read_on()


class _Events:
    """What a running training has said so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = EventReader(path)
        self._inode = self._size = 0
        self.evaluations = 0
        self.last: Progress | None = None

    def read_on(self) -> None:
        """Takes in what is new since the last call."""
        try:
            file = self._path.stat()
        except FileNotFoundError:
            return
        # another attempt begins its file anew, maybe in the inode of the one before
        if file.st_ino != self._inode or file.st_size < self._size:
            self._read = EventReader(self._path)
        self._inode, self._size = file.st_ino, file.st_size
        for event in self._read():
            self.evaluations += isinstance(event, Evaluated)
            self.last = event if isinstance(event, Progress) else self.last
