"""A bundle: one configuration taken away whole, as a folder that trains, verifies and scores elsewhere.

`bundle.json` (model, training, seed, inputs, metrics beside the baseline's, cost, log, versions),
`encoding/` (schema, vocabularies and numeric statistics fitted on training rows), `weights.safetensors`,
`check.safetensors` (a few encoded examples and their scores), `manifest.json` (SHA-256 of every file).
For an average the weights of each member have a file, `weights.member0.safetensors` ...; all else is there once.
What was learnt after the export lies below `increments/` (`search.bundles.increments`).

Shapes: B examples, T categorical tables, K numeric inputs, N numbers with buckets.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from pydantic import Field, model_validator
from safetensors.torch import save_file
from torch import Tensor, nn

from dhen.atomic_write import atomic_folder, check_named
from dhen.cost import CostRow
from dhen.errors import UserError
from dhen.inputs.growing import unfilled_tables
from dhen.inputs.int8_tables import Int8Tables, scales_of, use_int8_tables
from dhen.members import MeanOfNetworks
from dhen.model import build_model, model_cost
from dhen.schema import FeatureSchema
from dhen.values import Value, fingerprint, load_json, parse
from search.bundles.increments import (
    MANIFEST,
    Increment,
    TrainedPeriod,
    Version,
    check_is_bundle,
    file_hashes,
    first_fault,
    read_increments,
    replay,
    write_manifest,
)
from search.bundles.int8_cost import Int8Cost
from trials.data.encoding import Bags, EncodedRows, Encoding
from trials.data.loader import feature_batch
from trials.data.prepared_log import PreparedLog
from trials.optim.adamw import compute_in
from trials.records.events import WEIGHTS
from trials.records.job import Job
from trials.records.serving_limits import ForwardTime, ServingConfig
from trials.records.study_record import Comparison, LogSummary
from trials.records.trial_record import Metrics
from trials.store.weights import adopt_weights, named_tensor, read_weights, stored_numbers
from trials.training.scoring import forward_time

INFO, ENCODING, CHECK = "bundle.json", "encoding", "check.safetensors"
CHECK_EXAMPLES = 64
CHECK_TOLERANCE = 1e-4
"""Largest difference of a score in fp32 from one machine to another that still counts as the same."""
LIBRARIES = ("dhen-search", "torch", "numpy", "pyarrow", "safetensors", "optuna", "mlflow")


class Member(Value):
    """A network of an average."""

    trial: int
    job: Job


class BundleInfo(Value):
    """The content of `bundle.json`."""

    bundle_version: int = Field(default=1, ge=1, le=1)
    study: str
    trial: int
    job: Job | None = None
    """Job of the network; None for an average."""
    members: tuple[Member, ...] = ()
    """Networks of an average, in the order of their weights' files."""
    log: LogSummary
    flops: float = Field(ge=0, allow_inf_nan=False)
    """Forward FLOPs per example."""
    parameters: int = Field(ge=0)
    embedding_parameters: int = Field(ge=0)
    cost: tuple[CostRow, ...]
    validation: Metrics
    """Metrics on validation; of networks that were trained on validation too (`Job.refit`) those that they were
    chosen by, before they were."""
    test: Metrics | None = None
    baseline_validation: Metrics | None = None
    baseline_test: Metrics | None = None
    comparison: Comparison | None = None
    """The comparison with the baseline on test, over several seeds: `comparison.better` is the verdict."""
    negative_sampling_rate: float = Field(default=1.0, gt=0, le=1)
    """Fraction of negatives the training log kept; scores are corrected for it."""
    forward: ForwardTime | None = None
    """Forward time measured at export; None if the device did not hold the model, and in older bundles."""
    version: Version | None = Field(default=None, exclude_if=lambda version: version is None)
    """The version of another bundle that this one has the weights of, increments included; None for one that
    increments begin with."""
    trained: TrainedPeriod | None = Field(default=None, exclude_if=lambda period: period is None)
    """The newest period that was trained on online, if its increment is in the weights themselves; None if
    there was none."""
    converted: Version | None = Field(default=None, exclude_if=lambda version: version is None)
    """The version of another bundle from which this one was made, with tables of 8 bits; None for one that was
    trained as it is."""
    int8_tables: Int8Cost | None = Field(default=None, exclude_if=lambda cost: cost is None)
    """What it costs that the tables have 8 bits per value; None if they have fp32."""
    planned_technique: str | None = None
    executed_technique: str | None = None
    versions: dict[str, str]

    @model_validator(mode="after")
    def _has_networks(self) -> BundleInfo:
        if (self.job is None) != bool(self.members):
            raise ValueError("expected either a job, or members")
        if any(job.training.precision == "auto" for job in self.jobs):
            raise ValueError("training.precision is auto; a trained network has fp32 or bf16")
        return self

    @property
    def has_seen_validation(self) -> bool:
        """Tells whether the networks were trained on the rows of validation too."""
        return any(job.refit is not None for job in self.jobs)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Jobs of all networks in the bundle."""
        return (self.job,) if self.job else tuple(member.job for member in self.members)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle on disk whose files are whole."""

    directory: Path
    info: BundleInfo
    encoding: Encoding
    increments: tuple[Increment, ...] = ()
    """The increments that were learnt since the export, in order."""

    @property
    def trained(self) -> TrainedPeriod | None:
        """The newest period that was trained on online; None if there was none."""
        return self.increments[-1].info.period if self.increments else self.info.trained

    @property
    def version(self) -> Version:
        """The version of the weights, increments included."""
        return self.increments[-1].version if self.increments else _exported(self.directory, self.info)

    def weights(self, member: int | None = None) -> Path:
        """The weights file of the bundle's network, or of this member of its average.

        Raises:
            UserError: if the bundle has increments, which are not in the file, or tables of 8 bits.
        """
        self.check_trainable()
        if self.increments:
            raise UserError(
                f"{self.directory} has {len(self.increments)} increments, which its weights file lacks: write a "
                f"bundle that has them in its weights, `dhen-search apply {self.directory} --out FULL`."
            )
        return self.directory / weights_names(self.info)[member or 0]

    def check_trainable(self) -> None:
        """Checks that training can go on from the bundle's weights.

        Raises:
            UserError: if its tables have 8 bits per value.
        """
        if self.info.int8_tables is not None:
            raise UserError(
                f"{self.directory} has tables of 8 bits per value, which cannot be trained: take the bundle that "
                "they were made of (`dhen-search export` without --int8-tables writes it)."
            )

    def job(self, member: int | None = None) -> Job:
        """The job of the bundle's network, or of this member of its average.

        Raises:
            UserError: for an average if no member is named, or if the bundle has no such member.
        """
        members = range(len(self.info.members))
        if self.info.job is not None and member is None:
            return self.info.job
        if member is not None and member in members:
            return self.info.members[member].job
        if not members:
            raise UserError(f"{self.directory} is a bundle of one network; leave --member {member} out.")
        trials = ", ".join(str(member.trial) for member in self.info.members)
        named = "" if member is None else f", and has no member {member}"
        raise UserError(
            f"{self.directory} is an average of {len(members)} networks (trials {trials}){named}: name one of "
            f"them, --member 0 (in Python member=0) to --member {members[-1]}."
        )

    def model(self, *, as_trained: bool = False, mapped: bool = False) -> nn.Module:
        """The trained model, in evaluation mode; in fp32, or in the precision that it was trained in.

        With `mapped` its weights stay in the bundle's files (`trials.store.weights.adopt_weights`).
        """
        return _model(self.directory, self.info, self.increments, as_trained=as_trained, mapped=mapped)

    def examples(self) -> EncodedRows:
        """The stored examples, encoded."""
        stored = read_weights(self.directory / CHECK)
        arrays = {name: tensor.numpy() for name, tensor in stored.items()}
        count = sum(name.endswith(".offsets") for name in arrays)
        bags = [(arrays[f"bag{i}.ids"], arrays[f"bag{i}.offsets"]) for i in range(count)]
        return EncodedRows(
            categorical=arrays["ids"],
            bags=tuple(Bags(ids=ids, offsets=np.append(starts, len(ids))) for ids, starts in bags),
            numeric=arrays["numeric"],
            share=arrays.get("share"),
            keys=arrays.get("keys"),
        )

    def scores(self, model: nn.Module) -> Tensor:
        """The scores of the stored examples by a model in fp32, in host memory.

        Raises:
            UserError: if the examples are none of the model's.
        """
        try:
            return scores(model, self.examples())
        except UserError:
            raise
        except (LookupError, ValueError, TypeError, RuntimeError, AssertionError) as error:
            raise UserError(
                f"{self.directory / CHECK}: its examples do not fit the model ({type(error).__name__}: {error})."
            ) from None

    @property
    def serving(self) -> ServingConfig:
        """The request whose forward time was measured at export."""
        at_export = self.info.forward
        return (
            ServingConfig(batch=at_export.batch, threads=at_export.threads) if at_export else ServingConfig()
        )

    def check(self, model: nn.Module | None = None) -> float:
        """The largest difference between the scores of the stored examples now and when exported.

        `model` is the bundle's in fp32; None if it is not there yet.

        Raises:
            UserError: if it exceeds the tolerance.
        """
        if self.increments:
            stored = self.increments[-1].scores()
        else:
            stored = named_tensor(read_weights(self.directory / CHECK), "score", self.directory / CHECK)
        found = self.scores(model or self.model())
        if found.shape != stored.shape:
            raise UserError(
                f"{self.directory}: there are {len(found)} examples, and {stored.numel()} scores."
            )
        worst = float((found - stored).abs().max())
        if not worst <= CHECK_TOLERANCE:
            raise UserError(
                f"{self.directory}: scores differ by up to {worst:.2g} from those at export "
                f"(tolerance {CHECK_TOLERANCE}); exported with {self.info.versions}."
            )
        return worst

    def check_finite(self, model: nn.Module) -> None:
        """Checks that all weights of the bundle's model are numbers, those that no stored example uses too.

        Raises:
            UserError: naming the first tensor with NaN or an infinity.
        """
        tensors = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
        tensors |= {
            f"{name}.packed": scales_of(module.packed)
            for name, module in model.named_modules()
            if isinstance(module, Int8Tables)
        }
        for name, tensor in tensors.items():
            # the extremes of a tensor with NaN are NaN; unlike `isfinite`, they need no copy of a table
            if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
                raise UserError(
                    f"{self.directory}: the weights {name} hold NaN or an infinity; export the bundle again."
                )

    def forward_time(self, log: PreparedLog | None = None) -> ForwardTime | None:
        """Forward time measured now, as at export; without a log on the stored examples, repeated.

        None if memory runs out.
        """
        rows = log.split("validation").inputs if log else self.examples()
        return _forward_time(self.model(), rows, self.serving)


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that a bundle depends on."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in LIBRARIES}


def check_place(directory: Path) -> None:
    """Checks that a bundle may be written to a folder.

    Raises:
        UserError: if `directory` is something else than a bundle, or has no name (`.`).
    """
    check_named(directory)
    there = directory.exists() and not is_bundle(directory)
    if there and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not a bundle; choose another --out.")


def weights_names(info: BundleInfo) -> list[str]:
    """Names of the weights files, one for each network."""
    if not info.members:
        return [WEIGHTS]
    stem, _, suffix = WEIGHTS.partition(".")
    return [f"{stem}.member{index}.{suffix}" for index in range(len(info.members))]


def write_bundle(
    directory: Path,
    info: BundleInfo,
    weights: Sequence[Path],
    log: PreparedLog,
    serving: ServingConfig | None = None,
) -> Path:
    """Writes a bundle that is whole or not there; an earlier bundle in its place is replaced.

    The forward time of a request as in `serving` is measured and becomes part of the bundle. `weights` has a file
    for each network.

    Raises:
        UserError: as `check_place`.
    """
    check_place(directory)
    with atomic_folder(directory) as building:
        for file, name in zip(weights, weights_names(info), strict=True):
            shutil.copyfile(file, building / name)
        inputs = log.split("validation").inputs
        write_beside_weights(building, info, log.encoding, inputs, serving or ServingConfig())
    return directory


def read_bundle(directory: Path) -> Bundle:
    """A bundle whose files are all there and unaltered.

    Raises:
        UserError: if the folder is no bundle, if a file is missing or altered, or if model, encoding and weights
            do not fit together.
    """
    check_is_bundle(directory)
    try:
        fault = first_fault(directory, (INFO, CHECK))
    except ValueError:
        raise UserError(f"{directory / MANIFEST} is damaged; export the bundle again.") from None
    if fault:
        raise UserError(f"{directory}: the bundle's file {fault}; export it again.")
    info = parse(BundleInfo, load_json(directory / INFO), INFO)
    increments = read_increments(directory, _exported(directory, info))
    encoding = Encoding.load(directory / ENCODING)
    # models, the encoding and the headers of the weights fit together, before anything is built
    try:
        encoded = encoding.features
    except (LookupError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{directory / ENCODING}: its parts do not fit together ({reason}).") from None
    for job, name in zip(info.jobs, weights_names(info), strict=True):
        if _inputs(job.features) != _inputs(encoded):
            raise UserError(
                f"{directory}: the tables and numbers of its model in {INFO} are others than those of {ENCODING}/."
            )
        stored = stored_numbers(directory / name)
        implied = sum(row.parameters for row in model_cost(job.model, job.features))
        if implied > stored:
            raise UserError(
                f"{directory / name}: has {stored:,} numbers, and the model in {INFO} needs {implied:,}; export "
                "the bundle again."
            )
    return Bundle(directory=directory, info=info, encoding=encoding, increments=increments)


def _inputs(features: FeatureSchema) -> tuple[object, ...]:
    """Returns what encoding and model must agree on; statistics of tables may differ."""
    tables = [(table.name, table.rows, table.multi_hot, table.buckets) for table in features.tables]
    return tables, [table.growing is not None for table in features.tables], features.numeric


def _exported(directory: Path, info: BundleInfo) -> Version:
    """The version of the weights that a bundle was written with: what it has of another bundle, or a version 0,
    known by what it scores with. What is known of its quality, and what was measured at export, may change."""
    if info.version is not None:
        return info.version
    scores_with = {
        name: file_hash
        for name, file_hash in file_hashes(directory).items()
        if name in weights_names(info) or Path(name).parts[0] == ENCODING
    }
    models = [job.model.to_dict() for job in info.jobs]
    identity = fingerprint({"files": scores_with, "models": models})
    return Version(number=0, base=identity, identity=identity)


def is_bundle(path: Path) -> bool:
    """Tells whether the folder says it is a bundle (whole or not), and not a prepared log or another thing with a
    manifest."""
    if not (path / MANIFEST).is_file():
        return False
    return (path / INFO).is_file() or INFO in (path / MANIFEST).read_text(encoding="utf-8", errors="replace")


def write_beside_weights(
    building: Path, info: BundleInfo, encoding: Encoding, rows: EncodedRows, serving: ServingConfig
) -> None:
    """Writes all files of a bundle but its weights, which are there; the manifest last.

    The first of the rows are stored with their scores, and the forward time is measured on all.
    """
    encoding.save(building / ENCODING)
    model = _model(building, info)
    # a few examples, encoded, with the scores that the weights give them in fp32
    few = rows.slice(0, min(CHECK_EXAMPLES, rows.rows))
    arrays = {"ids": few.categorical, "numeric": few.numeric, "share": few.share, "keys": few.keys}
    for index, bags in enumerate(few.bags):
        arrays |= {f"bag{index}.ids": bags.ids, f"bag{index}.offsets": bags.offsets[:-1]}
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items() if array is not None}
    tensors["score"] = scores(model, few).contiguous()
    save_file(tensors, building / CHECK)
    info = info.replace(forward=_forward_time(model, rows, serving))
    (building / INFO).write_text(json.dumps(info.to_dict(), indent=1), encoding="utf-8")
    write_manifest(building)


def _model(
    directory: Path,
    info: BundleInfo,
    increments: Sequence[Increment] = (),
    *,
    as_trained: bool = False,
    mapped: bool = False,
) -> nn.Module:
    """The model with the weights of the files in a folder."""
    networks = []
    for job, name in zip(info.jobs, weights_names(info), strict=True):
        with unfilled_tables():
            network = build_model(job.model, job.features)
        if info.int8_tables is not None:
            use_int8_tables(network)
        adopt_weights(network, directory / name, mapped=mapped)
        if increments:
            weights = network.state_dict()
            replay(weights, increments)
            network.load_state_dict(weights, assign=True)  # also makes the index of growing tables
        assert job.training.precision != "auto"
        networks.append(compute_in(network, job.training.precision) if as_trained else network)
    model = networks[0] if info.job else MeanOfNetworks(networks, info.negative_sampling_rate)
    return model.eval()


def _forward_time(model: nn.Module, rows: EncodedRows, serving: ServingConfig) -> ForwardTime | None:
    """Forward time; None for a model that several devices trained and one cannot hold."""
    try:
        return forward_time(model, rows, serving)
    except torch.OutOfMemoryError:
        return None


@torch.no_grad()
def scores(model: nn.Module, rows: EncodedRows) -> Tensor:
    """The scores of encoded rows by a model in fp32, in host memory."""
    batch = feature_batch(rows).to(next(model.parameters()).device)
    return torch.sigmoid(model(batch)).cpu()
