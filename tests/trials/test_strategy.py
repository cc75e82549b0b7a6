"""Names of strategies: read in any order, and refused with what would work."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from trials.planner.ladder import ladder
from trials.records.strategy import Strategy, StrategyName, named


@pytest.mark.parametrize("hosts", [1, 2])
def test_every_strategy_of_the_ladder_is_found_by_its_name(hosts: int) -> None:
    for strategy in ladder(hosts, 2, 64, layers=4):
        assert named(strategy.name) == strategy
        assert named(strategy.held_as) == strategy.replace(micro_batches=1, no_sync=False)
        reversed_name = "+".join(reversed(strategy.name.split("+")))
        assert TypeAdapter(StrategyName).validate_python(reversed_name) == strategy.name


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("zero4", "'zero4' is no memory technique"),
        ("fsdp+checkpointing", "'checkpointing' is no memory technique"),
        ("some_checkpointing", "'some_checkpointing' is no memory technique"),
        ("dp+micro_batches=0", "'micro_batches=0' is no memory technique"),
        ("dp+micro_batches", "'micro_batches' is no memory technique"),
        ("disk_tables", "'disk_tables' is no memory technique"),
        ("host_tables=10", "'host_tables=10' is no memory technique"),
        ("host_tables+ssd_tables", "says tables twice"),
        ("tensor", "'tensor' is no memory technique"),
        ("tensor1", "'tensor1' is no memory technique"),
        ("tensor2+tensor4", "says tensor twice"),
        ("", "'' is no memory technique"),
        ("zero1+fsdp", "says dense twice"),
        ("dp+full_checkpointing+selective_checkpointing", "says checkpointing twice"),
    ],
)
def test_other_names_are_refused_with_what_would_work(name: str, what: str) -> None:
    with pytest.raises(ValueError, match=what) as error:
        named(name)
    assert all(word in str(error.value) for word in ("zero1", "full_checkpointing", "micro_batches=N"))


def test_modules_are_split_in_the_stages_of_a_pipeline() -> None:
    found = named("zero1+pipeline4=gpipe+tensor2+micro_batches=8")
    assert found.name == "tensor2+pipeline4=gpipe+zero1+micro_batches=8"
    assert found.model_ranks == 8
    with pytest.raises(ValueError, match="hsdp does not hold the stages of a pipeline"):
        Strategy(tensor=2, pipeline=2, dense="hsdp")


def test_micro_batches_make_no_other_way_to_hold_a_model() -> None:
    assert Strategy(dense="fsdp", micro_batches=4).held_as == "fsdp"
    assert Strategy(micro_batches=4).held_as == "dp"
    assert named("ssd_tables=1.5MiB+micro_batches=4").name == "dp+ssd_tables=1536KiB+micro_batches=4"
    assert named("ssd_tables=1.5MiB+micro_batches=4").held_as == "dp+ssd_tables"
    assert Strategy(checkpointing="full", micro_batches=2).held_as == "dp+full_checkpointing"
