"""Uses an installed Replicax the way a first user does."""

import pathlib

import jax.numpy as jnp
import numpy as np

import replicax as rx

tree = pathlib.Path(__file__).resolve().parents[1]
assert tree not in pathlib.Path(rx.__file__).resolve().parents, rx.__file__

rx.set_virtual_devices(4)
strategy = rx.MirroredStrategy()
assert strategy.num_replicas_in_sync == 4


def step(x):
    """Returns the mean over all replicas, and this replica's squared distances."""
    context = rx.get_replica_context()
    mean = context.all_reduce("mean", x.mean())
    return mean, (x - mean) ** 2


rows = np.arange(32, dtype=np.float32)
dataset = strategy.experimental_distribute_dataset(
    rx.datasets.from_arrays(rows).batch(16)
)
for number, batch in enumerate(dataset):
    mean, squares = strategy.run(step, args=(batch,))
    expected = rows[16 * number : 16 * number + 16]
    np.testing.assert_allclose(mean, expected.mean())
    variance = strategy.reduce("mean", squares, axis=0)
    np.testing.assert_allclose(variance, expected.var())
    assert isinstance(squares, rx.PerReplica)
    assert isinstance(mean, jnp.ndarray)
print(f"replicax {rx.__version__} works: {strategy.num_replicas_in_sync} replicas")
