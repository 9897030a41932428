"""TF's answers for writing to some rows of a variable."""

import jax.numpy as jnp

import replicax as rx

from .steps import replica_id, run
from .table import Each, Raises, differs, same
from .variables import DRIFTS, copies, unequal, variable

UNCOMBINED = Raises("NotImplementedError")


def row_of_a_replica():
    return rx.IndexedSlices(
        values=jnp.reshape(unequal(), 1), indices=jnp.reshape(replica_id(), 1)
    )


def scattered(call, aggregation):
    v = variable([1.0, 2.0, 3.0], aggregation=aggregation)
    run(lambda: getattr(v, call)(row_of_a_replica()))
    return copies(v)


def scatter(call, aggregation, *tf):
    name = f"scatter_replica_{call}_{aggregation}"
    tf = Each(*(2 * tf if len(tf) == 1 else tf)) if tf else UNCOMBINED
    ask = lambda: scattered(call, aggregation)  # noqa: E731
    if aggregation == "NONE":
        ours = Raises(rx.ReplicaDivergenceError)
        return differs(name, tf, ask, ours=ours, reason=DRIFTS)
    return same(name, tf, ask)


def scattered_between_steps(call, aggregation):
    v = variable([1.0, 2.0, 3.0], aggregation=aggregation)
    getattr(v, call)(rx.IndexedSlices(values=[10.0], indices=[1]))
    return copies(v)


CASES = [
    scatter("scatter_add", "NONE", [11.0, 2.0, 3.0], [1.0, 22.0, 3.0]),
    scatter("scatter_sub", "NONE", [-9.0, 2.0, 3.0], [1.0, -18.0, 3.0]),
    scatter("scatter_min", "NONE", [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
    scatter("scatter_max", "NONE", [10.0, 2.0, 3.0], [1.0, 20.0, 3.0]),
    scatter("scatter_div", "NONE", [0.1, 2.0, 3.0], [1.0, 0.1, 3.0]),
    scatter("scatter_add", "SUM", [11.0, 22.0, 3.0]),
    scatter("scatter_sub", "SUM", [-9.0, -18.0, 3.0]),
    scatter("scatter_update", "SUM"),
    scatter("scatter_add", "MEAN", [6.0, 12.0, 3.0]),
    scatter("scatter_sub", "MEAN", [-4.0, -8.0, 3.0]),
    scatter("scatter_update", "MEAN"),
    scatter("scatter_min", "MEAN"),
    scatter("scatter_max", "MEAN"),
    scatter("scatter_mul", "MEAN", [5.0, 20.0, 3.0]),
    scatter("scatter_div", "MEAN", [0.2, 0.2, 3.0]),
    scatter("scatter_update", "ONLY_FIRST_REPLICA", [10.0, 2.0, 3.0]),
    scatter("scatter_mul", "ONLY_FIRST_REPLICA", [10.0, 2.0, 3.0]),
    scatter("scatter_div", "ONLY_FIRST_REPLICA", [0.1, 2.0, 3.0]),
    same(
        "scatter_cross_add",
        Each([1.0, 12.0, 3.0], [1.0, 12.0, 3.0]),
        lambda: scattered_between_steps("scatter_add", "NONE"),
    ),
    same(
        "scatter_cross_update_SUM",
        UNCOMBINED,
        lambda: scattered_between_steps("scatter_update", "SUM"),
    ),
]
