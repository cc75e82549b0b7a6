"""What `fidelity` may be told: the log, the fractions of it, which candidates, and the tau that is wanted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from dhen.errors import UserError
from dhen.values import parse
from search.config import StudyConfig
from search.log_config import LogConfig, set_override
from trials.cluster.quantity import Bytes
from trials.job import TrainingConfig

STUDYS_OWN = ("space", "seed", "training")
"""Keys that a study has decided for its candidates."""
FEWEST = 5
"""Number of candidates below which a rank correlation says nothing."""
CANDIDATES = 20


def _fractions(value: Any) -> Any:
    """Fractions as a shell has them, `0.05,0.1`; a single one needs no list."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return (value,) if isinstance(value, (int, float)) else value


Fractions = Annotated[tuple[float, ...], BeforeValidator(_fractions)]


class FidelityConfig(LogConfig):
    """An audit: candidates trained on parts of the log and, from two seeds, on all of it."""

    fractions: Fractions = (0.05, 0.1, 0.25, 0.5)
    """Fractions of the training rows to measure, each the last rows of the log; the whole log is always
    measured too."""
    tau: float = Field(default=0.8, gt=0, le=1)
    """Kendall's tau that is wanted between the ranking on a fraction and the ranking on the whole log."""
    candidates: int = Field(default=CANDIDATES, ge=FEWEST, le=1000)
    """Number of candidates, drawn at random from the space: different networks that fit the cluster."""
    space: str = "default"
    """The space that candidates are drawn from: a name, or the path of a YAML file."""
    seed: int = Field(default=0, ge=0)
    """Seed of the draw and of the trainings; `seed + 1` is the second seed on the whole log."""
    training: TrainingConfig = TrainingConfig()
    """Training settings of all trainings; the training axes of the space come on top."""
    cluster: str = "local"
    """The cluster that candidates must fit: a name, the path of a YAML file, or `local`, this machine."""
    ranks: str | None = None
    """Hosts x ranks per host, such as 2x4, in place of the cluster's own."""
    hbm: Bytes | None = None
    """Memory per rank, such as 24GiB, in place of the cluster's own."""
    parallel: int | None = Field(default=None, gt=0)
    """Number of trainings side by side; the default is that of a study."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads per training; the default is that of a study."""

    @field_validator("fractions")
    @classmethod
    def _are_fractions(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        example = "give parts of the training rows, such as 0.1,0.25,0.5"
        if not value:
            raise ValueError(f"no fraction is given; {example}")
        outside = [fraction for fraction in value if not 0.0 < fraction <= 1.0]
        if outside:
            raise ValueError(f"{outside[0]:g} lies outside (0, 1]; {example}")
        if len(set(value)) < len(value):
            doubled = next(fraction for fraction in value if value.count(fraction) > 1)
            raise ValueError(f"{doubled:g} is given twice; {example}")
        return tuple(sorted(value))

    @model_validator(mode="after")
    def _fractions_are_not_in_training(self) -> FidelityConfig:
        if self.training.train_fraction != 1.0:
            raise ValueError(
                "training.train_fraction is what an audit is to find: say with --fractions which are measured"
            )
        return self

    @property
    def parts(self) -> tuple[float, ...]:
        """The fractions without that of the whole log."""
        return tuple(fraction for fraction in self.fractions if fraction < 1.0)


def read_fidelity_config(
    overrides: Iterable[str], study: StudyConfig | None, **settings: Any
) -> FidelityConfig:
    """The audit's settings from options of the command line and `key=value` words.

    `study` has the settings of the study whose candidates are taken; without it candidates are drawn.

    Raises:
        UserError: for an unknown key (the nearest is named), a key that is given both ways or that the study
            has decided, and wrong values.
    """
    data = {key: value for key, value in settings.items() if value is not None}
    options = set(data)
    for word in overrides:
        if (key := word.partition("=")[0]) in options:
            raise UserError(f"{word!r}: --{key} is given too; give one of them.")
        set_override(data, word)
    if study is not None:
        decided = [key for key in (*STUDYS_OWN, "candidates", "cluster", "ranks", "hbm") if key in data]
        if decided:
            raise UserError(
                f"{decided[0]}: --from takes the study's own candidates, trained as they were there."
            )
        data = {key: study.to_dict()[key] for key in (*LogConfig.model_fields, *STUDYS_OWN)} | data
    return parse(FidelityConfig, data, "fidelity")
