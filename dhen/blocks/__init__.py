"""The registry of interaction modules: kind -> config class."""

from __future__ import annotations

from dhen.blocks.attention import AttentionConfig
from dhen.blocks.base import BlockConfig, BlockShape, DropoutBlockConfig
from dhen.blocks.cin import CinConfig
from dhen.blocks.conv import ConvConfig
from dhen.blocks.cross import CrossConfig
from dhen.blocks.dcn import DcnConfig
from dhen.blocks.dcn_mix import DcnMixConfig
from dhen.blocks.dcn_v2 import DcnV2Config
from dhen.blocks.dlrm import DlrmConfig
from dhen.blocks.factorized import FactorizedConfig
from dhen.blocks.fibinet import FibinetConfig
from dhen.blocks.fm import FmConfig
from dhen.blocks.gated_cross import GatedCrossConfig
from dhen.blocks.instance_gate import InstanceGateConfig
from dhen.blocks.linear import LinearConfig
from dhen.blocks.low_rank_fm import LowRankFmConfig
from dhen.blocks.mask_block import MaskBlockConfig
from dhen.blocks.mlp import MlpConfig
from dhen.blocks.own_files import blocks_of_own_files
from dhen.blocks.pnn import PnnConfig
from dhen.blocks.sparse_attention import SparseAttentionConfig
from dhen.blocks.sparse_moe import SparseMoeConfig
from dhen.blocks.token_mixing import TokenMixingConfig
from dhen.blocks.two_stream import TwoStreamConfig

BLOCKS: dict[str, type[BlockConfig]] = {
    "attention": AttentionConfig,
    "cin": CinConfig,
    "conv": ConvConfig,
    "cross": CrossConfig,
    "dcn": DcnConfig,
    "dcn_mix": DcnMixConfig,
    "dcn_v2": DcnV2Config,
    "dlrm": DlrmConfig,
    "factorized": FactorizedConfig,
    "fibinet": FibinetConfig,
    "fm": FmConfig,
    "gated_cross": GatedCrossConfig,
    "instance_gate": InstanceGateConfig,
    "linear": LinearConfig,
    "low_rank_fm": LowRankFmConfig,
    "mask_block": MaskBlockConfig,
    "mlp": MlpConfig,
    "pnn": PnnConfig,
    "sparse_attention": SparseAttentionConfig,
    "sparse_moe": SparseMoeConfig,
    "token_mixing": TokenMixingConfig,
    "two_stream": TwoStreamConfig,
}

BLOCKS |= blocks_of_own_files(known=BLOCKS)

__all__ = ["BLOCKS", "BlockConfig", "BlockShape", "DropoutBlockConfig"]
