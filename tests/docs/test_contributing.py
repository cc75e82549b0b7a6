"""CONTRIBUTING's walk-through works as written: a block in one file, in the registry, under the contract."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from dhen.blocks import BLOCKS
from dhen.model import parse_model
from dhen.values import parse
from spaces.space import Space, SpaceConfig

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The block of the walk-through, registered for one test."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    entry = re.search(r'`"(\w+)": (\w+)`', text)
    assert code
    assert entry
    kind, class_name = entry.groups()
    path = tmp_path / f"{kind}.py"
    path.write_text(code[1])
    spec = importlib.util.spec_from_file_location(f"dhen.blocks.{kind}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, f"dhen.blocks.{kind}", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(BLOCKS, kind, getattr(module, class_name))
    return kind


def test_the_contract_holds_for_it(gate: str) -> None:
    spec = importlib.util.spec_from_file_location("block_contract", ROOT / "tests/contracts/test_blocks.py")
    assert spec
    assert spec.loader
    contract = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(contract)
    contract.test_maps_m_embeddings_to_l_at_the_cost_that_torch_counts(gate)
    contract.test_every_parameter_learns(gate)
    contract.test_is_exported_for_any_number_of_examples_which_do_not_mix(gate)
    contract.test_its_settings_stand_in_a_layer_round_trip_and_are_documented(gate)


def test_models_spaces_and_the_command_line_know_it(gate: str, capsys: pytest.CaptureFixture[str]) -> None:
    from search.verbs.blocks import command

    model = parse_model({"layers": [{"modules": [gate, "linear"]}]}, "test")
    assert gate in str(model.to_dict())
    space = Space("test", parse(SpaceConfig, {"modules": {gate: {}}, "depth": 1}, "test"))
    assert space.decode({axis.name: axis.labels[0] for axis in space.axes}).model.layers
    command.main([gate], standalone_mode=False)
    assert "squeeze-and-excitation" in capsys.readouterr().out
