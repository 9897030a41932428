"""Steps per second of an MLP under Replicax and its peers, and of a tiny step.

The perceptron 784-512-512-10 is trained with Adam at a global batch of 256 by

- ``strategy.run`` with functional state, and with nnx objects as arguments;
- ``jax.jit(jax.shard_map)`` by hand, ``jax.pmap``, ``jax.jit`` and ``nnx.jit`` over
  arrays with a ``NamedSharding``;
- TensorFlow's ``MirroredStrategy`` under ``tf.function``, and Keras' ``fit``.

TensorFlow runs in a process of its own, which the same run takes its turns with. It is
left out, aloud, where the interpreter of ``--peer-python`` has none.
"""

from __future__ import annotations

import argparse
import sys

import _ways as ways
from _harness import Report, compare, measure, parse, parser
from _peer import Peer, add_option, peer
from _problems import mlp, thousand_floats

import replicax as rx

BATCH = 256
TF_FUNCTION = "TensorFlow, tf.function"
KERAS_FIT = "TensorFlow, Keras fit"


def train_perceptron(
    report: Report, options: argparse.Namespace, tensorflow: Peer | None
) -> None:
    """Compares all ways of training the perceptron."""
    mesh = ways.replica_mesh(options.devices)
    strategy = rx.MirroredStrategy(list(mesh.devices.flat))
    problem = mlp(BATCH)
    contenders = [
        ways.replicax(problem, strategy),
        ways.replicax_nnx(problem.batch, strategy),
        ways.hand_shard_map(problem, mesh),
        ways.pmap(problem, mesh),
        ways.jit_sharded(problem, mesh),
        ways.nnx_jit_sharded(problem.batch, mesh),
    ]
    if tensorflow:
        contenders += [
            tensorflow.contender(TF_FUNCTION, "mlp"),
            tensorflow.contender(KERAS_FIT, "fit"),
        ]
    timings = measure(contenders, options.rounds, options.slice_seconds)
    report.add_timings(problem.title, timings)

    ours, nnx_ours = timings["strategy.run"], timings["strategy.run, nnx objects"]
    bars = [
        (ours, "jit(shard_map)", None),
        (ours, "jax.pmap", 1.15),
        (ours, "jit + NamedSharding", 1.2),
        (nnx_ours, "nnx.jit + NamedSharding", 1.2),
    ]
    if tensorflow:
        bars += [(ours, TF_FUNCTION, 1.5), (nnx_ours, KERAS_FIT, None)]
    where = f"rate, {problem.name}, {options.devices} devices"
    report.add_checks(
        compare(
            f"{where}: {timing.name} / {base}", timing, timings[base], bar, rate=True
        )
        for timing, base, bar in bars
    )


def tiny_step(report: Report, options: argparse.Namespace, tensorflow: Peer) -> None:
    """Compares what a step on 1,000 floats costs here and in TensorFlow."""
    mesh = ways.replica_mesh(options.devices)
    strategy = rx.MirroredStrategy(list(mesh.devices.flat))
    problem = thousand_floats(options.devices)
    contenders = [
        ways.replicax(problem, strategy),
        tensorflow.contender(TF_FUNCTION, "sgd"),
    ]
    timings = measure(contenders, options.rounds, options.slice_seconds)
    report.add_timings(problem.title, timings)
    ours, peers = timings.values()
    where = f"rate, {problem.name}, {options.devices} devices"
    what = f"{where}: {ours.name} / {peers.name}"
    bar = 5 if options.devices == 2 else None  # more devices: XLA's collective decides
    report.add_checks([compare(what, ours, peers, bar, rate=True)])


def main() -> int:
    """Runs the comparison."""
    arguments = parser(__doc__)
    add_option(arguments)
    options = parse(arguments)
    rx.set_virtual_devices(options.devices)
    report = Report("train_mlp", options)
    command = ("_tf_peer.py", options.devices, BATCH)
    with peer("tensorflow", options, report, *command) as tensorflow:
        train_perceptron(report, options, tensorflow)
        if tensorflow:
            tiny_step(report, options, tensorflow)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
