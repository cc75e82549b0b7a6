"""What an interaction module is: a frozen config that builds its torch module and knows its cost.

An interaction module maps x_BMD to u_BLD: M embeddings of length D to L of the same length
(DHEN paper, section 3.2). Adding one is one file with a subclass of `BlockConfig` and one entry in
`BLOCKS`; the search, the reports and the contract tests pick it up from there.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from pydantic import Field
from torch import nn

from dhen.cost import Costs
from dhen.ops.split import RankGroup
from dhen.tape import Tape
from dhen.values import Value


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Where a module stands: what comes in and what goes out."""

    embeddings: int
    """M, embeddings in."""
    dim: int
    """D, length of each."""
    out: int
    """L, embeddings out."""

    @property
    def width(self) -> int:
        """Numbers in: M D."""
        return self.embeddings * self.dim

    @property
    def out_width(self) -> int:
        """Numbers out: L D."""
        return self.out * self.dim


class BlockConfig(Value):
    """One interaction module's own settings. `kind` names it in `BLOCKS`."""

    kind: str
    """The module's name."""

    @abstractmethod
    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """The module: forward maps x_BMD to u_BLD."""

    @abstractmethod
    def cost(self, shape: BlockShape) -> Costs:
        """FLOPs and parameters per example; equal to what torch counts on `build(shape)`."""

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """Writes down what its forward makes and keeps of x_BMD; the tensor u_BLD (see `dhen.tape`).

        A module that leaves it out works everywhere; planners then trace it, which is slower.

        Raises:
            NotImplementedError: if the module declares no memory.
        """
        raise NotImplementedError

    def split(self, module: nn.Module, group: RankGroup) -> None:
        """Leaves this rank's part of the module, which `build` made, over a group of ranks (`dhen.ops.split`).

        A module that leaves it out stays whole on every rank.
        """
        del module, group

    def whole(self, shape: BlockShape, ranks: int) -> str | None:
        """Why a rank of so many has the module, or a map of it, whole; None if all of it is split."""
        del shape, ranks
        return "it declares no split"

    def dropout_in(self, model_dropout: float) -> float:
        """What it is built with in a model of this dropout."""
        return model_dropout

    def with_dropout_said_once(self, model_dropout: float) -> BlockConfig:
        """The same module in a model of this dropout; what the model says too is left out."""
        del model_dropout
        return self

    def uses(self, setting: str) -> bool:
        """Whether a setting means anything beside the values of the others; if not, it has its default."""
        del setting
        return True

    def check(self, dim: int) -> None:
        """Raises ValueError, with a remedy, if the module cannot stand at embedding dimension `dim`."""
        del dim


class DropoutBlockConfig(BlockConfig):
    """A module with dropout in it, which may have its own."""

    # left out of plain data if null, so that jobs of before it was a field keep their fingerprint
    dropout: float | None = Field(default=None, ge=0.0, lt=1.0, exclude_if=lambda own: own is None)
    """Dropout of this module in place of the model's; null: the model's."""

    def dropout_in(self, model_dropout: float) -> float:
        """Its own, or the model's."""
        return model_dropout if self.dropout is None else self.dropout

    def with_dropout_said_once(self, model_dropout: float) -> BlockConfig:
        """Its own only if that is another than the model's."""
        return self.replace(dropout=None) if self.dropout == model_dropout else self
