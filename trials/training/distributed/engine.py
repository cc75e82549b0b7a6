"""What holds the dense part of a model while it trains: every strategy has an engine of this kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import Optimizer

from dhen.inputs.features import FeatureProcessing, Tables
from dhen.inputs.growing import GrowingRows
from trials.optim.adamw import Clip
from trials.records.strategy import RECOMPUTED, Checkpointing
from trials.store.weights import Weights
from trials.training.checkpoint_files import FlatPieces

# Separates the embedding tables from the dense part of a model, since the two are held in different ways.
#
# Embeddings are looked up once for a rank's whole batch; the dense part takes them as leaves and leaves their
# gradients on them, for the tables' owner to carry on with. Micro-batches are slices of such a batch.

TABLES = "features.tables."
"""Beginning of the names of tables' weights in a model."""


class DenseInputs(NamedTuple):
    """What the dense part sees of B examples."""

    embeddings: tuple[Tensor, ...]
    """Embeddings in fp32, as tables put them out (`dhen.inputs.lift.looked_up`): e_BTD of the categorical
    tables, e_B1D of each multi-hot one; if tables have several lengths, these for each length."""
    numeric_BK: Tensor
    """Numeric inputs in float32."""
    share_BN: Tensor | None = None
    """As `FeatureBatch` has it."""

    def part(self, rows: slice | Tensor) -> DenseInputs:
        """Returns the inputs of some examples."""
        share_BN = None if self.share_BN is None else self.share_BN[rows]
        return DenseInputs(tuple(e[rows] for e in self.embeddings), self.numeric_BK[rows], share_BN)


class DenseBatch(NamedTuple):
    """A rank's B examples; embeddings are leaves that require gradients, which stand in `.grad` afterwards.

    Each gradient is that of the mean over this rank's examples, not yet averaged over ranks.
    """

    inputs: DenseInputs
    label_B: Tensor
    weight_B: Tensor | None = None


class GivenEmbeddings(nn.Module):
    """A stand-in for the tables, which hands on what was looked up before."""

    def forward(self, inputs: DenseInputs) -> list[Tensor]:
        """Returns [e_BTD, e_B1D, ...]."""
        return list(inputs.embeddings)


def take_tables(model: nn.Module) -> Tables | None:
    """Takes the tables out of the model, where `GivenEmbeddings` stands in for them; None if the log has no
    ids."""
    features = model.features
    assert isinstance(features, FeatureProcessing)
    tables = features.tables
    if tables is not None:
        features.tables = GivenEmbeddings()  # type: ignore[assignment]
    return tables


def take_growing(model: nn.Module) -> GrowingRows | None:
    """Takes the rows of growing tables out of the model, which is given rows from then on; None if there are
    none."""
    features = model.features
    assert isinstance(features, FeatureProcessing)
    growing, features.growing = features.growing, None
    return growing


def part_of(batch: DenseBatch, rows: slice | Tensor) -> DenseBatch:
    """Returns some examples with leaves of their own: the gradient of a slice of a leaf would be as long as the
    whole leaf."""
    inputs, label_B, weight_B = batch
    leaves = inputs._replace(embeddings=tuple(e.detach() for e in inputs.embeddings)).part(rows)
    for embedding in leaves.embeddings:
        embedding.requires_grad_()
    return DenseBatch(leaves, label_B[rows], None if weight_B is None else weight_B[rows])


def pass_on_gradients(micro_batch: DenseBatch, batch: DenseBatch, start: int) -> None:
    """Copies the gradients of a slice's embeddings into those of the whole batch."""
    for slice_leaf, leaf in zip(micro_batch.inputs.embeddings, batch.inputs.embeddings, strict=True):
        assert slice_leaf.grad is not None
        if leaf.grad is None:
            leaf.grad = torch.empty_like(leaf)
        leaf.grad[start : start + len(slice_leaf)] = slice_leaf.grad


class Engine(ABC):
    """What holds the dense state under one strategy."""

    module: nn.Module
    """The wrapped model: `DenseInputs` -> logit_B, or logit_BK of members in training."""
    optimizer: Optimizer
    """The optimizer of this rank's part, or of what it has a part in; its first group's learning rate counts."""

    clip: Clip
    """What clips the gradients before each update."""

    def predict(self, inputs: DenseInputs) -> Tensor:
        """Returns logit_B without gradients, of the model in the mode (evaluation or training) that it is in; a
        collective."""
        with torch.no_grad():
            return self.module(inputs)  # type: ignore[no-any-return]

    def accumulate_only(self, yes: bool) -> None:  # noqa: B027
        """Sets whether the next backward leaves ranks apart, because another micro-batch follows; does nothing if
        it always does, or never."""

    @abstractmethod
    def update(self) -> None:
        """Updates the weights by AdamW, from the gradients of all ranks."""

    @abstractmethod
    def is_finite(self) -> bool:
        """Tells whether no weight that this rank updates is NaN or infinite."""

    @abstractmethod
    def weights(self) -> Weights:
        """Returns a copy of all weights under the plain model's names, fp32 on the CPU; a collective.

        Only the first rank has them; the result is empty on other ranks.
        """

    @abstractmethod
    def state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """Returns weights and optimizer state that this rank holds, to save; with `saved`, to load what a
        checkpoint has under these names into (`restored`)."""

    def clipped_ranges(self) -> list[list[tuple[int, int]]]:
        """Returns of each gradient that is clipped, in order, the ranges (start, stop) that it consists of in the
        vector of the weights that the engine was given. Engines that never hold a tensor rank's part have none."""
        raise NotImplementedError

    @abstractmethod
    def restored(self, steps: int) -> None:
        """Takes over what was loaded into `state()`: weights and optimizer state after so many updates; a
        collective."""


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Returns the layers of a DHEN; none of another model."""
    layers = getattr(model, "layers", nn.ModuleList())
    assert isinstance(layers, nn.ModuleList)
    return layers


def checkpoint_layers(model: nn.Module, checkpointing: Checkpointing) -> None:
    """Has layers computed again in backward in place of keeping their activations (arXiv 1604.06174)."""
    if checkpointing == "none":
        return
    layers = layers_of(model)
    for index in range(len(layers))[RECOMPUTED[checkpointing]]:
        layers[index] = checkpoint_wrapper(layers[index])
