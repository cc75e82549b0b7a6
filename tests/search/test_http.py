"""The socket and the token that servers share: a port is taken once, and only the whole token opens."""

from __future__ import annotations

import socket

import pytest

from dhen.errors import UserError
from search.http import bearer, digest, is_token, listening, shown_address

HERE = "127.0.0.1"
TOKEN = "correct horse battery"


def test_a_taken_port_and_a_foreign_address_are_said_with_what_would_work() -> None:
    # neither listens yet as the other's port is picked: it is taken as soon as it is picked
    with listening(HERE, None) as taken, listening(HERE, None) as other:
        assert other.getsockname() != taken.getsockname()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}: .*; leave --port out"):
            listening(HERE, port)
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(UserError, match=f"cannot listen on {host}.*0.0.0.0"):
            listening(host, None)


def test_an_address_can_be_asked_at() -> None:
    assert shown_address("127.0.0.1", 5000) == "http://127.0.0.1:5000"
    assert shown_address("::1", 5000) == "http://[::1]:5000"
    for everywhere in ("0.0.0.0", "::"):
        assert shown_address(everywhere, 5000) == f"http://{socket.gethostname()}:5000"


@pytest.mark.parametrize(
    "given", ["", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), TOKEN[::-1], digest(TOKEN), "wrong horse battery"]
)
def test_only_the_whole_token_opens(given: str) -> None:
    assert is_token(TOKEN, digest(TOKEN))
    assert not is_token(given, digest(TOKEN))


def test_a_header_gives_its_token_under_its_own_scheme_alone() -> None:
    assert bearer(f"Bearer {TOKEN}") == bearer(f"bearer  {TOKEN} ") == TOKEN
    assert bearer(f"Basic {TOKEN}") == bearer(TOKEN) == bearer("") == ""
