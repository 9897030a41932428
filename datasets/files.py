"""Batches of rows that lie in files, read by grain."""

from __future__ import annotations

import dataclasses
import glob
import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from replicax.errors import listed

from .chain import RowsDataset, RowsIterator, as_integer
from .file_rows import CountedFile, FileRows
from .records import ArrayRecordRows, NpzRows, TextRows, stack_rows

_OPENERS: dict[str, Callable[[str], Any]] = {
    "array_record": ArrayRecordRows,
    "npz": NpzRows,
    "text": TextRows,
}
_FORMATS = {
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
    ".npz": "npz",
    ".txt": "text",
}


def from_files(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    format: str | Callable[[str], Any] | None = None,
) -> FileDataset:
    """Makes a dataset of the rows in some files. Needs the library grain.

    Leave the files as they are while the dataset is in use: one that was written to
    since is refused when it is opened. Few files are open at a time.

    Args:
      files: A path, a pattern as ``glob`` has them, or a list of both. The files of a
        pattern are sorted.
      format: What the files are:

        - ``"npz"``: arrays of shape ``[num_rows, ...]``, equally many rows in each. A
          row is a dict. Only what a batch needs is read, so a file's checksum is not
          looked at. Compressed files are read whole: one after the other; but if the
          rows are shuffled, each file that was read stays in memory until the iteration
          ends, in the end the whole dataset.
        - ``"array_record"``: a row is the ``bytes`` of a record.
        - ``"text"``: UTF-8 lines. A row is a ``str``.
        - a function that is called with a path and returns a sequence of rows: an
          object with ``len`` and ``[index]``. If the rows are shuffled, the objects
          are kept until the iteration ends.
        - ``None``: decided by the ending: ``.npz``, ``.array_record``, ``.arrayrecord``
          or ``.txt``, in capitals too.

    Returns:
      A :class:`FileDataset`. Its elements are single rows until it is batched.

    Raises:
      FileNotFoundError: A path does not exist, or a pattern matches no file.
      TypeError: ``files`` are no paths, or a format function returns no rows.
      ValueError: There is no file, a path is a folder, the format is not known, a file
        is not of the format, or the files hold different arrays.
      ImportError: grain is not installed.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> import replicax as rx
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     np.savez(f"{folder}/part0.npz", x=np.arange(3))
      ...     np.savez(f"{folder}/part1.npz", x=np.arange(3, 6))
      ...     dataset = rx.datasets.from_files(f"{folder}/part*.npz").batch(4)
      ...     [batch["x"].tolist() for batch in dataset]
      [[0, 1, 2, 3], [4, 5]]
    """
    importlib.import_module(".grains", __package__)  # refused here if it is missing
    paths = _resolved(files)
    open_file = _opener(paths, format)
    counted = tuple(CountedFile.of(path, open_file) for path in paths)
    specs: dict[str, str] = {}
    for file in counted:
        specs.setdefault(repr(file.spec), file.path)
    if len(specs) > 1:
        found = "; ".join(f"{path}: {spec}" for spec, path in specs.items())
        raise ValueError(
            f"All files must hold arrays of the same names, dtypes and shapes of a "
            f"row. Got {found}."
        )
    return FileDataset(counted, open_file)


def _resolved(files: Any) -> list[str]:
    one = isinstance(files, str | os.PathLike)
    patterns = [files] if one or not isinstance(files, Iterable) else list(files)
    if isinstance(files, bytes) or not all(
        isinstance(item, str | os.PathLike) for item in patterns
    ):
        raise TypeError(
            "from_files takes a path or a pattern, as str or pathlib.Path, or a list "
            f"of them. Got {files!r}."
        )
    # The working folder may be another one when the files are read.
    paths = [
        os.path.abspath(path)
        for item in patterns
        for path in _matching(os.fspath(item))
    ]
    if not paths:
        raise ValueError(f"from_files needs at least one file. Got {files!r}.")
    if len(set(paths)) < len(paths):
        twice = sorted({path for path in paths if paths.count(path) > 1})
        warnings.warn(
            f"from_files reads these files more than once, as {files!r} names them "
            f"so: {listed(twice, ', ')}.",
            stacklevel=3,
        )
    return paths


def _matching(pattern: str) -> list[str]:
    if os.path.exists(pattern):
        return [pattern]
    found = sorted(glob.glob(pattern, recursive=True))
    if not found:
        hint = ""
        if "[" in pattern:
            hint = (
                " Brackets list characters; glob.escape(path) takes them as they are."
            )
        raise FileNotFoundError(
            f"No file matches {pattern!r}, seen from the folder {os.getcwd()}. Give a "
            f"path or a pattern of files that exist.{hint}"
        )
    return found


def _opener(paths: list[str], format: Any) -> Callable[[str], Any]:
    if callable(format):
        return format
    for path in paths:
        if os.path.isdir(path):
            raise ValueError(
                f"{path} is a folder. Give the files in it, for example by a pattern: "
                f"{os.path.join(path, '*.npz')}."
            )
    endings = {Path(path).suffix.lower() for path in paths}
    found = {_FORMATS.get(ending) for ending in endings} if format is None else {format}
    name = found.pop() if len(found) == 1 else None
    if name not in _OPENERS:
        got = repr(format) if format else f"files ending in {sorted(endings)}"
        raise ValueError(
            f"The format of all files must be one of {sorted(_OPENERS)}, or a function "
            f"that opens a file as a sequence of rows. Got {got}; pass format=..."
        )
    return _OPENERS[name]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FileDataset(RowsDataset):
    """Rows in files. Made by :func:`from_files`.

    ``shuffle``, ``map``, ``batch``, ``repeat`` and ``read`` return a new dataset and
    leave this one as it is. Shuffling is over the rows of all files, and grain's.

    Each iteration is a new epoch: iteration ``k`` of one dataset object is epoch ``k``,
    and the order of an epoch is a function of the seed and the epoch alone, however
    many threads and processes read. With ``repeat(n)`` an iteration runs through ``n``
    epochs and the next one continues with the epochs after them; an endless iteration
    ``k`` begins with epoch ``k``.
    """

    _made_by: ClassVar[str] = "from_files"

    _files: tuple[CountedFile, ...]
    _open_file: Callable[[str], Any]
    _row_maps: tuple[Callable[[Any], Any], ...] = ()
    _batch_maps: tuple[Callable[[Any], Any], ...] = ()
    _num_threads: int = 0
    _num_workers: int = 0

    # -- the chain -------------------------------------------------------------------

    def map(self, function: Callable[[Any], Any]) -> Self:
        """Calls a function on each row or, after ``batch``, on each batch.

        Args:
          function: Called with a row or a batch; returns what takes its place. A
            batch may get other rows. With ``read(num_workers=...)`` the function is
            sent to other processes.

        Returns:
          The dataset of the results.

        Raises:
          TypeError: ``function`` cannot be called.
          ValueError: The dataset is already repeated.
        """
        if not callable(function):
            raise TypeError(f"map(function) takes a function. Got {function!r}.")
        self._refuse_after("map")
        kind = "_batch_maps" if self._is_batched else "_row_maps"
        maps = (*getattr(self, kind), function)
        return dataclasses.replace(self, **{kind: maps})

    def read(self, num_threads: int = 0, num_workers: int = 0) -> Self:
        """Reads ahead in threads or processes. The order stays as it is.

        Args:
          num_threads: Threads, in each process, that read and ``map``.
          num_workers: Processes that do so. They are started anew for each iteration,
            and import the main module: guard it with ``if __name__ == "__main__"``.

        Returns:
          The dataset that is read so.

        Raises:
          TypeError: A number is not an integer.
          ValueError: A number is negative.
        """
        return dataclasses.replace(
            self,
            _num_threads=as_integer("read(num_threads)", num_threads, at_least=0),
            _num_workers=as_integer("read(num_workers)", num_workers, at_least=0),
        )

    def of_files(self, numbers: Sequence[int]) -> Self:
        """Returns the dataset of some of the files, else made alike.

        Args:
          numbers: Their places among the files.
        """
        return dataclasses.replace(self, _files=tuple(self._files[n] for n in numbers))

    def rebatched(self, batch_size: int) -> Self:
        """Returns this batched dataset with another batch size."""
        return dataclasses.replace(self, _batch_size=batch_size)

    # -- what it holds ---------------------------------------------------------------

    @property
    def files(self) -> tuple[str, ...]:
        """The files, in their order, by absolute paths."""
        return tuple(file.path for file in self._files)

    @property
    def num_rows(self) -> int:
        """The number of rows of one epoch."""
        return sum(file.rows for file in self._files)

    @property
    def private(self) -> bool:
        """Whether each batch lies in memory that nobody else writes to."""
        return not (self._row_maps or self._batch_maps or self._num_workers)

    @property
    def keeps_sizes(self) -> bool:
        """Whether each batch has as many rows as were grouped."""
        return not self._batch_maps

    def _calls(self) -> list[str]:
        _, *others = super()._calls()
        maps = [
            f"map({getattr(function, '__qualname__', type(function).__qualname__)})"
            for function in (*self._row_maps, *self._batch_maps)
        ]
        made = f"from_files({len(self._files)} files, {self.num_rows} rows)"
        return [made, *maps, *others]

    # -- iterating -------------------------------------------------------------------

    def iteration(self, number: int) -> FileIterator:
        """Starts a given iteration, without counting it."""
        return FileIterator(self, number)

    def _epoch(self, epoch: int) -> Iterator[Any]:
        from .grains import read

        start = epoch * self.batches_per_epoch
        return read(self._one_epoch(), start, start + self.batches_per_epoch)

    def to_grain(self) -> Any:
        """Returns the same rows or batches as a ``grain.MapDataset``.

        Element ``i`` is that of :meth:`epoch` 0; an index past the end is one of the
        epochs after it, so that grain's ``repeat`` goes on with them.
        """
        from .grains import repeated

        return repeated(self._one_epoch(), self._repeats)

    def _one_epoch(self) -> Any:
        from .grains import shuffled_range

        rows = FileRows(self._files, self._open_file, self._seed is None)
        dataset = shuffled_range(self.num_rows, self._seed)
        if self._batch_size is None:
            return _mapped(dataset, rows.__getitem__, *self._row_maps)
        size, drop = self._batch_size, self._drop_remainder
        if self._row_maps:
            dataset = _mapped(dataset, rows.__getitem__, *self._row_maps)
            dataset = dataset.batch(size, drop_remainder=drop, batch_fn=stack_rows)
        else:
            # Whole batches of row numbers: the files are asked for many rows at once.
            dataset = dataset.batch(size, drop_remainder=drop).map(rows.take)
        return _mapped(dataset, *self._batch_maps)


def _mapped(dataset: Any, *functions: Callable[[Any], Any]) -> Any:
    for function in functions:
        dataset = dataset.map(_NoStop(function))
    return dataset


@dataclasses.dataclass(frozen=True)
class _NoStop:
    """Calls a function, whose ``StopIteration`` must not look like the end."""

    function: Callable[[Any], Any]

    def __call__(self, element: Any) -> Any:
        try:
            return self.function(element)
        except StopIteration as error:
            raise RuntimeError(f"{self.function!r} raised StopIteration.") from error


class FileIterator(RowsIterator):
    """One iteration of a :class:`FileDataset`; it can be saved and restored."""

    _dataset: FileDataset
    _elements: Any = None
    _error: str | None = None

    def _begin(self, iteration: int, position: int) -> None:
        self.close()
        self._error = None
        super()._begin(iteration, position)

    def __next__(self) -> Any:
        if self._error is not None:
            raise RuntimeError(
                f"This iteration has ended with an error: {self._error}. Start another "
                "one, or call set_state(get_state()) to try the same element again."
            )
        if self._elements is None:
            self._elements = self._read()
        try:
            element = next(self._elements)
        except StopIteration:
            raise
        except BaseException as error:
            # Threads may have lost the element: it would be left out silently.
            self.close()
            self._error = repr(error) if isinstance(error, Exception) else None
            raise
        self._position += 1
        return element

    def _read(self) -> Iterator[Any]:
        from .grains import read

        dataset = self._dataset
        first = self._first_epoch * dataset.batches_per_epoch
        return read(
            dataset._one_epoch(),
            first + self._position,
            None if dataset.num_epochs is None else first + len(dataset),
            dataset._num_threads,
            dataset._num_workers,
        )

    def close(self) -> None:
        """Ends the threads and processes that read, and closes the files."""
        if self._elements is not None:
            self._elements.close()
            self._elements = None
