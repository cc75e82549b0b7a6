"""The rows that bundles are trained on, and those that come later."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import write_two_logs


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Earlier rows, and later ones."""
    return write_two_logs(tmp_path_factory.mktemp("logs"))
