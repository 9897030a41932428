"""Ten thousand launches of a step with a collective, and memory over fifty epochs.

A loop that launches such steps on CPU without ever waiting deadlocks on JAX 0.10, and
is aborted after 40 s. ``strategy.run`` waits where it must: the loops here never do,
one of them with an eager operation of the user's after each step. Each loop is a
process of its own, so that an abort would be seen and told.

The memory check trains for fifty epochs through ``rx.datasets`` and compares the
process's resident memory and the number of live arrays after epochs 5 and 50 (and
some between, to tell a leak from an allocator that is still settling). The allocator is
told to keep a single arena for it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import _ways as ways
import jax
import numpy as np
from _harness import Check, Report, parse, parser
from _problems import classification_batch, mlp, thousand_floats

import replicax as rx

DEVICE_COUNTS = (2, 8)
EPOCHS = (5, 10, 20, 35, 50)  # where memory is looked at
ROWS, BATCH = 2048, 64
MEMORY_BAR = 1.05  # keeping one batch an epoch alive would be over it
STUCK = ("rendezvous", "stuck", "deadlock")


# -- in the child process ----------------------------------------------------------


def launch(devices: int, launches: int, eager: bool) -> dict[str, float]:
    """Launches a small step again and again; returns the seconds that all took."""
    strategy = rx.MirroredStrategy(jax.devices()[:devices])
    problem = thousand_floats(devices)
    step = ways.replicax_step(problem, strategy)
    state, batch = problem.state, ways.per_replica(problem.batch, strategy)
    state, loss = step(state, batch)
    start = time.perf_counter()
    for _ in range(launches):
        state, loss = step(state, batch)
        if eager:
            mean = (loss.array * 2).mean()
    jax.block_until_ready((state, mean) if eager else state)
    return {"seconds": time.perf_counter() - start}


def train(devices: int) -> dict[str, list[float]]:
    """Trains with Replicax for many epochs; see :func:`train_epochs`."""
    strategy = rx.MirroredStrategy(jax.devices()[:devices])
    step = ways.replicax_step(mlp(), strategy)
    examples = rx.datasets.from_arrays(classification_batch(ROWS, 784))
    dataset = strategy.experimental_distribute_dataset(examples.shuffle(0).batch(BATCH))

    def mean(loss):
        return float(strategy.reduce("mean", loss))

    return train_epochs(step, dataset, mean)


def train_by_hand(devices: int) -> dict[str, list[float]]:
    """The same training without Replicax, to see what JAX itself does to memory."""
    mesh = ways.replica_mesh(devices)
    examples = classification_batch(ROWS, 784)

    class Batches:
        def __iter__(self):
            order = np.random.default_rng(0).permutation(ROWS)
            for rows in np.split(order, ROWS // BATCH):
                yield ways.shard({k: x[rows] for k, x in examples.items()}, mesh)

    step = ways.shard_map_step(mlp(), mesh)
    return train_epochs(step, Batches(), lambda loss: float(loss.mean()))


def train_epochs(
    step: ways.Step, dataset: Iterable[Any], mean: Callable[[Any], float]
) -> dict[str, list[float]]:
    """Trains for many epochs; returns memory in MiB and live arrays after some."""
    import psutil

    state = jax.tree.map(jax.numpy.copy, mlp().state)
    result: dict[str, list[float]] = {"mib": [], "arrays": []}
    for epoch in range(1, EPOCHS[-1] + 1):
        for number, batch in enumerate(dataset):
            state, loss = step(state, batch)
            if number % ways.WAIT_EVERY == 0:
                mean(loss)
        if epoch in EPOCHS:
            jax.block_until_ready(state)
            gc.collect()
            result["mib"].append(psutil.Process().memory_info().rss / 2**20)
            result["arrays"].append(len(jax.live_arrays()))
    return result


def child(options: argparse.Namespace) -> None:
    """Does one job and prints its result as JSON."""
    rx.set_virtual_devices(options.devices)
    if options.job == "train":
        result = train(options.devices)
    elif options.job == "train-by-hand":
        result = train_by_hand(options.devices)
    else:
        result = launch(options.devices, options.launches, options.job == "eager")
    print(json.dumps(result))


# -- in the parent process ---------------------------------------------------------


def run_child(
    job: str, devices: int, options: argparse.Namespace
) -> tuple[dict[str, Any] | None, str]:
    """Runs one job in a process of its own.

    Returns:
      Its result, None if it failed, and what it wrote to its standard error.
    """
    command = [sys.executable, __file__, "--job", job, "--devices", str(devices)]
    command += ["--launches", str(options.launches)]
    # One arena: glibc gives each new thread one of its own, and what they keep for
    # reuse would look like a leak that levels off after a hundred epochs.
    env = os.environ | ({"MALLOC_ARENA_MAX": "1"} if job.startswith("train") else {})
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=env,
        )
        errors.seek(0)
        log = errors.read()
    return (None if done.returncode else json.loads(done.stdout)), log


def check_launches(
    report: Report, job: str, devices: int, options: argparse.Namespace
) -> Check:
    """Runs a loop of launches and counts what went wrong."""
    with_eager = ", an eager operation after each" if job == "eager" else ""
    what = f"{options.launches:,} launches, {devices} devices{with_eager}"
    result, log = run_child(job, devices, options)
    stuck = [line for line in log.splitlines() if any(w in line.lower() for w in STUCK)]
    if result is None:
        report.fact(what, f"FAILED: {log[-500:]}")
    else:
        each = result["seconds"] / options.launches * 1e6
        report.fact(what, f"{result['seconds']:.2f} s, {each:.0f} us each")
    problems = len(stuck) + (result is None)
    return Check(f"failures and stuck messages, {what}", problems, 0)


def check_memory(report: Report, options: argparse.Namespace) -> list[Check]:
    """Runs the training, also by hand, and compares late with early."""
    when = f"after epoch {EPOCHS[-1]} / after epoch {EPOCHS[0]}"
    checks = []
    for job, who, bar in [
        ("train", "run", MEMORY_BAR),
        ("train-by-hand", "by hand", None),
    ]:
        what = f"resident memory, {who}, {when}"
        result, log = run_child(job, 2, options)
        if result is None:
            report.fact(f"memory, {who}", f"FAILED: {log[-500:]}")
            checks.append(Check(f"failures, {what}", 1, 0))
            continue
        mib, arrays = result["mib"], result["arrays"]
        epochs = f"after epochs {', '.join(map(str, EPOCHS))}"
        report.fact(f"MiB, {who}, {epochs}", [round(x, 1) for x in mib])
        report.fact(f"live arrays, {who}, {epochs}", arrays)
        checks.append(Check(what, mib[-1] / mib[0], bar))
        if bar is not None:
            checks.append(Check(f"live arrays, {when}", arrays[-1] / arrays[0], 1))
    return checks


def main() -> int:
    """Runs all loops and the memory check."""
    arguments = parser(__doc__)
    arguments.add_argument("--launches", type=int, help="(default: 10,000)")
    arguments.add_argument("--job", help=argparse.SUPPRESS)
    options = parse(arguments)
    if options.launches is None:
        options.launches = 10_000
    if options.job:
        child(options)
        return 0
    rx.set_virtual_devices(2)
    report = Report("many_launches", options)
    checks = []
    for devices in DEVICE_COUNTS:
        for job in ("plain", "eager"):
            checks.append(check_launches(report, job, devices, options))
    report.add_checks([*checks, *check_memory(report, options)])
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
