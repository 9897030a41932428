"""The one place that touches private or moving parts of JAX.

Each function says which symbol it stands on. ``tests/test_compat.py`` has a test for
every one of them, run on the oldest and the newest JAX that Replicax supports.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.core
import jax.extend.core
import jax.ref
import numpy as np
from jax._src import core as _core
from jax._src.state.types import RefEffect as _RefEffect
from jax.extend.core import Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

# Whether the caller runs outside of every JAX transformation. An alias, since it stands
# on the path of every call of a step.
no_trace_is_active = _core.trace_ctx.is_top_level


def trace_level() -> Any:
    """Stands for the trace that operations are recorded in now; compare with ``==``.

    Each transformation (``jax.jit``, ``jax.grad``, the body of a ``lax.scan``) makes a
    level of its own. Stands on ``jax.extend.core.get_opaque_trace_state``.
    """
    return jax.extend.core.get_opaque_trace_state(convention="nnx")


def is_staged() -> bool:
    """Whether operations are recorded now, rather than carried out.

    So it is in a ``jax.jit``, but not in a ``jax.grad`` or ``jax.vmap`` by itself.
    """
    return isinstance(jax.lax.add(_ZERO, _ZERO), jax.core.Tracer)


_ZERO = np.float32(0)


def is_searched_for_nans() -> bool:
    """Whether JAX calls a compiled function by its parts, to find a NaN.

    It does so when ``jax_debug_nans`` is set and a NaN came out. Without effect on
    ``shard_map``, whose parts it would call by their parts without end.
    """
    config: Any = jax.config
    return no_trace_is_active() and not config.jax_disable_jit


num_signatures: Callable[[Any], int] = operator.methodcaller("_cache_size")
"""Returns how many kinds of arguments a jitted function is ready for.

Each structure, shape, dtype and place makes another kind. Stands on the private
method ``_cache_size``.
"""


def active_mesh_is_foreign(mesh: jax.sharding.Mesh) -> bool:
    """Whether the caller has set a mesh (``jax.set_mesh``) other than ``mesh``."""
    active = jax.sharding.get_abstract_mesh()
    return not active.empty and active != mesh.abstract_mesh


@contextlib.contextmanager
def own_mesh(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Makes ``mesh`` the active one while a program of ours is traced and called.

    Inside a trace, by way of no mesh at all, since JAX refuses to go from one size to
    another there.
    """
    if no_trace_is_active():
        with jax.set_mesh(mesh):
            yield
        return
    with (
        jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        yield


@contextlib.contextmanager
def mesh_for(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Lets operations on arrays of a mesh pass, whatever mesh the caller has set.

    JAX refuses arrays that do not lie on all devices of that one.
    """
    if no_trace_is_active() and active_mesh_is_foreign(mesh):
        with jax.set_mesh(mesh):
            yield
    else:
        yield


def parts_of(x: jax.Array) -> list[jax.Array]:
    """The part of an array on each of its devices, in the same memory.

    As ``x.addressable_shards``, but without its trace on ``x``. Stands on the private
    ``_arrays``.
    """
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return [shard.data for shard in x.addressable_shards]
    return x._arrays  # pyright: ignore[reportAttributeAccessIssue]


# -- collectives of one replica ------------------------------------------------------

_TRANSPOSED = {
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
}

collective_of_one_p = Primitive("collective_of_one")
"""The identity, in place of a collective that has one replica to talk to.

It compiles to nothing, and tells the replication proof what stands here when there are
more replicas. Stands on ``jax.interpreters``, whose modules are public but moving.
"""
collective_of_one_p.def_impl(lambda x, collective: x)
collective_of_one_p.def_abstract_eval(lambda x, collective: x)
mlir.register_lowering(collective_of_one_p, lambda ctx, x, collective: [x])
ad.deflinear2(
    collective_of_one_p,
    lambda ct, _, collective: [
        collective_of_one_p.bind(ct, collective=_TRANSPOSED[collective])
    ],
)
batching.defvectorized(collective_of_one_p)


def collective_of_one(x: jax.Array, collective: str) -> jax.Array:
    """Returns ``x``, marked as what a collective returned.

    Args:
      x: The one replica's array.
      collective: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
    """
    return collective_of_one_p.bind(x, collective=collective)


class Aggregated:
    """What an :func:`aggregate` compiles to, to be decided by the proof.

    Args:
      communicate: Combines a value that may differ between replicas.
      without: Does so for one that is the same on all of them.

    Attributes:
      varies: Whether the value may differ. Set between tracing and lowering.
    """

    def __init__(
        self,
        communicate: Callable[[jax.Array], jax.Array],
        without: Callable[[jax.Array], jax.Array],
    ):
        self._communicate = communicate
        self._without = without
        self.varies = False

    def __call__(self, x: jax.Array) -> jax.Array:
        """Combines ``x`` over the replicas."""
        return (self._communicate if self.varies else self._without)(x)


aggregate_p = Primitive("aggregate")
"""Combines a value over replicas. Its lowering asks :class:`Aggregated` how.

Stands on ``jax.interpreters`` and on ``mlir.lower_fun``.
"""
aggregate_p.def_abstract_eval(lambda x, *, axis_name, how: x)
mlir.register_lowering(
    aggregate_p,
    mlir.lower_fun(lambda x, *, axis_name, how: how(x), multiple_results=False),
)
batching.defvectorized(aggregate_p)


def aggregate(x: jax.Array, axis_name: str, how: Aggregated) -> jax.Array:
    """Returns ``x`` combined over replicas, as ``how`` will say when it is lowered."""
    return aggregate_p.bind(x, axis_name=axis_name, how=how)


# -- captured arrays -----------------------------------------------------------------


class _Hook(threading.local):
    active = False


_hook = _Hook()
_hook_installed = False
_install_lock = threading.Lock()


@contextlib.contextmanager
def captured_arrays_as_constants() -> Iterator[None]:
    """Lets a ``shard_map`` body index arrays that it captures from the mesh.

    JAX gives a captured array a type that carries its own mesh, which then clashes
    with the mesh context of the body in ``x[0]``, ``jnp.where`` and the like. While
    this is entered, this thread sees captured arrays as types without a mesh.

    Stands on the private table ``jax._src.core.pytype_aval_mappings``. If that is
    gone, nothing is changed, and such operations raise JAX's own error.
    """
    _install_hook()
    before, _hook.active = _hook.active, True
    try:
        yield
    finally:
        _hook.active = before


def _install_hook() -> None:
    global _hook_installed
    with _install_lock:
        if _hook_installed:
            return
        _hook_installed = True
        table = getattr(_core, "pytype_aval_mappings", {})
        array_type = next((t for t in table if t.__name__ == "ArrayImpl"), None)
        if array_type is None:
            return
        original = table[array_type]

        def type_of_array(x: Any) -> Any:
            aval = original(x)
            if _hook.active:
                return jax.core.ShapedArray(
                    aval.shape, aval.dtype, weak_type=aval.weak_type
                )
            return aval

        table[array_type] = type_of_array


# -- jaxprs --------------------------------------------------------------------------


def is_jaxpr(x: Any) -> bool:
    """Whether ``x`` is a jaxpr, open or closed."""
    return isinstance(getattr(x, "jaxpr", x), Jaxpr)


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """The jaxpr itself, without the values of its constants.

    ``jax.make_jaxpr`` returns a ``ClosedJaxpr`` up to jax 0.10 and a ``Jaxpr``, which
    is its own ``.jaxpr``, in later versions.
    """
    return getattr(jaxpr, "jaxpr", jaxpr)


def evaluate(jaxpr: Any, args: Iterable[Any]) -> list[Any]:
    """The outputs of a jaxpr with its constants.

    Stands on ``jax.core.eval_jaxpr``, because ``jax.extend.core.jaxpr_as_fun`` makes
    its thread deaf to ``jax_debug_nans`` from there on.
    """
    return jax.core.eval_jaxpr(open_jaxpr(jaxpr), jaxpr.consts, *args)


def bind(eqn: JaxprEqn, arrays: Iterable[Any]) -> list[Any]:
    """The outputs of an equation for operands that may have other shapes than its own.

    Stands on the undocumented method ``Primitive.get_bind_params``.
    """
    primitive: Any = eqn.primitive
    made = primitive.bind(*arrays, **primitive.get_bind_params(eqn.params))
    return list(made) if primitive.multiple_results else [made]


def sub_jaxprs(params: Mapping[str, Any]) -> list[Jaxpr]:
    """The jaxprs among an equation's parameters, also those inside of tuples."""
    found: list[Jaxpr] = []
    _collect_jaxprs(params.values(), found)
    return found


def _collect_jaxprs(values: Iterable[Any], found: list[Jaxpr]) -> None:
    for value in values:
        if isinstance(value, (tuple, list)):
            _collect_jaxprs(value, found)
        elif is_jaxpr(value):
            found.append(open_jaxpr(value))


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a ``scan`` are constants, and how many are carries.

    Stands on the parameters ``num_consts`` and ``num_carry`` up to jax 0.10, and on
    the tree of operands ``ft_in`` in later versions.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carries, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carries))


def is_ref(variable: Any) -> bool:
    """Whether a variable of a jaxpr holds a mutable reference (``jax.new_ref``)."""
    return isinstance(variable.aval, jax.ref.AbstractRef)


def expand_hi_primitive(eqn: JaxprEqn) -> Jaxpr | None:
    """The jaxpr that a ``call_hi_primitive`` equation is compiled as.

    From jax 0.11 on, ``jnp.searchsorted``, ``lax.custom_root`` and others are objects
    with a method ``expand`` in place of primitives. ``None`` where it cannot be traced
    apart from its program. Stands on the private parameter ``_prim`` and its method.
    """
    operands: list[Any] = [v.aval for v in eqn.invars]
    if not all(type(aval) is jax.core.ShapedArray for aval in operands):
        return None
    hi_primitive = eqn.params["_prim"]

    def expanded(*leaves: jax.Array) -> Any:
        return hi_primitive.expand(*jax.tree.unflatten(hi_primitive.in_tree, leaves))

    try:
        with eqn.ctx.manager:
            jaxpr = jax.make_jaxpr(expanded)(
                *(
                    jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
                    for a in operands
                )
            )
    except Exception:
        return None
    return open_jaxpr(jaxpr)


def is_checkpoint(eqn: JaxprEqn) -> bool:
    """Whether an equation is a ``jax.checkpoint``, of which the inside may run twice.

    Stands on the primitive's name ``remat2``, and on that of its future form.
    """
    if eqn.primitive.name == "call_hi_primitive":
        return type(eqn.params["_prim"]).__name__ == "RematTraced"
    return eqn.primitive.name == "remat2"


def checkpoint_label(eqn: JaxprEqn) -> str | None:
    """The label of a ``jax.ad_checkpoint.checkpoint_name``; else ``None``.

    Stands on the primitive's name ``name``, and on that of its future form.
    """
    if eqn.primitive.name == "call_hi_primitive":
        hi_primitive = eqn.params["_prim"]
        is_label = type(hi_primitive).__name__ == "CheckpointName"
        return hi_primitive.params["name"] if is_label else None
    return eqn.params["name"] if eqn.primitive.name == "name" else None


def is_plain(eqn: JaxprEqn) -> bool:
    """Whether an equation has no effect, no inner jaxpr and no axis name.

    True for most equations, and quickly decided; where false, look closer.
    """
    return not eqn.effects and all(
        isinstance(v, _INERT) or (type(v) is tuple and all(type(i) is int for i in v))
        for v in eqn.params.values()
    )


_INERT = (type(None), int, float, jax.numpy.dtype, jax.sharding.Sharding)


def names_axis(eqn: JaxprEqn, axis_name: str) -> bool:
    """Whether an equation mentions a mesh axis, in its effects or its parameters.

    Both are read, because ``ppermute`` carries no effect. Stands on the private
    ``jax._src.core.NamedAxisEffect``.
    """
    for effect in eqn.effects:
        if isinstance(effect, _core.NamedAxisEffect) and effect.name == axis_name:
            return True
    for key, value in eqn.params.items():
        if isinstance(value, str):
            if value == axis_name and key != "name":
                return True
        elif isinstance(value, (tuple, list, set, frozenset)) and any(
            isinstance(v, str) and v == axis_name for v in value
        ):
            return True
    return False


def has_hidden_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than compute, use a ref, or use a mesh axis.

    Stands on the private effect classes of ``jax._src.core`` and
    ``jax._src.state.types``.
    """
    return any(not isinstance(effect, _PLAIN_EFFECTS) for effect in eqn.effects)


_PLAIN_EFFECTS = (_core.NamedAxisEffect, _core.InternalMutableArrayEffect, _RefEffect)


def is_jax_primitive(primitive: Primitive) -> bool:
    """Whether JAX itself defines a primitive, so that its name says what it does.

    A primitive is JAX's own if one of JAX's loaded modules holds it.
    """
    if primitive not in _jax_primitives:
        _jax_primitives.update(
            value
            for name, module in list(sys.modules.items())
            if name.split(".", 1)[0] == "jax"
            for value in list(vars(module).values())
            if isinstance(value, Primitive)
        )
    return primitive in _jax_primitives


_jax_primitives: set[Primitive] = set()


# -- where an equation comes from ----------------------------------------------------


def name_stack(eqn: JaxprEqn) -> str:
    """The transformations and scopes that an equation was traced under.

    Equations of a backward pass have ``transpose(`` in it. Stands on the private
    ``source_info.name_stack``.
    """
    return str(eqn.source_info.name_stack)


def frames(eqn: JaxprEqn) -> list[tuple[str, int, str]]:
    """The calls that made an equation, innermost first: file, line, function.

    An equation of an inner jaxpr (of a scan's body, say) has the frames inside of
    that body only. Stands on the private ``source_info.traceback``.
    """
    traceback = eqn.source_info.traceback
    if traceback is None:
        return []
    return [(f.file_name, f.line_num, f.function_name) for f in traceback.frames]


def is_gradient_call(file: str, function: str) -> bool:
    """Whether a frame is JAX's entry into differentiation (``grad``, ``vjp``, ...).

    Stands on the names of the functions in ``jax/_src/api.py``.
    """
    return file.endswith(_API_FILE) and function.startswith(
        ("grad", "value_and_grad", "vjp", "jacrev", "linear_transpose")
    )


_API_FILE = os.path.join("jax", "_src", "api.py")


@functools.cache
def is_jax_file(file: str) -> bool:
    """Whether a source file belongs to JAX."""
    path = os.path.abspath(file)
    return file.startswith("<frozen ") or path.startswith(
        _folders_of(("jax", "jaxlib"))
    )


@functools.cache
def is_library_file(file: str) -> bool:
    """Whether a source file belongs to a library, and not to the user's program."""
    if file.startswith("<frozen "):
        return True
    path = os.path.abspath(file)
    if path.startswith(_library_folders()):
        return True
    installed = "site-packages" in path or "dist-packages" in path
    return not installed and path.startswith(os.path.dirname(os.__file__) + os.sep)


_LIBRARIES = (
    *("jax", "jaxlib", "flax", "optax", "chex", "numpy"),
    *("replicax", "replicax.strategies", "replicax.datasets"),
)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """The folders of JAX, Flax, Optax and Replicax."""
    return _folders_of(_LIBRARIES)


@functools.cache
def _folders_of(packages: tuple[str, ...]) -> tuple[str, ...]:
    folders: list[str] = []
    for name in packages:
        with contextlib.suppress(ImportError):
            spec = importlib.util.find_spec(name)
            folders += list(spec.submodule_search_locations or ()) if spec else []
    return tuple(os.path.join(os.path.abspath(f), "") for f in folders)
