"""The folder in which what is costly to make is kept for later commands: prepared logs, this machine's speeds."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Returns `$DHEN_SEARCH_CACHE`, else `~/.cache/dhen-search`."""
    root = os.environ.get("DHEN_SEARCH_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "dhen-search"
