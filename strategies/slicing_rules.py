"""What each JAX primitive does to arrays that are held in slices.

The default: a function of whole values is whole, and anything else mixes elements. A
rule stands here for what works on slices as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from replicax import _compat

from .slicing import FILLED, WHOLE, Kind, Mixed, Rule, Sliced, Value, Walk, join, whole
from .variation import Enclosing


def rule_for(primitive: core.Primitive) -> Rule:
    """The rule of a primitive."""
    # A name says what a primitive does only if JAX gave it.
    if not _compat.is_jax_primitive(primitive):
        return default
    return RULES.get(primitive.name, default)


# -- single operations ---------------------------------------------------------------


def default(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """A function of whole values only."""
    mixed = _first_mixed(operands)
    if mixed is None:
        cut = next((v.kind for v in operands if isinstance(v.kind, Sliced)), None)
        if cut is not None:
            mixed = Mixed(
                f"depends on {_what(eqn)} {walk.name(cut)}{_line(eqn, walk.enclosing)}"
            )
        elif eqn.effects or not _compat.is_jax_primitive(eqn.primitive):
            mixed = Mixed(
                f"depends on the operation {eqn.primitive}, of which nothing is known"
                f"{_line(eqn, walk.enclosing)}"
            )
    if mixed is not None:
        return [Value(mixed)] * len(eqn.outvars)
    kinds = [whole(var) for var in eqn.outvars]
    if not walk.computes:
        return [Value(kind) for kind in kinds]
    made = _compat.bind(
        eqn, _arrays(walk, operands, [WHOLE] * len(operands), eqn.invars)
    )
    return [Value(kind, array) for kind, array in zip(kinds, made, strict=True)]


def elementwise(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Element ``k`` of the output follows from the elements ``k`` of the operands."""
    kind = _joined(walk, eqn, operands)
    if isinstance(kind, Mixed) or not walk.computes:
        return [Value(kind)] * len(eqn.outvars)
    arrays = _arrays(walk, operands, [kind] * len(operands), eqn.invars)
    return [Value(kind, array) for array in _compat.bind(eqn, arrays)]


def reshape(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """The same elements in the same order, or a scalar's copies."""
    kind, array = operands[0]
    (before,), (after,) = walk.shapes(eqn.invars[:1]), walk.shapes(eqn.outvars)
    if kind == FILLED:
        return [Value(FILLED, array)]
    stays = [n for n in before if n != 1] == [n for n in after if n != 1]
    is_reshape = eqn.primitive.name == "reshape" and eqn.params["dimensions"] is None
    if isinstance(kind, Sliced) and (stays or is_reshape):
        return [Value(kind, array)]
    return default(walk, eqn, operands)


def identity(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """One output per operand, as it is."""
    return list(operands)


# -- inner jaxprs --------------------------------------------------------------------


def call(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """An inner jaxpr with the equation's own operands and outputs."""
    for inner in _closed_jaxprs(eqn):
        opened = _compat.open_jaxpr(inner)
        if (len(opened.invars), len(opened.outvars)) == (
            len(eqn.invars),
            len(eqn.outvars),
        ):
            return walk.run(inner, operands, eqn)
    return default(walk, eqn, operands)


def hi_primitive(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """The identity of a label, else a function of whole values only."""
    if _compat.checkpoint_label(eqn) is not None:
        return identity(walk, eqn, operands)
    return default(walk, eqn, operands)


def cond(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Branches of which one is taken for all elements."""
    index, *operands = operands
    if index.kind not in (FILLED, WHOLE):
        return _diverges(walk, eqn, index.kind)
    branches = eqn.params["branches"]
    given = [Value(v.kind) for v in operands]
    sketch = walk.kinds_only()
    runs = [sketch.run(branch, given, eqn) for branch in branches]
    kinds = [_join_all([v.kind for v in each]) for each in zip(*runs, strict=True)]
    if not walk.computes:
        return [Value(kind) for kind in kinds]
    held = [v.kind for v in operands]
    taken = [_function(walk, eqn, branch, held, kinds) for branch in branches]
    made = lax.switch(
        index.array,
        taken,
        *_held(operands),
    )
    return _values(kinds, made)


def scan(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """A loop whose carry may be held in slices; what it runs along may not."""
    constants, carries = _compat.scan_counts(eqn.params)
    last = constants + carries
    body = eqn.params["jaxpr"]
    opened = _compat.open_jaxpr(body)
    xs_kinds = [
        _row(walk, eqn, v.kind, var)
        for v, var in zip(operands[last:], opened.invars[last:], strict=True)
    ]
    fixed = [v.kind for v in operands[:constants]]
    carry, outputs = _settle(
        walk,
        lambda carry: walk.kinds_only().run(
            body, [Value(k) for k in (*fixed, *carry, *xs_kinds)], eqn
        ),
        [v.kind for v in operands[constants:last]],
    )
    rows: list[Kind] = [_row(walk, eqn, k, None) for k in outputs[carries:]]
    if not walk.computes:
        return [Value(kind) for kind in (*carry, *rows)]
    # Rows are stacked, so each is made whole.
    step = _function(walk, eqn, body, [*fixed, *carry, *xs_kinds], [*carry, *rows])
    held = _held(operands[:constants])
    first = _carried(walk, operands[constants:last], carry, eqn.invars[constants:last])
    xs = [
        walk.array_as(v, WHOLE, shape) if v.kind in (FILLED, WHOLE) else None
        for v, shape in zip(
            operands[last:], walk.shapes(eqn.invars[last:]), strict=True
        )
    ]

    def iteration(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        made = step(*held, *carry, *row)
        return made[:carries], made[carries:]

    params = eqn.params
    end, made = lax.scan(
        iteration, first, xs, params["length"], params["reverse"], params["unroll"]
    )
    return _values([*carry, *rows], [*end, *made])


def while_loop(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """A loop that ends for all elements at once."""
    params = eqn.params
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    test_kinds = [v.kind for v in operands[:first]]
    body_kinds = [v.kind for v in operands[first:last]]
    carry, _ = _settle(
        walk,
        lambda carry: walk.kinds_only().run(
            body, [Value(k) for k in (*body_kinds, *carry)], eqn
        ),
        [v.kind for v in operands[last:]],
    )
    given = [Value(k) for k in (*test_kinds, *carry)]
    (predicate,) = walk.kinds_only().run(test, given, eqn)
    if predicate.kind != FILLED:
        return _diverges(walk, eqn, predicate.kind)
    if not walk.computes:
        return [Value(kind) for kind in carry]
    goes_on = _function(walk, eqn, test, [*test_kinds, *carry], [FILLED])
    step = _function(walk, eqn, body, [*body_kinds, *carry], carry)
    test_held, body_held = _held(operands[:first]), _held(operands[first:last])
    made = lax.while_loop(
        lambda carry: goes_on(*test_held, *carry)[0],
        lambda carry: step(*body_held, *carry),
        _carried(walk, operands[last:], carry, eqn.invars[last:]),
    )
    return _values(carry, made)


def _function(
    walk: Walk,
    eqn: core.JaxprEqn,
    jaxpr: Any,
    given: Sequence[Kind],
    wanted: Sequence[Kind],
) -> Any:
    """An inner jaxpr as a function from held arrays to held arrays; None if mixed."""
    outvars = _compat.open_jaxpr(jaxpr).outvars

    def run(*arrays: Any) -> list[Any]:
        values = [Value(k, a) for k, a in zip(given, arrays, strict=True)]
        outputs = walk.run(jaxpr, values, eqn)
        return _carried(walk, outputs, wanted, outvars)

    return run


def _settle(walk: Walk, step: Any, carry: list[Kind]) -> tuple[list[Kind], list[Kind]]:
    """Repeats a loop's body until the kinds of its carry do not change."""
    while True:
        outputs = [value.kind for value in step(carry)]
        joined = [join(a, b) for a, b in zip(carry, outputs, strict=False)]
        if joined == carry:
            return carry, outputs
        carry = joined


def _row(walk: Walk, eqn: core.JaxprEqn, kind: Kind, row: Any) -> Kind:
    """The kind of a row of a scanned array, or of the array stacked from such rows."""
    if isinstance(kind, Sliced):
        line = _line(eqn, walk.enclosing)
        return Mixed(f"depends on a loop over rows of {walk.name(kind)}{line}")
    if isinstance(kind, Mixed):
        return kind
    return WHOLE if row is None else whole(row)


def _diverges(walk: Walk, eqn: core.JaxprEqn, kind: Kind) -> list[Value]:
    why = (
        kind
        if isinstance(kind, Mixed)
        else Mixed(
            f"depends on a condition on an element of {walk.name(kind)}"
            f"{_line(eqn, walk.enclosing)}"
        )
    )
    return [Value(why)] * len(eqn.outvars)


def _held(operands: Sequence[Value]) -> list[Any]:
    return [None if isinstance(v.kind, Mixed) else v.array for v in operands]


def _carried(
    walk: Walk,
    operands: Sequence[Value],
    kinds: Sequence[Kind],
    variables: Sequence[Any],
) -> list[Any]:
    """What goes in or out of an inner function: of one kind and dtype every time."""
    return [
        None
        if isinstance(kind, Mixed)
        else jnp.asarray(walk.array_as(value, kind, var.aval.shape), var.aval.dtype)
        for value, kind, var in zip(operands, kinds, variables, strict=True)
    ]


def _values(kinds: Sequence[Kind], arrays: Sequence[Any]) -> list[Value]:
    return [Value(kind, array) for kind, array in zip(kinds, arrays, strict=True)]


def _closed_jaxprs(eqn: core.JaxprEqn) -> list[Any]:
    return [v for v in eqn.params.values() if _compat.is_jaxpr(v)]


# -- kinds and words -----------------------------------------------------------------


def _first_mixed(operands: Sequence[Value]) -> Mixed | None:
    return next((v.kind for v in operands if isinstance(v.kind, Mixed)), None)


def _join_all(kinds: Sequence[Kind]) -> Kind:
    result: Kind = FILLED
    for kind in kinds:
        result = join(result, kind)
    return result


def _joined(walk: Walk, eqn: core.JaxprEqn, operands: Sequence[Value]) -> Kind:
    """The kind of an elementwise function of operands, with the line if it is mixed."""
    if (mixed := _first_mixed(operands)) is not None:
        return mixed
    kind = _join_all([v.kind for v in operands])
    if isinstance(kind, Mixed):
        return Mixed(kind.why + _line(eqn, walk.enclosing))
    return kind


def _arrays(
    walk: Walk, operands: Sequence[Value], kinds: Sequence[Kind], variables: Any
) -> list[Any]:
    return [
        walk.array_as(value, kind, getattr(var.aval, "shape", ()))
        for value, kind, var in zip(operands, kinds, variables, strict=True)
    ]


def _what(eqn: core.JaxprEqn) -> str:
    name = eqn.primitive.name
    return _WORDS.get(name, f"{name}, which moves or combines elements of")


def _line(eqn: core.JaxprEqn, enclosing: Enclosing | None) -> str:
    """Where an equation was made: the innermost call outside of JAX, and for whom.

    Like ``" at optax/file.py:line (function), in clip_by_global_norm"``: the functions
    of a transformation are defined in the one that makes it.
    """
    calls = [
        call for call in _calls(eqn, enclosing) if not _compat.is_jax_file(call[0])
    ]
    if not calls:
        return ""
    file, line, function = calls[0]
    text = f" at {_shown(file)}:{line} ({function.rsplit('<locals>.', 1)[-1]})"
    for _, _, function in calls:
        maker, is_local, _ = function.partition(".<locals>.")
        if is_local:
            return f"{text}, in {maker}"
    return text


def _calls(
    eqn: core.JaxprEqn, enclosing: Enclosing | None
) -> Iterator[tuple[str, int, str]]:
    """The calls that made an equation, and those that made what it stands in."""
    yield from _compat.frames(eqn)
    while enclosing is not None:
        eqn, enclosing = enclosing
        yield from _compat.frames(eqn)


def _shown(file: str) -> str:
    """A file as it is imported if it is installed, else its name."""
    _, installed, inside = file.rpartition(f"site-packages{os.sep}")
    return inside.replace(os.sep, "/") if installed else os.path.basename(file)


_WORDS = {
    "reduce_sum": "a sum over elements of",
    "reduce_max": "the maximum over elements of",
    "reduce_min": "the minimum over elements of",
    "reduce_prod": "a product over elements of",
    "reduce_and": "a condition on all elements of",
    "reduce_or": "a condition on any element of",
    "argmax": "the place of the maximum of",
    "argmin": "the place of the minimum of",
    "dot_general": "a matrix product with",
    "sort": "a sort of elements of",
    "transpose": "a transposition of",
    "broadcast_in_dim": "copies of",
    "cumsum": "running sums of",
    "concatenate": "a concatenation with",
}

_ELEMENTWISE = (
    *("add", "add_any", "sub", "mul", "div", "rem", "max", "min", "neg", "abs", "sign"),
    *("pow", "integer_pow", "square", "sqrt", "rsqrt", "cbrt", "nextafter"),
    *("exp", "exp2", "expm1", "log", "log1p", "logistic", "erf", "erfc", "erf_inv"),
    *("lgamma", "digamma", "floor", "ceil", "round", "is_finite", "atan2"),
    *("sin", "cos", "tan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"),
    *("and", "or", "xor", "not", "population_count", "clz"),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic"),
    *("select_n", "clamp", "convert_element_type", "reduce_precision"),
    *("real", "imag", "conj", "complex", "copy", "copy_p"),
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    **dict.fromkeys(("reshape", "broadcast_in_dim", "squeeze"), reshape),
    **dict.fromkeys(
        ("optimization_barrier", "pvary", "name", "stop_gradient"), identity
    ),
    **dict.fromkeys(
        (
            *("jit", "pjit", "closed_call", "core_call", "call", "remat2"),
            *("custom_jvp_call", "custom_vjp_call"),
        ),
        call,
    ),
    "call_hi_primitive": hi_primitive,
    "cond": cond,
    "scan": scan,
    "while": while_loop,
}
"""The rules by the names of JAX's primitives; :func:`default` is every other's."""
