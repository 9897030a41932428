"""Memory, live arrays and threads over fifty epochs of training.

A perceptron is trained on batches of ``rx.datasets``, and by hand to see what JAX
itself does to memory. Each is a process of its own, whose allocator is told to keep a
single arena: glibc gives each new thread one of its own, and what they keep for reuse
would look like a leak that levels off after a hundred epochs.

What is held after the last epoch is compared with what was held after the fifth.
Between them stand some more, to tell a leak from an allocator that is still settling.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import _ways as ways
import jax
import numpy as np
import psutil
from _harness import Check, Report, do_job, parse, parser, run_job
from _problems import classification_batch, mlp

import replicax as rx

EPOCHS = (5, 10, 20, 35, 50)  # where is looked
ROWS, BATCH = 2048, 64
# Keeping one batch or one array an epoch alive would be over them.
BARS = {"MiB": 1.05, "live arrays": 1.05, "threads": 1}

Found = dict[str, list[float]]


# -- in the job's process ------------------------------------------------------------


def train(devices: int) -> Found:
    """Trains with Replicax for many epochs; see :func:`train_epochs`."""
    strategy = rx.MirroredStrategy(jax.devices()[:devices])
    step = ways.replicax_step(mlp(), strategy)
    examples = rx.datasets.from_arrays(classification_batch(ROWS, 784))
    dataset = strategy.experimental_distribute_dataset(examples.shuffle(0).batch(BATCH))

    def mean(loss):
        return float(strategy.reduce("mean", loss))

    return train_epochs(step, dataset, mean)


def train_by_hand(devices: int) -> Found:
    """The same training without Replicax."""
    mesh = ways.replica_mesh(devices)
    examples = classification_batch(ROWS, 784)

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            order = np.random.default_rng(0).permutation(ROWS)
            for rows in np.split(order, ROWS // BATCH):
                yield ways.shard({k: x[rows] for k, x in examples.items()}, mesh)

    step = ways.shard_map_step(mlp(), mesh)
    return train_epochs(step, Batches(), lambda loss: float(loss.mean()))


def train_epochs(
    step: ways.Step, dataset: Iterable[Any], mean: Callable[[Any], float]
) -> Found:
    """Trains for many epochs; returns what the process holds after some of them."""
    state = jax.tree.map(jax.numpy.copy, mlp().state)
    found: Found = {"MiB": [], "live arrays": [], "threads": []}
    for epoch in range(1, EPOCHS[-1] + 1):
        for number, batch in enumerate(dataset):
            state, loss = step(state, batch)
            if number % ways.WAIT_EVERY == 0:
                mean(loss)
        if epoch in EPOCHS:
            jax.block_until_ready(state)
            gc.collect()
            process = psutil.Process()
            found["MiB"].append(process.memory_info().rss / 2**20)
            found["live arrays"].append(len(jax.live_arrays()))
            found["threads"].append(process.num_threads())
    return found


# -- in the process that asks --------------------------------------------------------

JOBS = {"run": train, "by hand": train_by_hand}


def check_epochs(report: Report, job: str, devices: int) -> list[Check]:
    """Runs a training, and compares late with early."""
    when = f"after epoch {EPOCHS[-1]} / after epoch {EPOCHS[0]}"
    found, log = run_job(__file__, job, devices, MALLOC_ARENA_MAX="1")
    if found is None:
        report.fact(f"training, {job}", f"FAILED: {log[-500:]}")
        return [Check(f"failures, training, {job}", 1, 0)]
    checks = []
    for what, values in found.items():
        epochs = f"after epochs {', '.join(map(str, EPOCHS))}"
        report.fact(f"{what}, {job}, {epochs}", [round(x, 1) for x in values])
        bar = BARS[what] if job == "run" else None
        checks.append(Check(f"{what}, {job}, {when}", values[-1] / values[0], bar))
    return checks


def main() -> int:
    """Runs the trainings."""
    options = parse(parser(__doc__))
    rx.set_virtual_devices(options.devices)
    if options.job:
        return do_job(JOBS[options.job](options.devices))
    report = Report("many_epochs", options)
    for job in JOBS:
        report.add_checks(check_epochs(report, job, options.devices))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
