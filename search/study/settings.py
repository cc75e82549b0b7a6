"""The facts that must not change while a study lives, and what its readers need beside its trials."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from dashboards.terminal.tables import counted
from dhen.errors import UserError
from dhen.values import parse
from search.config import StudyConfig
from search.execution.attempts import Parallelism
from search.execution.growth import ordered_axes
from search.execution.plan_trial import LOCAL, cluster_summary, declared_clusters
from search.read_study import HEAD, NOTED_AT, not_begun, run_directory_of
from search.run_directory import database_url, has_database, has_results
from search.study.drivers import SETTINGS, WRITTEN, for_other_drivers
from search.study_state import StudyState
from spaces.axes import ChoiceAxis
from spaces.space import Space
from trials.cluster.cluster import Cluster
from trials.cluster.machine import Precision, preferred_precision
from trials.cluster.this_machine import THIS
from trials.data.prepared_log import PreparedLog
from trials.records.job import TRAINING_VERSION, TrainingConfig
from trials.records.places import LOCAL as LAUNCHED_HERE
from trials.records.study_record import StageName, StudyRecord, StudyStage
from trials.store.database import same_database
from trials.store.ledger import Ledger, StoredStudy, StudySetting

BUDGET = "budget"
"""Key of the facts under which the study's budget is noted."""
LARGER_SHAPES = "larger_shapes"
"""Key of the facts under which the cluster is noted in its other shapes, if trials may have several."""
KEEP_TIME_SECONDS = 30.0
"""Longest time of a driver that is killed that may be lost."""


class StudySettings:
    """What the ledger notes of a study when it begins; a resumed study is held to it."""

    def __init__(
        self,
        ledger: Ledger,
        config: StudyConfig,
        directory: Path,
        log: PreparedLog,
        space: Space,
        shares: Parallelism,
        *,
        joins: bool = False,
    ) -> None:
        """Notes the facts of a new study, and holds a known study to its facts.

        Args:
            ledger: ledger of the study.
            config: settings as given now.
            directory: the run directory.
            log: log that the study searches on.
            space: space that it searches.
            shares: what trials have of a machine, if the cluster is this one or like it.
            joins: whether another driver has begun the study, or goes on with it.

        Raises:
            UserError: if the ledger knows the study with another log, space, seed or cluster, or another run
                directory has it.
        """
        if not joins:
            _check_home(ledger, directory)
        self._ledger, self._changes_alone = ledger, joins
        self._facts = _settled(ledger, config, directory, log, space, shares)
        with ledger.database.record_errors():
            described = (self._facts["cluster"], *self._facts.get(LARGER_SHAPES, ()))
            # older versions noted `part_costs`, what parts of models had been measured to take
            known = ({key: value for key, value in one.items() if key != "part_costs"} for one in described)
            self.clusters = tuple(map(Cluster.model_validate, known))
            """Cluster that trials are planned for, in each shape that they may have, the least first: as declared,
            or this machine as measured when the study began."""
            earlier = StudyRecord.model_validate(self._facts[HEAD]) if HEAD in self._facts else None
            self.precision: Precision = self._facts["precision"]
            """Precision of all trainings: this machine's preference when the study began."""
            created_at = float(self._facts["created"])
        self.begun = earlier is not None
        """Whether an earlier session has begun the study."""
        self.setting = StudySetting(
            directory=(ledger.directory() if joins else None) or str(directory.resolve()),
            log=log.fingerprint,
            features=log.features.to_dict(),
            seed=config.seed,
            version=TRAINING_VERSION,
            cluster=self._facts["cluster"],
        )
        """What the study's trials have in common."""
        self.head = StudyRecord(
            name=ledger.study,
            directory=str(directory),
            created_at=created_at,
            space=space.name,
            space_file=config.space if config.space != space.name else None,
            sampler=config.sampler,
            seed=config.seed,
            log=log.summary(),
            cluster=cluster_summary(self.clusters),
            serving=config.serving,
            max_table_bytes=config.max_table_bytes,
            period=config.next_period,
            axes=ordered_axes(space),
            grows=config.grow,
            trials=(),
            trials_budget=config.most_trials + config.tune_trials if config.most_trials else None,
            seconds_budget=60.0 * config.minutes if config.minutes else None,
        )
        """The study's record without its trials."""
        self.state: StudyState
        """The study's state, once it is opened; its head has what is noted here."""
        self.had_finished = False
        """Says whether the study came to its end with this very budget: minutes left over then stay so, also if
        a later session of it was broken off."""
        budget = [config.most_trials, config.tune, config.minutes, config.knows_when_to_stop, config.worth]
        if earlier is not None:
            stands = ["elapsed_seconds", "refused", "grown", "passes", "choice", "refits"]
            if joins:
                stands += ["finished", "stage"]
            if self._facts.get(BUDGET) == budget:
                stands += ["finished_at", "expected_gain"]
                self.had_finished = earlier.finished or earlier.finished_at is not None
            self.head = self.head.replace(**{name: getattr(earlier, name) for name in stands})
        self._budget_noted: dict[str, Any] = {BUDGET: budget}
        if ledger.leases is not None:
            self._budget_noted |= {WRITTEN: False, SETTINGS: for_other_drivers(config)}
        self._noted_at = time.monotonic()

    def once(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the study noted under this key when it began; a study that begins makes it now."""
        if key not in self._facts:
            self._facts[key] = make()
        noted: dict[str, Any] = self._facts[key]
        return noted

    def note(self, **facts: Any) -> None:
        """Commits the head with these facts and the study's time, so that readers have it, and gives them to the
        state's head too."""
        facts["elapsed_seconds"] = self.state.elapsed_seconds()
        self._noted_at = time.monotonic()
        self.head = self.head.replace(**facts)
        self.state.head = self.state.head.replace(**facts)
        self._ledger.settle(self.setting)
        changes = self.head.model_dump(mode="json", include=set(facts) if self._changes_alone else None)

        def noted(now: dict[str, Any]) -> dict[str, Any]:
            # what another driver has noted meanwhile stays, but for what the first note of all is about
            whole = now if self._changes_alone else self._facts | self._budget_noted
            head = (now.get(HEAD, {}) if self._changes_alone else {}) | changes
            head["elapsed_seconds"] = max(
                head["elapsed_seconds"], now.get(HEAD, {}).get("elapsed_seconds", 0.0)
            )
            return whole | {HEAD: head, NOTED_AT: time.time()}

        self._ledger.change_facts(noted)
        self._changes_alone = self._ledger.leases is not None

    def note_written(self) -> None:
        """Commits that the study's end is in its report and in MLflow."""
        self._ledger.change_facts(lambda facts: facts | {WRITTEN: True})

    @property
    def written(self) -> bool:
        """Whether a driver has committed that the study's end is in its report and in MLflow."""
        return bool((self._ledger.facts() or {}).get(WRITTEN))

    def enter(self, name: StageName, total: int | None = None, done_before: int | None = None) -> None:
        """Notes that a stage begins, so that observers and other terminals can say how far the study is.

        Args:
            name: the stage.
            total: number of its trainings, if there are any to count.
            done_before: number of these that are done; None: all trainings of their kind that the study has.
        """
        before = counted(self.state.record(), name)
        stage = StudyStage(
            name=name,
            total=total,
            done_before=before if done_before is None else done_before,
            counted_before=before,
            began_seconds=self.state.elapsed_seconds(),
        )
        self.note(stage=stage)
        self.state.tell()

    def keep_time(self, state: StudyState) -> None:
        """Notes the study's time once in a while, for a driver that is killed: an observer of the state."""
        if time.monotonic() - self._noted_at > KEEP_TIME_SECONDS and state.trials:
            self.note()


def _settled(
    ledger: Ledger,
    config: StudyConfig,
    directory: Path,
    log: PreparedLog,
    space: Space,
    shares: Parallelism,
) -> dict[str, Any]:
    """The facts of a study. This machine is measured for a new study alone: a second measurement would differ."""
    facts: dict[str, Any] = {"log": log.fingerprint, "space": space.fingerprint, "seed": config.seed}
    noted = ledger.facts()
    if noted is None and has_results(directory):
        raise not_begun(directory)
    if noted is not None and _is_copy(ledger, directory, noted):
        noted["created"] = time.time()  # a study of its own, wherever studies are told apart by it
    if noted is None or config.cluster not in (LOCAL, THIS):
        cluster, *larger = declared_clusters(
            config.cluster,
            config.shapes,
            config.hbm,
            side_by_side=shares.sharing,
            threads=shares.threads,
            hosts_apart=config.launcher != LAUNCHED_HERE,
        )
        facts |= {"cluster": cluster.to_dict(), LARGER_SHAPES: [one.to_dict() for one in larger]}
    if noted is None:
        return facts | {"created": time.time(), "precision": preferred_precision()}
    noted_now = {LARGER_SHAPES: []} | noted  # older versions had one shape alone
    different = [key for key, value in facts.items() if noted_now.get(key) != value]
    changed = dict.fromkeys("cluster" if key == LARGER_SHAPES else key for key in different)
    if changed:
        raise UserError(
            f"{directory} holds a study with another {' and another '.join(changed)}; "
            f"continue it with the same settings, or choose another --out (or name=)."
        )
    return noted


def _check_home(ledger: Ledger, directory: Path) -> None:
    """Raises UserError if another run directory has the study, such as the one that this is a copy of: its weights
    lie there, and `storage` has one study of a name."""
    home = run_directory_of(ledger.url, StoredStudy(ledger.study, ledger.directory()))
    if home is not None and not home.samefile(directory):
        raise UserError(
            f"study {ledger.study!r} of the database that storage= names lies in {home}: go on there "
            f"(`dhen-search run {home}`), or begin a study with another name= and another --out than {directory}."
        )


def _is_copy(ledger: Ledger, directory: Path, noted: dict[str, Any]) -> bool:
    """Whether the run directory is a copy of the one in which the study began, and that one still exists."""
    own, began_in = database_url(directory, None), Path(ledger.directory() or directory)
    with suppress(UserError, OSError):
        other = database_url(began_in, None)
        if same_database(ledger.url, own) and has_database(began_in) and not same_database(other, own):
            with closing(Ledger(other, ledger.study, create=False)) as original:
                return bool((original.facts() or {}).get("created") == noted.get("created"))
    return False


def check_training_axes(space: Space, training: TrainingConfig) -> None:
    """Checks that the space's training settings exist and that their values are valid.

    Raises:
        UserError: naming the setting that is not.
    """
    if "train_fraction" in space.training_axes:
        raise UserError(
            f"space {space.name!r}: training.train_fraction is no axis: candidates on different parts of the "
            "log do not compare. Give it to the study: training.train_fraction=0.25."
        )
    for key, axis in space.training_axes.items():
        for value in axis.values if isinstance(axis, ChoiceAxis) else (axis.low, axis.high):
            parse(TrainingConfig, training.to_dict() | {key: value}, f"space {space.name!r}: training")
