"""A bundle with tables of 8 bits per value, of the newest version of another, and what they cost in NE.

Rows are rounded to FBGEMM's row-wise format (`dhen.inputs.int8_tables`); all else is copied. The cost is measured:
both networks score the same rows, and `bundle.json` keeps both metrics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import nn

from dhen.atomic_write import atomic_folder
from dhen.errors import UserError
from dhen.inputs.int8_tables import Int8Tables, use_int8_tables
from search.bundles.bundle import (
    Bundle,
    check_place,
    weights_names,
    write_beside_weights,
)
from search.bundles.int8_cost import Int8Cost
from trials.cluster.machine import device
from trials.data.cache import PreparedLog
from trials.optim.master_weights import compute_in, embedding_tables
from trials.storage.weights_file import save_weights
from trials.training.evaluation import evaluate


def write_int8(bundle: Bundle, out: Path, log: PreparedLog) -> Int8Cost:
    """Writes a bundle with tables of 8 bits; this one stays as it is.

    Args:
        bundle: the bundle, with fp32 tables.
        out: the folder of the new one.
        log: the log, in the bundle's encoding, on whose validation rows the cost is measured.

    Returns:
        What the tables cost and save.

    Raises:
        UserError: where there are no tables of fp32, or `out` is something else than a bundle.
    """
    check_place(out)
    if out.resolve() == bundle.directory.resolve():
        raise UserError(f"{out} is the bundle that is exported; choose another --out.")
    if bundle.info.int8_tables is not None:
        raise UserError(f"{bundle.directory} has tables of 8 bits per value already.")
    trained = bundle.model(as_trained=True)
    if not embedding_tables(trained):
        raise UserError(f"{bundle.directory} has no embedding tables; leave --int8-tables out.")
    fp32_bytes = sum(matrix.weight.nbytes for matrix in embedding_tables(trained))
    seen = bundle.info.has_seen_validation and log.fingerprint == bundle.info.log.fingerprint
    split: Literal["validation", "test"] = "test" if seen else "validation"
    fp32 = evaluate(trained.to(device()), log, split)
    del trained  # tables may take most of the memory
    model = bundle.model()
    with atomic_folder(out) as building:
        for network, name in zip(_networks(bundle, model), weights_names(bundle.info), strict=True):
            use_int8_tables(network)
            save_weights(network.state_dict(), building / name)
        int8_bytes = sum(one.packed.nbytes for one in model.modules() if isinstance(one, Int8Tables))
        for network, job in zip(_networks(bundle, model), bundle.info.jobs, strict=True):
            assert job.training.precision != "auto"
            compute_in(network, job.training.precision)
        cost = Int8Cost(
            log=log.fingerprint,
            split=split,
            int8=evaluate(model.to(device()), log, split),
            fp32=fp32,
            table_bytes=int8_bytes,
            fp32_table_bytes=fp32_bytes,
        )
        info = bundle.info.replace(int8_tables=cost, version=None, converted=bundle.version)
        write_beside_weights(building, info, bundle.encoding, bundle.examples(), bundle.serving)
    return cost


def _networks(bundle: Bundle, model: nn.Module) -> list[nn.Module]:
    """Returns the network, or those of an average."""
    return [model] if bundle.info.job else list(model.networks)  # type: ignore[arg-type]
