"""What `spaces NAME` prints is the file of a space."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Run

from spaces.space import catalog, load_space


@pytest.mark.parametrize("name", catalog())
def test_a_printed_space_can_be_used_as_a_file(dhen_search: Run, name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(dhen_search("spaces", name).stdout)
    assert load_space(str(file)).fingerprint == load_space(name).fingerprint
