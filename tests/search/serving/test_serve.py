"""`serve`: raw rows over HTTP have the probabilities of `predict`, whatever happens to bundle and workers."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run, wait_until
from servers.served import CSV, JSON, Server, asked_all_the_time, wait_until_gone

from search.bundles.bundle import read_bundle

BODY_LIMIT = 1_000_000
Rows = list[dict[str, Any]]
Serve = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def bundles(dhen_search: Run, growing: Path, folder: Path) -> list[Path]:
    """Two bundles of a network with a growing table of users, trained from other seeds."""
    other = ("--data", growing / "log", "--out", folder / "seed1", "training.epochs=1", "seed=1")
    dhen_search("train", growing / "model.yaml", *other)
    shutil.copy(growing / "later.csv", folder)
    return [growing / "bundle", folder / "seed1"]


@pytest.fixture(scope="module")
def served(bundles: list[Path], folder: Path) -> Path:
    """The bundle that is served and changes; a copy of the first."""
    return Path(shutil.copytree(bundles[0], folder / "served"))


@pytest.fixture(scope="module")
def server(serve: Serve, served: Path) -> Iterator[Server]:
    with serve(served, "--workers", 2, "--max-body", BODY_LIMIT) as one:
        yield one


@pytest.fixture(scope="module")
def predicted(dhen_search: Run, bundles: list[Path], folder: Path) -> list[np.ndarray]:
    """What `predict` writes for the later rows, with each bundle."""
    found = []
    for bundle in bundles:
        dhen_search("predict", bundle, "--data", folder / "later.csv", "--out", folder / "scores.csv")
        found.append(scores_in(folder / "scores.csv"))
    return found


@pytest.fixture(scope="module")
def rows(folder: Path, bundles: list[Path]) -> Rows:
    """The later rows as JSON has them: numbers as numbers, what is missing as null, tags as a list."""
    with (folder / "later.csv").open() as file:
        rows: Rows = list(csv.DictReader(file))
    for row in rows:
        row |= {name: float(row[name]) if row[name] else None for name in ("price", "visits")}
        row |= {"site": row["site"] or None, "tags": row["tags"].split("|") if row["tags"] else []}
    return rows


def scores_in(path: Path) -> np.ndarray:
    return np.loadtxt(path, delimiter=",", skiprows=1)[:, 1]


def name_of(bundle: Path) -> str:
    version = read_bundle(bundle).version
    return f"{version.number}-{version.identity[:12]}"


def replace(served: Path, new: Path) -> None:
    """Puts a copy of a bundle in the place of another, by renames."""
    copy = served.with_name(".new")
    shutil.copytree(new, copy)
    served.rename(served.with_name(".old"))
    copy.rename(served)
    shutil.rmtree(served.with_name(".old"))


def test_rows_in_every_form_have_the_probabilities_of_predict(
    server: Server, rows: Rows, predicted: list[np.ndarray], folder: Path, bundles: list[Path]
) -> None:
    some = rows[:500]
    split = {"columns": list(some[0]), "data": [list(row.values()) for row in some]}
    for body in (
        {"dataframe_records": some},
        {"instances": some},
        {"dataframe_split": split},
        {"inputs": {name: [row[name] for row in some] for name in some[0]}},
    ):
        answer = server.post(body)
        assert answer.status == 200, answer
        assert answer.data["predictions"] == pytest.approx(predicted[0][:500], rel=1e-6)
        assert answer.version == name_of(bundles[0])
    whole = server.post((folder / "later.csv").read_bytes(), CSV)
    assert whole.data["predictions"] == pytest.approx(predicted[0], rel=1e-6)
    assert server.post({"dataframe_records": []}).data == {"predictions": []}


def test_it_says_that_it_is_up_and_in_which_protocol(server: Server) -> None:
    assert server.ask("GET", "/ping").status == server.ask("GET", "/health").status == 200
    assert server.ask("GET", "/version").data.count(".") == 2
    assert server.ask("GET", "/").status == 404
    assert server.ask("GET", "/invocations").status == 405


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"price": "dear"}, "row 2: column 'price' holds 'dear', which is no number"),
        ({"time": "noon"}, "row 2: column 'time' holds 'noon', which is no time stamp"),
        ({"site": ["a"]}, "row 2: column 'site' holds ['a'], which is no single value"),
        ({"tags": {"x": 1}}, "row 2: column 'tags' holds {'x': 1}, which is no list of values or text"),
        ({"site": "\ud800"}, "no Unicode"),
    ],
    ids=str,
)
def test_a_value_that_its_role_does_not_allow_is_named_with_its_row(
    server: Server, rows: Rows, change: dict[str, Any], message: str
) -> None:
    answer = server.post({"dataframe_records": [rows[0], {**rows[1], **change}]})
    assert (answer.status, answer.data["error_code"]) == (400, "BAD_REQUEST")
    assert message in answer.data["message"]


@pytest.mark.parametrize(
    ("body", "content_type", "status", "message"),
    [
        (b'{"dataframe_records": [{"site": "a"}]}', JSON, 400, "the columns 'time', 'user', 'tags', 'price'"),
        (b"\xff", JSON, 400, "no UTF-8"),
        (b"[1]", JSON, 400, "one of dataframe_records, dataframe_split, instances, inputs, received a list"),
        (
            b'{"dataframe_split": {"columns": ["a"], "data": [[1, 2]]}}',
            JSON,
            400,
            "row 1: expected a list of 1",
        ),
        (b'{"inputs": {"a": [1], "b": []}}', JSON, 400, "different numbers of values"),
        (b'{"instances": [], "params": {"a": 1}}', JSON, 400, "beside instances stands params"),
        (b'{"dataframe_records": [{}, {}]}', JSON, 400, "2 rows without a column of the model, which has"),
        (b'{"inputs": {"price": [' + b"1" * 5000 + b"]}}", JSON, 400, "the body is no JSON"),
        (b"site,price\na,1,2\n", CSV, 400, "row 1: expected 2 fields, found 3"),
        (b"{}", "text/plain", 415, "send application/json or text/csv"),
        (b" " * (BODY_LIMIT + 1), JSON, 413, "more than 1,000,000 bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_body_that_holds_no_rows_is_refused_in_words(
    server: Server, body: bytes, content_type: str, status: int, message: str
) -> None:
    answer = server.post(body, content_type)
    assert (answer.status, answer.data["error_code"]) == (status, "BAD_REQUEST")
    assert message in answer.data["message"]


def test_a_new_bundle_answers_without_a_failed_request(
    server: Server, served: Path, bundles: list[Path], rows: Rows, predicted: list[np.ndarray]
) -> None:
    expected = {name_of(bundle): list(scores[:50]) for bundle, scores in zip(bundles, predicted, strict=True)}
    with asked_all_the_time(server, {"dataframe_records": rows[:50]}) as answers:
        for new in (bundles[1], bundles[0], bundles[1]):
            replace(served, new)
            server.until_all_serve(name_of(new))
    assert {answer.version for answer in answers} == set(expected)
    for answer in answers:
        assert answer.status == 200, answer
        assert answer.data["predictions"] == pytest.approx(expected[answer.version], rel=1e-6)


def test_a_torn_bundle_is_refused_and_the_old_one_goes_on(
    server: Server, served: Path, bundles: list[Path], rows: Rows, predicted: list[np.ndarray], folder: Path
) -> None:
    before = server.ask("GET", "/ping").version
    torn = Path(shutil.copytree(bundles[0], folder / "torn"))
    os.truncate(torn / "weights.safetensors", 1000)
    replace(served, torn)
    server.until(lambda: server.said().count("weights.safetensors was altered") == 2)  # once for each worker
    assert f"refused, version {before} goes on" in server.said()
    answer = server.post({"dataframe_records": rows[:50]})
    assert (answer.status, answer.version) == (200, before)
    assert answer.data["predictions"] == pytest.approx(predicted[1][:50], rel=1e-6)
    shutil.copyfile(bundles[0] / "weights.safetensors", served / "weights.safetensors")
    server.until_all_serve(name_of(bundles[0]))


def test_increments_answer_as_they_come(
    server: Server, served: Path, bundles: list[Path], rows: Rows, dhen_search: Run, folder: Path
) -> None:
    with asked_all_the_time(server, {"dataframe_records": rows[:50]}) as answers:
        dhen_search("online", bundles[0], "--data", folder / "later.csv", "--out", served)
        newest = name_of(served)
        assert int(newest.partition("-")[0]) >= 2
        server.until_all_serve(newest)
    assert {answer.status for answer in answers} == {200}
    dhen_search("predict", served, "--data", folder / "later.csv", "--out", folder / "newest.csv")
    answer = server.post({"dataframe_records": rows[:500]})
    assert answer.version == newest
    assert answer.data["predictions"] == pytest.approx(scores_in(folder / "newest.csv")[:500], rel=1e-6)


def test_a_worker_that_dies_is_replaced(server: Server, rows: Rows) -> None:
    victim = server.workers()[0]
    os.kill(victim, signal.SIGKILL)
    server.until(lambda: f"worker {victim} ended: exit code -9; another one starts" in server.said())
    server.until(lambda: len(server.workers()) == 2)
    assert server.post({"dataframe_records": rows[:5]}).status == 200


def test_it_ends_after_the_requests_that_it_has_begun(server: Server, rows: Rows) -> None:
    body = json.dumps({"dataframe_records": rows[:50]}).encode()
    head = (
        f"POST /invocations HTTP/1.1\r\nHost: here\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert b"100 Continue" in connection.recv(1000)  # a worker has begun to answer
        os.kill(server.process.pid, signal.SIGTERM)
        wait_until(lambda: refuses(server.port))
        connection.sendall(body)
        with connection.makefile("rb") as file:
            answer = file.read()
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.count(b"0.") >= 50
    assert server.process.wait() == 0
    wait_until_gone(server.process.pid)
    assert server.said().endswith("ended.\n")


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_other_machines_need_the_token_mapped_rows_score_alike_and_no_worker_outlives_its_parent(
    serve: Serve, bundles: list[Path], rows: Rows, predicted: list[np.ndarray]
) -> None:
    body = {"dataframe_records": rows[:500]}
    with serve(bundles[0], "--mmap", "--host", "0.0.0.0") as server:
        (token,) = re.findall(r"Authorization: Bearer (\S+)", server.said())
        assert server.ask("GET", "/ping").status == 200
        for shown in ("", "Bearer", token[:-1], token + "a"):
            refused = server.post(body, token=shown)
            assert (refused.status, refused.data["error_code"]) == (401, "UNAUTHENTICATED")
            assert server.ask("GET", "/version", token=shown).status == 401
        answer = server.post(body, token=token)
        assert answer.data["predictions"] == pytest.approx(predicted[0][:500], rel=1e-6)
        (worker,) = server.workers()
        assert str(bundles[0] / "weights.safetensors") in Path(f"/proc/{worker}/maps").read_text()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        wait_until_gone(server.process.pid)


def test_what_cannot_be_served_is_said(dhen_search: Run, bundles: list[Path], folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = dhen_search("serve", bundles[0], "--port", port, code=2).stderr
    assert f"cannot listen on 127.0.0.1, port {port}" in said
    assert "--port" in said
    assert "no bundle here" in dhen_search("serve", folder, code=2).stderr
    guessed = dhen_search("serve", bundles[0], "--token", "short", code=2).stderr
    assert "5 letters can be guessed; give 12 or more" in guessed
    assert "--max-body 16Mib" in dhen_search("serve", bundles[0], "--max-body", "16Mib", code=2).stderr
    damaged = Path(shutil.copytree(bundles[0], folder / "damaged"))
    (damaged / "encoding" / "numeric.json").unlink()
    done = dhen_search("serve", damaged, "--port", 0, code=2)
    assert "encoding/numeric.json is missing" in done.stderr
