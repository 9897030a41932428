"""What all benchmarks share: paired rounds, medians, bars, tables and JSON.

Contenders are timed in turn, round after round, in one run, so that whatever else the
machine does falls on all of them alike. A figure is the median over rounds; what is
compared is the ratio of two medians of the same run. Beside it stand the quartiles of
the ratios of single rounds, which show how far to trust it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = ("replicax", "jax", "jaxlib", "flax", "optax", "numpy")


# -- the command line --------------------------------------------------------------


def parser(description: str | None, devices: int | None = 2) -> argparse.ArgumentParser:
    """Returns a parser with the options that every benchmark has.

    Args:
      description: The benchmark's module docstring; its first line is shown.
      devices: Default number of devices, or None where the option makes no sense.
    """
    result = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    if devices is not None:
        result.add_argument(
            "--devices",
            type=int,
            default=devices,
            help="devices to use; virtual ones on CPU (default: %(default)s)",
        )
    result.add_argument(
        "--rounds", type=int, help="paired rounds (default: 21, or 7 with --quick)"
    )
    result.add_argument(
        "--quick", action="store_true", help="short slices, for a first impression"
    )
    result.add_argument("--json", type=Path, metavar="FILE", help="also write JSON")
    result.add_argument(
        "--check", action="store_true", help="exit with 1 if a bar is missed"
    )
    result.add_argument("--job", help=argparse.SUPPRESS)
    return result


def parse(result: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line and fills in what follows from ``--quick``."""
    options = result.parse_args()
    if options.rounds is None:
        options.rounds = 7 if options.quick else 21
    options.slice_seconds = 0.1 if options.quick else 0.25
    return options


# -- measuring ---------------------------------------------------------------------


@dataclass
class Contender:
    """One of the things that are compared.

    Attributes:
      name: What the table calls it.
      run: Takes a number of steps, does them, waits for the last one. It may return
        the seconds that they took where it knows better than the caller's clock.
      turn: The steps of one turn, or None for as many as fill a slice.
    """

    name: str
    run: Callable[[int], float | None]
    turn: int | None = None

    def seconds(self, steps: int) -> float:
        """Seconds that ``steps`` steps take, waiting for the last one included."""
        start = time.perf_counter()
        measured = self.run(steps)
        elapsed = time.perf_counter() - start
        return elapsed if measured is None else measured


@dataclass
class Timing:
    """Seconds a step of one contender, one figure a round."""

    name: str
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds a step."""
        return statistics.median(self.seconds)


def calibrate(contender: Contender, slice_seconds: float) -> int:
    """Compiles, warms up, and returns how many steps a turn has."""
    if contender.turn is not None:
        contender.run(contender.turn)
        return contender.turn
    contender.run(1)
    contender.run(2)
    steps = 2
    while True:
        elapsed = contender.seconds(steps)
        if elapsed >= slice_seconds / 4 or steps >= 1 << 20:
            return max(2, math.ceil(steps * slice_seconds / elapsed))
        steps *= 2


def measure(
    contenders: Sequence[Contender], rounds: int, slice_seconds: float
) -> dict[str, Timing]:
    """Times the contenders in turn, each round beginning with another one.

    Args:
      contenders: What to compare; names must differ.
      rounds: How many times each one has its turn.
      slice_seconds: About how long a turn is.

    Returns:
      The timings by name.
    """
    steps = {c.name: calibrate(c, slice_seconds) for c in contenders}
    timings = {c.name: Timing(c.name) for c in contenders}
    for number in range(rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            count = steps[contender.name]
            timings[contender.name].seconds.append(contender.seconds(count) / count)
    return timings


@dataclass(frozen=True)
class Check:
    """One ratio (or count) with the bar that it should meet; bar None only informs.

    Attributes:
      what: What is compared, "a / b".
      value: The figure.
      bar: Where it should lie.
      at_most: Whether ``bar`` is an upper bound; a lower one otherwise.
      quartiles: Those of the ratios of single rounds, where there are rounds.
    """

    what: str
    value: float
    bar: float | None = None
    at_most: bool = True
    quartiles: Sequence[float] | None = None

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without a bar."""
        if self.bar is None:
            return None
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def cells(self) -> list[str]:
        """The row of the table of checks."""
        rounds = ["", "", ""]
        if self.quartiles is not None:
            rounds = [f"{q:.3f}" for q in self.quartiles]
        sign = "<=" if self.at_most else ">="
        bar = "" if self.bar is None else f"{sign} {self.bar:g}"
        verdict = {None: "", True: "met", False: "MISSED"}[self.met]
        return [self.what, f"{self.value:.3f}", *rounds, bar, verdict]


def compare(
    what: str, timing: Timing, base: Timing, bar: float | None = None, *, rate=False
) -> Check:
    """Compares two timings of one run.

    Args:
      what: How the check is called.
      timing: Whose figure is the numerator.
      base: Whose figure is the denominator.
      bar: Where the ratio should lie.
      rate: Compare steps per second (more is better) instead of seconds a step.
    """
    top, bottom = (base, timing) if rate else (timing, base)
    pairs = [a / b for a, b in zip(top.seconds, bottom.seconds, strict=True)]
    value = top.median / bottom.median
    return Check(what, value, bar, not rate, statistics.quantiles(pairs, n=4))


# -- jobs in processes of their own ------------------------------------------------


def run_job(
    program: str, job: str, devices: int, *arguments: object, **environment: str
) -> tuple[dict[str, Any] | None, str]:
    """Runs a benchmark again as a process that does one job of it.

    Args:
      program: The benchmark's file.
      job: What ``--job`` tells it to do, and to end with :func:`do_job`.
      devices: The devices it uses.
      arguments: The rest of its command line.
      environment: Variables that it finds beside those that are set here.

    Returns:
      Its result, None if it failed, and what it wrote to its standard error.
    """
    command = [sys.executable, program, "--job", job, "--devices", devices, *arguments]
    done = subprocess.run(
        list(map(str, command)),
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    result = None if done.returncode else json.loads(done.stdout)
    return result, done.stderr


def do_job(result: dict[str, Any]) -> int:
    """Hands the result of a job to :func:`run_job`; returns the exit code."""
    print(json.dumps(result))
    return 0


# -- reporting ---------------------------------------------------------------------


def environment(devices: int | None = None) -> dict[str, Any]:
    """What the figures depend on: versions, cores, devices, date."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": versions,
    }
    if devices is not None:
        import jax

        result["devices"] = devices
        result["device_kind"] = jax.devices()[0].device_kind
    return result


class Report:
    """Collects tables, checks and notes; prints them and writes the JSON.

    Args:
      name: The benchmark's name.
      options: Its parsed command line.
    """

    def __init__(self, name: str, options: argparse.Namespace):
        self.name = name
        self.options = options
        self.environment = environment(getattr(options, "devices", None))
        self.checks: list[Check] = []
        self.timings: dict[str, dict[str, list[float]]] = {}
        self.facts: dict[str, Any] = {}
        env = self.environment
        words = [f"{k} {v}" for k, v in env["versions"].items()]
        where = f"{env['cores']} cores, load {env['load_average']:.1f}"
        if "devices" in env:
            where += f", {env['devices']} x {env['device_kind']}"
        print(f"\n== {name}: {where}\n   {', '.join(words)}", flush=True)

    def note(self, text: str) -> None:
        """Prints a sentence that the reader of the figures needs."""
        print(f"   {text}", flush=True)

    def fact(self, name: str, value: Any) -> None:
        """Prints and keeps a finding that is not a timing."""
        self.facts[name] = value
        print(f"   {name}: {value}", flush=True)

    def add_timings(
        self, title: str, timings: dict[str, Timing], step: str = "step"
    ) -> None:
        """Prints and keeps the timings of one comparison, of ``step`` each."""
        self.timings[title] = {t.name: t.seconds for t in timings.values()}
        fastest = min(t.median for t in timings.values())
        scale, unit = (1e6, "us") if fastest < 1e-3 else (1e3, "ms")
        rows = [
            [
                t.name,
                f"{t.median * scale:,.2f}",
                f"{1 / t.median:,.1f}",
                f"{min(t.seconds) * scale:,.2f} .. {max(t.seconds) * scale:,.2f}",
            ]
            for t in timings.values()
        ]
        table(title, ["", f"{unit} per {step}", f"{step}s/s", f"range, {unit}"], rows)

    def add_checks(self, checks: Iterable[Check]) -> None:
        """Prints and keeps comparisons with their bars."""
        checks = list(checks)
        self.checks += checks
        print_checks("", checks)

    def finish(self) -> int:
        """Writes the JSON and returns the exit code."""
        missed = any(check.met is False for check in self.checks)
        if self.options.json:
            self.options.json.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        return int(self.options.check and missed)

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        settings = {
            k: v if isinstance(v, int | float | str | bool | None) else str(v)
            for k, v in vars(self.options).items()
        }
        return {
            "benchmark": self.name,
            "environment": self.environment,
            "settings": settings,
            "seconds_a_step": self.timings,
            "facts": self.facts,
            "checks": [asdict(check) | {"met": check.met} for check in self.checks],
        }


def print_checks(title: str, checks: Iterable[Check]) -> None:
    """Prints figures, their spread over rounds, the bars, and whether they are met."""
    head = ["", "value", "rounds: 25 %", "50 %", "75 %", "bar", ""]
    table(title, head, [check.cells() for check in checks])


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, with rich on a terminal where rich is there, plainly elsewhere.

    The first column is set flush left, the others flush right.
    """
    if sys.stdout.isatty():
        try:
            return _rich_table(title, head, rows)
        except ImportError:
            pass
    lines = [list(head), *[list(row) for row in rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if title:
        print(f"\n{title}")
    for number, line in enumerate(lines):
        first, *others = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
    sys.stdout.flush()


def _rich_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The same table drawn by rich."""
    from rich import box, console, text
    from rich import table as rich_table

    drawn = rich_table.Table(title=title or None, box=box.SIMPLE, title_justify="left")
    for index, name in enumerate(head):
        drawn.add_column(name, justify="right" if index else "left")
    for row in rows:
        style = {"met": "green", "MISSED": "bold red"}.get(row[-1], "")
        drawn.add_row(*[text.Text(cell) for cell in row], style=style)
    console.Console().print(drawn)


__all__ = [
    "Check",
    "Contender",
    "Report",
    "Timing",
    "compare",
    "do_job",
    "measure",
    "parse",
    "parser",
    "print_checks",
    "run_job",
    "table",
]
