"""No process builds whole tables when servers hold them: a server draws its rows, a worker none."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dhen.model import parse_model
from dhen.schema import FeatureSchema, Growing, Table
from trials.planner.memory_counter import MemoryCounter
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Ranks, named
from trials.training.distributed_step import fresh_step
from trials.training.process_group import meeting_of_servers
from trials.training.servers.client import Servers
from trials.training.servers.messages import Share
from trials.training.servers.server import Server

DIM, ROWS, BLOCK = 16, 50_000, 1024
WHOLE_BYTES = ROWS * DIM * 4
JOB = Job(
    model=parse_model({"embedding_dim": DIM, "layers": [{"modules": ["mlp"], "out_embeddings": 2}]}, "test"),
    features=FeatureSchema(
        tables=(
            Table(name="a", rows=ROWS - 11),
            Table(name="b", rows=11, growing=Growing(capacity=10)),
        ),
        numeric=(),
    ),
    log="none",
    training=TrainingConfig.model_validate({"tables": {"synchrony": "sync"}}).resolved(1000, "fp32"),
    seed=0,
)


def peak_bytes(counter: MemoryCounter) -> int:
    return counter.peak + counter.host_peak


@pytest.mark.parametrize("servers", [2, 5])
def test_a_server_takes_memory_for_its_rows_alone(servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhen.inputs.growing.BLOCK_ROWS", BLOCK)
    with MemoryCounter() as counter:
        Server(JOB, Share(1, servers), 1, "memory")
    block_bytes = 2 * BLOCK * DIM * 4
    assert peak_bytes(counter) == pytest.approx(WHOLE_BYTES / servers, abs=0.1 * WHOLE_BYTES + block_bytes)


def test_a_worker_has_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhen.inputs.growing.BLOCK_ROWS", BLOCK)
    store = meeting_of_servers(tmp_path, None, makes=False)
    server = Server(JOB, Share(0, 1), 1, "memory")
    thread = threading.Thread(target=server.serve, args=(meeting_of_servers(tmp_path, None, makes=False),))
    thread.start()
    servers = Servers(store, 0, 1, 1)
    try:
        with MemoryCounter() as counter:
            step = fresh_step(JOB, None, Ranks(), named("dp+servers1"), None, servers)
        assert peak_bytes(counter) < 0.1 * WHOLE_BYTES
        assert sum(tensor.numel() for tensor in step.weights().values()) > ROWS * DIM
    finally:
        servers.leave()
        thread.join(60)
    assert not thread.is_alive()
