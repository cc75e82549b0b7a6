"""StudyConfig: what a study is, from a YAML file and `key=value` words; complete in its `study.yaml`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dhen.atomic_write import write_atomically
from dhen.errors import UserError
from dhen.values import dump_yaml, load_yaml, parse, without_removed
from search.log_config import DEMO, LogConfig, set_override
from search.run_directory import DRIVER_LOG, LOCK_FILE, STUDY_DB, STUDY_FILE
from trials.cluster.cluster import RANKS, Bytes, Share, SignedBytes
from trials.cluster.this_machine import THIS
from trials.data.read_options import DAY, parse_length
from trials.data.remote import is_url
from trials.records.job import TrainingConfig
from trials.records.places import LOCAL, LauncherName
from trials.records.serving_limits import Limits, ServingConfig
from trials.records.strategy import Prefer, StrategyName
from trials.store.database import masked

REMOVED: dict[str, tuple[Any, str]] = {
    "average_seeds": (1, "`dhen-search average DIRECTORY --seeds N` trains the best network from N seeds"),
    "ledger": (None, "warm_start=RUN takes over what an earlier study has trained"),
    "tune_best": (3, "tune=N takes the three best architectures in turn"),
}
"""Keys that there were once: the default, which the `study.yaml` of an earlier study may have, and what decides
now. `trials.records.job.REMOVED` has those of `training`."""
Count = Annotated[int, Field(ge=0)] | Literal["auto"]


class StudyConfig(LogConfig):
    """Everything a study needs; the same values propose and train the same candidates."""

    space: str = "default"
    """The search space: a name (`dhen-search spaces` lists them) or the path of a YAML file."""
    grow: bool = True
    """Whether the study widens an ordered axis of the space while it searches, if its best candidates sit at an
    end of it and a candidate beyond fits the memory, serving and the budget. No: the space stays as it is."""
    sampler: str = "auto"
    """Sampler that proposes candidates: ranker, tpe, nsga2, gp (TPE takes over after 200 candidates), random, or
    auto, which is ranker."""
    stopping: str = "auto"
    """Rule that ends candidates early: curve (those that can no longer reach the front), none, or auto, which is
    none."""
    trials: Annotated[int, Field(gt=0)] | Literal["auto"] | None = "auto"
    """Number of candidates; the baseline's own trials come on top. Null: the search ends when its share of
    `minutes` is over, by `search_until`, or after 100 proposals in a row that needed no training. Auto: null if
    `minutes`, `worth` or `search_until=auto` are given, else 20."""
    search_until: Literal["auto", "none"] | None = None
    """Whether the search may end before its budget: auto (once further candidates are expected to gain less than
    `worth`, or less than this log's validation rows can show) or none. Null: auto if `worth` is given, or
    `minutes` without `trials`; else none."""
    worth: Share | None = None
    """Smallest decrease of the best NE that is worth a longer search, such as 0.1%, for `search_until=auto`. Null:
    whatever this log's validation rows can show."""
    tune: Count = "auto"
    """Number of further candidates after the search, which tune training settings and dropouts again for the three
    best architectures in turn: the best by NE, the knee of the front, the next best. It counts over the whole
    study: if `trials` is raised later, raise `tune` too, or no more are tuned. Auto: if `minutes` are given
    and `trials` are not, tuning takes turns with the search, by what each is expected to gain per second; else
    0."""
    minutes: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Wall clock of the whole command in minutes, from reading the log to the report, earlier sessions of the
    study included; what follows the search has a reserve in it."""
    seed: int = Field(default=0, ge=0)
    """Seed of proposals, initial weights and the order of examples."""
    baseline: str = "advanced_dlrm"
    """The model that NE is relative to: the name of a shipped one (advanced_dlrm, advanced_dlrm_moe, dcn_v2,
    dlrm, wide_deep) or the path of a model configuration."""
    baseline_trials: int = Field(default=4, gt=0)
    """Number of trainings in which the baseline is tuned; the best on validation counts."""
    training: TrainingConfig = TrainingConfig()
    """Training settings of every trial; the training axes of the space come on top."""
    serving: ServingConfig = ServingConfig()
    """A request to the exported model, and limits on serving it; a candidate over a limit is not trained."""
    objective: Literal["validation", "next_period"] = "validation"
    """Which model of a candidate NE is of: validation (the network as it was trained, which scores validation), or
    next_period (one that goes on learning: each period of validation is scored, then trained on once, as
    `dhen-search online` does). With next_period NE on test is of periods too, after those of validation."""
    period: str | None = None
    """Length of a period with `objective=next_period`: 1d if nothing is said; 6h, 30m, or a number of rows,
    which a log without time stamps needs."""
    max_table_bytes: Bytes | None = None
    """Limit on the bytes of a candidate's embedding tables as training stores them, such as 1GiB: rows x columns x
    bytes of `training.table_precision`, growing tables with their whole capacity. A candidate over it is not
    trained."""
    parallel: int | None = Field(default=None, gt=0)
    """Number of trials that train side by side; by default one on an accelerator, and on a CPU as
    many as the cores allow with `threads` times ranks each, at most four. With `launcher=ray` it is as many as the
    cluster's nodes can hold at once when the command begins; with more than there are accelerators for, trials
    with one rank per host share them, and each is planned for its part of the memory. If `ranks` names several
    shapes, trials in the least are counted: one in a larger shape takes the places of several."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads per trial (per rank, if it has several); by default as many of its share of the cores as
    are measured to make it faster."""
    cluster: str = "local"
    """The cluster that candidates are planned for: a name (`dhen-search clusters` lists them), the path of a
    YAML file, or `local` (the same as `this`): this machine, or the launcher's nodes, taken to be like it. Plans
    are executed with `local`, and with any `launcher` but `local` whatever the cluster is; else one process trains
    here."""
    ranks: str | None = None
    """Hosts x ranks per host, such as 2x4, in place of the cluster's own; or several such shapes, those with fewer
    ranks first, such as 1x1,1x2,2x2: each candidate then has the least in which a strategy fits."""
    hbm: Bytes | None = None
    """Memory per rank, such as 24GiB, in place of the cluster's own; with `local` the default is a share of
    this machine's memory, which its trials divide."""
    enforce_memory: Literal["auto"] | bool = "auto"
    """Whether ranks are held to their memory, by counting tensors on a CPU and by the allocator's limit on a GPU:
    yes, no, or auto, which holds them to a memory that `hbm` declares. A candidate that needs more runs out of
    memory then, and goes on under the next strategy."""
    launcher: LauncherName = LOCAL
    """What starts the ranks of candidates, and where: local (this machine), ray (the Ray cluster that RAY_ADDRESS
    names, else the one that runs on this machine), ray://HOST:10001 (the same as a client of the cluster), or
    slurm (a Ray cluster that is made on the nodes of the Slurm job in which the command runs)."""
    servers: int | None = Field(default=None, gt=0)
    """Number of servers that hold embedding tables, in processes of their own, if `training.tables.synchrony`
    is async, semi or sync; by default the fewest that have room for them."""
    prefer: Prefer = "least"
    """Which of the strategies that fit is taken: least (the fewest memory techniques, then the shortest step)
    or fastest (the shortest step)."""
    technique: StrategyName | None = None
    """Strategy that the ladder is restricted to, by name, such as zero1 or fsdp+full_checkpointing; if the
    name says no micro_batches=N, any number of micro-batches is allowed."""
    memory_margin: SignedBytes = 0
    """Memory that is added to every predicted peak, such as 512MiB; below 0 it is taken off, so that candidates
    are tried under strategies that are predicted not to fit."""
    storage: str | None = None
    """SQLAlchemy URL of the study's database; `study.db` in the run directory if not given."""
    optuna: str | None = None
    """Storage of Optuna in which the study stands too, kept up to date while it runs: a SQLAlchemy URL such as
    sqlite:///optuna.db, or the path of a journal file. `dhen-search optuna` writes it later."""
    confirm: Count = "auto"
    """Number of seeds from which the winners and the baseline are retrained at the end, for intervals: 0 (none),
    or 2 or more. Auto: if `minutes` are given, as many as a share of them allows, 2 to 5; else 0."""
    block_by: str | None = None
    """A categorical column, such as a user's id: `confirm` resamples rows with the same value together; if
    not given, rows that are consecutive in time or in the log."""
    averages: Count = "auto"
    """Largest number of networks in an average, which is the mean of their predictions. Averages of the best
    networks are chosen on validation at the end and join the front. 0 (none), or 2 or more. Auto: 3 if
    `minutes` are given and leave time for their scores, else 0."""
    distil: Literal["auto"] | bool = "auto"
    """Whether networks of the front, five at most, learn from the best average if there is one: they are
    trained once more, on labels that are half its predictions, and join the front. With `origins` none does,
    since averages have seen what comes after them. Auto: yes if `minutes` are given and leave time for it;
    yes does it though they do not."""
    refit: Literal["auto"] | bool = "auto"
    """Whether the baseline and the winners, once they are chosen, are trained once more, on the rows of training
    and validation together, as many passes as they took to their best. These networks are scored on test beside
    the others, compared by `confirm`, and exported. With `objective=next_period` none is, since test is scored by
    networks that have learnt from validation. Auto: yes if `minutes` are given and leave time for it; yes does
    it though they do not."""
    origins: int = Field(default=0, ge=0)
    """Number of earlier periods, each as long as validation, that winners and baseline are judged on too before
    the best is chosen: their networks are trained again on the rows before each. 0: on validation alone. It needs
    a log with time stamps."""
    proposals: str | None = None
    """Path of a file of proposals, a JSON object per line: points of the space or model configurations. They are
    trained in turn with the sampler's own, also those that are added while the study runs."""
    warm_start: tuple[str, ...] = ()
    """Run directories of earlier studies of this log; the sampler learns from their candidates before it
    proposes."""
    start_from: tuple[str, ...] = ()
    """Run directories of earlier studies of logs like this one: their best networks, three of each at most, are
    among the first candidates, with the settings that they were trained with, as near as the space has them."""
    name: str | None = None
    """Name of the study in the database and in MLflow; the run directory's name if not given."""
    tracking: str | None = None
    """Where MLflow keeps the study's runs in place of the run directory's `mlflow.db`: a tracking server such as
    http://tracking.example:5000, a database (sqlite:///FILE, postgresql://USER@HOST/DATABASE, mysql, mssql),
    `databricks` or databricks://PROFILE, or, if `MLFLOW_ALLOW_FILE_STORE` is true, a folder; `local`: the run
    directory, whatever the environment has. Null: `MLFLOW_TRACKING_URI` of the environment, if it is set. That
    variable may hold a password; `study.yaml` does not keep it."""
    register_model: bool = True
    """Whether the bundle of the best is registered as a model in MLflow at the end, under the study's name, with
    the alias `best`. It is copied: a bundle of many GiB takes its time and its place once more."""

    @property
    def next_period(self) -> str | None:
        """Length of the periods that are scored ahead; None if the objective is validation as it is."""
        return (self.period or DAY) if self.objective == "next_period" else None

    @property
    def limits(self) -> Limits:
        """All that candidates may take, but for memory."""
        return Limits(serving=self.serving, max_table_bytes=self.max_table_bytes)

    @property
    def most_trials(self) -> int | None:
        """Number of candidates after which the search ends; None if none does."""
        if self.trials == "auto":
            open_ended = self.minutes is not None or self.search_until == "auto"
            ends_itself = self.worth is not None and self.search_until is None
            return None if open_ended or ends_itself else DEFAULT_TRIALS
        return self.trials

    @property
    def executes_plans(self) -> bool:
        """Whether ranks train as planned, here or on a launcher's hosts; else plans are recorded and one process
        trains here."""
        return self.launcher != LOCAL or self.cluster in (LOCAL, THIS)

    @property
    def knows_when_to_stop(self) -> bool:
        """Whether the search ends if further candidates are not expected to be worth their time."""
        if self.search_until is None:
            return self.worth is not None or (self.minutes is not None and self.most_trials is None)
        return self.search_until == "auto"

    @property
    def tunes_in_turns(self) -> bool:
        """Whether tuning takes turns with the search, in place of a number of candidates after it."""
        return self.tune == "auto" and self.minutes is not None and self.most_trials is None

    @property
    def tune_trials(self) -> int:
        """Number of candidates that tune the best architectures once the search is over."""
        return 0 if self.tune == "auto" else self.tune

    @property
    def most_averaged(self) -> int:
        """Largest number of networks in an average; 0 if no averages are made."""
        if self.averages == "auto":
            return DEFAULT_AVERAGED if self.minutes is not None else 0
        return self.averages

    @property
    def distils(self) -> bool:
        """Whether networks learn from the best average."""
        wanted = self.minutes is not None if self.distil == "auto" else self.distil
        possible = self.objective == "validation" and not self.origins
        return wanted and possible and self.most_averaged > 0

    @property
    def refits(self) -> bool:
        """Tells whether winners are trained once more, on the rows of training and validation together."""
        if self.refit == "auto":
            return self.minutes is not None and self.objective == "validation"
        return self.refit

    @property
    def confirm_seeds(self) -> tuple[int, int]:
        """Smallest and largest number of seeds that winners are confirmed from; (0, 0) if they are not."""
        if self.confirm == "auto":
            return CONFIRM_SEEDS if self.minutes is not None else (0, 0)
        return self.confirm, self.confirm

    @property
    def shapes(self) -> tuple[str, ...]:
        """The shapes that `ranks` names, the least first; none if it is not given."""
        return tuple(self.ranks.split(",")) if self.ranks is not None else ()

    @property
    def declared_ranks(self) -> tuple[tuple[int, int], ...]:
        """Number of hosts and number of ranks per host of each shape that `ranks` names."""
        return tuple(_numbers(shape) for shape in self.shapes)

    @model_validator(mode="before")
    @classmethod
    def _without_removed_keys(cls, data: Any) -> Any:
        return without_removed(data, REMOVED)

    @field_validator("stopping")
    @classmethod
    def _rungs_are_gone(cls, value: str) -> str:
        if value == "rungs":
            raise ValueError(
                "the rule 'rungs' was removed: curve ends candidates early, none and auto train all to their end"
            )
        return value

    @field_validator("period", mode="before")
    @classmethod
    def _rows_as_words(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("ranks", mode="before")
    @classmethod
    def _hosts_by_ranks(cls, value: Any) -> Any:
        if value is None:
            return None
        given = value.split(",") if isinstance(value, str) else value
        if (
            not isinstance(given, list | tuple)
            or not given
            or not all(isinstance(shape, str) and RANKS.fullmatch(shape.strip()) for shape in given)
        ):
            raise ValueError(
                "expected hosts x ranks per host, both above 0, such as 2x4, or several such shapes: 1x1,1x2"
            )
        shapes = [shape.strip() for shape in given]
        counts = [hosts * ranks_per_host for hosts, ranks_per_host in map(_numbers, shapes)]
        if len(set(shapes)) < len(shapes) or counts != sorted(counts):
            least_first = dict.fromkeys(sorted(shapes, key=lambda shape: prod(_numbers(shape))))
            raise ValueError(
                "shapes are tried one after another, each is named once, and those with fewer ranks come first: "
                f"ranks={','.join(least_first)}"
            )
        return ",".join(shapes)

    @field_validator("warm_start", "start_from", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value or ()

    @field_validator("confirm")
    @classmethod
    def _enough_seeds(cls, value: int | str) -> int | str:
        if value == 1:
            raise ValueError("an interval needs two seeds at least, five for a narrow one; 0 leaves it out")
        return value

    @field_validator("averages")
    @classmethod
    def _several_networks(cls, value: int | str) -> int | str:
        if value == 1:
            raise ValueError("an average is of two networks at least; 0 leaves averages out")
        return value

    @model_validator(mode="after")
    def _keys_go_together(self) -> StudyConfig:
        synchrony, ahead = self.training.tables.synchrony, self.objective == "next_period"
        if self.servers is not None and synchrony == "local":
            raise ValueError(
                f"servers={self.servers} would hold tables, and training.tables.synchrony=local has them on the "
                "ranks: give training.tables.synchrony=async, semi or sync too, or leave servers out"
            )
        if synchrony != "local" and ahead:
            raise ValueError(
                f"objective=next_period goes on with tables that the ranks hold, and training.tables.synchrony="
                f"{synchrony} has them on servers: leave one of the two out"
            )
        if ahead and self.refit is True:
            raise ValueError(
                "refit=yes trains on validation before test, which objective=next_period does in any case: leave "
                "one of the two out"
            )
        if ahead and self.distil is True:
            raise ValueError(
                "distil=yes has networks learn from what an average says of the training rows, and with "
                "objective=next_period they go on learning from later ones: leave one of the two out"
            )
        if self.enforce_memory is True and not self.executes_plans:
            raise ValueError(
                f"enforce_memory=yes holds ranks to their memory, and with cluster={self.cluster} plans are "
                "recorded and one process trains here: leave it out, or set cluster=local or a launcher"
            )
        if self.period is not None and not ahead:
            raise ValueError(
                f"period={self.period} is the length of periods that are scored ahead, which none are: give "
                "objective=next_period too, or leave it out"
            )
        if self.period is not None:
            parse_length(self.period)
        if self.worth is not None and self.search_until == "none":
            raise ValueError(
                f"worth={self.worth:g} says when the search ends, and search_until=none that it does not: leave "
                "one of the two out"
            )
        if self.distil is True and self.origins:
            raise ValueError(
                f"distil=yes has networks learn from averages, which with origins={self.origins} have seen what "
                "comes after them: leave one of the two out"
            )
        if self.distil is True and not self.most_averaged:
            raise ValueError(
                "distil=yes has networks learn from averages: say with averages= how many networks one may have, "
                "such as averages=3"
            )
        return self


def _numbers(shape: str) -> tuple[int, int]:
    """Number of hosts and number of ranks per host."""
    hosts, _, ranks_per_host = shape.partition("x")
    return int(hosts), int(ranks_per_host)


DEFAULT_TRIALS = 20
"""Number of candidates of a study that has neither `trials` nor `minutes`."""
DEFAULT_AVERAGED = 3
"""Largest number of networks in an average, if no other is asked for."""
CONFIRM_SEEDS = (2, 5)
"""Smallest and largest number of seeds of a confirmation that fits itself to the minutes."""
BUDGET_KEYS = frozenset(
    {
        "grow",
        "trials",
        "search_until",
        "worth",
        "tune",
        "minutes",
        "parallel",
        "threads",
        "optuna",
        "proposals",
        "launcher",
        "confirm",
        "block_by",
        "averages",
        "distil",
        "refit",
        "origins",
        "tracking",
        "register_model",
        "data",
        "schema_file",
    }
)
"""Keys that may differ when a study is resumed: a log is known by its content, which the ledger has."""
HELD_KEYS = ("ranks", "hbm", "prefer", "technique", "memory_margin", "servers")
"""Keys of a study that say how a model is held; `train` and `plan` take them too."""
EXECUTED_KEYS = (*HELD_KEYS, "enforce_memory")
"""Those that `train` takes, which executes what is planned."""
CONFIGURATION_KEYS = ("model", "schema", "training")
"""Keys of a file that holds a configuration: `plan` reads all, `train` and `baseline=` leave the schema to it."""
LOG_KEYS = tuple(key for key in LogConfig.model_fields if key != "data")
"""Keys of a study that say how its log is read; `train` and `plan` take them too."""
ADDRESSES = ("storage", "tracking", "optuna")
"""Keys whose values are addresses, which may hold a password."""
OWN_FILES = {LOCK_FILE, STUDY_DB, DRIVER_LOG}
"""Files that a session may leave in a folder before its `study.yaml` is there."""


def held_config(given: Mapping[str, Any], training: TrainingConfig, name: str) -> StudyConfig:
    """A study's settings that say how a model is held and how a log is read, for a training of these settings,
    which wants servers or does not; `name` says in messages whose settings they are.

    Raises:
        UserError: for unknown keys and wrong values.
    """
    tables = {"training": {"tables": training.tables.to_dict()}}
    return parse(StudyConfig, dict(given) | tables, name)


def read_study_config(file: Path | None, overrides: Iterable[str], **options: Any) -> StudyConfig:
    """A config from a YAML file (or defaults), options of the command line, and `key=value` words.

    Raises:
        UserError: for unknown keys (the nearest is named), words without `=`, and wrong values.
    """
    data = load_yaml(file) if file else {}
    if not isinstance(data, dict):
        raise UserError(f"{file}: expected a mapping of keys to values, received {type(data).__name__}.")
    data |= {key: value for key, value in options.items() if value is not None}
    for word in overrides:
        set_override(data, word)
    return parse(StudyConfig, data, str(file) if file else "study")


def as_begun(config: StudyConfig, directory: Path) -> StudyConfig:
    """Settings for a study in a run directory: with paths that hold in any working directory, and with the name
    by which a database that others use too has known the study since its start.

    Raises:
        UserError: for a `study.yaml` that was edited into something else.
    """
    name = config.name
    if name is None and (directory / STUDY_FILE).exists():
        name = written_config(directory).name
    elif name is None and config.storage is not None:
        name = directory.resolve().name
    log = {} if config.data == (DEMO,) else {"data": tuple(map(_absolute, config.data))}
    files = {"schema_file": config.schema_file, "space": config.space, "baseline": config.baseline}
    # what has no suffix may be a name of ours
    paths = {key: Path(file) for key, file in files.items() if file is not None}
    named = {key: str(path.absolute()) for key, path in paths.items() if path.suffix and path.is_file()}
    earlier = {key: tuple(map(_absolute, getattr(config, key))) for key in ("warm_start", "start_from")}
    return config.replace(name=name, **log, **named, **earlier)


def _absolute(path: str) -> str:
    return path if not path or is_url(path) else str(Path(path).absolute())


def check_directory(directory: Path, config: StudyConfig) -> None:
    """Checks that the run directory holds this study or nothing at all.

    Raises:
        UserError: naming what differs, if the directory holds another study or other files.
    """
    path = directory / STUDY_FILE
    if path.exists():
        before, now = as_begun(written_config(directory), directory).to_dict(), config.to_dict()
        changed = [key for key in now if now[key] != before[key] and key not in BUDGET_KEYS]
        if changed:
            differences = "; ".join(
                masked(f"{key}: {before[key]!r} there, {now[key]!r} now") for key in changed
            )
            raise UserError(
                f"{directory} holds another study ({differences}). Run it with its own settings to go on, "
                f"or choose another --out."
            )
    elif directory.exists() and any(entry.name not in OWN_FILES for entry in directory.iterdir()):
        raise UserError(f"{directory} is not empty and holds no study; choose another --out.")


def write_config(directory: Path, config: StudyConfig) -> None:
    """Writes the run directory's `study.yaml`, with every key; one with secrets is its owner's alone to read."""
    text = dump_yaml(config.to_dict())
    write_atomically(directory / STUDY_FILE, text, private=masked(text) != text)


def written_config(directory: Path) -> StudyConfig:
    """The settings in a run directory's `study.yaml`.

    Raises:
        UserError: for a file that was edited into something else.
    """
    path = directory / STUDY_FILE
    return parse(StudyConfig, load_yaml(path), str(path))
