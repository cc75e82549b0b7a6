"""StudyConfig: what a study is, from a YAML file and `key=value` words; complete in its `study.yaml`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, field_validator, model_validator

from dhen.errors import UserError
from dhen.values import Value, dump_yaml, load_yaml, parse
from search.run_directory import LOCK_FILE, STUDY_DB, STUDY_FILE, write_atomically
from trials.address import Address
from trials.cluster.cluster import RANKS
from trials.cluster.quantity import parse_bytes
from trials.job import TrainingConfig
from trials.serving_limits import ServingConfig
from trials.strategy import Prefer

DEMO = "demo"
"""The name of the built-in generated log, where a path of a log would stand."""


class DemoConfig(Value):
    """The built-in demo log."""

    rows: int = Field(default=200_000, ge=1000)
    """Examples to generate."""
    seed: int = Field(default=0, ge=0)
    """Of the teacher and the examples."""


class LogConfig(Value):
    """Which log, and how it is read."""

    data: tuple[str, ...] = (DEMO,)
    """Files or folders of the log, a prepared log, or `demo`."""
    format: str | None = None
    """csv, tsv, parquet, criteo or avazu; found out where not given."""
    label: str | None = None
    """The label column; found out where not given."""
    schema_file: str | None = None
    """A schema.yaml that `prepare` wrote and you edited; inferred where not given."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be read, and count them, in place of stopping at the first."""
    demo: DemoConfig = DemoConfig()


class StudyConfig(LogConfig):
    """Everything a study needs; the same values propose and train the same candidates."""

    space: str = "default"
    """A named space, or the path of a YAML file."""
    sampler: str = "auto"
    """auto, random, tpe, nsga2, gp (TPE goes on after 200 candidates) or ranker."""
    stopping: str = "auto"
    """Of candidates that can no longer reach the front: auto, none, rungs or curve."""
    trials: int | None = Field(default=20, gt=0)
    """Candidates in all; the baseline's own trials come on top."""
    tune: int = Field(default=0, ge=0)
    """Candidates more, which tune training settings and dropouts again for the best architectures, in turn. In
    all: a study whose `trials` are raised wants more of them too."""
    tune_best: int = Field(default=3, gt=0)
    """How many architectures: the best by NE, the knee of the front, then the next best."""
    minutes: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Wall-clock budget of all trials; no candidate is started after it."""
    seed: int = Field(default=0, ge=0)
    """Of proposals, initial weights and the order of examples."""
    baseline: str = "advanced_dlrm"
    """A shipped model's name or the path of a model configuration: what NE is relative to."""
    baseline_trials: int = Field(default=4, gt=0)
    """Trainings the baseline gets for its own tuning; the best on validation counts."""
    training: TrainingConfig = TrainingConfig()
    """What every trial shares; a space's own training axes come on top."""
    serving: ServingConfig = ServingConfig()
    """A request to an exported model, and what it may take: what is over a limit is not trained."""
    parallel: int | None = Field(default=None, gt=0)
    """Trials side by side; where not given one on an accelerator, on a CPU as many as cores, four at most."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads a trial; where not given as many of its share of the cores as make it faster."""
    cluster: str = "local"
    """What candidates are planned for: a named cluster, a YAML file's path, or `local`, this machine."""
    ranks: str | None = None
    """Hosts x ranks a host, e.g. 2x4, in place of the cluster's own."""
    hbm: int | None = None
    """Memory a rank, e.g. 24GiB, in place of the cluster's own; `local` shares this machine's among trials."""
    address: Address | None = None
    """`host:port` of this machine, where other hosts of `ranks=` join; without it all ranks are on this one."""
    prefer: Prefer = "least"
    """Of the techniques that fit: as few as may be, or the fastest."""
    storage: str | None = None
    """SQLAlchemy URL of the study's database; study.db in the run's directory where not given."""
    ledger: str | None = None
    """SQLAlchemy URL of a ledger that several studies share: what one has trained another takes over, with the
    weights where they are needed and still there."""
    confirm: int = Field(default=0, ge=0)
    """Seeds from which the front and the baseline are trained again at the end, for intervals; 0 for not then."""
    block_by: str | None = None
    """A categorical column whose rows `confirm` resamples together, such as a user's id; where not given, rows
    that lie together in time."""
    averages: int = Field(default=0, ge=0)
    """Networks in an average at most: means of what the best networks predict, chosen on validation at the end,
    stand on the front beside them; 0 for none."""
    average_seeds: int = Field(default=1, gt=0)
    """Trainings of the best network that averages may take in, each from its own seed; 1 for the one there is."""
    warm_start: tuple[str, ...] = ()
    """Run directories of earlier studies of this log, whose candidates the sampler begins with."""
    name: str | None = None
    """Of the study, in the database and in MLflow; the run directory's name where not given."""

    @property
    def declared_ranks(self) -> tuple[int, int] | None:
        """Hosts, and ranks a host."""
        found = RANKS.fullmatch((self.ranks or "").strip())
        return (int(found[1]), int(found[2])) if found else None

    @field_validator("ranks", mode="before")
    @classmethod
    def _hosts_by_ranks(cls, value: Any) -> Any:
        if value is not None and not (isinstance(value, str) and RANKS.fullmatch(value.strip())):
            raise ValueError("expected hosts x ranks a host, both above 0, such as 2x4")
        return value

    @model_validator(mode="after")
    def _has_hosts_to_join(self) -> StudyConfig:
        if self.address is not None and (self.declared_ranks or (1, 1))[0] == 1:
            raise ValueError(
                f"address={self.address} is where other hosts join: say with ranks= how many hosts and ranks a "
                "host there are, such as ranks=2x4"
            )
        return self

    @field_validator("warm_start", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value or ()

    @field_validator("confirm")
    @classmethod
    def _enough_seeds(cls, value: int) -> int:
        if value == 1:
            raise ValueError("an interval needs two seeds at least, five for a narrow one; 0 leaves it out")
        return value

    @field_validator("averages")
    @classmethod
    def _several_networks(cls, value: int) -> int:
        if value == 1:
            raise ValueError("an average is of two networks at least; 0 leaves averages out")
        return value

    @model_validator(mode="after")
    def _averages_for_seeds(self) -> StudyConfig:
        if self.average_seeds > 1 and not self.averages:
            raise ValueError(
                f"average_seeds={self.average_seeds} are members for averages: say with averages= how many "
                "networks one may have, such as averages=3"
            )
        return self

    @field_validator("hbm", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return value if value is None else parse_bytes(value)


BUDGET_KEYS = frozenset(
    {
        "trials",
        "tune",
        "minutes",
        "parallel",
        "threads",
        "ledger",
        "address",
        "confirm",
        "block_by",
        "averages",
        "average_seeds",
    }
)
"""What may differ when a study is resumed."""


def read_study_config(file: Path | None, overrides: Iterable[str], **given: Any) -> StudyConfig:
    """A config from a YAML file (or defaults), options of the command line, and `key=value` words.

    Raises:
        UserError: for unknown keys (the nearest is named), words without `=`, and wrong values.
    """
    data = load_yaml(file) if file else {}
    if not isinstance(data, dict):
        raise UserError(f"{file}: expected a mapping of keys to values, received {type(data).__name__}.")
    data |= {key: value for key, value in given.items() if value is not None}
    for word in overrides:
        set_override(data, word)
    return parse(StudyConfig, data, str(file) if file else "study")


def set_override(data: dict[str, Any], word: str) -> None:
    """Applies one `dotted.key=value` to nested data; values are read as YAML.

    Raises:
        UserError: where the word is none.
    """
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise UserError(f"{word!r} is not of the form key=value, e.g. trials=30 or training.epochs=2.")
    *path, last = key.split(".")
    for part in path:
        inner = data.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"{word!r}: {part!r} has no keys below it.")
        data = inner
    try:  # 0x2 are ranks, no number in hexadecimal
        data[last] = text if text.startswith("0x") else yaml.safe_load(text) if text else None
    except yaml.YAMLError as error:
        raise UserError(f"{word!r}: the value is not valid YAML ({error}).") from None


def check_directory(directory: Path, config: StudyConfig) -> None:
    """Nothing else than this study, or nothing at all, is in the run directory.

    Raises:
        UserError: naming what differs, where the directory holds another study or other files.
    """
    path = directory / STUDY_FILE
    if path.exists():
        before, now = written_config(directory).to_dict(), config.to_dict()
        changed = [key for key in now if now[key] != before[key] and key not in BUDGET_KEYS]
        if changed:
            differences = "; ".join(f"{key}: {before[key]!r} there, {now[key]!r} now" for key in changed)
            raise UserError(
                f"{directory} holds another study ({differences}). Run it with its own settings to go on, "
                f"or choose another --out."
            )
    elif directory.exists() and any(entry.name not in (LOCK_FILE, STUDY_DB) for entry in directory.iterdir()):
        raise UserError(f"{directory} is not empty and holds no study; choose another --out.")


def write_config(directory: Path, config: StudyConfig) -> None:
    """The run directory's `study.yaml`, complete."""
    write_atomically(directory / STUDY_FILE, dump_yaml(config.to_dict()))


def written_config(directory: Path) -> StudyConfig:
    """What `write_config` left there.

    Raises:
        UserError: for a file that was edited into something else.
    """
    path = directory / STUDY_FILE
    return parse(StudyConfig, load_yaml(path), str(path))
