"""The ladder is every way to hold the dense state, with and without each technique that goes with it."""

from __future__ import annotations

import pytest

from trials.planner.ladder import ladder

CHECKPOINTING = ("", "+selective_checkpointing", "+full_checkpointing")


@pytest.mark.parametrize(
    ("hosts", "ranks", "dense"),
    [
        (2, 2, {"dp", "zero1", "zero2", "zero_offload", "shard_grad_op", "hsdp", "fsdp"}),
        (1, 1, {"dp", "zero_offload"}),
        (1, 4, {"dp", "zero1", "zero2", "zero_offload", "shard_grad_op", "fsdp"}),
    ],
)
def test_every_technique_is_there_and_offload_with_fully_shard_alone(
    hosts: int, ranks: int, dense: set[str]
) -> None:
    offloaded = dense & {"shard_grad_op", "hsdp", "fsdp"} if hosts * ranks > 1 else {"fsdp"}
    names = {f"{held}{how}" for held in dense for how in CHECKPOINTING}
    names |= {f"{held}{how}+cpu_offload" for held in offloaded for how in CHECKPOINTING}
    if hosts * ranks == 1:
        names |= {f"{name}+{level}_tables" for name in names for level in ("host", "ssd")}
    found = ladder(hosts, ranks, 64)
    assert {strategy.held_as for strategy in found} == names
    for name in names:
        counts = {each.micro_batches for each in found if each.held_as == name}
        assert counts == {1, 2, 4, 8, 16}
    assert found[0].name == "dp"
    assert [len(each.techniques) for each in found] == sorted(len(each.techniques) for each in found)
    for each in found:
        assert len(each.techniques) == len(each.replace(micro_batches=1).techniques) + (
            each.micro_batches > 1
        )
