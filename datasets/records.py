"""How files are read as rows: one class for each format.

An object of these classes is an index: it knows where the rows of its file lie, and
keeps no file open. ``opened()`` returns the same rows with the file open, for reading.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
import numpy as np

from .batches import kind_of
from .buffers import take_rows

_NEWLINE = ord("\n")
_CHUNK = 1 << 24


class FormatRows(ABC):
    """The rows of one file.

    Args:
      path: The file.

    Attributes:
      path: The file.
      spec: What must be the same in all files of a dataset.
    """

    spec: Any = None

    def __init__(self, path: str):
        self.path = path

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Reads one row of an opened file."""

    def take(self, indices: np.ndarray) -> Any:
        """Reads some rows of an opened file as one batch."""
        return stack_rows([self[index] for index in indices.tolist()])

    def opened(self) -> Self:
        """Returns these rows for reading. Dropping them closes the file."""
        opened = copy.copy(self)
        opened._open()
        return opened

    @abstractmethod
    def _open(self) -> None: ...


@contextlib.contextmanager
def _as_format(what: str, format: str) -> Iterator[None]:
    """Lets errors about a file's content name the file."""
    try:
        yield
    except OSError:
        raise  # which names the file itself
    except Exception as error:
        raise ValueError(f"{what} cannot be read as {format}: {error}") from error


class NpzRows(FormatRows):
    """The rows of the arrays in an ``.npz`` file, as dicts.

    Arrays that are stored as they are (``np.savez``) are memory-mapped; compressed ones
    (``np.savez_compressed``) are read whole, and the index holds them.

    Raises:
      ValueError: The file is no archive of arrays, the arrays do not have equally many
        rows, or there is none.
    """

    def __init__(self, path: str):
        super().__init__(path)
        with _as_format(path, "npz"), zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            found = {
                info.filename.removesuffix(".npy"): _member(path, archive, info)
                for info in members
            }
        self._members = dict(sorted(found.items()))
        shapes = {name: member.shape for name, member in self._members.items()}
        rows = {shape[:1] for shape in shapes.values()}
        if len(rows) != 1 or () in rows:
            raise ValueError(
                f"The arrays of {path} must have equally many rows (first axis). Got "
                f"shapes {shapes}."
            )
        ((self._rows,),) = rows
        self.spec = {
            name: (str(kind_of(member.dtype)), member.shape[1:])
            for name, member in self._members.items()
        }

    def __len__(self) -> int:
        return self._rows

    def _open(self) -> None:
        content = _mapped(self.path)
        self._arrays = {
            name: m if isinstance(m, np.ndarray) else m.in_file(content)
            for name, m in self._members.items()
        }

    def __getitem__(self, index: int) -> Any:
        # A copy, since a part of the mapped file would keep it open.
        return {name: array[index].copy() for name, array in self._arrays.items()}

    def take(self, indices: np.ndarray) -> Any:
        """Reads some rows of an opened file as one batch."""
        return {name: take_rows(array, indices) for name, array in self._arrays.items()}


class _Stored:
    """Where an array lies in a file."""

    def __init__(self, offset: int, shape: tuple[int, ...], dtype: Any, order: Any):
        self.offset, self.shape, self.dtype, self.order = offset, shape, dtype, order

    def in_file(self, content: np.ndarray) -> np.ndarray:
        """The array, given the bytes of the file."""
        return np.ndarray(
            self.shape, self.dtype, content, self.offset, order=self.order
        )


def _member(
    path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo
) -> np.ndarray | _Stored:
    """One array of an archive, or where it lies if it can be memory-mapped."""
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    with archive.open(info) as file:
        read_header = readers.get(np.lib.format.read_magic(file))
        if read_header is not None and info.compress_type == zipfile.ZIP_STORED:
            shape, fortran, dtype = read_header(file)
            size = math.prod(shape) * dtype.itemsize
            is_whole = file.tell() + size == info.file_size  # else reading says so
            if not dtype.hasobject and 0 not in shape and is_whole:
                offset = _start_of(path, info) + file.tell()
                return _Stored(offset, shape, dtype, "F" if fortran else "C")
    with archive.open(info) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _start_of(path: str, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a member start: after a header and two texts of its own."""
    with open(path, "rb") as file:
        file.seek(info.header_offset + 26)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    return info.header_offset + 30 + name + extra


def _mapped(path: str) -> np.ndarray:
    """The bytes of a file, read when they are looked at."""
    empty = os.path.getsize(path) == 0
    return np.empty(0, np.uint8) if empty else np.memmap(path, np.uint8, "r")


class TextRows(FormatRows):
    """The lines of a UTF-8 text file, as strings without their line ends."""

    def __init__(self, path: str):
        super().__init__(path)
        content = _mapped(path)
        found = [
            start + np.flatnonzero(content[start : start + _CHUNK] == _NEWLINE)
            for start in range(0, len(content), _CHUNK)
        ]
        self._ends = np.concatenate([*found, np.empty(0, np.int64)])
        if len(content) and content[-1] != _NEWLINE:
            self._ends = np.append(self._ends, len(content))

    def __len__(self) -> int:
        return len(self._ends)

    def _open(self) -> None:
        self._content = _mapped(self.path)

    def __getitem__(self, index: int) -> str:
        start = self._ends[index - 1] + 1 if index else 0
        line = self._content[start : self._ends[index]].tobytes()
        with _as_format(f"Line {index + 1} of {self.path}", "UTF-8"):
            return line.removesuffix(b"\r").decode()


class ArrayRecordRows(FormatRows):
    """The records of an ArrayRecord file, as ``bytes``."""

    _source: Any

    def __init__(self, path: str):
        super().__init__(path)
        self._open()
        self._rows = len(self._source)
        del self._source

    def __len__(self) -> int:
        return self._rows

    def _open(self) -> None:
        from .grains import grain

        with _as_format(self.path, "array_record"):
            self._source = grain.sources.ArrayRecordDataSource(self.path)

    def __getitem__(self, index: int) -> bytes:
        return self._source[index]


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
    ends_in_zero = isinstance(leaves[0], str) and any(x.endswith("\0") for x in leaves)
    if isinstance(leaves[0], bytes) or ends_in_zero:
        return as_objects(leaves)  # numpy's own would end before trailing zeros
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
