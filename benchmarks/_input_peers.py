"""The peers of ``input_pipeline.py``, each in a process of its own (see ``_peer.py``).

``_input_peers.py LIBRARY DEVICES ROWS BATCH`` shuffles the rows of arrays in memory,
groups them and lays each batch on the devices, as its library does it. What is not
TensorFlow hands its batches to JAX, and needs that too.

A step is one example, and what is timed is whole epochs.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from _peer import Workload, serve, timed_loop
from _tf_peer import start

COLUMNS = 784


def examples(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Random examples of shape `[rows, 784]` and their labels."""
    random = np.random.default_rng(0)
    x = random.random((rows, COLUMNS), np.float32)
    return x, random.integers(0, 10, rows, np.int32)


def whole_epochs(epoch: Callable[[], object], rows: int) -> Workload:
    """Counts the steps of a loop over one epoch in examples."""
    loop = timed_loop(epoch)
    return lambda steps: loop(steps // rows)


def delivered(batches: Iterable[Any], devices: int) -> Callable[[], None]:
    """An epoch that lays host batches on JAX's devices and waits for each."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:devices]), ("rows",))
    sharding = NamedSharding(mesh, PartitionSpec("rows"))

    def epoch() -> None:
        for batch in batches:
            jax.block_until_ready(jax.device_put(batch, sharding))

    return epoch


# -- TensorFlow ----------------------------------------------------------------------


def tensorflow(devices: int, rows: int, batch: int) -> dict[str, Callable[[], object]]:
    """``tf.data`` row by row and by whole batches, distributed by its strategy."""
    tf, strategy = start(devices)
    x, y = map(tf.constant, examples(rows))

    def gather(index):
        return tf.gather(x, index), tf.gather(y, index)

    single = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(rows, seed=0)
    indices = tf.data.Dataset.range(rows).shuffle(rows, seed=0).batch(batch)
    datasets = {
        "rows": single.batch(batch),
        "batches": indices.map(gather, num_parallel_calls=tf.data.AUTOTUNE),
    }

    def epoch_of(dataset):
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
        distributed = strategy.experimental_distribute_dataset(dataset)

        @tf.function
        def epoch():
            taken = 0
            for _ in distributed:
                taken += 1
            return taken

        return epoch

    return {name: epoch_of(dataset) for name, dataset in datasets.items()}


# -- torch ---------------------------------------------------------------------------


def torch(devices: int, rows: int, batch: int) -> dict[str, Callable[[], object]]:
    """A ``DataLoader`` of a ``TensorDataset``, also with workers or whole batches."""
    import torch as library
    from torch.utils import data

    dataset = data.TensorDataset(*map(library.from_numpy, examples(rows)))
    workers = {"persistent_workers": True, "multiprocessing_context": "forkserver"}
    batches = data.BatchSampler(data.RandomSampler(dataset), batch, drop_last=False)
    loaders = {
        "workers-0": data.DataLoader(dataset, batch, shuffle=True),
        "workers-2": data.DataLoader(
            dataset, batch, shuffle=True, num_workers=2, **workers
        ),
        "batches": data.DataLoader(dataset, batch_size=None, sampler=batches),
    }
    return {name: _torch_epoch(loader, devices) for name, loader in loaders.items()}


def _torch_epoch(loader: Iterable[Any], devices: int) -> Callable[[], None]:
    class Batches:
        def __iter__(self):
            return ([tensor.numpy() for tensor in batch] for batch in loader)

    return delivered(Batches(), devices)


# -- grain ---------------------------------------------------------------------------


def grain(devices: int, rows: int, batch: int) -> dict[str, Callable[[], object]]:
    """A ``MapDataset`` of single rows, and one of the indices of a batch."""
    import grain as library

    x, y = examples(rows)
    shuffled = library.MapDataset.range(rows).shuffle(seed=0)
    datasets = {
        "rows": shuffled.map(lambda i: (x[i], y[i])).batch(batch),
        "batches": shuffled.batch(batch).map(lambda i: (x[i], y[i])),
    }
    return {
        name: delivered(dataset.to_iter_dataset(), devices)
        for name, dataset in datasets.items()
    }


# -- the process ---------------------------------------------------------------------

LIBRARIES = {
    "tensorflow": (tensorflow, "tensorflow_cpu"),
    "torch": (torch, "torch"),
    "grain": (grain, "grain"),
}


def prepare(library: str, devices: int, rows: int, batch: int):
    """The versions and workloads of one library."""
    if library != "tensorflow":
        import jax

        jax.config.update("jax_num_cpu_devices", devices)
    epochs_of, package = LIBRARIES[library]
    workloads = {
        name: whole_epochs(epoch, rows)
        for name, epoch in epochs_of(devices, rows, batch).items()
    }
    return {library: importlib.metadata.version(package)}, workloads


if __name__ == "__main__":
    serve(lambda: prepare(sys.argv[1], *map(int, sys.argv[2:])))
