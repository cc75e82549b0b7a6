"""Names of strategies: read in any order, and refused with what would work."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from trials.planner.ladder import ladder
from trials.records.strategy import Strategy, StrategyName, named


def test_every_strategy_of_the_ladder_is_found_by_its_name() -> None:
    for strategy in (*ladder(1, 2, 64, layers=4), *ladder(2, 2, 64, layers=4)):
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


def test_the_parts_of_a_name_have_an_order_and_micro_batches_are_no_way_to_hold_a_model() -> None:
    found = named("zero1+pipeline4=gpipe+tensor2+micro_batches=8")
    assert found.name == "tensor2+pipeline4=gpipe+zero1+micro_batches=8"
    assert found.model_ranks == 8
    assert named("ssd_tables=1.5MiB+micro_batches=4").name == "dp+ssd_tables=1536KiB+micro_batches=4"
    assert named("ssd_tables=1.5MiB+micro_batches=4").held_as == "dp+ssd_tables"
    with pytest.raises(ValueError, match="hsdp does not hold the stages of a pipeline"):
        Strategy(tensor=2, pipeline=2, dense="hsdp")
