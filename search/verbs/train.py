"""`train`: one configuration, from nothing or from a bundle's weights."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dhen.config import ModelConfig
from dhen.errors import UserError
from dhen.model import catalog, named_model, parse_model
from dhen.values import parse
from search.baseline import read_configuration
from search.bundle import is_bundle, read_bundle, write_bundle
from search.config import StudyConfig, set_override
from search.export import bundle_info
from search.log import log_files, open_log
from search.objective import Trainer, new_record
from search.terminal import step_progress
from trials.data.cache import PreparedLog
from trials.data.prepare import prepare
from trials.events import WEIGHTS, Progress
from trials.job import TrainingConfig
from trials.launcher import Launcher
from trials.record import Outcome, TrialKind, TrialRecord


@click.command(
    epilog="""\b
Examples:
  dhen-search train runs/demo/best --data log.csv --out retrained seed=1
  dhen-search train runs/demo/best --data newer.csv --from-weights --out continued
  dhen-search train dcn_v2 --data log.csv --out dcn training.epochs=2
"""
)
@click.argument("what", metavar="BUNDLE|CONFIG.yaml|MODEL")
@click.argument("overrides", nargs=-1, metavar="[key=value ...]")
@click.option(
    "--data", multiple=True, required=True, help="The log: files, a folder, a prepared log, `demo`."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The new bundle's folder.")
@click.option("--from-weights", is_flag=True, help="Go on from the bundle's weights, in its encoding.")
def command(
    what: str, overrides: tuple[str, ...], data: tuple[str, ...], out: Path, from_weights: bool
) -> None:
    """Train one configuration and write it as a bundle. Keys: seed, model.KEY, training.KEY."""
    console = Console()
    model, training, seed = _configuration(what, overrides)
    if from_weights and not is_bundle(Path(what)):
        raise UserError(f"--from-weights goes on from a bundle's weights; {what} is no bundle.")
    launcher = Launcher()
    launcher.warm_up()
    with step_progress(console) as progress:
        if from_weights:
            log = prepare(log_files(data), encoding=read_bundle(Path(what)).encoding, progress=progress)
        else:
            log = _open(what, data, progress)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.training.") as folder:
        trainer = Trainer(launcher, log, Path(folder))
        job = trainer.job(model, training, seed)
        record = new_record(0, TrialKind.CANDIDATE, {}, job)
        start = Path(what) / WEIGHTS if from_weights else None
        record = trainer.train(record, job, _Printer(console), start_from=start)
        if record.outcome is not Outcome.COMPLETED:
            raise UserError(f"training ended as {record.outcome}: {record.error}")
        record = record.model_copy(update={"test": trainer.score(record, job, "test")})
        write_bundle(out, bundle_info(record, job, log, study="train"), trainer.folder(0) / WEIGHTS, log)
    assert record.validation is not None
    assert record.test is not None
    console.print(f"validation NE {record.validation.ne:.5f}, test NE {record.test.ne:.5f}")
    console.print(f"bundle: {out}", soft_wrap=True)


def _configuration(what: str, overrides: tuple[str, ...]) -> tuple[ModelConfig, TrainingConfig, int]:
    """Model, training and seed of a bundle, a file or a shipped model, with the overrides applied."""
    path, seed = Path(what), 0
    if is_bundle(path):
        job = read_bundle(path).info.job
        model, training, seed = job.model, job.training, job.seed
    elif path.exists():
        model, training = read_configuration(path, TrainingConfig())
    elif what in catalog():
        model, training = named_model(what), TrainingConfig()
    else:
        names = ", ".join(sorted(catalog()))
        raise UserError(f"{what!r} is no bundle, no configuration file and no shipped model ({names}).")
    data: dict[str, Any] = {"model": model.to_dict(), "training": training.to_dict(), "seed": seed}
    for word in overrides:
        set_override(data, word)
    unknown = set(data) - {"model", "training", "seed"}
    if unknown:
        raise UserError(f"unknown key {sorted(unknown)[0]!r}; known: seed, model.KEY, training.KEY.")
    return (
        parse_model(data["model"], "model"),
        parse(TrainingConfig, data["training"], "training"),
        int(data["seed"]),
    )


def _open(what: str, data: tuple[str, ...], progress: Any) -> PreparedLog:
    """The log, by the bundle's schema where there is one, so that equal logs are prepared equally."""
    sources = log_files(data)
    prepared = len(sources) == 1 and PreparedLog.is_prepared(sources[0])
    if is_bundle(Path(what)) and not prepared:
        return prepare(sources, schema=read_bundle(Path(what)).encoding.schema, progress=progress)
    return open_log(StudyConfig(data=data), progress)


class _Printer:
    """Each evaluation as a line."""

    def __init__(self, console: Console) -> None:
        self._console, self._shown = console, 0

    def __call__(self, record: TrialRecord, progress: Progress | None) -> None:
        for point in record.curve[self._shown :]:
            metrics = point.validation
            self._console.print(
                f"{point.examples:>12,} examples  train loss {point.train_loss:.5f}  "
                f"validation NE {metrics.ne:.5f}  AUC {metrics.auc:.5f}  {point.seconds:.1f} s"
            )
        self._shown = len(record.curve)
