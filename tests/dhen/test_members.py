"""Members of one network: what they share, where they part, and how their probabilities are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dhen.batch import FeatureBatch
from dhen.config import DhenConfig
from dhen.errors import UserError
from dhen.members import mean_logit_of_members
from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema, Table

SCHEMA = FeatureSchema(tables=(Table(name="a", rows=20), Table(name="b", rows=9)), numeric=("x", "y"))
LAYERS = [
    {"modules": ["dlrm", "linear"], "raw_numeric": True, "out_embeddings": 4},
    {"modules": ["attention"], "norm_placement": "pre", "out_embeddings": 4},
]
EXAMPLES, MEMBERS = 16, 3


def config(members: int, members_from: int = 0, **more: Any) -> DhenConfig:
    data = {
        "embedding_dim": 8,
        "layers": LAYERS,
        "head": [16],
        "members": members,
        "members_from": members_from,
    }
    found = parse_model(data | more, "test")
    assert isinstance(found, DhenConfig)
    return found


def batch() -> FeatureBatch:
    torch.manual_seed(1)
    ids_BT = torch.stack([torch.randint(0, table.rows, (EXAMPLES,)) for table in SCHEMA.tables], dim=1)
    return FeatureBatch(ids_BT=ids_BT, bags=(), numeric_BK=torch.randn(EXAMPLES, 2))


def member_weights(several: nn.Module, member: int) -> dict[str, Tensor]:
    """A single network's weights that compute what one member computes, adapters left out."""
    state = several.state_dict()
    own = {f"{name}.{kind}" for name in ("head.0", "logit") for kind in ("weight", "bias")}
    return {
        name: value[member] if name in own else value
        for name, value in state.items()
        if "adapter" not in name
    }


@pytest.mark.parametrize("members_from", [0, 1, 2])
def test_members_with_one_adapter_are_single_networks_with_their_heads(members_from: int) -> None:
    several, features = build_model(config(MEMBERS, members_from), SCHEMA), batch()
    with torch.no_grad():
        for name, parameter in several.named_parameters():
            if "adapter" in name:
                parameter.fill_(1.0)
    logit_BK = several.train()(features)
    single = build_model(config(1), SCHEMA).eval()
    for member in range(MEMBERS):
        single.load_state_dict(member_weights(several, member))
        torch.testing.assert_close(logit_BK[:, member], single(features))
    mean = logit_BK.sigmoid().mean(dim=1)
    torch.testing.assert_close(several.eval()(features).sigmoid(), mean)


def test_members_part_at_the_first_adapter_alone() -> None:
    """A sign for each embedding; later adapters change nothing at first, and all of them learn."""
    model = build_model(config(MEMBERS, 0), SCHEMA).train()
    first, second = (model.get_parameter(f"layers.{layer}.adapter.scale") for layer in (0, 1))
    assert first.abs().eq(1).all()
    assert first.eq(first[:, :, :1]).all()
    assert first.min() < 0 < first.max()
    assert second.eq(1).all()
    model(batch()).square().sum().backward()
    assert all(p.grad is not None and p.grad.to_dense().any() for p in model.parameters())
    later = build_model(config(MEMBERS, 1), SCHEMA).state_dict()
    assert [name for name in later if "adapter" in name] == ["layers.1.adapter.scale"]


def test_the_mean_of_probabilities_as_a_logit() -> None:
    logit_BK = torch.tensor([[0.3, -2.0], [500.0, 400.0], [-500.0, -400.0], [90.0, -90.0]])
    p = logit_BK[0].double().sigmoid().mean()
    found = mean_logit_of_members(logit_BK)
    assert found[0].item() == pytest.approx((p / (1 - p)).log().item(), abs=1e-6)
    two = torch.tensor(2.0).log()
    expected = torch.stack([400 + two, -400 - two, torch.zeros(())])
    torch.testing.assert_close(found[1:], expected)


def test_one_member_is_the_network_from_before_there_were_several() -> None:
    plain = parse_model({"layers": LAYERS}, "a")
    assert parse_model({"layers": LAYERS, "members": 1, "members_from": 2}, "b") == plain
    assert not {"members", "members_from"} & set(plain.to_dict())
    several = config(4, 1)
    assert DhenConfig.model_validate(several.to_dict()) == several


@pytest.mark.parametrize(
    ("members", "members_from", "says"),
    [
        (0, 0, "members: .*greater than 0"),
        (2, 3, r"members_from=3 of 2 layers; 0 .* to 2 \(only heads differ\)"),
    ],
)
def test_what_cannot_be(members: int, members_from: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        config(members, members_from)
