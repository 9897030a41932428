"""The one door through which values get onto a strategy's devices.

A mirrored value lies whole on every device (a replicated sharding); a per-replica one
has a row on each. What already lies so is left alone. What does not is placed once:
arrays that were placed are remembered weakly, so that parameters which a caller passes
again and again are sent to the devices a single time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax import _compat
from replicax.errors import (
    PerReplicaError,
    ReplicaDivergenceError,
    StaticArgumentError,
)
from replicax.values import PerReplica

from ..datasets import buffers


class Placer:
    """Places values on the devices of one mesh.

    Args:
      mesh: A one-dimensional mesh.
      axis_name: The name of its axis.
    """

    def __init__(self, mesh: Mesh, axis_name: str):
        self.num_replicas = mesh.size
        self.axis_name = axis_name
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.per_replica = NamedSharding(mesh, PartitionSpec(axis_name))
        self._placed: dict[int, tuple[weakref.ref[Any], jax.Array]] = {}

    # -- placing ---------------------------------------------------------------------

    def mirrored(self, x: Any) -> jax.Array:
        """Returns ``x`` as an array that lies whole on every device.

        Args:
          x: A jax array on any devices, a numpy array or a number.

        Returns:
          ``x`` itself if it lies so already, else a placed copy. The copy of a jax
          array is remembered for as long as the original lives; numpy arrays can
          change and are sent again.
        """
        if not isinstance(x, jax.Array):
            return jax.device_put(_frozen(x), self.replicated)
        return self._placed_as(x, self.replicated)

    def stacked(self, x: Any) -> jax.Array:
        """Returns a stacked array with row ``r`` on the device of replica ``r``.

        Args:
          x: The stacked array, ``[num_replicas, ...]``.

        Raises:
          PerReplicaError: ``x`` holds another number of replicas.
        """
        if np.ndim(x) == 0 or np.shape(x)[0] != self.num_replicas:
            held = np.shape(x)[0] if np.ndim(x) else "no"
            raise PerReplicaError(
                f"{replicas_of(self.num_replicas)} Got a PerReplica that holds {held}. "
                "Make it with this strategy: by its `run`, its distributed datasets, "
                "or `experimental_distribute_values_from_function`."
            )
        if not isinstance(x, jax.Array):
            return jax.device_put(_frozen(x), self.per_replica)
        return self._placed_as(x, self.per_replica)

    def _placed_as(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        if self.lies_as(x, sharding):
            return x
        known = self._placed.get(id(x))
        if known is not None and known[0]() is x and not known[1].is_deleted():
            return known[1]
        # device_put may share memory with its source, even when told not to.
        placed = self.copy(jax.device_put(x, sharding))
        forget = _forget(self._placed, id(x))
        self._placed[id(x)] = (weakref.ref(x, forget), placed)
        return placed

    def copy(self, x: jax.Array) -> jax.Array:
        """Returns a copy of a placed array, whatever mesh the caller has set."""
        mesh: Any = self.replicated.mesh
        with _compat.mesh_for(mesh):
            return x.copy()

    def lies_as(self, x: Any, sharding: NamedSharding) -> bool:
        """Whether ``x`` is an array that lies as ``sharding`` says already.

        On one device, a sharding of another class is not good enough: it would be the
        same memory, but another program.
        """
        return isinstance(x, jax.Array) and (
            x.sharding is sharding
            or (
                isinstance(x.sharding, NamedSharding)
                and x.sharding.is_equivalent_to(sharding, x.ndim)
            )
        )

    # -- checking --------------------------------------------------------------------

    def check_copies_equal(self, named: Iterable[tuple[str, Any]]) -> None:
        """Raises if the copies of a mirrored array differ between devices.

        Args:
          named: Pairs of a name and an array.

        Raises:
          ReplicaDivergenceError: Some copies are not bit-equal; all are named.
        """
        unequal = []
        for name, x in named:
            if isinstance(x, jax.core.Tracer) or not self.lies_as(x, self.replicated):
                continue
            if x.is_deleted():
                continue  # the launch will say so
            if is_key(x):
                x = jax.random.key_data(x)
            copies = [np.asarray(s.data).tobytes() for s in x.addressable_shards]
            if any(c != copies[0] for c in copies):
                unequal.append(name)
        if unequal:
            raise ReplicaDivergenceError(
                "These arguments are labelled as mirrored, but their copies differ "
                f"between devices: {', '.join(unequal)}. They were probably built "
                "from data that differs per device; build them from one source, or "
                "pass them as PerReplica."
            )


def _forget(table: dict[int, Any], key: int) -> Any:
    def forget(reference: Any) -> None:
        entry = table.get(key)
        if entry is not None and entry[0] is reference:
            del table[key]

    return forget


def _frozen(x: Any) -> Any:
    """A copy of a numpy array, since JAX may read it after the caller changes it."""
    return x.copy() if isinstance(x, np.ndarray) else x


def as_array(x: Any) -> Any:
    """Returns a component as an array: jax arrays as they are, the rest as numpy."""
    return x if isinstance(x, jax.Array) else np.asarray(x)


def replicas_of(number: int) -> str:
    """Says how many replicas a strategy has, to somebody who has another number."""
    if number > 1:
        return f"The strategy has {number} replicas."
    return (
        "The strategy has 1 replica. (Outside of `with strategy.scope():`, "
        "`rx.get_strategy()` is the default strategy, of one replica.)"
    )


def is_key(x: Any) -> bool:
    """Whether ``x`` is an array of random keys."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def may_be_key(x: Any) -> bool:
    """Whether ``x`` is an array of random keys, or of what they are made of."""
    if is_key(x):
        return True
    shape = getattr(x, "shape", ())
    return shape[-1:] in ((2,), (4,)) and x.dtype == np.uint32


def is_numeric(x: Any) -> bool:
    """Whether an array can lie on a device: not one of strings or objects."""
    return isinstance(x, jax.Array) or buffers.is_numeric(x.dtype)


def stack(value: PerReplica, placer: Placer, name: str = "the value") -> PerReplica:
    """Returns a per-replica value as one placed array.

    Args:
      value: A per-replica value; its components may have been given by hand.
      placer: Where to place it.
      name: What to call it in an error.

    Raises:
      PerReplicaError: Components have unequal shapes or dtypes, or their number is not
        the number of replicas.
      StaticArgumentError: Components are strings or objects.
    """
    if value.is_stacked:
        stacked = PerReplica.from_array(placer.stacked(value.array))
        stacked.is_data = value.is_data
        return stacked
    parts = [as_array(x) for x in value.values]
    if not all(map(is_numeric, parts)):
        raise StaticArgumentError(
            f"{name} holds values of dtype {parts[0].dtype}, which stay on the host. "
            "Take them out of what is passed to `run`, or encode them as numbers."
        )
    shapes = {np.shape(p) for p in parts}
    if len(shapes) > 1 or len({p.dtype for p in parts}) > 1:
        listed = ", ".join(
            f"replica {i}: {p.dtype}{list(np.shape(p))}" for i, p in enumerate(parts)
        )
        raise PerReplicaError(
            "A step needs equal shapes and dtypes on all replicas, because it is one "
            f"program. {name} has {listed}. Pad the components to one shape and pass "
            "a mask, or combine them outside of the step with `reduce` or `gather`."
        )
    if len(parts) != placer.num_replicas:
        raise PerReplicaError(
            f"The strategy has {placer.num_replicas} replicas. {name} holds "
            f"{len(parts)} components."
        )
    stacked = PerReplica.from_array(from_components(parts, placer.per_replica))
    stacked.is_data = True
    return stacked


def from_components(parts: list[Any], sharding: NamedSharding) -> jax.Array:
    """Builds the stacked array of equal components, each sent to its device only.

    Args:
      parts: One array per replica, of equal shape and dtype.
      sharding: The per-replica sharding of the mesh.

    Returns:
      An array of shape ``[num_replicas, ...]``.
    """
    if any(isinstance(p, jax.core.Tracer) for p in parts):
        return jax.numpy.stack(parts)
    with jax.ensure_compile_time_eval():
        return _placed_rows(parts, sharding)


def _placed_rows(parts: list[Any], sharding: NamedSharding) -> jax.Array:
    mesh: Any = sharding.mesh
    devices = list(mesh.devices.flat)
    rows = [
        jax.device_put(
            jax.numpy.expand_dims(p, 0)
            if isinstance(p, jax.Array)
            else np.array(p)[None],
            d,
        )
        for p, d in zip(parts, devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(
        (len(rows), *rows[0].shape[1:]), sharding, rows
    )
