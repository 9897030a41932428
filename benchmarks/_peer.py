"""Peers in processes of their own, which take their turns when they are asked to.

Libraries with thread pools should not share a process with those they are compared
with. A peer is a program that is run by an interpreter which has its library. It reads
lines ``WORKLOAD STEPS`` on its standard input, does that many steps, and answers each
line with the seconds that they took. While it waits for a line, it does nothing.

Both sides are here; this file needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from _harness import Contender, Report


def add_option(arguments: argparse.ArgumentParser) -> None:
    """Adds ``--peer-python`` to a command line."""
    arguments.add_argument(
        "--peer-python",
        default=sys.executable,
        help="an interpreter that has the peers' libraries (default: this one)",
    )


# -- the side that asks --------------------------------------------------------------


class Peer:
    """A process that does steps when it is asked to.

    Args:
      python: Its interpreter.
      program: Its file, next to this one.
      arguments: Its command line.

    Raises:
      RuntimeError: The process does not come up; the text is the end of its log.
    """

    def __init__(self, python: str, program: str, *arguments: object):
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in close)
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name(program)), *map(str, arguments)],
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

    def contender(self, name: str, workload: str, turn: int | None = None) -> Contender:
        """The contender that does steps of one of the peer's workloads."""

        def run(steps: int) -> float:
            self.process.stdin.write(f"{workload} {steps}\n")
            return float(self._answer())

        return Contender(name, run, turn)

    def close(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


@contextlib.contextmanager
def peer(
    library: str, options: argparse.Namespace, report: Report, *command: object
) -> Iterator[Peer | None]:
    """The peer that needs a library, or None with a notice where it is not found.

    Args:
      library: The name that it is imported by.
      options: The command line, with ``--peer-python``.
      report: Where the notice and the peer's versions go.
      command: The peer's program and its command line.
    """
    probe = f"import importlib.util as u, sys; sys.exit(not u.find_spec({library!r}))"
    found = subprocess.run([options.peer_python, "-c", probe], check=False)
    if found.returncode:
        report.note(
            f"{library} is left out: {options.peer_python} does not have it "
            "(see benchmarks/README.md)."
        )
        yield None
        return
    program, *arguments = command
    asked = Peer(options.peer_python, str(program), *arguments)
    report.environment["versions"] |= asked.versions
    report.note(", ".join(f"{k} {v}" for k, v in asked.versions.items()))
    try:
        yield asked
    finally:
        asked.close()


# -- the side that answers -----------------------------------------------------------

Workload = Callable[[int], float]


def serve(prepare: Callable[[], tuple[Mapping[str, str], Mapping[str, Workload]]]):
    """Answers lines on standard input until it is closed.

    Args:
      prepare: Imports the library; returns versions by package, and by name what is
        done: a function that takes a number of steps and returns their seconds.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the libraries print must not pass for an answer
    versions, workloads = prepare()
    print(json.dumps(versions), file=answers)
    for line in sys.stdin:
        workload, steps = line.split()
        print(workloads[workload](int(steps)), file=answers)


def timed_loop(step: Callable[[], object]) -> Workload:
    """Seconds that a number of steps take, which end when the call returns."""

    def run(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            result = step()
        del result
        return time.perf_counter() - begin

    return run
