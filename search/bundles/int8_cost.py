"""What tables of 8 bits save, and what they cost in NE."""

from __future__ import annotations

from typing import Literal

from dhen.values import Value
from trials.records.trial_record import Metrics


class Int8Cost(Value):
    """What tables of 8 bits cost and save."""

    log: str
    """Fingerprint of the log whose rows were scored."""
    split: Literal["validation", "test"]
    """The split that these rows are: test if the network was trained on validation too."""
    int8: Metrics
    """Metrics with these tables, in the precision that the network was trained in."""
    fp32: Metrics
    """The same with the tables that they were made of."""
    table_bytes: int
    """Bytes of the embedding tables' rows, scales and offsets included."""
    fp32_table_bytes: int

    @property
    def ne_percent(self) -> float:
        """The difference in NE, in percent of that with fp32 tables; positive is worse."""
        return 100 * (self.int8.ne / self.fp32.ne - 1)
