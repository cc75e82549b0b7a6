"""Row-wise Adagrad for embedding tables: one float of state per row; a step touches the rows looked up alone.

The optimizer that FBGEMM and TorchRec train tables with (Adagrad, Duchi et al., JMLR 2011, with the mean
square of a row's gradient in place of each element's). Gradients of a row that was looked up several times are
added up through one integer per row in place of a sort: 4 to 6 times faster than coalescing. Tables in fp16
are updated in fp32, and rounded stochastically.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# fp32 into fp16 by stochastic rounding: up or down at random, so that the mean is the number itself.
#
# Updates that are small beside a weight survive on average, which rounding to the nearest loses (Gupta et al.,
# arXiv 1502.02551). Random bits are added below fp16's mantissa, and what is below it then cut off. The bits are
# a hash of a counter and of the number's place (splitmix64's, Steele et al., OOPSLA 2014), the same on every
# rank and device; the counter is all that a checkpoint has to keep.
#
# Shapes: R rows of a table, D its columns, N rows of it that are written, W words of random bits per row.

BELOW = 2**13 - 1
"""Number of the bits of fp32's mantissa that fp16's lacks."""
SIGN = -(2**31)
LARGEST = 65504.0
SMALLEST_NORMAL = (127 - 14) << 23
"""The smallest normal number of fp16, 2^-14, as the bits of an fp32. Below it, fp16's numbers are as far apart as
from there up to twice that: what is below is lifted by it, and put down again."""
AT_ONCE = {"cpu": 2**16, "cuda": 2**22}
"""Numbers that are rounded at a time: on a CPU as many as its cache has room for."""
WORKSPACE_BYTES = 16
"""Bytes of workspace per number that is rounded: four numbers of four bytes (trials/planner/memory_counter.py
counts as many)."""
BITS_PER_WORD, BITS_PER_NUMBER = 64, 16
GOLDEN = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


class StochasticRounding:
    """Writes fp32 numbers into fp16 tables; every write has random bits of its own."""

    def __init__(self, seed: int) -> None:
        self.state = torch.tensor(_signed(_mixed(seed)), dtype=torch.int64)
        """The counter, to save and to load into."""

    def write(
        self, table_RD: Tensor, rows_N: Tensor, values_ND: Tensor, number_N: Tensor | None = None
    ) -> None:
        """Puts values into rows; if a row comes several times, it must be with the same values.

        Random bits follow from the rows' numbers; `number_N` are others to take, for rows of a cache.
        """
        self.state.add_(1)
        key, size = self._key(0), _rows_at_once(table_RD)
        parts = (rows_N, rows_N if number_N is None else number_N, values_ND)
        for rows, numbers, values in zip(*(torch.split(part, size) for part in parts), strict=True):
            bits = random_bits(numbers, table_RD.shape[1], key)
            table_RD.index_copy_(0, rows, rounded(values, bits))

    def multiply(self, tables: Sequence[Tensor], factor: Tensor | float) -> None:
        """Multiplies whole tables, each (R, D), by a number or by one for each row, (R, 1)."""
        self.state.add_(1)
        for index, table_RD in enumerate(tables):
            key, size = self._key(index), _rows_at_once(table_RD)
            for start in range(0, len(table_RD), size):
                rows_RD = table_RD[start : start + size]
                by = factor[start : start + size] if isinstance(factor, Tensor) else factor
                rows = torch.arange(start, start + len(rows_RD), device=rows_RD.device)
                rows_RD.copy_(rounded(rows_RD.float().mul_(by), random_bits(rows, rows_RD.shape[1], key)))

    def _key(self, index: int) -> int:
        """Returns the key of one of several tables, of which other ranks may have fewer: the counter is the same
        on all."""
        return _mixed(_mixed(int(self.state)) + index) >> 2  # places are added to it


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Returns fp16 of fp32 values, each one of its two neighbours.

    A number that fp16 has stays, one beyond its range becomes its largest, and one that is not finite becomes NaN,
    so that it is noticed.
    Without comparisons, which take a CPU ten times as long as arithmetic.

    Args:
        values: of any shape.
        bits: of the same shape, int32 of 13 random bits.
    """
    clamped = values.clamp(-LARGEST, LARGEST)
    pattern = clamped.view(torch.int32)
    small = (pattern & ~SIGN).sub_(SMALLEST_NORMAL).bitwise_right_shift_(31)  # -1, or 0 from there on
    lift = small.bitwise_and_(SMALLEST_NORMAL).bitwise_or_(pattern & SIGN).view(torch.float32)
    clamped.add_(lift)
    pattern.add_(bits).bitwise_and_(~BELOW)
    return clamped.sub_(lift).add_(values * 0.0).half()


def random_bits(rows_N: Tensor, columns: int, key: int) -> Tensor:
    """Returns int32 of (N, columns), 13 random bits each, which follow from row, column and key."""
    words = -(-columns * BITS_PER_NUMBER // BITS_PER_WORD)
    x_NW = rows_N.unsqueeze(1) * words + torch.arange(key, key + words, device=rows_N.device)
    for shift, factor in MIX:
        x_NW.bitwise_xor_(_shifted(x_NW, shift)).mul_(_signed(factor))
    x_NW.bitwise_xor_(_shifted(x_NW, 31))
    return x_NW.view(torch.int16)[:, :columns].int().bitwise_and_(BELOW)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifts right, with zeros from the left."""
    return (x >> bits).bitwise_and_((1 << (BITS_PER_WORD - bits)) - 1)


def _mixed(x: int) -> int:
    """Returns splitmix64's output of an unsigned word."""
    mask = (1 << BITS_PER_WORD) - 1
    x = (x + GOLDEN) & mask
    for shift, factor in MIX:
        x = ((x ^ (x >> shift)) * factor) & mask
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """Returns the int64 with the bits of an unsigned word."""
    return x - (1 << BITS_PER_WORD) if x >> (BITS_PER_WORD - 1) else x


def _rows_at_once(table_RD: Tensor) -> int:
    return max(1, AT_ONCE[table_RD.device.type] // table_RD.shape[1])


EPSILON = 1e-8
LOG_SHRINK, SETTLED, ROUNDING = "log_shrink", "settled", "rounding"
"""Names in the state: the sum of table decay so far, the sum when all rows were last brought up to it, and the
counter of stochastic rounding."""


class RowWiseAdagrad(Optimizer):
    """Optimizer w_r -= lr g_r / (sqrt(s_r) + epsilon), s_r += mean(g_r^2); sparse gradients only.

    `decay` is L2 regularisation of the rows looked up, added to their gradients (as FBGEMM's).
    `table_decay` is decoupled decay of all rows, w_r *= 1 - lr * table_decay at every step. It is exact and
    lazy: a row catches up on the steps it missed when `catch_up` is told that it will be read.
    """

    def __init__(
        self, tables: Iterable[Tensor], *, lr: float, decay: float = 0.0, table_decay: float = 0.0
    ) -> None:
        defaults = {"lr": lr, "decay": decay, "table_decay": table_decay, LOG_SHRINK: 0.0, SETTLED: 0.0}
        super().__init__(tables, defaults)
        self._rounding = StochasticRounding(torch.initial_seed())
        self.row_numbers: dict[Tensor, Tensor] = {}
        """Of a table that is a cache: the number of each row among all of them, in host memory."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the rows that have a gradient."""
        assert closure is None
        (group,) = self.param_groups
        if group["table_decay"]:
            group[LOG_SHRINK] += log_shrink(group["lr"], group["table_decay"])
        for table in group["params"]:
            if table.grad is not None:
                self._update(table, group)

    @torch.no_grad()
    def catch_up(self, table: Tensor, rows: Tensor) -> None:
        """Applies the table decay that rows have missed, before they are read; duplicates do no harm."""
        if self.param_groups[0]["table_decay"]:
            self._write(table, rows, _rows_of(table, rows).mul_(self._due(table, rows)))

    @torch.no_grad()
    def settle(self) -> None:
        """Applies all table decay that is due, before tables are evaluated or saved."""
        (group,) = self.param_groups
        if group[LOG_SHRINK] != group[SETTLED]:
            group[SETTLED] = group[LOG_SHRINK]
            for table in group["params"]:
                factor_R1 = self._due(table, slice(None))
                if table.dtype == torch.float16:
                    self._rounding.multiply([table], factor_R1)
                else:
                    table.mul_(factor_R1)

    def _due(self, table: Tensor, rows: Tensor | slice) -> Tensor:
        """Returns what rows are multiplied by for the table decay that they have missed (R, 1), and notes it as
        done."""
        applied, shrink = self.state_of(table)[LOG_SHRINK], self.param_groups[0][LOG_SHRINK]
        factor_R1 = missed_shrink(shrink, applied[rows])
        if isinstance(rows, slice):
            applied.fill_(shrink)
        else:  # by index an accelerator would wait for the number
            applied.index_fill_(0, rows, shrink)
        return factor_R1

    def _update(self, table: Tensor, group: dict[str, Any]) -> None:
        state = self.state_of(table)
        rows, gradient_RD = summed_by_row(table, state["slot"])
        weights_RD = _rows_of(table, rows)
        if group["table_decay"]:
            weights_RD.mul_(self._due(table, rows))
        if group["decay"]:
            gradient_RD.add_(weights_RD, alpha=group["decay"])
        self._write(table, rows, weights_RD.sub_(row_steps(state["sum"], rows, gradient_RD, group["lr"])))

    def _write(self, table: Tensor, rows: Tensor, weights_RD: Tensor) -> None:
        if table.dtype == torch.float16:
            numbers = self.row_numbers.get(table)
            given = None if numbers is None else numbers[rows.cpu()].to(rows.device)
            self._rounding.write(table, rows, weights_RD, given)
        else:
            table.index_copy_(0, rows, weights_RD)

    def state_of(self, table: Tensor) -> dict[str, Tensor]:
        """Returns tensors with a number for each row, made at first use."""
        state: dict[str, Tensor] = self.state[table]
        if not state:
            rows, device = table.shape[0], table.device
            state["sum"] = torch.zeros(rows, dtype=torch.float32, device=device)
            state["slot"] = torch.zeros(rows, dtype=torch.int64, device=device)
            if self.param_groups[0]["table_decay"]:
                state[LOG_SHRINK] = torch.zeros(rows, dtype=torch.float64, device=device)
        return state

    def progress(self, saved: Collection[str] | None = None) -> dict[str, Tensor]:
        """Returns what settled tables need beside their numbers to go on to the bit, for a checkpoint: to save,
        or, with `saved`, to load what the checkpoint has."""
        (group,) = self.param_groups
        progress = {}
        if group["table_decay"]:
            progress[LOG_SHRINK] = torch.tensor(group[LOG_SHRINK], dtype=torch.float64)
        if any(table.dtype == torch.float16 for table in group["params"]):
            progress[ROUNDING] = self._rounding.state
        return {name: tensor for name, tensor in progress.items() if saved is None or name in saved}

    def go_on(self, progress: Mapping[str, Tensor]) -> None:
        """Takes over what was loaded into `progress(saved)`."""
        if LOG_SHRINK in progress:
            (group,) = self.param_groups
            group[LOG_SHRINK] = group[SETTLED] = progress[LOG_SHRINK].item()
            for table in group["params"]:
                self.state_of(table)[LOG_SHRINK].fill_(progress[LOG_SHRINK])


def log_shrink(rate: float, table_decay: float) -> float:
    """Returns the logarithm of what all rows are multiplied by in a step at this learning rate."""
    return math.log(max(1.0 - rate * table_decay, EPSILON))


def missed_shrink(total: float, applied_R: Tensor) -> Tensor:
    """Returns what rows are multiplied by for the table decay that they have missed (R, 1), from the sum of
    `log_shrink` of all steps and, for each row, the sum when it had caught up last."""
    factor_R: Tensor = (total - applied_R).exp_().float()
    return factor_R.unsqueeze(1)


def row_steps(sum_R: Tensor, rows: Tensor, gradient_RD: Tensor, rate: float) -> Tensor:
    """Adds the gradients of rows, each once or each time the same, to their sums; returns what the rows lose, in
    the place of the gradients."""
    sums = sum_R.index_select(0, rows).add_(gradient_RD.square().mean(dim=1))
    sum_R.index_copy_(0, rows, sums)
    return gradient_RD.mul_(sums.sqrt_().add_(EPSILON).reciprocal_().mul_(rate).unsqueeze(1))


def _rows_of(table: Tensor, rows: Tensor) -> Tensor:
    """Returns a copy of rows in fp32."""
    return table.index_select(0, rows).float()


def summed_by_row(table: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (rows, gradient_RD) of a table's sparse gradient, duplicates added up.

    `slot` holds an int64 for each row of the table; what it contains does not matter and is overwritten.
    Each row looked up gets the place of one of its lookups, found without sorting. On the CPU rows come
    once; on an accelerator, which would have to wait for their number, once for each lookup, each time
    with the whole sum, so that writing them several times writes the same.
    """
    gradient = table.grad
    assert gradient is not None
    assert gradient.is_sparse
    rows, values_ND = gradient._indices()[0], gradient._values()
    positions = torch.arange(len(rows), device=rows.device)
    if table.device.type != "cpu":
        representative = slot.scatter_(0, rows, positions).index_select(0, rows)
        summed = torch.zeros_like(values_ND).index_add_(0, representative, values_ND)
        return rows, summed.index_select(0, representative)
    first_positions = (
        slot.scatter_(0, rows, positions).index_select(0, rows).eq_(positions).nonzero().squeeze(1)
    )
    once = rows.index_select(0, first_positions)
    slot.scatter_(0, once, positions[: len(once)])
    summed = values_ND.new_zeros(len(once), values_ND.shape[1])
    return once, summed.index_add_(0, slot.index_select(0, rows), values_ND)
