"""ZeRO's own accounts (arXiv 1910.02054): 2 + 2 + 12 bytes per parameter, and what each stage leaves and sends."""

from __future__ import annotations

from typing import Any

import pytest

from dhen.tape import Footprint
from dhen.values import parse
from trials.cluster.cluster import Cluster
from trials.planner.memory import DensePeak, dense_peak, recomputed
from trials.planner.segments import Segment
from trials.planner.step_time import prepare, price
from trials.planner.table_placement import Placement
from trials.planner.zero_memory import Activations, DenseRank, Itemsizes, RankInput, zero_buckets
from trials.records.job import TrainingConfig
from trials.records.strategy import Dense, Strategy

BF16 = TrainingConfig(precision="bf16")
"""bf16 weights and gradients (2 + 2 bytes); fp32 masters and AdamW's two moments (12)."""
LAYERS, ROWS, WIDTH = 1000, 1024, 64
PARAMETERS = LAYERS * ROWS * WIDTH
IN_FLIGHT = 0.02
"""Bytes per parameter for the few layers of a thousand that are gathered or reduced at a moment."""


def segment(name: str, parameters: int) -> Segment:
    shapes = ((ROWS, parameters // ROWS),) if parameters else ()
    return Segment(name, parameters, 0.0, Footprint(*[0] * 12, traffic=0), shapes)


def peak(dense: Dense, ranks: int) -> DensePeak:
    """Of weights and their state alone: activations and inputs take nothing, NCCL makes no copies."""
    layers = [segment(f"layer{index}", ROWS * WIDTH) for index in range(LAYERS)]
    segments, strategy = [segment("features", 0), *layers, segment("head", 0)], Strategy(dense=dense)
    activations = Activations(segments, recomputed(segments, strategy))
    itemsizes = Itemsizes.of(BF16)
    return dense_peak(
        DenseRank(segments, activations, strategy, RankInput(0, 0, 0), itemsizes, 1, ranks, device="cuda")
    )


def bytes_per_parameter(dense: Dense, ranks: int) -> float:
    return peak(dense, ranks).total / PARAMETERS


def test_plain_data_parallelism_holds_16_bytes_and_a_copy_of_gradients_at_the_update() -> None:
    found = peak("dp", 64)
    assert (found.parameters + found.buckets + found.optimizer_state) / PARAMETERS == 16
    assert found.moment.at == "optimizer step"
    assert found.moment.gradients / PARAMETERS == 4  # `MasterWeights` puts gradients together in fp32


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_stages_leave_a_fourth_an_eighth_and_an_nth_in_the_limit(ranks: int) -> None:
    """The paper has 4 + 12 / N, 2 + 14 / N and 16 / N; the own gradient in fp32 adds 4 / N and 2 / N to the first
    two."""
    assert bytes_per_parameter("zero1", ranks) == pytest.approx(16 / 4 + 16 / ranks, abs=0.06)
    assert bytes_per_parameter("zero2", ranks) == pytest.approx(16 / 8 + 16 / ranks, abs=IN_FLIGHT)
    assert bytes_per_parameter("fsdp", ranks) == pytest.approx(16 / ranks, abs=IN_FLIGHT)


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_zero_offload_leaves_2_bytes_on_the_device_and_the_rest_divided_by_ranks_to_the_host(
    ranks: int,
) -> None:
    """Of the paper's 16 bytes (arXiv 2101.06840, section 4) weights stay; masters, moments and gradients in fp32
    are the host's, with gradients as they arrive and weights as they go back."""
    found = peak("zero_offload", ranks)
    assert found.total / PARAMETERS == pytest.approx(2, abs=IN_FLIGHT)
    assert found.host / PARAMETERS == pytest.approx((4 + 8 + 4 + 2 + 2) / ranks)


def test_stages_1_and_2_send_as_much_as_plain_data_parallelism_and_stage_3_half_as_much_again() -> None:
    """In bytes past each rank, on links of a byte per second without latency, where all numbers are in bf16."""
    free = {"bandwidth": "1B/s", "latency": 0}
    data: dict[str, Any] = {
        "verified": True,
        "hosts": 1,
        "gpus_per_host": 64,
        "hbm": "1GiB",
        "host_memory_bytes": "1TB",
        "memory_bandwidth": 1e30,
        "peak_flops": {"fp32": "1TFLOP/s", "bf16": "1TFLOP/s"},
        "host_link_bandwidth": "1GB/s",
        "nvlink": free,
        "network": free,
    }
    nothing = Placement(
        replicated=(),
        shards=(),
        bytes_per_rank=(0,),
        cost_per_rank=(0.0,),
        lookup_bytes_per_rank=(0.0,),
        all_to_all_bytes_per_rank=(0.0,),
        id_bytes_per_rank=(0.0,),
        replicated_gradient_bytes=0,
    )
    layers = [segment(f"layer{index}", ROWS * WIDTH * 10**6) for index in range(3)]
    step = prepare(layers, parse(Cluster, data, "test"), nothing, examples=1, training=BF16)

    def sent(dense: Dense) -> float:
        time = price(step, Strategy(dense=dense))
        return time.all_gather + time.reduce_scatter + time.all_reduce

    plain = sent("dp")
    assert plain == pytest.approx(2 * 63 / 64 * 2 * step.parameters.total, rel=1e-6)
    for stage, times in (
        ("zero1", 1.0),
        ("zero2", 1.0),
        ("zero_offload", 1.0),
        ("shard_grad_op", 1.0),
        ("fsdp", 1.5),
    ):
        assert sent(stage) == pytest.approx(times * plain, rel=1e-6), stage  # type: ignore[arg-type]


def test_buckets_are_filled_from_the_end_and_hold_every_unit() -> None:
    sizes = [3, 10, 10, 10, 0, 2]
    assert zero_buckets(sizes, 0) == [range(1), range(1, 2), range(2, 3), range(3, 5), range(5, 6)]
    assert zero_buckets(sizes, 12) == [range(1), range(1, 3), range(3, 6)]
    assert zero_buckets(sizes, 10**9) == [range(6)]
    assert zero_buckets([0, 5, 0], 0) == [range(1, 3)]
    for full in (0, 1, 11, 12, 25, 10**9):
        buckets = zero_buckets(sizes, full)
        assert [place for bucket in buckets for place in bucket] == list(range(len(sizes)))
        assert all(sum(sizes[place] for place in bucket) >= full for bucket in buckets[1:])
