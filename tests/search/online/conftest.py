"""The rows that bundles are trained on, those that come later, and a bundle that has learnt both."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def logs(growing: Path) -> tuple[Path, Path]:
    """Earlier rows, and later ones."""
    return growing / "earlier.csv", growing / "later.csv"


@pytest.fixture(scope="session")
def bundle(growing: Path) -> Path:
    return growing / "bundle"


@pytest.fixture(scope="module")
def live(growing: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module's own copy of the bundle after the later rows."""
    return Path(shutil.copytree(growing / "live", tmp_path_factory.mktemp("online") / "live"))
