"""The configuration reference is what the configuration classes say, and says something of every key."""

from __future__ import annotations

import pytest
from generate_reference import DECISIONS, FOLDER, all_rows, decisions, pages

from dhen.blocks import BLOCKS
from dhen.ensembles import ENSEMBLES
from spaces.axes import RANGE_KEYS
from trials.data.log_schema import ROLES


@pytest.fixture(scope="module")
def given() -> dict[str, str]:
    return pages()


def test_the_committed_pages_are_what_the_generator_gives(given: dict[str, str]) -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(given)
    for name, text in given.items():
        assert (FOLDER / name).read_text() == text, f"{name} is not up to date: run `make docs`"
    assert (DECISIONS / "README.md").read_text() == decisions(), "run `make docs`"


def test_every_key_has_a_meaning_of_some_words_and_a_type_without_python() -> None:
    for row in all_rows():
        assert len(row.meaning.split()) >= 3, f"{row.key}: write a docstring below the field"
        assert not any(python in row.type for python in ("typing", "class", "None", "Any")), row


@pytest.mark.parametrize(
    ("page", "names"),
    [("modules.md", BLOCKS), ("model.md", ENSEMBLES), ("schema.md", ROLES), ("space.md", RANGE_KEYS)],
)
def test_every_member_of_a_registry_is_on_its_page(given: dict[str, str], page: str, names: object) -> None:
    text = given[page]
    assert all(f"`{name}" in text or f": {name}`" in text for name in names)  # type: ignore[attr-defined]
