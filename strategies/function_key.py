"""When are two functions the same program?

``run`` keeps one compiled program per function. A step that is defined anew in each
turn of a loop is another object each time, but the same program, as long as its code
and what it captures are the same. The key made here says so.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Sequence
from typing import Any, TypeAlias

from replicax._compat import is_library_file

_BY_VALUE = frozenset({int, bool, str, bytes, type(None), type(Ellipsis)})
_FUNCTIONS = frozenset({types.FunctionType, types.MethodType, functools.partial})
_EMPTY_CELL = object()
_MISSING = object()

Global: TypeAlias = tuple[dict[str, Any], str, Any]
"""Where a global is, what it is called, and what it held."""


def function_key(fn: Any) -> Any:
    """Describes a callable by its code and what it captures.

    Functions are compared by code object, closure cells, defaults and the globals that
    their code reads; numbers and strings that they capture by value, everything else by
    identity; bound methods and ``functools.partial`` by their parts; any other callable
    by identity.

    Args:
      fn: The callable.

    Returns:
      A hashable key. It means something only while the objects whose identity it
      holds are alive (:func:`function_references`), because ids are reused.
    """
    return _of(fn, [], ())


def function_references(fn: Any) -> list[Any]:
    """Returns the objects whose identity the key of ``fn`` holds."""
    references: list[Any] = []
    _of(fn, references, ())
    return references


def code_key(fn: Any) -> Any:
    """Describes a callable by its code alone, whatever it captures."""
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__"):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__wrapped__
    if isinstance(fn, types.MethodType):
        return code_key(fn.__func__), id(fn.__self__)
    return getattr(fn, "__code__", None) or id(fn)


def captured_cells(fn: Any) -> list[tuple[Any, Any]]:
    """Returns the closure cells that the key of ``fn`` looks into, with their contents.

    As long as ``fn`` is the same object and none of them holds another one, its key is
    the same.
    """
    return [
        (cell, contents_of(cell))
        for function in _captured_functions(fn)
        for cell in function.__closure__ or ()
    ]


def captured_globals(fn: Any) -> list[Global]:
    """Returns the globals that the key of ``fn`` looks at."""
    return [
        found for function in _captured_functions(fn) for found in _globals_of(function)
    ]


def reachable_globals(fn: Any) -> list[Global]:
    """Returns the globals that a function can read, itself or by functions it calls.

    Functions of libraries are left out, and all beyond the first thousand.
    """
    found: list[Global] = []
    pending, seen = _captured_functions(fn), set()
    while pending and len(found) < 1000:
        function = pending.pop()
        if id(function) in seen or is_library_file(function.__code__.co_filename):
            continue
        seen.add(id(function))
        own = _globals_of(function)
        found += own
        for _, _, value in own:
            pending += _captured_functions(value)
    return found


def have_other_values(names: Sequence[Global]) -> bool:
    """Whether any of these globals holds something else by now."""
    for namespace, name, value in names:
        now = namespace.get(name, _MISSING)
        if now is not value and _of_global(now, []) != _of_global(value, []):
            return True
    return False


def _captured_functions(fn: Any) -> list[types.FunctionType]:
    """The functions that a callable consists of: itself, and those in its closure."""
    found: list[types.FunctionType] = []
    pending, seen = [fn], set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            found.append(value)
            pending += [contents_of(c) for c in value.__closure__ or ()]
            pending += value.__defaults__ or ()
            pending += (value.__kwdefaults__ or {}).values()
        elif isinstance(value, types.MethodType):
            pending.append(value.__func__)
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif type(value) is tuple:
            pending += value
    return found


def _globals_of(function: types.FunctionType) -> list[Global]:
    namespace = function.__globals__
    names = global_names(function.__code__)
    return [(namespace, name, namespace.get(name, _MISSING)) for name in names]


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of the globals that code, or code nested in it, reads and never writes.

    What it writes, such as a count of how often it was traced, says nothing about it.
    """
    read: dict[str, None] = {}
    written: set[str] = set()
    pending = [code]
    while pending:
        code = pending.pop()
        pending.extend(c for c in code.co_consts if isinstance(c, types.CodeType))
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read[instruction.argval] = None
            elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                written.add(instruction.argval)
    return tuple(name for name in read if name not in written)


def static_key(values: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Describes static arguments: functions as above, everything else by equality.

    Args:
      values: Hashable values.

    Returns:
      A hashable key, and the objects whose identity it holds.
    """
    references: list[Any] = []
    key = tuple(
        _of(v, references, ()) if type(v) in _FUNCTIONS else (type(v), v)
        for v in values
    )
    return key, references


def _of(value: Any, references: list[Any], inside: tuple[int, ...]) -> Any:
    kind = type(value)
    if kind in _BY_VALUE:
        return kind, value
    if kind is float or kind is complex:
        return kind, repr(value)  # tells -0.0 from 0.0, and equals itself when NaN
    if kind is types.FunctionType and id(value) not in inside:
        return _of_function(value, references, (*inside, id(value)))
    if kind is types.MethodType:
        return (
            _of(value.__func__, references, inside),
            _of_identity(value.__self__, references),
        )
    if kind is functools.partial:
        return (
            "partial",
            _of(value.func, references, inside),
            tuple(_of(a, references, inside) for a in value.args),
            tuple((k, _of(a, references, inside)) for k, a in value.keywords.items()),
        )
    if kind is tuple:
        return kind, tuple(_of(v, references, inside) for v in value)
    return _of_identity(value, references)


def _of_function(
    fn: types.FunctionType, references: list[Any], inside: tuple[int, ...]
) -> Any:
    references.append(fn.__code__)
    references.append(fn.__globals__)
    key: tuple[Any, ...] = (id(fn.__code__), id(fn.__globals__))
    key += tuple(_of_global(value, references) for _, _, value in _globals_of(fn))
    if fn.__closure__:
        key += tuple(
            _of(contents_of(cell), references, inside) for cell in fn.__closure__
        )
    if fn.__defaults__:
        key += tuple(_of(d, references, inside) for d in fn.__defaults__)
    if fn.__kwdefaults__:
        key += tuple(
            (k, _of(d, references, inside)) for k, d in fn.__kwdefaults__.items()
        )
    return key


def _of_global(value: Any, references: list[Any]) -> Any:
    kind = type(value)
    if kind in _BY_VALUE or kind is float or kind is complex:
        return _of(value, references, ())
    return _of_identity(value, references)


def contents_of(cell: Any) -> Any:
    """Returns what a closure cell holds, or a mark if nothing was assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY_CELL


def _of_identity(value: Any, references: list[Any]) -> int:
    references.append(value)
    return id(value)
