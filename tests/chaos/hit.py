"""What a fault did."""

from __future__ import annotations

import time
from typing import NamedTuple


class Hit(NamedTuple):
    trials: set[int] | None = None
    """Trials that it hit; None: any may show that training goes on."""
    ended_at: float = 0.0
    """When it was over, from which on recovery counts; 0: at once."""

    @property
    def since(self) -> float:
        return self.ended_at or time.time()
