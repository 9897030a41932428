"""Steps per second of a small ConvNet against the same step written by hand.

XLA's gradient of max-pooling is slow on CPU, whoever calls it: with ``--max-pool`` both
ways lose most of their time there. Strided convolutions, the default, avoid it.
"""

from __future__ import annotations

import sys

import _ways as ways
from _harness import Report, compare, measure, parse, parser
from _problems import convnet

import replicax as rx


def main() -> int:
    """Runs the comparison."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--max-pool", action="store_true", help="max-pool instead of striding"
    )
    options = parse(arguments)
    if options.max_pool:
        options.slice_seconds *= 3  # a step takes a tenth of a second
    rx.set_virtual_devices(options.devices)
    report = Report("train_convnet", options)
    report.note(
        "XLA's max-pool gradient is slow on CPU for everyone; "
        + ("this run shows it." if options.max_pool else "see --max-pool.")
    )
    mesh = ways.replica_mesh(options.devices)
    strategy = rx.MirroredStrategy(list(mesh.devices.flat))
    problem = convnet(max_pool=options.max_pool)
    contenders = [
        ways.replicax(problem, strategy),
        ways.hand_shard_map(problem, mesh),
        ways.hand_shard_map(problem, mesh, name="jit(shard_map), again"),
    ]
    timings = measure(contenders, options.rounds, options.slice_seconds)
    report.add_timings(problem.title, timings)
    ours, hand, again = timings.values()
    what = f"time, {problem.name}: "
    report.add_checks(
        [
            compare(what + "run / by hand", ours, hand, 1.03),
            compare(what + "by hand / by hand (noise)", again, hand),
        ]
    )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
