"""The part of a model's embedding tables that one server has: rows are read, updated, given to keys, saved.

Rows lie in the server's memory, or on its SSD, each with row-wise Adagrad's sum. Updates are those of
`trials.optim.rowwise_adagrad`, in fp16 rounded stochastically; `trials.training.embeddings.growing` gives rows
of growing tables to keys, of which each server has its own.

Shapes: R rows of the server's part of a matrix, U of them that are read or updated, each once, D columns, K
keys, T rows of a table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dhen.errors import UserError
from dhen.inputs.features import Tables, matrices
from dhen.inputs.growing import EMPTY, GrowingRows
from dhen.schema import FeatureSchema
from trials.optim.rowwise_adagrad import StochasticRounding, log_shrink, missed_shrink, row_steps
from trials.records.job import TrainingConfig
from trials.records.strategy import Ranks, ServerLevel
from trials.store.weights import Weights, read_all, save_weights
from trials.training.embeddings.blocks import Block, State, TableBlock, sums_of
from trials.training.embeddings.growing import PROGRESS, GrowingTables, NewRows, begin_rows
from trials.training.embeddings.levels import on_ssd
from trials.training.servers.messages import Share, growing_shares, numbers_of, schema_of_shares

LOG = logging.getLogger(__name__)
ROWS_AT_ONCE = 1 << 18
"""Rows that are settled, or told of as changed, at a time."""
FILES = "tables-server"
"""Beginning of the names of servers' files."""
WEIGHT, SUM, ROUNDING = "weight.", "sum.", "rounding"
"""Names in a server's file: of rows and of their sums, by their matrix; of the counter of stochastic rounding."""
KEYS, NUMBERS, COUNTED, GIVEN, GIVEN_AT = "keys", "numbers", "counted.", "given", "given_at."
"""Names for growing tables: the key of each row, the row's number among those of all servers, what is counted, how
many times rows were given to keys, and when each row was."""


class Gradients(NamedTuple):
    """Gradients of some rows of every matrix."""

    rows: tuple[Tensor, ...]
    """row_U of each matrix, as the server numbers them."""
    gradients: tuple[Tensor, ...]
    """gradient_UD of each, in fp32."""
    rate: float
    """Learning rate."""
    decay: float
    """L2 regularisation of these rows."""
    read_at: int
    """How many times rows had been given to keys when the rows were read: a row that has gone to another key
    since then is left out."""


class ServerPart:
    """The rows of all matrices that one server has."""

    def __init__(
        self,
        tables: Tables,
        rows: GrowingRows | None,
        schema: FeatureSchema,
        config: TrainingConfig,
        share: Share,
        level: ServerLevel,
        workers: int,
        given: Mapping[str, Tensor] | None = None,
        learnt: State | None = None,
    ) -> None:
        """Takes the server's rows of tables over.

        Args:
            tables: with the server's rows of fresh ones (`dhen.inputs.growing.part_of_tables`); without any
                if weights are given.
            rows: which keys have which rows so far; None if no table grows.
            schema: the tables', as the model holds them.
            config: resolved.
            share: which server this is.
            level: where the rows lie.
            workers: number of ranks that read and update them.
            given: all rows of each matrix, of which the server's are copied; None for fresh ones.
            learnt: sums of all rows and counts of growing ones, as one process has them
                (`trials.training.embeddings.blocks`, `GrowingTables.state`); None for fresh ones.

        Raises:
            UserError: if a growing table has fewer rows than there are servers.
        """
        self._share, self._level, self._seed = share, level, torch.initial_seed()
        turns = workers if config.tables.synchrony == "semi" else 1
        self._decay, self._shrink = config.table_decay / turns, 0.0
        """Decoupled decay of all rows at each step, of which each worker's push has its part, and the sum of its
        logarithms. A row catches up when it is read or updated; it is exact (`trials.optim.rowwise_adagrad`)."""
        self._applied = dict[str, Tensor]()
        """Of each matrix, the sum that its rows have caught up with."""
        built = matrices(tables)
        self.names = tuple(built)
        half = config.table_precision == "fp16"
        self._rounding = StochasticRounding(self._seed) if half else None
        self._weights, self._sums = dict[str, Tensor](), dict[str, Tensor]()
        self._is_changed = dict[str, Tensor]()
        """Of each matrix, which rows changed since `changed` returned them last; none are noted before it is asked
        for the first time. A row that is returned is noted again by its next update, so who asks again and again
        while training goes on receives each change, and lacks what came after the last one."""
        self._told_key_R: Tensor | None = None
        """The key of each growing row, as last received."""
        sums = dict[str, Tensor]()
        if learnt:
            for name, matrix in built.items():
                blocks = [Block(table.name, 0, matrix.weight.shape[1]) for table in matrix.tables]
                sums[name] = torch.cat([sums_of(learnt, block.name) for block in blocks])
        for name, matrix in built.items():
            weight_RD = matrix.weight.detach() if given is None else share.part(given[name])
            weight_RD = weight_RD.half() if half else weight_RD.float()
            self._hold(name, weight_RD, share.part(sums[name]) if sums else torch.zeros(len(weight_RD)))
        self._growing: GrowingTables | None = None
        self.given = 0
        """How many times rows were given to keys."""
        if rows is None:
            return
        self._shares = growing_shares(built, rows, share)
        self._own_rows = GrowingRows(schema_of_shares(schema, rows, self._shares, turns))
        self._number_R = numbers_of(rows, self._own_rows, self._shares, share)
        self._spans = rows.spans
        self._given_at = {
            name: torch.zeros(len(held), dtype=torch.int64) for name, held in self._weights.items()
        }
        self._growing = GrowingTables(self._own_rows, Ranks())
        if given is not None and rows.keys.any():

            def of_file(name: str, row_K: Tensor) -> tuple[Tensor, Tensor | None]:
                return given[name][row_K], sums[name][row_K] if sums else None

            self._take_keys(rows.keys, of_file, learnt or {})

    @property
    def held_bytes(self) -> int:
        """Bytes of rows and of their sums."""
        held = (*self._weights.values(), *self._sums.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def read(self, rows: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """Returns weight_UD of each matrix's row_U."""
        return tuple(self._read(name, row_U).to(dtype) for name, row_U in zip(self.names, rows, strict=True))

    @torch.no_grad()
    def update(self, gradients: Gradients) -> int:
        """Runs row-wise Adagrad on some rows; returns how many were left out, as they belong to other keys now."""
        dropped = 0
        if self._decay:
            self._shrink += log_shrink(gradients.rate, self._decay)
            for is_changed_R in self._is_changed.values():  # the decay changes all
                is_changed_R.fill_(True)
        for name, row_U, gradient_UD in zip(self.names, gradients.rows, gradients.gradients, strict=True):
            if self._growing is not None:
                same = self._given_at[name][row_U] <= gradients.read_at
                dropped += int((~same).sum())
                row_U, gradient_UD = row_U[same], gradient_UD[same]
            weight_UD = self._read(name, row_U)
            if self._decay:
                self._applied[name][row_U] = self._shrink
            if gradients.decay:
                gradient_UD = gradient_UD.add(weight_UD, alpha=gradients.decay)
            weight_UD -= row_steps(self._sums[name], row_U, gradient_UD.clone(), gradients.rate)
            self._write(name, row_U, weight_UD)
        return dropped

    @torch.no_grad()
    def admit(self, key_K: Tensor, table_K: Tensor, times_K: Tensor, time: int | None) -> Tensor:
        """Counts keys of a step, each once with its occurrences, and gives rows to those that are admitted;
        returns the rows of all, as all servers' rows are numbered together."""
        assert self._growing is not None
        row_K, begun = self._growing.rows_of(key_K, table_K, time, times_K)
        if begun is not None:
            self.given += 1
            self._begin(begun)
        return self._number_R[row_K]

    def find(self, key_K: Tensor) -> Tensor:
        """Returns the rows that keys have, as all servers' rows are numbered together; 0 for those without one."""
        return self._number_R[self._own_rows.index.find(key_K)]

    def begin_pass(self) -> None:
        """Is called before the first step of each pass."""
        if self._growing is not None:
            self._growing.begin_pass()

    def rows_from(self, matrix: int, first: int, most: int) -> Tensor:
        """Returns so many rows of a matrix in fp32, from one of the server's on; fewer at the end."""
        name = self.names[matrix]
        return self._read(name, torch.arange(first, min(first + most, len(self._weights[name]))))

    def keys(self) -> tuple[Tensor, Tensor]:
        """Returns the numbers of growing rows that keys have, as all servers' rows are numbered, and these
        keys."""
        row_K = self._own_rows.keys.nonzero().squeeze(1)
        return self._number_R[row_K], self._own_rows.keys[row_K]

    def changed(self, matrix: int, most: int) -> tuple[Tensor, Tensor]:
        """Returns rows of a matrix, as all servers' are numbered, that have changed since this returned them last,
        so many at most, and their weights in fp32; for the number behind those of all, growing rows whose keys
        have changed, and the keys. All have, if they were never asked for, or were read from a folder since.
        """
        self._note_changes()
        if matrix < len(self.names):
            name = self.names[matrix]
            row_U = self._is_changed[name].nonzero().squeeze(1)[:most]
            self._is_changed[name][row_U] = False
            return row_U * self._share.servers + self._share.server, self._read(name, row_U)
        assert self._told_key_R is not None
        row_K = (self._own_rows.keys != self._told_key_R).nonzero().squeeze(1)[:most]
        self._told_key_R[row_K] = self._own_rows.keys[row_K]
        return self._number_R[row_K], self._own_rows.keys[row_K]

    def all_told(self) -> None:
        """Takes rows and keys, as they are, for returned by `changed`."""
        self._note_changes()
        for is_changed_R in self._is_changed.values():
            is_changed_R.fill_(False)
        if self._growing is not None:
            self._told_key_R = self._own_rows.keys.clone()

    def save(self, folder: Path, beside: Mapping[str, Tensor]) -> None:
        """Writes a file of the folder with the server's part, and with what else is given."""
        if self._decay:
            for name, weight_RD in self._weights.items():
                for row_U in torch.split(torch.arange(len(weight_RD)), ROWS_AT_ONCE):
                    self._write(name, row_U, self._read(name, row_U))
                    self._applied[name][row_U] = self._shrink
        state: Weights = {f"{WEIGHT}{name}": weight for name, weight in self._weights.items()}
        state |= {f"{SUM}{name}": sums for name, sums in self._sums.items()}
        if self._rounding is not None:
            state[ROUNDING] = self._rounding.state
        if self._growing is not None:
            state |= {f"{COUNTED}{name}": values for name, values in self._counted().items()}
            state |= {KEYS: self._own_rows.keys, NUMBERS: self._number_R, GIVEN: torch.tensor(self.given)}
            state |= {f"{GIVEN_AT}{name}": values for name, values in self._given_at.items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(state | dict(beside), folder / file_name(self._share))

    @torch.no_grad()
    def load(self, folder: Path) -> list[Weights]:
        """Takes over what servers have saved in a folder, however many they were; returns their files, in order.

        If they were as many, growing tables go on to the bit; else they keep rows and sums of all keys, and
        count occurrences anew.

        Raises:
            UserError: if files are missing or damaged.
        """
        paths = list(folder.glob(f"{FILES}*"))
        expected = [folder / file_name(Share(server, len(paths))) for server in range(len(paths))]
        if not paths or sorted(paths) != sorted(expected):
            raise UserError(
                f"{folder}: the tables' checkpoint is not whole: there are {len(paths)} file(s) of servers. "
                "Delete it, and training begins anew."
            )
        files = [read_all(path) for path in expected]
        self._is_changed.clear()
        if len(files) == self._share.servers:
            file = files[self._share.server]
            for name, weight_RD in self._weights.items():
                weight_RD.copy_(file[f"{WEIGHT}{name}"])
                self._sums[name].copy_(file[f"{SUM}{name}"])
            if self._rounding is not None:
                self._rounding.state.copy_(file[ROUNDING])
            if self._growing is not None:
                self._own_rows.keys.copy_(file[KEYS])
                for name, values in self._counted().items():
                    values.copy_(file[f"{COUNTED}{name}"])
                self._growing.restored()
                self.given = int(file[GIVEN])
                for name, given_R in self._given_at.items():
                    given_R.copy_(file[f"{GIVEN_AT}{name}"])
            return files

        def of_files(name: str, row_K: Tensor) -> tuple[Tensor, Tensor]:
            return _of_all(files, f"{WEIGHT}{name}", row_K), _of_all(files, f"{SUM}{name}", row_K)

        for name, held in self._weights.items():
            row_R = torch.arange(len(held)) * self._share.servers + self._share.server
            self._hold(name, *of_files(name, row_R))
        if self._growing is not None:
            key_R = torch.zeros(1 + self._spans[-1].stop, dtype=torch.int64)
            for file in files:
                key_R[file[NUMBERS]] = file[KEYS]
            self._take_keys(key_R, of_files)
        return files

    def _note_changes(self) -> None:
        """Begins to note which rows and keys change, if it has not begun: of what was before nothing is known, so
        all count as changed."""
        if not self._is_changed:
            for name, weight_RD in self._weights.items():
                self._is_changed[name] = torch.ones(len(weight_RD), dtype=torch.bool)
            self._told_key_R = None if self._growing is None else ~self._own_rows.keys

    def _counted(self) -> State:
        """Returns what growing tables count, but for their keys."""
        assert self._growing is not None
        counted = self._growing.state().items()
        return {name: values for name, values in counted if name.startswith(f"{PROGRESS}.")}

    def _read(self, name: str, row_U: Tensor) -> Tensor:
        """Returns weight_UD in fp32, a copy, with all table decay that is due."""
        weight_UD = self._weights[name].index_select(0, row_U).float()
        if self._decay:
            weight_UD.mul_(missed_shrink(self._shrink, self._applied[name][row_U]))
        return weight_UD

    def _write(self, name: str, row_U: Tensor, weight_UD: Tensor) -> None:
        if self._is_changed:
            self._is_changed[name][row_U] = True
        if self._rounding is not None:
            self._rounding.write(self._weights[name], row_U, weight_UD)
        else:
            self._weights[name].index_copy_(0, row_U, weight_UD)

    def _hold(self, name: str, weight_RD: Tensor, sum_R: Tensor) -> None:
        """Takes rows of a matrix and their sums over, to where they lie."""
        if self._level == "ssd":
            weight_RD, sum_R = on_ssd(weight_RD), on_ssd(sum_R)
        self._weights[name], self._sums[name] = weight_RD, sum_R
        if self._decay:
            self._applied[name] = torch.full((len(weight_RD),), self._shrink, dtype=torch.float64)

    def _take_keys(
        self,
        key_R: Tensor,
        rows_of: Callable[[str, Tensor], tuple[Tensor, Tensor | None]],
        counts: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Gives the server's first rows to those of all keys that are the server's, with the rows that they had
        among all.

        Args:
            key_R: the key of each row, as all servers' rows are numbered; 0 if it is free.
            rows_of: returns rows of a matrix, by its name, as all are numbered, and their sums, if they have any.
            counts: what one process has counted of all keys, to go on from; None or empty to count anew.
        """
        assert self._growing is not None
        places = list[tuple[Tensor, Tensor]]()
        for its, span, own in zip(self._shares, self._spans, self._own_rows.spans, strict=True):
            key_T = key_R[span]
            row_K = ((key_T != EMPTY) & self._share.own_keys(key_T)).nonzero().squeeze(1)
            if len(row_K) > its.count:
                LOG.warning("%d of %d keys find no row on this server", len(row_K) - its.count, len(row_K))
                row_K = row_K[: its.count]
            places.append((own.start + torch.arange(len(row_K)), span.start + row_K))
            self._own_rows.keys[places[-1][0]] = key_T[row_K]
            place = slice(its.place, its.place + len(row_K))
            in_matrix = row_K + its.start + 1  # row 0 of the table is the default row
            weight_KD, sum_K = rows_of(its.matrix, in_matrix)
            self._weights[its.matrix][place] = weight_KD.to(self._weights[its.matrix].dtype)
            if sum_K is not None:
                self._sums[its.matrix][place] = sum_K
        self._growing.count_on(dict(counts or {}), places)
        self._growing.restored()

    def _begin(self, begun: NewRows) -> None:
        """Begins rows anew that were given to keys."""
        held = []
        for table, its in zip(self._own_rows.tables, self._shares, strict=True):
            rows = slice(its.place, its.place + its.count)
            weight_RD, sum_R = self._weights[its.matrix][rows], self._sums[its.matrix][rows]
            held.append(TableBlock(Block(table.name, 0, weight_RD.shape[1]), weight_RD, sum_R))
            if table.name in begun.tables:
                given = begun.rows[begun.tables[table.name]] - 1
                self._given_at[its.matrix][rows][given] = self.given
                if self._is_changed:
                    self._is_changed[its.matrix][given + its.place] = True
                if self._decay:
                    self._applied[its.matrix][given + its.place] = self._shrink
        # rows of a server's table follow one another without the default row before them
        begin_rows(held, begun._replace(rows=begun.rows - 1))


def _of_all(files: Sequence[Weights], name: str, row_K: Tensor) -> Tensor:
    """Returns rows of a matrix, or of its sums, by their numbers among all, from the files of all servers."""
    of_first = files[0][name]
    found_K = torch.empty(len(row_K), *of_first.shape[1:], dtype=of_first.dtype)
    for number, file in enumerate(files):
        its_K = row_K % len(files) == number
        found_K[its_K] = file[name][row_K[its_K] // len(files)]
    return found_K


def file_name(share: Share) -> str:
    """Returns the name of a server's file in a checkpoint."""
    return f"{FILES}{share.server}-of-{share.servers}.safetensors"
