"""DhenConfig: what a search decides about a model. Frozen, valid from birth, canonical.

A layer is a multiset of interaction modules under an ensemble, so its modules are kept sorted, an ensemble
of one module is a plain sum, and a norm that is none has no place: networks that are the same have equal
configs and fingerprints.
The data's half is `dhen.schema`.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dhen.blocks import BLOCKS, BlockConfig
from dhen.ensembles import ENSEMBLES
from dhen.ensembles.ensembles import EnsembleConfig, SumConfig
from dhen.errors import unknown_name
from dhen.ops.norm import NormKind
from dhen.ops.parts import Widths
from dhen.values import Value, parse

K = TypeVar("K", bound=Value)


def of_kind(registry: dict[str, type[K]], what: str, value: object) -> object:
    """A registry member from `{"kind": name, ...}`, from a bare name, or as it is."""
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, dict):
        return value
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in registry:
        raise unknown_name(what, str(kind), registry)
    return parse(registry[kind], value, f"{what} {kind!r}")


_block = partial(of_kind, BLOCKS, "interaction module")
_ensemble = partial(of_kind, ENSEMBLES, "ensemble")


class LayerConfig(Value):
    """One DHEN layer: Y = Norm(Ensemble_i(Interaction_i(X)) + ShortCut(X)) (paper, equation 1)."""

    modules: tuple[Annotated[SerializeAsAny[BlockConfig], BeforeValidator(_block)], ...] = Field(min_length=1)
    """Interaction modules: names, or mappings of `kind` and its settings. Repeats are allowed, order has no
    meaning."""
    ensemble: Annotated[SerializeAsAny[EnsembleConfig], BeforeValidator(_ensemble)] = SumConfig()
    """How the modules' outputs are joined: a name, or a mapping of `kind` and its settings."""
    out_embeddings: int = Field(default=8, gt=0, le=4096)
    """l, the number of embeddings that each module puts out."""
    raw_numeric: bool = False
    """Whether the modules see the raw numeric inputs too, as one more embedding."""
    norm: NormKind = "layer"
    """Normalization over each embedding: layer normalization as in the paper, rms, or none."""
    # left out of plain data if it is the default, so that jobs of before it was a field keep their fingerprint
    norm_placement: Literal["post", "pre"] = Field(default="post", exclude_if=lambda where: where == "post")
    """Place of the norm: post, on the layer's output, as in the paper, or pre, on what its modules see."""
    shortcut: bool = True
    """Whether the layer has the paper's shortcut from its input to its output; DLRM, DCN-V2 and Wide & Deep as
    shipped have none."""

    @field_validator("modules")
    @classmethod
    def _sorted(cls, modules: tuple[BlockConfig, ...]) -> tuple[BlockConfig, ...]:
        return tuple(sorted(modules, key=lambda block: json.dumps(block.to_dict(), sort_keys=True)))

    @model_validator(mode="before")
    @classmethod
    def _one_module_needs_no_ensemble(cls, data: Any) -> Any:
        modules = data.get("modules") if isinstance(data, dict) else None
        if isinstance(modules, (list, tuple)) and len(modules) == 1:
            _ensemble(data.get("ensemble", "sum"))  # still an error if it names none
            return {**data, "ensemble": SumConfig()}
        return data

    @model_validator(mode="before")
    @classmethod
    def _no_norm_has_no_place(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("norm") == "none" and data.get("norm_placement") == "pre":
            return {**data, "norm_placement": "post"}
        return data

    def with_dropout_said_once(self, model_dropout: float) -> LayerConfig:
        """The same layer in a model of this dropout; modules keep their own if it is another."""
        modules = tuple(block.with_dropout_said_once(model_dropout) for block in self.modules)
        return self if modules == self.modules else LayerConfig(**{**dict(self), "modules": modules})

    @property
    def embeddings(self) -> int:
        """Embeddings of the layer's output, len(Y)."""
        return self.ensemble.embeddings(len(self.modules), self.out_embeddings)


class ModelConfig(Value):
    """What all model families share: feature processing (paper, section 3.1) and dropout."""

    family: str
    """The model family."""
    embedding_dim: int = Field(default=16, gt=0, le=4096)
    """D, the length of every embedding."""
    # this, capacity_share and buckets are left out of plain data if they are the default, as norm_placement is
    table_dim_exponent: float = Field(
        default=0.0, ge=0.0, le=1.0, exclude_if=lambda exponent: exponent == 0.0
    )
    """How much shorter the embeddings of tables with more rows are (alpha of arXiv 1909.11810); a linear map
    lifts them to D. 0: all have length D."""
    capacity_share: float = Field(default=1.0, gt=0.0, le=1.0, exclude_if=lambda share: share == 1.0)
    """Share of the capacity of the log's growing tables that this model has."""
    buckets: Literal["summed", "apart", "interpolated"] = Field(
        default="summed", exclude_if=lambda buckets: buckets == "summed"
    )
    """How the embeddings of numeric columns' buckets enter: summed into the one embedding of the numeric
    inputs, or apart, each as an embedding that interaction modules can cross, at more FLOPs. Interpolated: apart,
    and piecewise linear in the number, from each bucket to the next, in place of constant in each (arXiv
    2203.05556)."""
    numeric_mlp: Widths = (64,)
    """Hidden widths of the MLP that turns the numeric inputs into one embedding."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on the hidden layers of every MLP and inside attention; interaction modules may have their
    own."""

    @property
    def uses_dropout(self) -> bool:
        """Whether there is any in it."""
        return self.dropout > 0


class DhenConfig(ModelConfig):
    """A deep and hierarchical ensemble network."""

    family: Literal["dhen"] = "dhen"
    """The model family; it may be left out."""
    layers: tuple[LayerConfig, ...] = Field(min_length=1)
    """The layers, first to last, each on the output of the one before."""
    head: Widths = (64,)
    """Hidden widths of the MLP from the flattened last layer to the logit."""
    # left out of plain data if it is the default, as norm_placement is
    members: int = Field(default=1, gt=0, le=256, exclude_if=lambda members: members == 1)
    """K, the number of predictors that are trained at once and share tables, features and the layers' weights;
    their probabilities are averaged."""
    members_from: int = Field(default=0, ge=0, exclude_if=lambda layer: layer == 0)
    """The layer at which members part; those before it are computed once for all. At the number of layers
    only the heads differ."""

    @model_validator(mode="before")
    @classmethod
    def _one_member_parts_nowhere(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("members", 1) == 1 and data.get("members_from"):
            return {**data, "members_from": 0}
        return data

    @model_validator(mode="after")
    def _members_part_somewhere(self) -> Self:
        if self.members_from > len(self.layers):
            raise ValueError(
                f"members_from={self.members_from} of {len(self.layers)} layers; "
                f"0 (before the first) to {len(self.layers)} (only heads differ) would work"
            )
        return self

    @property
    def uses_dropout(self) -> bool:
        """The model's, or a module's own."""
        modules = (block for layer in self.layers for block in layer.modules)
        return self.dropout > 0 or any(block.dropout_in(self.dropout) > 0 for block in modules)

    @field_validator("layers")
    @classmethod
    def _dropout_said_once(
        cls, layers: tuple[LayerConfig, ...], info: ValidationInfo
    ) -> tuple[LayerConfig, ...]:
        dropout = info.data.get("dropout", 0.0)
        return tuple(layer.with_dropout_said_once(dropout) for layer in layers)

    @model_validator(mode="after")
    def _modules_stand_at_this_dimension(self) -> Self:
        for layer in self.layers:
            for block in layer.modules:
                block.check(self.embedding_dim)
        return self
