"""Slices of arrays on replicas, and an optimizer that keeps its state in them."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec
from replicax.strategies.elementwise import prove_elementwise
from replicax.strategies.replication import prove
from replicax.strategies.state_sharding import (
    all_gather,
    reduce_scatter,
    shard_layout,
)

import replicax as rx

SHAPES = [(), (0,), (1,), (7,), (5, 3), (2, 0, 3), (8, 24), (64, 300)]
AXIS = "replica"


def layouts_of(arrays, n):
    return [shard_layout(x.shape, x.dtype, n) for x in arrays]


def arrays_of(n=None):
    """Small whole numbers, of which all sums are exact, also in bfloat16."""
    random = np.random.default_rng(0)
    lead = () if n is None else (n,)
    return [
        jnp.asarray(random.integers(-4, 5, size=(*lead, *shape)), dtype)
        for shape, dtype in zip(
            SHAPES, itertools.cycle((jnp.float32, jnp.bfloat16)), strict=False
        )
    ]


def on_replicas(step, n, in_specs):
    """A step as a compiled function whose outputs are equal on all replicas."""
    mesh = Mesh(np.array(jax.devices()[:n]), (AXIS,))
    specs = {"in_specs": in_specs, "out_specs": PartitionSpec()}
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_slices_are_joined_to_the_array_that_they_were(n):
    for x in arrays_of():
        (layout,) = layouts_of([x], n)
        shards = layout.to_shards(x)
        assert shards.shape == (n, layout.length)
        assert shards.dtype == x.dtype
        assert shards.nbytes == layout.nbytes < x.nbytes + n * x.dtype.itemsize
        np.testing.assert_array_equal(layout.from_shards(shards), x)
        np.testing.assert_array_equal(layout.own_slice(x, n - 1), shards[-1])
        padding = np.ravel(shards)[x.size :]
        np.testing.assert_array_equal(padding, np.zeros_like(padding))


def test_what_does_not_fit_a_layout_is_refused():
    layout = shard_layout((5,), jnp.float32, 2)
    with pytest.raises(ValueError, match=r"of shape \(5,\)\. Got \(4,\)"):
        layout.to_shards(jnp.zeros(4))
    with pytest.raises(ValueError, match=r"slices of shape \(2, 3\)\. Got \(3, 2\)"):
        layout.from_shards(jnp.zeros((3, 2)))
    with pytest.raises(ValueError, match="at least one replica"):
        shard_layout((5,), jnp.float32, 0)


@pytest.mark.parametrize(
    ("n", "op", "bytes_per_pack"),
    [
        *((1, "mean", 1 << 10), (2, "sum", 0), (2, "mean", 1 << 20)),
        *((3, "mean", 1 << 10), (8, "sum", 1 << 10)),
    ],
)
def test_scattered_and_gathered_again_is_reduced(n, op, bytes_per_pack):
    stacked = arrays_of(n)
    layouts = layouts_of([x[0] for x in stacked], n)

    def step(rows):
        own = reduce_scatter(op, [x[0] for x in rows], layouts, AXIS, bytes_per_pack)
        assert [x.shape for x in own] == [(layout.length,) for layout in layouts]
        return all_gather(own, layouts, AXIS, bytes_per_pack)

    one = [x[:1] for x in stacked]
    traced = jax.make_jaxpr(step, axis_env=[(AXIS, n)])(one)
    assert not any(prove(traced, [True] * len(stacked)).varies)
    run = on_replicas(step, n, PartitionSpec(AXIS))
    for ours, x in zip(run(stacked), stacked, strict=True):
        expected = getattr(np, op)(np.asarray(x, np.float32), axis=0)
        assert ours.dtype == x.dtype
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), expected, rtol=2**-8, atol=0
        )


@pytest.mark.parametrize(("bytes_per_pack", "calls"), [(0, 3), (1 << 10, 2)])
def test_small_arrays_share_a_collective(bytes_per_pack, calls):
    small, large = jnp.zeros(10), jnp.zeros(1000)
    arrays = [small, large, small]
    layouts = layouts_of(arrays, 2)

    def step(arrays):
        own = reduce_scatter("sum", arrays, layouts, AXIS, bytes_per_pack)
        return all_gather(own, layouts, AXIS, bytes_per_pack)

    text = on_replicas(step, 2, PartitionSpec()).lower(arrays).compile().as_text()
    assert len(re.findall(r" reduce-scatter(-start)?\(", text)) == calls
    assert len(re.findall(r" all-gather(-start)?\(", text)) == calls
    assert " all-reduce" not in text


# -- training --------------------------------------------------------------------------

ADAM = optax.adam(0.01)
LAYERS = (13, 16, 5)


def perceptron():
    random = np.random.default_rng(0)
    return [
        {
            "w": jnp.asarray(random.normal(size=size, scale=0.3), jnp.float32),
            "b": jnp.zeros(size[1]),
        }
        for size in itertools.pairwise(LAYERS)
    ]


def loss_fn(params, x, y):
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(jnp.square(x @ last["w"] + last["b"] - y))


def replicated_step(params, slots, x, y):
    gradients = jax.grad(loss_fn)(params, x, y)
    gradients = rx.get_replica_context().all_reduce("mean", gradients)
    updates, slots = ADAM.update(gradients, slots, params)
    return optax.apply_updates(params, updates), slots


def sharded_step_of(params, n):
    """The step with slices, and the slots in slices `[N, k]`."""
    leaves, treedef = jax.tree.flatten(params)
    layouts = layouts_of(leaves, n)
    slots, slot_tree = jax.tree.flatten(ADAM.init(params))
    proof = prove_elementwise(ADAM.update, params, ADAM.init(params), params)
    assert proof.holds
    sliced = [
        slot if owner is None else layouts[owner].to_shards(slot)
        for slot, owner in zip(slots, proof.slot_owners, strict=True)
    ]

    def step(params, slots, x, y):
        gradients = jax.tree.leaves(jax.grad(loss_fn)(params, x, y))
        gradients = reduce_scatter("mean", gradients, layouts, AXIS)
        r = rx.get_replica_context().replica_id_in_sync_group
        own = [
            layout.own_slice(p, r)
            for layout, p in zip(layouts, jax.tree.leaves(params), strict=True)
        ]
        updates, slots = proof.update(
            treedef.unflatten(gradients), slots, treedef.unflatten(own)
        )
        own = optax.apply_updates(own, jax.tree.leaves(updates))
        return treedef.unflatten(all_gather(own, layouts, AXIS)), slots

    return step, (slot_tree, sliced, proof.slot_owners)


def distribute(strategy, slots):
    """Slots as ``run`` takes them: those in slices as per-replica values."""
    tree, arrays, owners = slots
    return tree.unflatten(
        x
        if owner is None
        else strategy.experimental_distribute_values_from_function(
            lambda context, x=x: x[context.replica_id_in_sync_group]
        )
        for x, owner in zip(arrays, owners, strict=True)
    )


def bytes_on(device, tree):
    """The bytes of a tree's arrays that lie on a device."""
    arrays = jax.tree.leaves(
        jax.tree.map(
            lambda x: list(x.values) if isinstance(x, rx.PerReplica) else [x],
            tree,
            is_leaf=lambda x: isinstance(x, rx.PerReplica),
        )
    )
    return sum(
        shard.data.nbytes
        for x in arrays
        for shard in x.addressable_shards
        if shard.device == device
    )


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_an_optimizer_with_its_state_in_slices_trains_alike(n):
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(n)])
    random = np.random.default_rng(1)
    batch = [
        strategy.experimental_distribute_values_from_function(
            lambda _, width=width: random.normal(size=(4, width)).astype(np.float32)
        )
        for width in (LAYERS[0], LAYERS[-1])
    ]
    params = ours = perceptron()
    slots = ADAM.init(params)
    step, slices = sharded_step_of(params, n)
    sliced = distribute(strategy, slices)
    for _ in range(3):
        params, slots = strategy.run(replicated_step, (params, slots, *batch))
        ours, sliced = strategy.run(step, (ours, sliced, *batch))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(params), strict=True):
        assert not isinstance(a, rx.PerReplica)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    whole = bytes_on(jax.devices()[0], slots)
    for device in jax.devices()[:n]:
        # Padding adds at most an element a slot, and the count is held whole.
        assert whole / n <= bytes_on(device, sliced) <= whole / n + 4 * (8 + 1)
