"""What each JAX primitive does to variation: one rule a kind of primitive.

The default: an equation's outputs vary if any of its operands does. A rule stands here
only where that would be wrong (``axis_index`` varies without operands) or needlessly
strict (a full ``psum`` makes everything equal).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from replicax import _compat

from .variation import (
    ASSERT_MIRRORED,
    Cause,
    Cell,
    Finding,
    Rule,
    Value,
    Walk,
    cause_of,
    first_cause,
)


def analyse(
    jaxpr: Any, varying_inputs: Sequence[bool], axis_name: str
) -> tuple[list[Cause | None], list[Finding]]:
    """Interprets a step.

    Args:
      jaxpr: What ``jax.make_jaxpr`` returned in the body of the ``shard_map``. Its
        constants are taken to be equal on all replicas.
      varying_inputs: For each input, whether replicas may hold different values.
      axis_name: The mesh axis that replicas are counted along.

    Returns:
      For each output why it varies (``None`` if it is the same on all replicas), and
      what is wrong whatever the outputs are.

    Raises:
      ValueError: The number of flags is not the number of inputs.
    """
    inputs = _compat.open_jaxpr(jaxpr).invars
    if len(varying_inputs) != len(inputs):
        raise ValueError(
            f"Expected one flag per input of the jaxpr, {len(inputs)}. "
            f"Got {len(varying_inputs)}."
        )
    walk = Walk(axis_name, rule_for)
    values: list[Value] = []
    for i, (var, varies) in enumerate(zip(inputs, varying_inputs, strict=True)):
        cause = Cause(None, input=i) if varies else None
        values.append(walk.new_cell(cause) if _compat.is_ref(var) else cause)
    outputs = walk.run(jaxpr, values)
    return [cause_of(value) for value in outputs], walk.findings


def rule_for(primitive: core.Primitive) -> Rule:
    """The rule of a primitive."""
    rule = _known.get(primitive)
    if rule is None:
        # A name says what a primitive does only if JAX gave it.
        if primitive is _compat.collective_of_one_p:
            rule = collective_of_one
        elif primitive is _compat.aggregate_p:
            rule = aggregate
        elif _compat.is_jax_primitive(primitive):
            rule = RULES.get(primitive.name, elementary)
        else:
            rule = unknown
        _known[primitive] = rule
    return rule


_known: dict[core.Primitive, Rule] = {}


# -- functions of their operands -----------------------------------------------------


def elementary(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Outputs vary if an operand does, or if something in the equation does.

    The default for JAX's own primitives, those that JAX will add included: so it looks
    at whatever could betray that the outputs depend on more than the operands.
    """
    cause: Cause | None = None
    makes_refs = any(map(_compat.is_ref, eqn.outvars))
    if makes_refs:
        cause = walk.origin(eqn, f"a ref made in an unknown way ({eqn.primitive})")
    elif hidden := hidden_variation(eqn, walk.axis_name):
        cause = walk.origin(eqn, hidden)
        if _compat.names_axis(eqn, walk.axis_name):
            walk.collective(eqn)
    elif operand := first_cause(operands):
        cause = walk.through(eqn, operand)
    for value in operands:
        if isinstance(value, Cell):
            walk.write(eqn, value, cause)
    if makes_refs:
        return [walk.new_cell(cause) for _ in eqn.outvars]
    return [cause] * len(eqn.outvars)


def hidden_variation(eqn: core.JaxprEqn, axis_name: str) -> str:
    """What an equation depends on that is not among its operands, in words, or ``""``.

    Inner jaxprs are searched, not interpreted: how their inputs and outputs belong to
    the equation's (in a scatter, a reduction, a Pallas kernel) is not known here.
    """
    if _compat.is_plain(eqn):
        return ""
    name = eqn.primitive.name
    if _compat.names_axis(eqn, axis_name):
        return f"a collective over the replicas ({name})"
    if eqn.outvars and _compat.has_hidden_effects(eqn):
        return f"an effect of {name}"
    for jaxpr in _compat.sub_jaxprs(eqn.params):
        for inner in jaxpr.eqns:
            inner_name = inner.primitive.name
            what = _ORIGINS.get(inner_name, "") or _IN_KERNELS.get(inner_name, "")
            if inner_name == "call_hi_primitive":
                what = _OPAQUE
            if not what and not _compat.is_jax_primitive(inner.primitive):
                what = _UNKNOWN
            if not what:
                what = hidden_variation(inner, axis_name)
            if what:
                return what.format(name=inner_name)
    return ""


def identity(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """One output per operand, which varies as that operand does."""
    causes = map(cause_of, operands)
    return [walk.through(eqn, cause) if cause else None for cause in causes]


def label(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """The identity, which may carry the assertion that its operand is uniform."""
    text = _compat.checkpoint_label(eqn) or ""
    cause = cause_of(operands[0])
    if cause is not None and text.startswith(ASSERT_MIRRORED):
        walk.find("assert_mirrored", eqn, cause=cause)
    return identity(walk, eqn, operands)


# -- what varies by itself, and what makes equal -------------------------------------


def varies_by_itself(what: str) -> Rule:
    """The rule of a primitive whose outputs differ even if its operands do not."""

    def rule(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        if eqn.primitive.name != "axis_index" and _compat.names_axis(
            eqn, walk.axis_name
        ):
            walk.collective(eqn)
        cause = walk.origin(eqn, what.format(name=eqn.primitive.name))
        for value in operands:
            if isinstance(value, Cell):
                walk.write(eqn, value, cause)
        return [
            walk.new_cell(cause) if _compat.is_ref(var) else cause
            for var in eqn.outvars
        ]

    return rule


def makes_equal(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """A collective after which all replicas hold the same, if all take part.

    In groups of replicas they do not, even if the operand is uniform: a ``psum`` over
    groups of unequal size multiplies it by unequal numbers.
    """
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    if walk.axis_name not in (axes if isinstance(axes, (tuple, list)) else (axes,)):
        return elementary(walk, eqn, operands)
    if eqn.params.get("axis_index_groups") is not None:
        return _grouped(walk, eqn, operands)
    walk.collective(eqn)
    return [None] * len(eqn.outvars)


def collective_of_one(
    walk: Walk, eqn: core.JaxprEqn, operands: list[Value]
) -> list[Value]:
    """What stands for a collective with one replica: the kinds are as with many."""
    walk.collective(eqn)
    if eqn.params["collective"] == "reduce_scatter":
        what = _COLLECTIVE.format(name="reduce_scatter")
        return [walk.origin(eqn, what)]
    return [None]


def aggregate(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Makes equal, by a collective only if its operand varies; which is noted here."""
    if first_cause(operands):
        eqn.params["how"].varies = True
        walk.collective(eqn)
    return [None]


_UNKNOWN = "the primitive {name}, which is not one of JAX's own"
_OPAQUE = "a computation that cannot be looked into ({name})"
_CALLBACK = "a host callback ({name})"
_RANDOM = "a random number generator with hidden state ({name})"
_COLLECTIVE = "a collective that gives each replica another part ({name})"
_MEMORY = "memory that was never written ({name})"

_ORIGINS = {
    "axis_index": "the replica id ({name})",
    "rng_uniform": _RANDOM,
    "io_callback": _CALLBACK,
    "pure_callback": _CALLBACK,
    "infeed": _CALLBACK,
    "call_exported": _OPAQUE,
    "call_hi_primitive_linearized": _OPAQUE,
    "custom_partitioning": _OPAQUE,
    "ffi_call": _OPAQUE,
    "box_get": _OPAQUE,
    "log_read": _OPAQUE,
    "new_box": _OPAQUE,
    "new_log": _OPAQUE,
    "empty": _MEMORY,
    "empty_ref": _MEMORY,
    "create_linear": _MEMORY,
    "ppermute": _COLLECTIVE,
    "pbroadcast": _COLLECTIVE,
    "pbroadcast_dynamic": _COLLECTIVE,
    "psend": _COLLECTIVE,
    "precv": _COLLECTIVE,
    "all_to_all": _COLLECTIVE,
    "ragged_all_to_all": _COLLECTIVE,
    "reduce_scatter": _COLLECTIVE,
}

# Only kernels can hold these: they reach other devices, keep a hidden state, or depend
# on the order in which threads happen to run.
_IN_KERNELS = {
    "prng_seed": _RANDOM,
    "prng_random_bits": _RANDOM,
    **dict.fromkeys(
        (
            *("dma_start", "get_barrier_semaphore", "get_global"),
            *("semaphore_signal", "semaphore_signal_multicast"),
            *("semaphore_signal_parallel", "multimem_store", "multimem_load_reduce"),
            *("inline_mgpu", "inline_mgpu_p", "mgpu_atomic_store"),
            *("atomic_rmw", "atomic_cas"),
            *("elementwise_inline_asm", "elementwise_inline_asm_p"),
        ),
        _OPAQUE,
    ),
}

unknown = varies_by_itself(_UNKNOWN)
_grouped = varies_by_itself("a collective over groups of replicas ({name})")
_opaque = varies_by_itself(_OPAQUE)


# -- inner jaxprs --------------------------------------------------------------------


def call(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """An inner jaxpr with the equation's own operands and outputs."""
    return _call_of(_only_jaxpr(eqn), walk, eqn, operands)


def hi_primitive(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """A call of what the primitive expands to when it is compiled."""
    if _compat.checkpoint_label(eqn) is not None:
        return label(walk, eqn, operands)
    jaxpr = walk.once(eqn, _compat.expand_hi_primitive)
    return _call_of(jaxpr, walk, eqn, operands)


def _call_of(
    jaxpr: core.Jaxpr | None, walk: Walk, eqn: core.JaxprEqn, operands: list[Value]
) -> list[Value]:
    if jaxpr is None:
        return _opaque(walk, eqn, operands)
    if _compat.is_checkpoint(eqn):
        return walk.run_checkpointed(jaxpr, operands, eqn)
    return walk.run(jaxpr, operands, eqn)


def _only_jaxpr(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """The one inner jaxpr, if its inputs and outputs are those of the equation."""
    shape = [(len(eqn.invars), len(eqn.outvars))]
    jaxprs = _compat.sub_jaxprs(eqn.params)
    if [(len(j.invars), len(j.outvars)) for j in jaxprs] == shape:
        return jaxprs[0]
    return None


def shard_map(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """A call, unless it splits a replica's values over devices of yet another axis."""
    splits = eqn.params.get("newly_manual_axes", True)
    return (_opaque if splits else call)(walk, eqn, operands)


def scan(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """A loop whose number of iterations is known."""
    constants, carries = _compat.scan_counts(eqn.params)
    first, last = constants, constants + carries

    def iteration(carry: list[Value]) -> list[Value]:
        inputs = [*operands[:first], *carry, *operands[last:]]
        return walk.run(eqn.params["jaxpr"], inputs, eqn)

    carry, outputs = walk.settle(iteration, operands[first:last])
    return [*carry, *outputs[carries:]]


def while_loop(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """A loop whose number of iterations varies if its predicate does."""
    params = eqn.params
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]

    def iteration(carry: list[Value]) -> list[Value]:
        inputs = [*operands[:first], *carry]
        (value,) = walk.run(params["cond_jaxpr"], inputs, eqn)
        predicate = cause_of(value)
        if predicate:
            # The predicate is evaluated once more than the body: it diverges as well.
            walk.run_diverging(params["cond_jaxpr"], inputs, eqn, predicate)
        inputs = [*operands[first:last], *carry]
        body = params["body_jaxpr"]
        outputs = walk.run_diverging(body, inputs, eqn, predicate)
        return [value or predicate for value in outputs]

    before = len(walk.written)
    carry, _ = walk.settle(iteration, operands[last:])
    if any(value in walk.written[before:] for value in operands[:first] if value):
        walk.find("ref_in_loop_predicate", eqn)
    return carry


def cond(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Branches, of which replicas take different ones if the index varies."""
    index = cause_of(operands[0])
    outputs = [
        walk.run_diverging(branch, operands[1:], eqn, index)
        for branch in eqn.params["branches"]
    ]
    if index:
        return [walk.through(eqn, index)] * len(eqn.outvars)
    return [first_cause(values) for values in zip(*outputs, strict=True)]


def linear_solve(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Inner functions that are called on the operands in a way only it knows."""
    if any(isinstance(value, Cell) for value in operands):
        return _opaque(walk, eqn, operands)
    operand = first_cause(operands)
    inner: list[Value] = []
    for jaxpr in _compat.sub_jaxprs(eqn.params):
        inner += walk.run(jaxpr, [operand] * len(jaxpr.invars), eqn)
    cause = operand or first_cause(inner)
    return [walk.through(eqn, cause) if cause else None] * len(eqn.outvars)


# -- refs ----------------------------------------------------------------------------


def new_ref(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """A ref that holds its operand."""
    (cause,) = identity(walk, eqn, operands)
    return [walk.new_cell(cause_of(cause))]


def read(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """A ref's contents, perhaps at some indices."""
    cause = first_cause(operands)
    return [walk.through(eqn, cause) if cause else None] * len(eqn.outvars)


def swap(walk: Walk, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Writes into a ref; ``swap`` returns what it held, ``addupdate`` nothing."""
    cell, value, *indices = operands
    assert isinstance(cell, Cell)
    outputs = read(walk, eqn, [cell, *indices])
    walk.write(eqn, cell, first_cause([value, *indices]))
    return outputs


RULES: dict[str, Rule] = {
    **{name: varies_by_itself(what) for name, what in _ORIGINS.items()},
    **dict.fromkeys(
        (
            *("psum", "pmax", "pmin", "all_gather"),
            *("psum_invariant", "all_gather_invariant"),
        ),
        makes_equal,
    ),
    **dict.fromkeys(
        (
            *("jit", "pjit", "closed_call", "core_call", "call", "eval_jaxpr"),
            *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
            *("linear_call", "remat2", "xla_metadata_call"),
        ),
        call,
    ),
    **dict.fromkeys(("optimization_barrier", "pvary"), identity),
    **dict.fromkeys(("get", "freeze", "free_ref"), read),
    **dict.fromkeys(("swap", "addupdate"), swap),
    "call_hi_primitive": hi_primitive,
    "cond": cond,
    "custom_linear_solve": linear_solve,
    "name": label,
    "new_ref": new_ref,
    "scan": scan,
    "shard_map": shard_map,
    "while": while_loop,
}
"""The rules by the names of JAX's primitives; :func:`elementary` is every other's."""
