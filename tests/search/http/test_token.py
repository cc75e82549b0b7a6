"""The token that servers ask for: nothing else opens them."""

from __future__ import annotations

import pytest

from search.http.token import bearer, digest, is_token

TOKEN = "correct horse battery"


@pytest.mark.parametrize(
    "given", ["", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), TOKEN[::-1], digest(TOKEN), "wrong horse battery"]
)
def test_only_the_whole_token_opens(given: str) -> None:
    assert is_token(TOKEN, digest(TOKEN))
    assert not is_token(given, digest(TOKEN))


def test_a_header_gives_its_token_under_its_own_scheme_alone() -> None:
    assert bearer(f"Bearer {TOKEN}") == bearer(f"bearer  {TOKEN} ") == TOKEN
    assert bearer(f"Basic {TOKEN}") == bearer(TOKEN) == bearer("") == ""
