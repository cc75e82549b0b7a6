"""A .npy file that grows: rows are appended in order, their number is written at the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray


class NpyWriter:
    """Writes one array, rows at a time.

    Plain writes and no memory map, because a full disk then raises an error instead of killing the process.
    """

    def __init__(self, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        self._file = path.open("wb")
        self.rows = 0
        self._write_header()

    def _write_header(self) -> None:
        """Writes a header of the same length for any number of rows: numpy leaves room for the first axis to
        grow."""
        shape = (self.rows, *self._row_shape)
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, rows: NDArray[np.generic]) -> None:
        """Adds rows (n x row_shape)."""
        assert rows.shape[1:] == self._row_shape, (rows.shape, self._row_shape)
        self._file.write(np.ascontiguousarray(rows, dtype=self._dtype).data)
        self.rows += len(rows)

    def close(self) -> None:
        """Writes the number of rows and closes the file."""
        self._file.seek(0)
        self._write_header()
        self._file.close()
