"""Which processes of a training are started anew when they are killed, while the others go on.

A rank that trains on its own against servers has nothing that others wait for, and a server comes back with what
it last saved where no step needs all updates. All else ends the attempt, which goes on from its newest checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trials.checkpoint.folders import checkpoints_in
from trials.processes.rank_process import RankProcess

if TYPE_CHECKING:
    from trials.processes.task import Task


class Replacements:
    """The processes of one attempt that were started anew."""

    def __init__(self, task: Task, start: Callable[[Task, int], RankProcess]) -> None:
        """`start` starts one process of a task, by its number."""
        self._task, self._start = task, start
        self._restarts = Counter[int]()
        self._examples = dict[int, int]()
        """Examples that were done when a process was started anew for the last time."""

    def possible(self, process: int, examples: int) -> bool:
        """Tells whether a process that is killed after so many examples can be started anew.

        One that is killed again before there was any progress ends the attempt: what kills it may be in it.
        """
        task = self._task
        if not task.trains or examples <= self._examples.get(process, 0):
            return False
        if task.server(process) is None:
            return task.ranks_on_their_own and process > 0  # the first evaluates, and tells of it
        saved = task.resume_from is not None and bool(checkpoints_in(Path(task.resume_from)))
        return saved and task.job.training.tables.servers_return

    def start(self, process: int, examples: int) -> RankProcess:
        """Starts a process anew."""
        self._restarts[process] += 1
        self._examples[process] = examples
        return self._start(self._task.replace(restarts=self._restarts[process]), process)
