"""The rows of several files as one sequence, of which few files are open at a time."""

from __future__ import annotations

import collections
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .batches import join_batches, kind_of
from .buffers import take_rows
from .records import FormatRows, stack_rows

# Files that are open at a time: an order of rows at random comes back to all of them.
_MOST_OPEN = 64
_MOST_OPEN_IN_ORDER = 4


@dataclasses.dataclass(frozen=True)
class CountedFile:
    """A file as it was when its rows were counted.

    Attributes:
      path: The file, by an absolute path.
      rows: Its rows.
      spec: What must be the same in all files, or ``None``.
      stamp: Its size, and when it was written.
    """

    path: str
    rows: int
    spec: Any
    stamp: tuple[int, int]

    @classmethod
    def of(cls, path: str, open_file: Callable[[str], Any]) -> CountedFile:
        """Counts the rows of a file.

        Args:
          path: The file.
          open_file: Opens it as a sequence of rows.

        Raises:
          TypeError: ``open_file`` returns something else.
        """
        stamp = _stamp(path)  # taken first: what is written meanwhile is noticed
        opened = _checked(open_file(path), path, open_file)
        return cls(path, len(opened), _spec(opened), stamp)

    def open(self, open_file: Callable[[str], Any]) -> Any:
        """Opens the file again.

        Raises:
          ValueError: It is not the file whose rows were counted.
        """
        self.check()
        opened = open_file(self.path)
        if len(opened) != self.rows:
            raise self._changed()
        return opened

    def check(self) -> None:
        """Raises ``ValueError`` if the file was written to since it was counted."""
        if _stamp(self.path) != self.stamp:
            raise self._changed()

    def _changed(self) -> ValueError:
        return ValueError(
            f"{self.path} has changed since from_files counted its {self.rows} rows. "
            "Call from_files again, and leave the files as they are while the dataset "
            "is in use."
        )


def _stamp(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _checked(opened: Any, path: str, open_file: Callable[[str], Any]) -> Any:
    try:
        if not isinstance(opened, Mapping) and hasattr(opened, "__getitem__"):
            len(opened)
            return opened
    except TypeError:
        pass  # as of an array without axes
    raise TypeError(
        f"The format function {open_file!r} must return a sequence of rows, with len() "
        f"and [index]. For {path} it returned {type(opened).__name__}."
    )


def _spec(opened: Any) -> Any:
    if isinstance(opened, np.ndarray):
        return str(kind_of(opened.dtype)), opened.shape[1:]
    return opened.spec if isinstance(opened, FormatRows) else None


class FileRows:
    """The rows of several files, one file after the other. Opens each when it is read.

    Args:
      files: The files.
      open_file: Opens one as a sequence of rows.
      in_order: Whether the rows are asked for about in their order. Files that were
        read are forgotten then; else what is known of each is kept.
    """

    def __init__(
        self,
        files: Sequence[CountedFile],
        open_file: Callable[[str], Any],
        in_order: bool,
    ):
        self._made_of = files, open_file, in_order
        self._files = files
        self._ends = np.cumsum([file.rows for file in files])
        self._known: dict[int, Any] = {}
        self._open: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return FileRows, self._made_of  # another process opens the files itself

    def _file(self, number: int) -> tuple[Any, int]:
        """An opened file, and the number of its first row."""
        with self._lock:
            opened = self._open.pop(number, None)
            if opened is None:
                opened = self._opened(number)
            self._open[number] = opened
        return opened, int(self._ends[number]) - self._files[number].rows

    def _opened(self, number: int) -> Any:
        _, open_file, in_order = self._made_of
        while len(self._open) >= (_MOST_OPEN_IN_ORDER if in_order else _MOST_OPEN):
            self._open.popitem(last=False)
        rows = self._known.get(number)
        if rows is None:
            rows = self._files[number].open(open_file)
        else:
            self._files[number].check()
        if not in_order:
            self._known[number] = rows
        return rows.opened() if isinstance(rows, FormatRows) else rows

    def __getitem__(self, index: int) -> Any:
        file, first = self._file(int(np.searchsorted(self._ends, index, "right")))
        return file[int(index) - first]

    def take(self, indices: np.ndarray) -> Any:
        """Reads some rows as one batch.

        Args:
          indices: Row numbers.

        Returns:
          The structure of a row with leaves of shape ``[len(indices), ...]``.

        Raises:
          IndexError: A row number is negative, or beyond the end.
          ValueError: The rows differ in structure, dtype or shape.
        """
        first, last = int(indices.min()), int(indices.max())
        if first < 0 or last >= self._ends[-1]:
            raise IndexError(
                f"Rows {first} to {last} were asked for, of {self._ends[-1]} in files."
            )
        numbers = np.searchsorted(self._ends, indices, "right")
        parts = []
        for number in np.unique(numbers).tolist():
            file, first = self._file(number)
            parts.append(_batch_of(file, indices[numbers == number] - first))
        if len(parts) == 1:
            return parts[0]
        # The parts lie one file after the other: bring them back into order.
        back = np.argsort(np.argsort(numbers, kind="stable"), kind="stable")
        return jax.tree.map(lambda x: take_rows(x, back), join_batches(parts))


def _batch_of(file: Any, indices: np.ndarray) -> Any:
    """Some rows of a file. What a method of another library does is not guessed."""
    if isinstance(file, FormatRows):
        return file.take(indices)
    if isinstance(file, np.ndarray):
        return take_rows(file, indices)
    return stack_rows([file[index] for index in indices.tolist()])
