"""A bundle for those who serve without Python: `model.pt2`, compiled by AOTInductor, and what its inputs are.

OUT/model.pt2            encoded rows to probabilities, for `torch::inductor::AOTIModelPackageLoader` in C++
OUT/inputs.json          each input and output: name, type, shape, and where its columns come from
OUT/encoding/            the bundle's: how raw values become ids and numbers
OUT/check.safetensors    encoded examples under the inputs' names, and their `probability`
OUT/manifest.json        SHA-256 of every other file

The number of examples, and of ids in each multi-hot column, is open. The process that wrote the package loads it
and compares its probabilities; no other process of ours ever loads one, as a package holds machine code.

Shapes: B examples, T categorical tables, K numeric inputs, N numbers with buckets, P ids of a multi-hot column.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from dhen.atomic_write import atomic_folder, check_named
from dhen.batch import FeatureBatch
from dhen.errors import UserError
from dhen.schema import FeatureSchema
from dhen.values import Value
from search.bundles.bundle import CHECK_TOLERANCE, ENCODING, Bundle
from search.bundles.increments import Version, write_manifest
from trials.cluster.machine import machine_name
from trials.data.encoding import Bags, EncodedRows
from trials.data.loader import feature_batch

MODEL, INPUTS, EXAMPLES = "model.pt2", "inputs.json", "check.safetensors"
OUR_OPERATORS = "dhen"
"""Namespace of operators that are registered by us (`dhen.ops.experts`)."""
PROBABILITY = "probability"
IDS, NUMERIC, SHARE = "ids", "numeric", "share"
Inputs = dict[str, Tensor]
"""Inputs of the package by name, in its order."""


class InputColumn(Value):
    """A column of an input."""

    name: str
    rows: int | None = None
    """Number of ids, which run from 0; None for a number."""


class PackageInput(Value):
    """An input or the output of the package."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    """Sizes; a letter stands for one that is open: B examples, P0, P1 ... ids of the multi-hot columns."""
    columns: tuple[InputColumn, ...] = ()
    """What the columns hold, in order; of a multi-hot input its one column."""


class PackageInfo(Value):
    """The content of `inputs.json`."""

    inputs_version: int = 1
    inputs: tuple[PackageInput, ...]
    """In the order in which the package takes them."""
    outputs: tuple[PackageInput, ...]
    bundle: Version
    """The version of the bundle whose weights the package has."""
    study: str
    trial: int
    machine: str
    """Kind of CPU that the machine code is for."""
    torch: str
    """Version of PyTorch, which the package is loaded with."""
    tolerance: float = Field(default=CHECK_TOLERANCE)
    """Largest difference of a probability in `check.safetensors` that still counts as the same."""


class Package(nn.Module):
    """Encoded rows as separate tensors -> probability_B, fp64, corrected for negative sampling."""

    def __init__(self, model: nn.Module, names: list[str], rate: float) -> None:
        """`rate`: the fraction of negatives that the log kept."""
        super().__init__()
        self.model, self.names, self.rate = model, names, rate

    def forward(self, *tensors: Tensor) -> Tensor:
        """`tensors` in the order of the names."""
        given = dict(zip(self.names, tensors, strict=True))
        bags = sum(name.endswith(".ids") for name in given)
        batch = FeatureBatch(
            ids_BT=given[IDS],
            bags=tuple((given[f"bag{i}.ids"], given[f"bag{i}.offsets"]) for i in range(bags)),
            numeric_BK=given[NUMERIC],
            share_BN=given.get(SHARE),
        )
        p_B = torch.sigmoid(self.model(batch).double())
        # as `trials.records.metrics.undo_negative_sampling`, which is of arrays
        return p_B if self.rate == 1.0 else p_B / (p_B + (1.0 - p_B) / self.rate)


def write_pt2(bundle: Bundle, out: Path) -> PackageInfo:
    """Writes the package of a bundle's newest version into a folder, whole or not at all.

    Raises:
        UserError: if tables grow or an operator is written in Python, which cannot be compiled; if there is
            no C++ compiler; or if the folder holds something else.
    """
    check_named(out)
    earlier = not out.exists() or (out / MODEL).is_file()
    if not earlier and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is no earlier package; choose another --out.")
    names = sorted({table.name for job in bundle.info.jobs for table in job.features.growing})
    if names:
        raise UserError(
            f"{bundle.directory}: the tables of {', '.join(names)} grow, and ids are found in them by a search "
            f"that cannot be compiled. Train on with static tables, from the same scores: `dhen-search train "
            f"{bundle.directory} --from-weights --data LOG growing.columns=[] --out STATIC`, then export STATIC."
        )
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise UserError("--format pt2 compiles machine code, and there is no g++ or clang++ on this machine.")
    rows = bundle.examples()
    inputs = _inputs(rows)
    package = Package(bundle.model(), list(inputs), bundle.info.negative_sampling_rate).eval()
    with atomic_folder(out) as building, torch.no_grad():
        # sizes of 0 and 1 would be taken for constants
        twice = _inputs(rows.take(np.tile(np.arange(rows.rows), 2)))
        traced = tuple(
            torch.cat([tensor, tensor.new_zeros(2)]) if name.endswith(".ids") else tensor
            for name, tensor in twice.items()
        )
        _compile(package, traced, building / MODEL)
        _compare(package, rows, building / MODEL)
        info = PackageInfo(
            inputs=tuple(
                _described(name, tensor, bundle.encoding.features) for name, tensor in inputs.items()
            ),
            outputs=(PackageInput(name=PROBABILITY, dtype="float64", shape=("B",)),),
            bundle=bundle.version,
            study=bundle.info.study,
            trial=bundle.info.trial,
            machine=machine_name(),
            torch=torch.__version__,
        )
        (building / INPUTS).write_text(json.dumps(info.to_dict(), indent=1), encoding="utf-8")
        shutil.copytree(bundle.directory / ENCODING, building / ENCODING)
        examples = {name: tensor.contiguous() for name, tensor in inputs.items()}
        save_file(examples | {PROBABILITY: package(*inputs.values())}, building / EXAMPLES)
        write_manifest(building)
    return info


def _inputs(rows: EncodedRows) -> Inputs:
    batch = feature_batch(rows)
    inputs = {IDS: batch.ids_BT, NUMERIC: batch.numeric_BK}
    if batch.share_BN is not None:
        inputs[SHARE] = batch.share_BN
    for index, (ids, offsets_B) in enumerate(batch.bags):
        inputs |= {f"bag{index}.ids": ids, f"bag{index}.offsets": offsets_B.long()}
    return {name: tensor.contiguous() for name, tensor in inputs.items()}


def _compile(package: Package, inputs: tuple[Tensor, ...], path: Path) -> None:
    """Exports the package with open sizes, and compiles it."""
    from torch._inductor import aoti_compile_and_package

    shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs)
    with _without_torchs_warnings():
        program = torch.export.export(package, inputs, dynamic_shapes=(shapes,))
    ours = sorted(
        {str(node.target) for node in program.graph.nodes if str(node.target).startswith(f"{OUR_OPERATORS}.")}
    )
    if ours:
        raise UserError(
            f"the model has operators that are written in Python ({', '.join(ours)}), which a process without "
            "Python cannot run: export a candidate without such a module (of those that are shipped, sparse_moe)."
        )
    with _without_torchs_warnings():
        aoti_compile_and_package(program, package_path=str(path))


@contextlib.contextmanager
def _without_torchs_warnings() -> Iterator[None]:
    """Keeps what torch says of its own insides from the user: deprecations, and how it calls an operator."""
    log = logging.getLogger("torch._inductor")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def _compare(package: Package, rows: EncodedRows, path: Path) -> None:
    """Checks that what was compiled gives the package's probabilities: for all examples, for one, and for one
    whose bags are empty."""
    from torch._inductor import aoti_load_package

    compiled = aoti_load_package(str(path))
    one = rows.slice(0, 1)
    nothing = tuple(Bags(ids=bags.ids[:0], offsets=np.zeros(2, dtype=np.int64)) for bags in one.bags)
    for some in (rows, one, dataclasses.replace(one, bags=nothing)):
        inputs = _inputs(some).values()
        worst = float((compiled(*inputs) - package(*inputs)).abs().max())
        if worst > CHECK_TOLERANCE:
            raise RuntimeError(f"{path.name} gives other probabilities than the bundle, by up to {worst:.2g}")


def _described(name: str, tensor: Tensor, features: FeatureSchema) -> PackageInput:
    """Returns what an input is: the bags' ids and offsets, or a matrix of a column for each table or number."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if name.startswith("bag"):
        number, _, part = name.removeprefix("bag").partition(".")
        table = features.multi_hot[int(number)]
        size = f"P{number}" if part == "ids" else "B"
        return PackageInput(
            name=name, dtype=dtype, shape=(size,), columns=(InputColumn(name=table.name, rows=table.rows),)
        )
    columns = {
        IDS: [InputColumn(name=table.name, rows=table.rows) for table in features.categorical],
        NUMERIC: [InputColumn(name=number) for number in features.numeric],
        SHARE: [InputColumn(name=table.name) for table in features.bucketed],
    }[name]
    return PackageInput(name=name, dtype=dtype, shape=("B", len(columns)), columns=tuple(columns))
