"""What an ensemble is: a frozen config that builds its torch module and knows its cost and memory.

An ensemble joins the outputs u_BLD of a layer's k interaction modules; it may look at what they saw, x_BMD.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from dhen.cost import Costs
from dhen.tape import Tape
from dhen.values import Value


@dataclass(frozen=True, kw_only=True)
class EnsembleShape:
    """Where an ensemble stands."""

    modules: int
    """k, outputs to join."""
    out: int
    """L, embeddings of each."""
    embeddings: int
    """M, embeddings that the modules see."""
    dim: int
    """D, length of each."""


class EnsembleConfig(Value):
    """One way to join k outputs u_BLD. `kind` names it in `ENSEMBLES`."""

    kind: str

    def embeddings(self, modules: int, out: int) -> int:
        """Embeddings of the joined output, for `modules` outputs of `out` embeddings each."""
        del modules
        return out

    @abstractmethod
    def build(self, shape: EnsembleShape) -> nn.Module:
        """The module: forward maps a list of k tensors u_BLD, and x_BMD, to one tensor."""

    @abstractmethod
    def cost(self, shape: EnsembleShape) -> Costs:
        """FLOPs and parameters per example."""

    @abstractmethod
    def write(self, tape: Tape, outputs: Sequence[int], x: int, shape: EnsembleShape) -> int:
        """Writes down what joining the outputs u_BLD does; the joined tensor."""
