"""How files are read as rows: one opener for each format.

An opened file is a sequence of rows. If it has a method ``take(indices)`` as well, that
reads many rows at once, as a batch. If it has an attribute ``spec``, it must be that of
the other files.
"""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .buffers import take_rows

_NEWLINE = ord("\n")
_CHUNK = 1 << 24


class NpzRows:
    """The rows of the arrays in an ``.npz`` file, as dicts.

    Arrays that are stored as they are (``np.savez``) are memory-mapped; compressed ones
    (``np.savez_compressed``) are read whole.

    Args:
      path: The file.

    Raises:
      ValueError: The arrays do not have equally many rows, or there is none.
    """

    def __init__(self, path: str):
        with zipfile.ZipFile(path) as archive:
            self._arrays = {
                info.filename.removesuffix(".npy"): _member(path, archive, info)
                for info in archive.infolist()
            }
        rows = {name: array.shape[:1] for name, array in self._arrays.items()}
        if len(set(rows.values())) != 1 or () in rows.values():
            raise ValueError(
                f"The arrays of {path} must have equally many rows (first axis). Got "
                f"shapes { {name: a.shape for name, a in self._arrays.items()} }."
            )
        self.spec = {
            name: (str(array.dtype), array.shape[1:])
            for name, array in self._arrays.items()
        }

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, index: int) -> Any:
        return {name: array[index] for name, array in self._arrays.items()}

    def take(self, indices: np.ndarray) -> Any:
        """Reads some rows as one batch."""
        return {name: take_rows(array, indices) for name, array in self._arrays.items()}


def _member(path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """One array of an archive, memory-mapped where it can be."""
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    with archive.open(info) as file:
        read_header = readers.get(np.lib.format.read_magic(file))
        if read_header is not None and info.compress_type == zipfile.ZIP_STORED:
            shape, fortran, dtype = read_header(file)
            if not dtype.hasobject and 0 not in shape:
                offset = _start_of(path, info) + file.tell()
                order = "F" if fortran else "C"
                return np.memmap(path, dtype, "r", offset, shape, order)
    with archive.open(info) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _start_of(path: str, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a member start: after a header and two texts of its own."""
    with open(path, "rb") as file:
        file.seek(info.header_offset + 26)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    return info.header_offset + 30 + name + extra


class TextRows:
    """The lines of a UTF-8 text file, as strings without their line ends.

    Args:
      path: The file.
    """

    def __init__(self, path: str):
        empty = Path(path).stat().st_size == 0
        self._bytes = np.empty(0, np.uint8) if empty else np.memmap(path, np.uint8, "r")
        found = [
            start + np.flatnonzero(self._bytes[start : start + _CHUNK] == _NEWLINE)
            for start in range(0, len(self._bytes), _CHUNK)
        ]
        ends = np.concatenate([*found, np.empty(0, np.int64)])
        if not empty and self._bytes[-1] != _NEWLINE:
            ends = np.append(ends, len(self._bytes))
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        start = self._ends[index - 1] + 1 if index else 0
        line = self._bytes[start : self._ends[index]].tobytes()
        return line.removesuffix(b"\r").decode()


def array_record_rows(path: str) -> Any:
    """Opens an ArrayRecord file. Its rows are ``bytes``."""
    from .grains import grain

    return grain.sources.ArrayRecordDataSource(path)


class FileRows:
    """The rows of several files, one file after the other. Opens each when it is read.

    Args:
      files: The files.
      open_file: Opens one as a sequence of rows.
      counts: The rows of each.
    """

    def __init__(
        self,
        files: Sequence[str],
        open_file: Callable[[str], Any],
        counts: Sequence[int],
    ):
        self._made_of = files, open_file, counts
        self._ends = np.cumsum(counts)
        self._opened: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return FileRows, self._made_of  # another process opens the files itself

    def _file(self, number: int) -> tuple[Any, int]:
        """An opened file, and the number of its first row."""
        files, open_file, counts = self._made_of
        with self._lock:
            if number not in self._opened:
                self._opened[number] = open_file(files[number])
        return self._opened[number], int(self._ends[number]) - counts[number]

    def __getitem__(self, index: int) -> Any:
        file, first = self._file(int(np.searchsorted(self._ends, index, "right")))
        return file[int(index) - first]

    def take(self, indices: np.ndarray) -> Any:
        """Reads some rows as one batch.

        Args:
          indices: Row numbers.

        Returns:
          The structure of a row with leaves of shape ``[len(indices), ...]``.
        """
        numbers = np.searchsorted(self._ends, indices, "right")
        present = np.unique(numbers)
        if not hasattr(self._file(present[0])[0], "take"):
            return stack_rows([self[index] for index in indices])
        parts = []
        for number in present:
            file, first = self._file(number)
            parts.append(file.take(indices[numbers == number] - first))
        if len(parts) == 1:
            return parts[0]
        # The parts lie one file after the other: bring them back into order.
        back = np.argsort(np.argsort(numbers, kind="stable"), kind="stable")
        return jax.tree.map(lambda *xs: take_rows(np.concatenate(xs), back), *parts)


def stack_rows(rows: Sequence[Any]) -> Any:
    """Makes a batch of rows.

    Args:
      rows: Pytrees of one structure; leaves are arrays, numbers, ``str`` or ``bytes``.

    Returns:
      The structure with leaves of shape ``[len(rows), ...]``; ``bytes`` become objects.

    Raises:
      ValueError: A leaf has another shape in some row, or the structures differ.
    """
    flat = [jax.tree_util.tree_flatten_with_path(row) for row in rows]
    structures = {treedef for _, treedef in flat}
    if len(structures) > 1:
        found = " and ".join(sorted(map(str, structures)))
        raise ValueError(f"Rows of a batch must have one structure. Got {found}.")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return structures.pop().unflatten(
        [_stack(same[0][0], [leaf for _, leaf in same]) for same in columns]
    )


def _stack(path: Any, leaves: list[Any]) -> np.ndarray:
    if isinstance(leaves[0], bytes):
        return as_objects(leaves)  # numpy's own bytes would end before trailing zeros
    shapes = {np.shape(leaf) for leaf in leaves}
    if len(shapes) > 1:
        raise ValueError(
            f"Rows of a batch must have one shape. row{jax.tree_util.keystr(path)} has "
            f"the shapes {', '.join(map(str, sorted(shapes)))}. Make them alike with "
            ".map(function) before .batch(batch_size)."
        )
    return np.stack(leaves)


def as_objects(values: Sequence[Any]) -> np.ndarray:
    """Returns an array of shape ``[len(values)]`` that holds the values as objects."""
    out = np.empty(len(values), object)
    for index, value in enumerate(values):
        out[index] = value
    return out
