"""How far behind the rows are that a server answers with."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from trials.records.job import Job, TrainingConfig
from trials.training.servers.messages import Share
from trials.training.servers.part import Gradients, ServerPart
from trials.training.servers.server import Server
from trials.training.servers.synchrony import FixedDelay, Semi

DIM = 4
ROW = (torch.tensor([3]),)
JOB = Job(
    model=parse_model({"embedding_dim": DIM, "layers": [{"modules": ["mlp"], "out_embeddings": 2}]}, "test"),
    features=FeatureSchema(tables=(Table(name="a", rows=20),), numeric=()),
    log="none",
    training=TrainingConfig.model_validate({"tables": {"synchrony": "semi"}}).resolved(1000, "fp32"),
    seed=0,
)
GRADIENTS = Gradients(ROW, (torch.ones(1, DIM),), rate=0.1, decay=0.0, read_at=0)


class OthersPush(threading.Condition):
    """The lock of a server: what waits for it sees the other workers push, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.coming: list[Callable[[], None]] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.coming.pop(0)()
        return True


def part_of_a_server() -> ServerPart:
    return Server(JOB, Share(0, 1), 2, "memory")._part


def test_a_pull_waits_for_all_updates_but_those_of_the_last_steps() -> None:
    lock = OthersPush()
    semi = Semi(part_of_a_server(), workers=2, staleness=1, lock=lock)
    with lock:
        assert semi.pull(1, ROW, torch.float32)[1] == 1
        # worker 1 is the slow one, at whose step all are that read
        semi.push(0, 0, GRADIENTS)
        semi.push(0, 1, GRADIENTS)
        lock.coming = [lambda: semi.push(1, 0, GRADIENTS), lambda: semi.push(1, 1, GRADIENTS)]
        assert semi.pull(2, ROW, torch.float32)[1] == 1
        assert len(lock.coming) == 1
        semi.drain(2)
        assert not lock.coming


def test_a_delayed_update_is_not_read_before_its_turn() -> None:
    """Also if it has come long before."""
    lock = OthersPush()
    delayed = FixedDelay(part_of_a_server(), workers=1, staleness=1, lock=lock)
    with lock:
        (fresh,), _ = delayed.pull(0, ROW, torch.float32)
        delayed.push(0, 0, GRADIENTS)
        (first,), behind = delayed.pull(1, ROW, torch.float32)
        assert behind == 1
        torch.testing.assert_close(first, fresh, rtol=0.0, atol=0.0)
        delayed.push(0, 1, GRADIENTS)
        (second,), _ = delayed.pull(2, ROW, torch.float32)
        torch.testing.assert_close(second, fresh - 0.1, rtol=0.0, atol=1e-6)
