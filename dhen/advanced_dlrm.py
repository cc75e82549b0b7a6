"""AdvancedDLRM as a whole model, alone or with MoE MLPs: what the paper's tables 2 and 3 compare with.

features -> pairwise dots beside the flattened embeddings (`dhen.ops.pairwise`) -> MLP, or a mixture of
expert MLPs -> logit.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.cost import Costs, headline_flops, linear_cost, within
from dhen.inputs.features import FeatureProcessing, feature_cost, taped_features
from dhen.inputs.lift import num_embeddings
from dhen.ops.experts import MoeMlp, moe_cost, moe_tape
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.pairwise import PairwiseDots, pairwise_cost, pairwise_tape, pairwise_width
from dhen.ops.parts import Widths, mlp, mlp_cost, split_in_turn, tower_tape, undivided
from dhen.ops.split import RankGroup
from dhen.schema import FeatureSchema
from dhen.tape import FP32_BYTES, Tape, TapedSegment, TapeSetting, row_bytes


class AdvancedDlrmConfig(ModelConfig):
    """AdvancedDLRM alone."""

    family: Literal["advanced_dlrm"] = "advanced_dlrm"
    """The model family; it must be named."""
    rank: int = Field(default=0, ge=0, le=65_536)
    """Number of learned mixes of the embeddings among which dot products are taken; 0: among the
    embeddings."""
    mlp: Widths = Field(default=(256, 128), min_length=1)
    """Hidden widths above the interactions."""
    experts: int = Field(default=1, gt=0, le=4096)
    """Number of MLPs of those widths, mixed by a softmax gate; 1: a plain MLP."""


class AdvancedDlrm(nn.Module):
    """FeatureBatch -> logit_B."""

    def __init__(self, config: AdvancedDlrmConfig, schema: FeatureSchema) -> None:
        super().__init__()
        width = _width(config, schema)
        self.features = FeatureProcessing(config, schema)
        self.interactions = PairwiseDots(num_embeddings(config, schema), config.rank)
        self.mlp: nn.Module = mlp(width, config.mlp, dropout=config.dropout)
        if config.experts > 1:
            self.mlp = MoeMlp(width, config.mlp, config.experts, dropout=config.dropout)
        self.logit = Linear(config.mlp[-1], 1)
        self.row_bytes = row_bytes(taped_advanced_dlrm(config, schema, TapeSetting(FP32_BYTES, "cpu")))
        """Bytes of each example in a forward pass in fp32 without gradients."""

    def forward(self, batch: FeatureBatch) -> Tensor:
        """The log odds of a click, one per example."""
        x_BMD = self.features(batch, self.logit.weight.dtype)
        return self.logit(self.mlp(self.interactions(x_BMD))).squeeze(1)  # type: ignore[no-any-return]

    def split(self, group: RankGroup) -> None:
        """Leaves this rank's part of the MLP and the map to the logit over a group of ranks (`dhen.ops.split`);
        experts stay whole."""
        if isinstance(self.mlp, nn.Sequential):
            split_in_turn([*self.mlp, self.logit], group)


def advanced_dlrm_cost(config: AdvancedDlrmConfig, schema: FeatureSchema) -> Costs:
    """The cost of `AdvancedDlrm`."""
    return (*within("features", feature_cost(config, schema)), *_head_cost(config, schema))


def taped_advanced_dlrm(
    config: AdvancedDlrmConfig, schema: FeatureSchema, setting: TapeSetting
) -> list[TapedSegment]:
    """`AdvancedDlrm` as features and head."""
    width, dim, m = _width(config, schema), config.embedding_dim, num_embeddings(config, schema)
    tape, flops = Tape(*setting), headline_flops(_head_cost(config, schema))
    x = pairwise_tape(tape, tape.input(m * dim), m, dim, config.rank)
    if config.experts > 1:
        why_whole: str | None = "experts stay whole"
        x = moe_tape(tape, x, width, config.mlp, config.experts, dropout=config.dropout)
        logit = linear_tape(tape, x, config.mlp[-1], 1)
    else:
        why_whole = undivided(config.mlp, setting.ranks)
        logit = tower_tape(tape, x, width, config.mlp, 1, dropout=config.dropout)
    whole = (f"mlp ({why_whole})",) if setting.ranks > 1 and why_whole else ()
    head = TapedSegment("head", flops - tape.flops_elsewhere, tape, logit, whole=whole)
    return [taped_features(config, schema, setting, raw=False), head]


def _head_cost(config: AdvancedDlrmConfig, schema: FeatureSchema) -> Costs:
    width = _width(config, schema)
    experts = moe_cost(width, config.mlp, config.experts)
    return (
        *within(
            "interactions", pairwise_cost(num_embeddings(config, schema), config.embedding_dim, config.rank)
        ),
        *(within("moe", experts) if config.experts > 1 else mlp_cost("mlp", width, config.mlp)),
        linear_cost("logit", config.mlp[-1], 1),
    )


def _width(config: AdvancedDlrmConfig, schema: FeatureSchema) -> int:
    return pairwise_width(num_embeddings(config, schema), config.embedding_dim, config.rank)
