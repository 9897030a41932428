"""Each private or moving JAX symbol that Replicax stands on, on the JAX at hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax import _compat

MESH = Mesh(jax.devices()[:2], ("replica",))


def test_whether_a_trace_is_active():
    assert _compat.no_trace_is_active()
    seen = []
    jax.jit(lambda: seen.append(_compat.no_trace_is_active()))()
    jax.vmap(lambda x: (seen.append(_compat.no_trace_is_active()), x)[1])(jnp.ones(2))
    assert seen == [False, False]
    assert _compat.no_trace_is_active()


def test_a_foreign_mesh_is_told_from_none_and_from_ours():
    other = Mesh(jax.devices()[2:5], ("model",))
    assert not _compat.active_mesh_is_foreign(MESH)
    with jax.set_mesh(MESH):
        assert not _compat.active_mesh_is_foreign(MESH)
    with jax.set_mesh(other):
        assert _compat.active_mesh_is_foreign(MESH)
        with _compat.own_mesh(MESH):
            assert not _compat.active_mesh_is_foreign(MESH)
        assert _compat.active_mesh_is_foreign(MESH)


def test_own_mesh_inside_a_trace():
    other = Mesh(jax.devices()[2:5], ("model",))

    def f(x):
        with _compat.own_mesh(MESH):
            assert not _compat.active_mesh_is_foreign(MESH)
        return x

    with jax.set_mesh(other):
        jax.jit(f)(1.0)


def test_captured_arrays_lose_their_mesh_only_while_asked():
    placed = jax.device_put(jnp.arange(4.0), NamedSharding(MESH, PartitionSpec()))

    def mapped(x):
        return x + placed[1]

    def call():
        return jax.jit(
            jax.shard_map(
                mapped,
                mesh=MESH,
                in_specs=PartitionSpec("replica"),
                out_specs=PartitionSpec("replica"),
                check_vma=False,
            )
        )(jnp.arange(2.0))

    with _compat.captured_arrays_as_constants():
        assert call().tolist() == [1.0, 2.0]
    before = str(jax.typeof(placed))
    with _compat.captured_arrays_as_constants():
        jax.typeof(placed)
    assert str(jax.typeof(placed)) == before


@pytest.mark.parametrize(
    ("collective", "gradient"),
    [
        ("all_reduce", "all_reduce"),
        ("all_gather", "reduce_scatter"),
        ("reduce_scatter", "all_gather"),
    ],
)
def test_a_collective_of_one_is_the_identity_under_every_transformation(
    collective, gradient
):
    def f(x):
        return _compat.collective_of_one(x * 2, collective)

    x = jnp.arange(3.0)
    assert f(x).tolist() == jax.jit(f)(x).tolist() == [0, 2, 4]
    assert jax.vmap(f)(x).tolist() == [0, 2, 4]
    assert jax.grad(lambda x: f(x).sum())(x).tolist() == [2, 2, 2]
    assert jax.jvp(f, (x,), (x,))[1].tolist() == [0, 2, 4]
    assert jax.grad(lambda x: jax.checkpoint(f)(x).sum())(x).tolist() == [2, 2, 2]
    text = str(jax.make_jaxpr(jax.grad(lambda x: f(x).sum()))(x))
    assert f"collective={gradient}" in text
    assert "custom_call" not in jax.jit(f).lower(x).compile().as_text()


def test_the_hook_survives_exceptions():
    with pytest.raises(KeyError), _compat.captured_arrays_as_constants():
        raise KeyError
    assert not _compat._hook.active


def test_the_number_of_signatures_grows_with_places_as_well_as_shapes():
    f = jax.jit(lambda x: x + 1)
    for _ in range(2):
        f(jnp.ones(2))
        assert _compat.num_signatures(f) == 1
    f(jax.device_put(jnp.ones(2), NamedSharding(MESH, PartitionSpec())))
    assert _compat.num_signatures(f) == 2
    f(jnp.ones(3))
    assert _compat.num_signatures(f) == 3


def test_parts_are_those_of_the_shards_and_leave_no_trace():
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(jax.devices()[:2], "x"), jax.sharding.PartitionSpec()
    )
    x = jax.device_put(jnp.arange(3.0), sharding)
    pointers = [part.unsafe_buffer_pointer() for part in _compat.parts_of(x)]
    assert "addressable_shards" not in vars(x)
    assert pointers == [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    assert "addressable_shards" in vars(x)
