"""What ``strategy.run`` adds to the same step written by hand, call by call.

The other side is ``jax.jit(jax.shard_map(step))``. Both run with and without donating
their state. The compiled programs must hold the same collectives.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import pstats
import re
import sys
from typing import Any

import _ways as ways
import jax
from _harness import Check, Report, compare, measure, parse, parser
from _problems import Problem, mlp, thousand_floats

import replicax as rx

COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)


def collectives(step: ways.Step, state: Any, batch: Any) -> dict[str, int]:
    """How many collectives of each kind the compiled program of a step holds."""
    text = jax.jit(step).lower(state, batch).compile().as_text()
    return dict(collections.Counter(COLLECTIVE.findall(text)))


def compare_programs(report: Report, problem: Problem, mesh, strategy) -> Check:
    """Compares the collectives of both compiled programs."""
    ours = collectives(
        ways.replicax_step(problem, strategy, donate=False),
        ways.replicate(problem.state, mesh),
        ways.per_replica(problem.batch, strategy),
    )
    hand = collectives(
        ways.shard_map_step(problem, mesh, donate=False),
        ways.replicate(problem.state, mesh),
        ways.shard(problem.batch, mesh),
    )
    report.fact(f"collectives, {problem.name}", f"run {ours}, by hand {hand}")
    differing = sum(
        abs(ours.get(kind, 0) - hand.get(kind, 0)) for kind in ours.keys() | hand.keys()
    )
    return Check(f"differing collectives, {problem.name}", differing, 0)


def compare_calls(
    report: Report,
    options: argparse.Namespace,
    problem: Problem,
    bar: float,
    mesh,
    strategy,
) -> None:
    """Times both ways on one problem, with donation and without."""
    contenders = []
    for donate, suffix in [(True, ", donating"), (False, "")]:
        contenders += [
            ways.replicax(problem, strategy, donate, f"strategy.run{suffix}"),
            ways.hand_shard_map(problem, mesh, donate, f"jit(shard_map){suffix}"),
        ]
    again = ways.hand_shard_map(problem, mesh, name="jit(shard_map), donating, again")
    timings = measure([*contenders, again], options.rounds, options.slice_seconds)
    report.add_timings(problem.title, timings)

    run_d, hand_d, run, hand, again_d = timings.values()
    what = f"time, {problem.name}: "
    report.add_checks(
        [
            compare(what + "run / by hand, donating", run_d, hand_d, bar),
            compare(what + "run / by hand", run, hand, bar),
            compare(what + "by hand / by hand (noise)", again_d, hand_d),
            compare_programs(report, problem, mesh, strategy),
        ]
    )


def profile(problem: Problem, strategy: rx.Strategy, calls: int = 5000) -> None:
    """Prints where the calls of a compiled step spend their time."""
    contender = ways.replicax(problem, strategy)
    contender.run(10)
    with cProfile.Profile() as profiler:
        contender.run(calls)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> int:
    """Runs the comparison."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--profile", action="store_true", help="only profile a repeated call"
    )
    options = parse(arguments)
    rx.set_virtual_devices(options.devices)
    mesh = ways.replica_mesh(options.devices)
    strategy = rx.MirroredStrategy(list(mesh.devices.flat))
    small = thousand_floats(options.devices)
    if options.profile:
        profile(small, strategy)
        return 0
    report = Report("run_overhead", options)
    compare_calls(report, options, small, 1.10, mesh, strategy)
    compare_calls(report, options, mlp(), 1.03, mesh, strategy)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
