"""Clients of `serve` beside connections that never send a whole request.

    python -m benchmarks.serving.half_open runs/demo/best rows.parquet

Opens 2,000 connections that send half a header each, and opens those anew that the server ends. Meanwhile 50
clients ask for one row at a time, each on a connection of its own that stays open. Prints how many requests
failed, how long they took, and the worker's memory before and after. With `--half-open 0` it is the same load
alone. Both sides need file descriptors: `ulimit -n 8192`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from benchmarks.serving.load import records_of
from benchmarks.serving.server import HOST, START_SECONDS, serving, without_threads
from benchmarks.shared.machine_and_tables import machine, markdown

HALF_HEADER = b"POST /invocations HTTP/1.1\r\nHost: here\r\nContent-Ty"


def main(arguments: Sequence[str] | None = None) -> None:
    """Starts a server, loads it, and prints one row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("log", type=Path, help="raw rows")
    parser.add_argument("--half-open", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args(arguments)
    without_threads()
    print(f"{machine()}\n")
    rows = records_of(options.bundle, options.log, 1)
    body = json.dumps({"dataframe_records": rows}, default=str)
    times, failures, done = list[float](), list[str](), threading.Event()

    with serving(options.bundle) as server:
        server.predictions(json.loads(body)["dataframe_records"])
        before = server.resident()
        clients = [
            threading.Thread(target=_ask, args=(server.port, body, times, failures, done))
            for _ in range(options.clients)
        ]
        holder = threading.Thread(target=_hold, args=(server.port, options.half_open, done))
        for thread in (holder, *clients):
            thread.start()
        time.sleep(options.seconds)
        after = server.resident()
        done.set()
        for thread in (holder, *clients):
            thread.join()
    percentiles = statistics.quantiles(times, n=100)
    line = [options.half_open, options.clients, len(times), len(failures)]
    line += [f"{1000 * percentiles[i]:.1f}" for i in (49, 98)]
    line += [f"{before.own:.0f}", f"{after.own:.0f}"]
    header = [
        "half open",
        "clients",
        "requests",
        "failed",
        "median, ms",
        "99 %, ms",
        "MiB before",
        "MiB after",
    ]
    print(markdown(header, [line]))
    for failure in sorted(set(failures)):
        print(f"{failures.count(failure)} x {failure}")


def _ask(port: int, body: str, times: list[float], failures: list[str], done: threading.Event) -> None:
    connection = HTTPConnection(HOST, port, timeout=START_SECONDS)
    while not done.is_set():
        began = time.monotonic()
        try:
            connection.request("POST", "/invocations", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                failures.append(f"status {answer.status}")
        except (OSError, HTTPException) as error:
            failures.append(repr(error))
            connection.close()
        times.append(time.monotonic() - began)
    connection.close()


def _hold(port: int, count: int, done: threading.Event) -> None:
    """Keeps `count` half-open connections until `done` is set."""
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        while not done.is_set():
            for _ in range(count - len(selector.get_map())):
                client = socket.create_connection((HOST, port))
                client.sendall(HALF_HEADER)
                selector.register(client, selectors.EVENT_READ)
            for key, _ in selector.select(0.1):  # it was ended by the server
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
