"""An audit as trained: each fraction's cost and how well it ranks, and the cheapest that is good enough.

`FidelityResult` is the shape of `--json` and of the file beside the table. Every row ranks against the same
reference, trainings on the whole log from a second seed: so no row profits from initial weights that it has in
common with it, and the row of the whole log is the most that a fraction can be expected to reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator
from rich.table import Table

from dashboards.names import MISSING, decimals
from dashboards.terminal.tables import plain_table
from dhen.errors import UserError
from dhen.values import Value, parse
from search.analysis.statistics import CONFIDENCE, RankCorrelation, regret_percent, tau_interval, tau_of_best
from search.analysis.views import markdown_table
from search.config import StudyConfig
from search.log_config import LogConfig, set_override
from trials.cluster.cluster import Bytes
from trials.data.prepared_log import PreparedLog
from trials.records.job import TrainingConfig
from trials.records.trial_record import TrialRecord

# What `fidelity` may be told: the log, the fractions of it, which candidates, and the tau that is wanted.

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
        for fraction in value:
            if not 0.0 < fraction <= 1.0:
                raise ValueError(f"{fraction:g} lies outside (0, 1]; {example}")
        for fraction in value:
            if value.count(fraction) > 1:
                raise ValueError(f"{fraction:g} is given twice; {example}")
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


BEST_SHARE = 1 / 3
"""Share of the candidates, the best by the reference, for which tau is given by itself."""


class CandidateResult(Value):
    """NE and FLOPs of one candidate."""

    name: str
    flops: float
    """FLOPs of the forward pass per example."""
    ne: tuple[float | None, ...]
    """NE on validation, by row of the table; None if the training diverged."""
    reference_ne: float | None
    """NE on the whole log, from the second seed."""


class FractionResult(Value):
    """Cost and ranking of one part of the log, or of all of it."""

    fraction: float
    rows: int
    """Number of rows of a pass."""
    flops_share: float
    """FLOPs per example times examples trained, over all candidates, relative to the whole log."""
    seconds: float
    """Seconds of training and evaluation of all candidates, as measured."""
    seconds_share: float | None
    tau: RankCorrelation | None
    """Correlation with the reference's ranking; None if all NE are equal."""
    tau_of_best_third: float | None
    """Tau among the reference's best third; None if that has fewer than three candidates."""
    regret_percent: float | None
    """Excess of the reference NE of the best candidate here over the lowest; None if it diverged."""


class FidelityResult(Value):
    """Results of an audit: cost and ranking of each fraction of a log."""

    log: str
    """Fingerprint of the log."""
    space: str
    train_rows: int
    validation_rows: int
    seed: int
    reference_seed: int
    wanted_tau: float
    confidence: float
    fractions: tuple[FractionResult, ...]
    """Rows in ascending order; the last is the whole log, of which no fraction can be expected to rank better."""
    candidates: tuple[CandidateResult, ...]
    cheapest: float | None
    """The least fraction whose tau is at least the wanted one."""
    cheapest_surely: float | None
    """The least fraction of which the lower end of tau's interval is at least the wanted tau."""


def result_of(
    config: FidelityConfig,
    log: PreparedLog,
    names: Sequence[str],
    trained: Mapping[float, Sequence[TrialRecord]],
    reference: Sequence[TrialRecord],
) -> FidelityResult:
    """The audit from its finished trainings.

    Args:
        config: settings of the audit.
        log: the log that is audited.
        names: names of the candidates.
        trained: trainings of all candidates by fraction, the whole log last.
        reference: trainings on the whole log from the second seed.

    Raises:
        UserError: if all candidates diverged on the whole log.
    """
    target = [_ne(record) for record in reference]
    if not any(map(math.isfinite, target)):
        raise UserError(f"every candidate diverged on the whole log: {reference[0].result.error}.")
    ne = {part: [_ne(record) for record in records] for part, records in trained.items()}
    seconds = {
        part: sum(record.result.measured.whole_seconds for record in records)
        for part, records in trained.items()
    }
    # forward FLOPs of all examples seen
    flops = {
        part: sum(
            (record.job.flops or 0.0) * record.result.curve[-1].examples
            for record in records
            if record.result.curve
        )
        for part, records in trained.items()
    }
    train_rows = log.manifest.rows["train"]
    rows = tuple(
        FractionResult(
            fraction=part,
            rows=config.training.replace(train_fraction=part).rows_used(train_rows),
            flops_share=flops[part] / flops[1.0],
            seconds=seconds[part],
            seconds_share=seconds[part] / seconds[1.0] if seconds[1.0] else None,
            tau=tau_interval(ne[part], target, CONFIDENCE, config.seed),
            tau_of_best_third=tau_of_best(ne[part], target, BEST_SHARE),
            regret_percent=regret_percent(ne[part], target),
        )
        for part in trained
    )
    return FidelityResult(
        log=log.fingerprint,
        space=config.space,
        train_rows=train_rows,
        validation_rows=log.manifest.rows["validation"],
        seed=config.seed,
        reference_seed=config.seed + 1,
        wanted_tau=config.tau,
        confidence=CONFIDENCE,
        fractions=rows,
        candidates=tuple(
            CandidateResult(
                name=name,
                flops=last.job.flops or 0.0,
                ne=tuple(_finite(part_ne[index]) for part_ne in ne.values()),
                reference_ne=_finite(target[index]),
            )
            for index, (name, last) in enumerate(zip(names, reference, strict=True))
        ),
        cheapest=cheapest(rows, config.tau),
        cheapest_surely=cheapest(rows, config.tau, surely=True),
    )


def cheapest(rows: Sequence[FractionResult], wanted: float, *, surely: bool = False) -> float | None:
    """The least fraction below 1 whose tau, or its interval's lower end, is at least the wanted one."""
    enough = (
        row.fraction
        for row in rows
        if row.fraction < 1.0 and row.tau and (row.tau.low if surely else row.tau.value) >= wanted
    )
    return min(enough, default=None)


def _ne(record: TrialRecord) -> float:
    """NE at the best point of the curve, as a study compares; infinite if the training diverged."""
    ne = record.result.validation.ne if record.result.validation else math.inf
    return math.inf if math.isnan(ne) else ne


def _finite(ne: float) -> float | None:
    return ne if math.isfinite(ne) else None


# An audit in words: for the terminal, and as Markdown.

COLUMNS = ("Fraction", "Rows", "FLOPs", "Seconds", "Tau", "95 % interval", "Best third", "Regret")


def part_name(fraction: float) -> str:
    """A part of the log in words: `25 %`, or `whole log`."""
    return "whole log" if fraction == 1.0 else f"{100 * fraction:g} %"


def cells(result: FidelityResult) -> list[tuple[str, ...]]:
    """A line for each part of the log."""
    return [
        (
            part_name(row.fraction),
            f"{row.rows:,}",
            f"{100 * row.flops_share:.1f} %",
            f"{row.seconds:,.0f}" + (f" ({100 * row.seconds_share:.0f} %)" if row.seconds_share else ""),
            decimals(row.tau.value if row.tau else None, 2),
            f"{row.tau.low:.2f} to {row.tau.high:.2f}" if row.tau else MISSING,
            decimals(row.tau_of_best_third, 2),
            f"{row.regret_percent:.2f} %" if row.regret_percent is not None else MISSING,
        )
        for row in result.fractions
    ]


def table(result: FidelityResult) -> Table:
    """The table for the terminal."""
    return plain_table(COLUMNS, cells(result), COLUMNS[:1])


def remark(result: FidelityResult) -> str:
    """How to read the table."""
    return (
        f"{len(result.candidates)} candidates of space {result.space}, NE on {result.validation_rows:,} "
        f"validation rows. A fraction is the last of {result.train_rows:,} training rows. Tau is Kendall's tau-b "
        f"between its ranking (seed {result.seed}) and the whole log's (seed {result.reference_seed}), with a "
        "bootstrap interval over candidates; the whole log's own row, between these two seeds, is the most that "
        "a fraction can be expected to reach. Best third: tau among the best by the whole log. Regret: NE, on "
        "the whole log, of the candidate that the fraction would choose, above the lowest. FLOPs and seconds are "
        "of all trainings in the row, relative to the whole log's."
    )


def verdict(result: FidelityResult) -> str:
    """Which fraction keeps the wanted tau, and what to set; or that none does."""
    wanted, whole = f"{result.wanted_tau:g}", result.fractions[-1].tau
    parts = [row for row in result.fractions if row.fraction < 1.0 and row.tau is not None]
    two_seeds = f"two seeds on the whole log agree with {_short(whole)}"
    if not parts:
        return f"{two_seeds[0].upper()}{two_seeds[1:]}: the most that a fraction can be expected to reach."
    if result.cheapest is None:
        best = max(parts, key=lambda row: row.tau.value if row.tau else 0.0, default=None)
        nearest = f" ({part_name(best.fraction)} comes nearest, {_short(best.tau)})" if best else ""
        reason = " Search on the whole log, or ask for less with --tau."
        if whole is not None and whole.value < result.wanted_tau:
            reason = (
                " No fraction can be expected to: the noise of one seed takes more on the whole log too. More "
                f"passes or rows make for less of it; --tau {_short(whole)} asks for what the whole log has."
            )
        return f"None of the fractions measured keeps a tau of {wanted}{nearest}; {two_seeds}.{reason}"
    row = next(row for row in result.fractions if row.fraction == result.cheapest)
    surely = (
        "no fraction's whole interval lies there"
        if result.cheapest_surely is None
        else f"with its whole interval there: {part_name(result.cheapest_surely)}"
    )
    return (
        f"The cheapest fraction with a tau of {wanted} or more is {part_name(row.fraction)} "
        f"({_short(row.tau)}), at {100 * row.flops_share:.0f} % of the FLOPs; {surely}; {two_seeds}. To search "
        "on it:"
    )


def key(result: FidelityResult) -> str | None:
    """The key of `run` for the cheapest fraction; None if there is none."""
    return f"training.train_fraction={result.cheapest:g}" if result.cheapest is not None else None


def markdown(result: FidelityResult) -> str:
    """Markdown of the table, how to read it, and what follows."""
    shown = markdown_table([COLUMNS, *cells(result)])
    end = f"\n\n`{key(result)}`" if key(result) else ""
    return f"# Ranking on a part of the log\n\n{shown}\n\n{remark(result)}\n\n{verdict(result)}{end}\n"


def _short(tau: RankCorrelation | None) -> str:
    return f"{tau.value:.2f}" if tau is not None else MISSING
