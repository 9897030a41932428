"""Variables, where it is easy to be wrong: rows that are not there, slices."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

SHARDING = rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_variables_above=0)


def test_rows_that_do_not_exist_are_dropped_in_a_step(two):
    with two.scope():
        v = rx.Variable(jnp.zeros(3))
    indices = jnp.array([-1, 1, 3])
    two.run(lambda i: v.scatter_add(rx.IndexedSlices(jnp.ones(3), i)), (indices,))
    assert v.numpy().tolist() == [0, 1, 0]


@pytest.mark.parametrize("index", [-1, 3])
def test_rows_that_do_not_exist_are_an_error_between_steps(index):
    v = rx.Variable(jnp.zeros(3))
    with pytest.raises(IndexError, match=rf"got index {index}.*rows are 0 to 2"):
        v.scatter_sub(rx.IndexedSlices(jnp.ones(1), jnp.array([index])))


def test_the_copies_of_a_sharded_variable_are_what_replicas_read():
    value = np.float32([1, 2, 3])  # an odd number, so that slices hold filler
    with SHARDING.scope():
        v = rx.Variable(value)
    copies = SHARDING.experimental_local_results(v)
    assert [copy.tolist() for copy in copies] == [[1, 2, 3]] * 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, "float16"])
def test_a_dtype_is_no_function_of_a_path(dtype):
    made = rx.variables({"w": 1.0}, dtype=dtype)
    chosen = rx.variables({"w": 1.0}, dtype=lambda path: dtype)
    assert made["w"].dtype == chosen["w"].dtype == jnp.dtype(dtype)


def test_a_variable_without_synchronization_stays_out_of_strategies(two):
    v = rx.Variable(1.0, synchronization=rx.VariableSynchronization.NONE)
    with pytest.raises(ValueError, match="NONE, which leaves its copies"):
        two.run(lambda: v.assign_add(1.0))
    assert float(v) == 1
