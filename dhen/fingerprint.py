"""The identity of plain data: equal configurations, equal jobs and equal points have equal fingerprints."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def fingerprint(data: Any) -> str:
    """16 hex digits of SHA-256 over the canonical JSON of plain data."""
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
