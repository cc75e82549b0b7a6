"""The ladder is every way to hold the dense state, with and without each technique that goes with it."""

from __future__ import annotations

from typing import cast

import pytest

from dhen.errors import UserError
from trials.planner.estimates import PricedStrategy
from trials.planner.ladder import check_degree, choose, ladder
from trials.records.strategy import named

CHECKPOINTING = ("", "+selective_checkpointing", "+full_checkpointing")


@pytest.mark.parametrize(
    ("hosts", "ranks", "dense", "split"),
    [
        (
            *(2, 2, {"dp", "zero1", "zero2", "zero_offload", "shard_grad_op", "hsdp", "fsdp"}),
            {"tensor2", "tensor2+zero1"},
        ),
        (1, 1, {"dp", "zero_offload"}, set()),
        (
            *(1, 4, {"dp", "zero1", "zero2", "zero_offload", "shard_grad_op", "fsdp"}),
            {"tensor2", "tensor2+zero1", "tensor4"},
        ),
        (2, 3, {"dp", "zero1", "zero2", "zero_offload", "shard_grad_op", "hsdp", "fsdp"}, set()),
    ],
)
def test_every_technique_is_there_and_offload_with_fully_shard_alone(
    hosts: int, ranks: int, dense: set[str], split: set[str]
) -> None:
    offloaded = dense & {"shard_grad_op", "hsdp", "fsdp"} if hosts * ranks > 1 else {"fsdp"}
    names = {f"{held}{how}" for held in dense for how in CHECKPOINTING}
    names |= {f"{held}{how}+cpu_offload" for held in offloaded for how in CHECKPOINTING}
    if hosts * ranks == 1:
        names |= {f"{name}+{level}_tables" for name in names for level in ("host", "ssd")}
    names |= {f"{held}{how}" for held in split for how in ("", "+full_checkpointing")}
    found = ladder(hosts, ranks, 64)
    assert {strategy.held_as for strategy in found} == names
    for name in names:
        counts = {each.micro_batches for each in found if each.held_as == name}
        assert counts == ({1, 4, 16} if name.startswith("tensor") else {1, 2, 4, 8, 16})
    assert found[0].name == "dp"
    assert [len(each.techniques) for each in found] == sorted(len(each.techniques) for each in found)
    for each in found:
        assert len(each.techniques) == len(each.replace(micro_batches=1).techniques) + (
            each.micro_batches > 1
        )


class Priced:
    """A strategy that fits, with its step's seconds."""

    fits = True

    def __init__(self, name: str, seconds: float) -> None:
        self.strategy, self.time = named(name), self
        self.total = seconds


def test_modules_are_split_after_all_else_of_as_few_techniques() -> None:
    def chosen(*priced: tuple[str, float], prefer: str = "least") -> str:
        found = choose([cast(PricedStrategy, Priced(*each)) for each in priced], prefer)  # type: ignore[arg-type]
        return found.strategy.name

    assert chosen(("tensor2", 1.0), ("fsdp", 2.0)) == "fsdp"
    assert chosen(("tensor2", 3.0), ("fsdp+full_checkpointing", 2.0)) == "tensor2"
    assert chosen(("tensor2+zero1", 3.0), ("tensor4", 4.0)) == "tensor4"
    assert chosen(("tensor2", 1.0), ("fsdp", 2.0), prefer="fastest") == "tensor2"


def test_tensor_groups_are_in_hosts_or_have_whole_ones_and_other_degrees_are_refused() -> None:
    for degree, hosts, ranks in ((2, 1, 2), (4, 2, 4), (8, 2, 4), (2, 3, 2), (6, 3, 2), (3, 1, 3)):
        check_degree(degree, hosts, ranks)
    for degree, hosts, ranks in ((3, 1, 4), (4, 3, 2), (8, 1, 4), (2, 1, 1), (6, 2, 4)):
        with pytest.raises(UserError, match=f"tensor{degree}.*(would work: tensor2|one rank has none)"):
            check_degree(degree, hosts, ranks)
