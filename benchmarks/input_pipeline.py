"""Examples per second that reach two devices, and what preparing ahead is worth.

First, arrays in memory (60,000 x 784, with labels) are shuffled and grouped into
batches of 256 that are laid on the devices, by a loop that only waits for them:

- ``rx.datasets.from_arrays``, distributed by the strategy;
- numpy's indexing and ``jax.device_put``, by hand;
- ``tf.data`` distributed by TensorFlow's strategy, in a ``tf.function``;
- torch's ``DataLoader``, and grain's ``MapDataset``, laid on the devices by hand.

Then a pipeline with some work of the user's for each batch feeds a step on one device,
with and without preparing batches ahead.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from _harness import Contender, Report, compare, measure, parse, parser
from _input_peers import delivered, examples, whole_epochs
from _peer import add_option, peer

import replicax as rx

ROWS, BATCH = 60_000, 256
# Library, workload, what it is called, and whether it is there to be beaten.
PEERS = [
    ("tensorflow", "rows", "tf.data", True),
    ("tensorflow", "batches", "tf.data, whole batches by index", True),
    ("torch", "workers-0", "torch DataLoader", True),
    ("torch", "workers-2", "torch DataLoader, 2 workers", True),
    ("torch", "batches", "torch DataLoader, whole batches by index", False),
    ("grain", "rows", "grain", False),
    ("grain", "batches", "grain, whole batches by index", False),
]
PEERS_BAR = 3


# -- arrays in memory ----------------------------------------------------------------


def by_hand(x: np.ndarray, y: np.ndarray, devices: int) -> Callable[[], None]:
    """An epoch of numpy's indexing and ``jax.device_put``."""

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            order = np.random.default_rng(0).permutation(ROWS)
            for start in range(0, ROWS, BATCH):
                rows = order[start : start + BATCH]
                yield x[rows], y[rows]

    return delivered(Batches(), devices)


def replicax(arrays: Any, devices: int, prefetch: int | None) -> Callable[[], None]:
    """An epoch of a distributed dataset; ``prefetch`` None is the default."""
    strategy = rx.MirroredStrategy(jax.devices()[:devices])
    dataset = rx.datasets.from_arrays(arrays).shuffle(0).batch(BATCH)
    options = None if prefetch is None else rx.InputOptions(prefetch=prefetch)
    distributed = strategy.experimental_distribute_dataset(dataset, options)

    def epoch() -> None:
        for batch in distributed:
            jax.block_until_ready(batch)

    return epoch


def deliver(report: Report, options: argparse.Namespace) -> None:
    """Compares all ways of delivering shuffled batches."""
    arrays = examples(ROWS)
    ours, hand = "from_arrays, distributed", "numpy + device_put"
    epochs = {
        ours: replicax(arrays, options.devices, None),
        f"{ours}, no prefetch": replicax(arrays, options.devices, 0),
        hand: by_hand(*arrays, options.devices),
    }
    contenders = [
        Contender(name, whole_epochs(epoch, ROWS), ROWS)
        for name, epoch in epochs.items()
    ]
    bars: list[tuple[str, float | None]] = [(hand, 0.9)]
    with contextlib.ExitStack() as stack:
        for library, found in itertools.groupby(PEERS, lambda peer: peer[0]):
            command = ("_input_peers.py", library, options.devices, ROWS, BATCH)
            process = stack.enter_context(peer(library, options, report, *command))
            for _, workload, name, to_beat in found if process else ():
                contenders.append(process.contender(name, workload, ROWS))
                bars.append((name, PEERS_BAR if to_beat else None))
        timings = measure(contenders, options.rounds, options.slice_seconds)
    title = f"{ROWS:,} x 784 in memory, shuffled, batch {BATCH}"
    report.add_timings(title, timings, "example")
    where = f"rate, arrays to {options.devices} devices"
    report.add_checks(
        compare(
            f"{where}: {ours} / {name}", timings[ours], timings[name], bar, rate=True
        )
        for name, bar in bars
    )


# -- a pipeline with work, and a step ------------------------------------------------


def seconds_of(function: Callable[[], object]) -> float:
    """Least seconds of a call: what it takes when nobody is in the way."""
    taken = []
    for _ in range(15):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return min(taken)


def hashing(seconds: float) -> Callable[[], object]:
    """Work that takes about so long on one core, without holding the GIL."""
    probe = bytes(1 << 20)
    size = int(len(probe) * seconds / seconds_of(lambda: hashlib.sha256(probe)))
    data = bytes(size)
    return lambda: hashlib.sha256(data)


def waiting(seconds: float) -> Callable[[], object]:
    """Work that takes so long and no core, as a disk does."""
    return lambda: time.sleep(seconds)


def step_of(seconds: float) -> Callable[[Any], Any]:
    """A step that takes about so long on one core."""

    def step(batch, turns):
        return jax.lax.fori_loop(0, turns, lambda _, x: (x + batch) / 2, batch)

    batch, probe, jitted = np.ones(256, np.float32), 5000, jax.jit(step)
    jitted(batch, probe).block_until_ready()
    taken = seconds_of(lambda: jitted(batch, probe).block_until_ready())
    turns = max(1, int(probe * seconds / taken))
    return lambda batch: step(batch, turns)


@dataclass(frozen=True)
class Pipeline:
    """Some work for each batch, and a step on one device.

    Attributes:
      work: Done before each batch.
      step: Done with each batch; the loop looks at its result before it goes on.
    """

    work: Callable[[], object]
    step: Callable[[Any], Any]

    def batches(self) -> Iterator[Any]:
        """Batches without end."""
        batch = np.ones((1, 256), np.float32)
        while True:
            self.work()
            yield batch

    def training(self, prefetch: int) -> Callable[[int], None]:
        """A loop over distributed batches, some of them prepared ahead."""
        strategy = rx.OneDeviceStrategy(jax.devices()[0])
        options = rx.InputOptions(prefetch=prefetch)
        dataset = strategy.experimental_distribute_dataset(self.batches, options)

        def run(steps: int) -> None:
            with iter(dataset) as batches:
                for batch in itertools.islice(batches, steps):
                    jax.block_until_ready(strategy.run(self.step, (batch,)))

        return run

    def by_hand(self) -> Callable[[int], None]:
        """The same loop with a thread of one's own: what this machine can overlap."""
        step = jax.jit(self.step)

        def run(steps: int) -> None:
            batches = self.batches()
            with ThreadPoolExecutor(1) as thread:
                ahead = thread.submit(next, batches)
                for _ in range(steps):
                    batch = ahead.result()
                    ahead = thread.submit(next, batches)
                    jax.block_until_ready(step(jax.device_put(batch)))

        return run


def overlap(
    report: Report,
    options: argparse.Namespace,
    title: str,
    pipeline: Pipeline,
    bar: float,
) -> None:
    """Compares training with batches prepared ahead and prepared on demand."""
    ahead, on_demand, by_hand = "prefetch=2", "prefetch=0", "a thread by hand"
    contenders = [
        Contender(ahead, pipeline.training(2)),
        Contender(on_demand, pipeline.training(0)),
        Contender(by_hand, pipeline.by_hand()),
    ]
    timings = measure(contenders, options.rounds, options.slice_seconds)
    report.add_timings(title, timings)
    report.add_checks(
        compare(
            f"rate, {title}: {name} / {on_demand}",
            timings[name],
            timings[on_demand],
            wanted,
            rate=True,
        )
        for name, wanted in [(ahead, bar), (by_hand, None)]
    )


def overlap_all(report: Report, options: argparse.Namespace) -> None:
    """Compares pipelines whose work takes as long as their step."""
    for name, work, seconds, bar in [
        ("hashing", hashing, 2e-3, 1.5),
        ("waiting", waiting, 2e-3, 1.5),
        ("hashing", hashing, 1e-4, 1),
    ]:
        title = f"{seconds * 1e3:g} ms of {name}, then of step"
        pipeline = Pipeline(work(seconds), step_of(seconds))
        overlap(report, options, title, pipeline, bar)


def main() -> int:
    """Runs the comparisons."""
    arguments = parser(__doc__)
    add_option(arguments)
    options = parse(arguments)
    rx.set_virtual_devices(options.devices)
    report = Report("input_pipeline", options)
    deliver(report, options)
    overlap_all(report, options)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
