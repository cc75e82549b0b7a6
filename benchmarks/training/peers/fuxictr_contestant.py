"""FuxiCTR's side: its layers, its data loader, its fit loop and its evaluation, as its users run them.

Run by beside_peers.py with a Python that has fuxictr. The DCN-V2 of its model zoo (parallel structure) is not in
the package, so it is composed here from the package's layers in the way of that zoo; `Dhen` below stacks
the same package's layers into the nearest to a DHEN there is. Only the stopwatch is ours.
"""

import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders import RankDataLoader
from fuxictr.pytorch.layers import CrossNetV2, FeatureEmbedding, InnerProductInteraction, MLP_Block
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import seed_everything
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.training.peers.contest import LEARNING_RATE, Contest, Result, Stopwatch

LOADER_WORKERS = 3
"""num_workers of FuxiCTR's shipped configurations."""


class Timed(BaseModel):  # type: ignore[misc]
    """FuxiCTR's base model with its own training loop, and a lap at the end of each of its steps."""

    def __init__(self, feature_map: FeatureMap, contest: Contest) -> None:
        super().__init__(
            feature_map,
            model_id=contest.architecture,
            monitor="logloss",
            monitor_mode="min",
            metrics=["logloss"],
            verbose=0,
            model_root=contest.folder,
            embedding_regularizer=None,
            net_regularizer=None,
        )
        Path(self.model_dir).mkdir(exist_ok=True)
        self.watch = Stopwatch()
        self.embedding = FeatureEmbedding(feature_map, contest.shape["embedding_dim"])
        self.network = NETWORKS[contest.architecture](len(contest.tables), contest.shape, contest.dropout)
        self.compile("adam", "binary_crossentropy", LEARNING_RATE)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x_BMD = self.embedding(self.get_inputs(inputs))
        return {"y_pred": self.output_activation(self.network(x_BMD))}

    def train_epoch(self, data_generator: Any) -> None:
        self.watch.begin()
        super().train_epoch(data_generator)

    def train_step(self, batch_data: dict[str, Tensor]) -> Tensor:
        loss: Tensor = super().train_step(batch_data)
        self.watch.lap(len(batch_data["label"]))
        return loss


class DcnV2(nn.Module):
    """Cross layers beside an MLP, concatenated, a linear head: `model_structure: parallel`."""

    def __init__(self, fields: int, shape: dict[str, Any], dropout: float) -> None:
        super().__init__()
        width = fields * shape["embedding_dim"]
        self.cross = CrossNetV2(width, shape["cross_layers"])
        self.dnn = MLP_Block(width, hidden_units=shape["mlp"], dropout_rates=dropout)
        self.fc = nn.Linear(width + shape["mlp"][-1], 1)

    def forward(self, x_BMD: Tensor) -> Tensor:
        x = x_BMD.flatten(start_dim=1)
        logits: Tensor = self.fc(torch.cat([self.cross(x), self.dnn(x)], dim=-1))
        return logits


class DhenLayer(nn.Module):
    """Inner products and the embeddings under an MLP, beside cross layers; concatenated, shortcut, layer norm."""

    def __init__(self, fields: int, shape: dict[str, Any], dropout: float) -> None:
        super().__init__()
        dim, out = shape["embedding_dim"], shape["out_embeddings"]
        self.products = InnerProductInteraction(fields, output="inner_product")
        width = fields * dim
        self.mlp = MLP_Block(
            self.products.interaction_units + width,
            hidden_units=shape["mlp"],
            output_dim=out * dim,
            dropout_rates=dropout,
        )
        self.cross = CrossNetV2(width, shape["cross_layers"])
        self.project = nn.Linear(fields, out, bias=False)
        self.shortcut = nn.Linear(fields, 2 * out, bias=False) if fields != 2 * out else nn.Identity()
        self.norm = nn.LayerNorm(dim)

    def forward(self, x_BMD: Tensor) -> Tensor:
        x = x_BMD.flatten(start_dim=1)
        dlrm = self.mlp(torch.cat([self.products(x_BMD), x], dim=-1)).unflatten(1, (-1, x_BMD.shape[2]))
        cross = self.project(self.cross(x).view_as(x_BMD).mT).mT
        out_BMD: Tensor = self.norm(torch.cat([dlrm, cross], dim=1) + self.shortcut(x_BMD.mT).mT)
        return out_BMD


class Dhen(nn.Module):
    """Layers of that kind one after another, and an MLP head."""

    def __init__(self, fields: int, shape: dict[str, Any], dropout: float) -> None:
        super().__init__()
        m = [fields] + [2 * shape["out_embeddings"]] * shape["layers"]
        self.layers = nn.Sequential(*(DhenLayer(each, shape, dropout) for each in m[:-1]))
        self.head = MLP_Block(
            m[-1] * shape["embedding_dim"], hidden_units=shape["head"], output_dim=1, dropout_rates=dropout
        )

    def forward(self, x_BMD: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(x_BMD).flatten(start_dim=1))
        return logits


NETWORKS: dict[str, type[DcnV2 | Dhen]] = {"dcn_v2": DcnV2, "dhen3": Dhen}


def feature_map(contest: Contest) -> FeatureMap:
    """What FuxiCTR's preprocessing would have written."""
    features = FeatureMap("log", contest.folder)
    features.features = OrderedDict(
        (f"c{i}", {"source": "", "type": "categorical", "vocab_size": rows})
        for i, rows in enumerate(contest.tables)
    )
    features.labels = ["label"]
    features.num_fields = len(contest.tables)
    features.set_column_index()
    return features


def main() -> None:
    contest = Contest.from_command_line()
    torch.set_num_threads(contest.threads)
    seed_everything(contest.seed)
    features = feature_map(contest)
    model = Timed(features, contest)
    train, validation, test = RankDataLoader(
        features,
        train_data=f"{contest.folder}/train.{contest.loader}",
        valid_data=f"{contest.folder}/validation.{contest.loader}",
        test_data=f"{contest.folder}/test.{contest.loader}",
        batch_size=contest.batch_size,
        data_format=contest.loader,
        num_workers=LOADER_WORKERS,
    )
    with FlopCounterMode(display=False) as counter:
        model(
            {f"c{i}": torch.zeros(contest.batch_size, dtype=torch.long) for i in range(len(contest.tables))}
        )
    flops = counter.get_total_flops() / contest.batch_size
    began = time.perf_counter()
    model.fit(train, epochs=contest.epochs, validation_data=validation)
    seconds = (time.perf_counter() - began) / len(model.watch.passes)
    np.save(f"{contest.folder}/test.npy", model.predict(test))
    Result(passes=model.watch.passes, epoch_seconds=seconds, flops=flops).save(contest.folder)


if __name__ == "__main__":
    main()
