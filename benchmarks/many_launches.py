"""Ten thousand launches of a step with a collective.

A loop that launches such steps on CPU without ever waiting deadlocks on JAX 0.10, and
is aborted after 40 s. ``strategy.run`` waits where it must: the loops here never do,
one of them with an eager operation of the user's after each step. Each loop is a
process of its own, so that an abort would be seen and told.
"""

from __future__ import annotations

import argparse
import sys
import time

import _ways as ways
import jax
from _harness import Check, Report, do_job, parse, parser, run_job
from _problems import thousand_floats

import replicax as rx

DEVICE_COUNTS = (2, 8)
STUCK = ("rendezvous", "stuck", "deadlock")


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


def check_launches(
    report: Report, job: str, devices: int, options: argparse.Namespace
) -> Check:
    """Runs a loop of launches and counts what went wrong."""
    with_eager = ", an eager operation after each" if job == "eager" else ""
    what = f"{options.launches:,} launches, {devices} devices{with_eager}"
    result, log = run_job(__file__, job, devices, "--launches", options.launches)
    stuck = [line for line in log.splitlines() if any(w in line.lower() for w in STUCK)]
    if result is None:
        report.fact(what, f"FAILED: {log[-500:]}")
    else:
        each = result["seconds"] / options.launches * 1e6
        report.fact(what, f"{result['seconds']:.2f} s, {each:.0f} us each")
    problems = len(stuck) + (result is None)
    return Check(f"failures and stuck messages, {what}", problems, 0)


def main() -> int:
    """Runs all loops."""
    arguments = parser(__doc__)
    arguments.add_argument("--launches", type=int, help="(default: 10,000)")
    options = parse(arguments)
    if options.launches is None:
        options.launches = 10_000
    rx.set_virtual_devices(options.devices)
    if options.job:
        eager = options.job == "eager"
        return do_job(launch(options.devices, options.launches, eager))
    report = Report("many_launches", options)
    checks = []
    for devices in DEVICE_COUNTS:
        for job in ("plain", "eager"):
            checks.append(check_launches(report, job, devices, options))
    report.add_checks(checks)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
