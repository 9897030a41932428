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
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import _ways as ways
from _harness import Contender, Report, compare, measure, parse, parser
from _problems import mlp, thousand_floats

import replicax as rx

BATCH = 256
TF_FUNCTION = "TensorFlow, tf.function"
KERAS_FIT = "TensorFlow, Keras fit"


class TensorFlowPeer:
    """A process with TensorFlow that does steps when it is asked to.

    Args:
      python: Its interpreter.
      devices: How many virtual CPU devices it uses.

    Raises:
      RuntimeError: The process does not come up; the text is the end of its log.
    """

    def __init__(self, python: str, devices: int):
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in close)
        program = Path(__file__).with_name("_tf_peer.py")
        self.process = subprocess.Popen(
            [python, str(program), str(devices), str(BATCH)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            bufsize=1,
        )
        self.versions: dict[str, str] = json.loads(self._answer())

    def _answer(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            raise RuntimeError(self.log.read()[-2000:])
        return line

    def contender(self, name: str, workload: str) -> Contender:
        """The contender that does steps of one of the peer's workloads."""

        def run(steps: int) -> float:
            self.process.stdin.write(f"{workload} {steps}\n")
            return float(self._answer())

        return Contender(name, run)

    def close(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


@contextlib.contextmanager
def tensorflow_peer(
    options: argparse.Namespace, report: Report
) -> Iterator[TensorFlowPeer | None]:
    """The peer, or None with a notice where there is no TensorFlow."""
    probe = "import importlib.util as u, sys; sys.exit(not u.find_spec('tensorflow'))"
    found = subprocess.run([options.peer_python, "-c", probe], check=False)
    if found.returncode:
        report.note(
            f"TensorFlow is left out: {options.peer_python} does not have it "
            "(see benchmarks/README.md)."
        )
        yield None
        return
    peer = TensorFlowPeer(options.peer_python, options.devices)
    report.environment["versions"] |= peer.versions
    report.note(", ".join(f"{k} {v}" for k, v in peer.versions.items()))
    try:
        yield peer
    finally:
        peer.close()


def train_perceptron(
    report: Report, options: argparse.Namespace, peer: TensorFlowPeer | None
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
    if peer:
        contenders += [
            peer.contender(TF_FUNCTION, "mlp"),
            peer.contender(KERAS_FIT, "fit"),
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
    if peer:
        bars += [(ours, TF_FUNCTION, 1.5), (nnx_ours, KERAS_FIT, None)]
    where = f"rate, {problem.name}, {options.devices} devices"
    report.add_checks(
        compare(
            f"{where}: {timing.name} / {base}", timing, timings[base], bar, rate=True
        )
        for timing, base, bar in bars
    )


def tiny_step(
    report: Report, options: argparse.Namespace, peer: TensorFlowPeer
) -> None:
    """Compares what a step on 1,000 floats costs here and in TensorFlow."""
    mesh = ways.replica_mesh(options.devices)
    strategy = rx.MirroredStrategy(list(mesh.devices.flat))
    problem = thousand_floats(options.devices)
    contenders = [ways.replicax(problem, strategy), peer.contender(TF_FUNCTION, "sgd")]
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
    arguments.add_argument(
        "--peer-python",
        default=sys.executable,
        help="an interpreter that has TensorFlow (default: this one)",
    )
    options = parse(arguments)
    rx.set_virtual_devices(options.devices)
    report = Report("train_mlp", options)
    with tensorflow_peer(options, report) as peer:
        train_perceptron(report, options, peer)
        if peer:
            tiny_step(report, options, peer)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
