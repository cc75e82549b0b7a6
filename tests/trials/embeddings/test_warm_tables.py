"""Tables that start from a trained model's: columns that both have are its, others are fresh, on any ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command_line import write_log
from gloo_ranks import as_rank, on_ranks

from dhen.config import ModelConfig
from dhen.errors import UserError
from dhen.inputs.features import EMBEDDING_INIT_STD
from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema, Table
from trials.data.prepare.prepare_log import prepare
from trials.embeddings.warm_tables import TABLES, start_tables_from
from trials.job import Job, TrainingConfig
from trials.ranks import Ranks
from trials.storage.weights_file import Weights, save_weights
from trials.training.loop import train

SCHEMA = FeatureSchema(tables=(Table(name="a", rows=30), Table(name="b", rows=5)), numeric=("x",))


def model(dim: int) -> ModelConfig:
    return parse_model({"embedding_dim": dim, "layers": [{"modules": ["linear"]}]}, "test")


def trained_tables(schema: FeatureSchema, dim: int) -> torch.Tensor:
    """Far from fresh ones."""
    return torch.arange(schema.total_rows * dim, dtype=torch.float32).view(-1, dim) + 1.0


def started_on_a_rank() -> dict[str, bool]:
    """Rank 1 has other fresh weights, and no file: both are to have the first's tables."""
    ranks = Ranks(dist.get_rank(), 1, 2)
    folder = Path(os.environ["FOLDER"])
    torch.manual_seed(ranks.rank)
    mine = build_model(model(4), SCHEMA)
    start_tables_from(folder / ("tables" if ranks.first else "none"), mine, SCHEMA, ranks)
    table_RD = mine.get_parameter(TABLES).detach()
    everywhere = [torch.empty_like(table_RD) for _ in range(2)]
    dist.all_gather(everywhere, table_RD)
    taken = torch.equal(table_RD[:, :3], trained_tables(SCHEMA, 3))
    return {"alike": torch.equal(*everywhere), "taken": taken}


def test_tables_of_several_lengths_start_from_those_of_one(tmp_path: Path) -> None:
    trained_RD = trained_tables(SCHEMA, 8)
    save_weights({TABLES: trained_RD}, tmp_path / "tables")
    mixed = model(8).model_copy(update={"table_dim_exponent": 0.5})
    mine = build_model(mixed, SCHEMA)
    start_tables_from(tmp_path / "tables", mine, SCHEMA, Ranks())
    held = {len(weight): weight for name, weight in mine.named_parameters() if "tables" in name}
    assert {weight.shape[1] for weight in held.values()} == {4, 8}
    for rows, first in ((30, 0), (5, 30)):
        assert torch.equal(held[rows], trained_RD[first : first + rows, : held[rows].shape[1]])


def test_several_ranks_start_alike(tmp_path: Path) -> None:
    save_weights({TABLES: trained_tables(SCHEMA, 3)}, tmp_path / "tables")
    assert on_ranks(__file__, 2, tmp_path) == {"alike": True, "taken": True}


@pytest.mark.parametrize("dim", [2, 6])
def test_a_training_starts_from_them(tmp_path: Path, dim: int) -> None:
    """With learning rates next to nothing it ends where it started."""
    log = prepare([write_log(tmp_path / "log.csv", 400)], out=tmp_path / "log")
    trained_RD = trained_tables(log.features, 4)
    save_weights({TABLES: trained_RD, "dense": torch.ones(3)}, tmp_path / "tables")
    training = TrainingConfig(epochs=1, learning_rate=1e-9, embedding_learning_rate=1e-9)
    kept: list[Weights] = []
    for path in (tmp_path / "tables", None):
        job = Job(
            model=model(dim),
            features=log.features,
            log=log.fingerprint,
            training=training.resolved(log.manifest.rows["train"], "fp32"),
            seed=0,
            tables_from="of another job" if path else None,
        )
        train(job, log, lambda _: None, keep=kept.append, tables_from=path, progress_seconds=60.0)
    warm, fresh = kept
    common = min(dim, 4)
    assert torch.allclose(warm[TABLES][:, :common], trained_RD[:, :common])
    assert torch.allclose(warm[TABLES][:, common:], fresh[TABLES][:, common:], atol=1e-6)
    assert fresh[TABLES].std() < 2 * EMBEDDING_INIT_STD
    assert all(torch.allclose(warm[name], fresh[name], atol=1e-6) for name in fresh if name != TABLES)


def test_a_job_from_fresh_tables_is_what_it_was() -> None:
    job = Job(model=model(4), features=SCHEMA, log="log", training=TrainingConfig(), seed=0)
    assert "tables_from" not in job.to_dict()
    assert job.model_copy(update={"tables_from": "x"}).fingerprint != job.fingerprint


def test_weights_of_another_log_are_refused(tmp_path: Path) -> None:
    save_weights({TABLES: trained_tables(SCHEMA, 3)[1:]}, tmp_path / "tables")
    with pytest.raises(UserError, match="tables of 34 rows; this log's have 35"):
        start_tables_from(tmp_path / "tables", build_model(model(4), SCHEMA), SCHEMA, Ranks())


if __name__ == "__main__":
    as_rank(started_on_a_rank)
