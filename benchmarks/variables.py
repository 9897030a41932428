"""What a step with closures over variables costs, against the functional one by hand.

The other side is ``jax.jit(jax.shard_map(step))`` with the same Optax transformation,
which hands parameters and slots from call to call and donates them. Also:

- steps per second with ``shard_state=True``, where each replica updates its slice only,
  against the hand-written step that updates everything on every device;
- the bytes of the arrays that training keeps alive: parameters and slots, once.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
from typing import Any

import _ways as ways
import jax
from _harness import Check, Contender, Report, compare, measure, parse, parser
from _problems import Problem, mlp, thousand_floats

import replicax as rx

VARIABLES, BY_HAND = "variables", "jit(shard_map)"
SHARDED, AGAIN = "variables, shard_state", "jit(shard_map), again"


def compare_calls(
    report: Report,
    options: argparse.Namespace,
    problem: Problem,
    bar: float,
    sharded_bar: float | None,
) -> None:
    """Times the ways of training one problem."""
    mesh = ways.replica_mesh(options.devices)
    contenders = [
        Contender(VARIABLES, ways.WithVariables(problem, strategy_of(options)).run),
        ways.hand_shard_map(problem, mesh, name=BY_HAND),
        Contender(
            SHARDED,
            ways.WithVariables(problem, strategy_of(options, shard_state=True)).run,
        ),
        ways.hand_shard_map(problem, mesh, name=AGAIN),
    ]
    timings = measure(contenders, options.rounds, options.slice_seconds)
    report.add_timings(problem.title, timings)
    hand = timings[BY_HAND]
    time, rate = f"time, {problem.name}: ", f"rate, {problem.name}: "
    sharded = compare(
        rate + f"{SHARDED} / by hand, replicated",
        timings[SHARDED],
        hand,
        sharded_bar,
        rate=True,
    )
    report.add_checks(
        [
            compare(time + f"{VARIABLES} / by hand", timings[VARIABLES], hand, bar),
            sharded,
            compare(time + "by hand / by hand (noise)", timings[AGAIN], hand),
        ]
    )


def strategy_of(options: argparse.Namespace, **settings: Any) -> rx.Strategy:
    """A strategy over the devices of the command line."""
    return rx.MirroredStrategy(jax.devices()[: options.devices], **settings)


def compare_memory(
    report: Report, options: argparse.Namespace, problem: Problem, shard_state: bool
) -> Check:
    """Compares the bytes that training keeps alive with those of its state."""
    before = live_bytes()
    strategy = strategy_of(options, shard_state=shard_state)
    training = ways.WithVariables(problem, strategy)
    batch = sum(x.nbytes for x in jax.tree.leaves(problem.batch))
    training.run(20)
    held = live_bytes() - before - batch
    wanted = sum(
        shard.data.nbytes
        for v in jax.tree.leaves(training.variables)
        for shard in v.array.addressable_shards
    )
    params = sum(x.nbytes for x in jax.tree.leaves(problem.params))
    state = sum(x.nbytes for x in jax.tree.leaves(problem.state))
    copies = 1 if shard_state else options.devices
    slots = (state - params) * copies
    title = SHARDED if shard_state else VARIABLES
    report.fact(
        f"MiB on all devices, {title}",
        f"live {held / 2**20:.2f}, in variables {wanted / 2**20:.2f}; "
        f"parameters {params * options.devices / 2**20:.2f} "
        f"and slots {slots / 2**20:.2f}",
    )
    # Scalars and padding of slices: next to nothing, but not the same bytes.
    whole = params * options.devices + slots
    return Check(f"bytes, {title} / parameters and slots", held / whole, 1.001)


def live_bytes() -> int:
    """The bytes of all live arrays, on all devices."""
    gc.collect()
    return sum(
        shard.data.nbytes for x in jax.live_arrays() for shard in x.addressable_shards
    )


def profile(options: argparse.Namespace, problem: Problem, calls: int = 5000) -> None:
    """Prints where the calls of a compiled step spend their time."""
    training = ways.WithVariables(problem, strategy_of(options))
    training.run(10)
    with cProfile.Profile() as profiler:
        training.run(calls)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> int:
    """Runs the comparison."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--profile", action="store_true", help="only profile a repeated call"
    )
    options = parse(arguments)
    rx.set_virtual_devices(options.devices)
    small = thousand_floats(options.devices)
    if options.profile:
        profile(options, small)
        return 0
    report = Report("variables", options)
    perceptron = mlp()
    report.add_checks(
        [
            compare_memory(report, options, perceptron, shard_state)
            for shard_state in (False, True)
        ]
    )
    compare_calls(report, options, small, 1.15, None)
    compare_calls(report, options, perceptron, 1.03, 1.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
