"""A server of embedding tables in a process of its own; part of `pull_and_push.py`."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from trials.records.job import Job
from trials.runtime.fork_server import server_environment, without_main
from trials.training.process_group import meeting_of_servers
from trials.training.servers.messages import Share
from trials.training.servers.server import Server


def start_server(job: Job, folder: Path, number: int, count: int) -> BaseProcess:
    """Starts one of several servers of a job's tables for one rank, which meets it in the folder."""
    arguments = (job.to_dict(), str(folder), number, count)
    process = multiprocessing.get_context("forkserver").Process(target=_serve, args=arguments, daemon=True)
    with server_environment(), without_main():
        process.start()
    return process


def _serve(job: dict[str, object], folder: str, number: int, count: int) -> None:
    torch.set_num_threads(1)
    server = Server(Job.model_validate(job), Share(number, count), 1, "memory")
    server.serve(meeting_of_servers(Path(folder), None, makes=False))
