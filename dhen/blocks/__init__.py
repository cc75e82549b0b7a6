"""The registry of interaction modules: kind -> config class."""

from __future__ import annotations

from dhen.blocks.attention import AttentionConfig
from dhen.blocks.base import BlockConfig, BlockShape
from dhen.blocks.conv import ConvConfig
from dhen.blocks.cross import CrossConfig
from dhen.blocks.dcn_v2 import DcnV2Config
from dhen.blocks.dlrm import DlrmConfig
from dhen.blocks.linear import LinearConfig
from dhen.blocks.mlp import MlpConfig

BLOCKS: dict[str, type[BlockConfig]] = {
    "attention": AttentionConfig,
    "conv": ConvConfig,
    "cross": CrossConfig,
    "dcn_v2": DcnV2Config,
    "dlrm": DlrmConfig,
    "linear": LinearConfig,
    "mlp": MlpConfig,
}

__all__ = ["BLOCKS", "BlockConfig", "BlockShape"]
