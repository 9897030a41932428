"""What it costs to sum a gradient of many arrays over the replicas.

160 arrays as a large network has them, 64 MB in all, most of them small, against the
same bytes as a single array. `all_reduce` packs the small ones; the other side sends
every array for itself. Collectives and the arrays that they send are counted in the
compiled programs. Compressed sums show what rounding costs where nothing is slow.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import _ways as ways
import jax
import numpy as np
from _harness import Check, Contender, Report, compare, measure, parse, parser
from jax import lax

import replicax as rx

FLOATS = 16 * 2**20
VECTORS = [64 * 2 ** (i % 6) for i in range(106)]
MATRICES = 54
ALL_REDUCE = re.compile(r" all-reduce(?:-start)?\((.*?)\), ")


def sizes() -> list[int]:
    """The elements of 160 arrays: a matrix, then two vectors, and so on."""
    shares = np.geomspace(1, 512, MATRICES)
    matrices = (shares * ((FLOATS - sum(VECTORS)) / shares.sum())).astype(int)
    matrices[-1] += FLOATS - sum(VECTORS) - matrices.sum()
    result = []
    for i in range(MATRICES):
        result += [int(matrices[i]), *VECTORS[2 * i : 2 * i + 2]]
    return result


def gradient(lengths: list[int], strategy: rx.Strategy) -> list[rx.PerReplica]:
    """Random arrays of these lengths on each replica."""
    draw = np.random.default_rng(0)
    replicas = strategy.num_replicas_in_sync
    arrays = [draw.random((replicas, n), dtype=np.float32) for n in lengths]
    return ways.per_replica(arrays, strategy)


def unpacked(arrays: list[jax.Array]) -> list[jax.Array]:
    """Sums every array for itself."""
    return lax.psum(arrays, rx.Strategy.axis_name)


def reduced(
    arrays: list[jax.Array], options: rx.CommunicationOptions | None = None
) -> list[jax.Array]:
    """Sums the arrays as a step does."""
    return rx.get_replica_context().all_reduce("sum", arrays, options)


def reduced_int8(arrays: list[jax.Array]) -> list[jax.Array]:
    """Sums the arrays rounded to int8, without keeping what rounding took away."""
    total, _ = rx.get_replica_context().all_reduce_int8("sum", arrays)
    return total


def contender(
    name: str, step: Callable[..., Any], arrays: Any, strategy: rx.Strategy
) -> Contender:
    """A loop over one way of summing."""

    def loop(steps: int) -> None:
        for _ in range(steps):
            jax.block_until_ready(strategy.run(step, (arrays,)))

    return Contender(name, loop)


def messages(step: Callable[..., Any], arrays: Any, strategy: rx.Strategy) -> list[int]:
    """How many arrays each all-reduce of the compiled program sends."""
    program = jax.jit(lambda arrays: strategy.run(step, (arrays,)))
    text = program.lower(arrays).compile().as_text()
    return [len(sent.split(", ")) for sent in ALL_REDUCE.findall(text)]


def main() -> int:
    """Counts and times all ways."""
    options = parse(parser(__doc__))
    rx.set_virtual_devices(options.devices)
    strategy = rx.MirroredStrategy(jax.devices()[: options.devices])
    report = Report("communication", options)
    many, one = gradient(sizes(), strategy), gradient([FLOATS], strategy)
    bfloat16 = rx.CommunicationOptions(compression="bfloat16")
    in_bfloat16 = functools.partial(reduced, options=bfloat16)
    for name, step in [("packed", reduced), ("unpacked", unpacked)]:
        counts = messages(step, many, strategy)
        report.fact(f"arrays in each all-reduce, {name}", counts)
    timings = measure(
        [
            contender("one array", reduced, one, strategy),
            contender("160 arrays", reduced, many, strategy),
            contender("160 arrays, unpacked", unpacked, many, strategy),
            contender("160 arrays, bfloat16", in_bfloat16, many, strategy),
            contender("160 arrays, int8", reduced_int8, many, strategy),
        ],
        options.rounds,
        options.slice_seconds,
    )
    report.add_timings("a gradient of 64 MB", timings, "all-reduce")
    whole, packed, plain, bf16, int8 = timings.values()
    (sent,) = messages(reduced, many, strategy)
    report.add_checks(
        [
            compare("time, 64 MB: 160 arrays / one array", packed, whole, 1.1),
            compare("time, 64 MB: 160 arrays, packed / unpacked", packed, plain),
            compare("time, 64 MB: 160 arrays, bfloat16 / packed", bf16, packed),
            compare("time, 64 MB: 160 arrays, int8 / packed", int8, packed),
            Check("arrays that the all-reduce of 160 sends", sent, 30),
        ]
    )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
