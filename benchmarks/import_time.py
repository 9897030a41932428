"""What ``import replicax`` costs, against ``import jax, flax, optax``.

Fresh processes take turns. The time is taken inside each, around its import only. The
bar compares with exactly ``import jax, flax, optax``, whatever of flax that loads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from _harness import Contender, Report, compare, measure, parse, parser

BASE = "jax, flax, optax"
PROGRAM = """
import json, sys, time
start = time.perf_counter()
import {what}
print(json.dumps([time.perf_counter() - start, sorted(sys.modules)]))
"""


def import_once(what: str) -> tuple[float, set[str]]:
    """Imports ``what`` in a fresh process.

    Returns:
      The seconds that it took, and the names of the modules that were then loaded.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(what=what)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""},
    )
    seconds, modules = json.loads(done.stdout)
    return seconds, set(modules)


def importer(what: str) -> Contender:
    """A contender whose step is one import in a fresh process."""
    return Contender(
        f"import {what}", lambda steps: sum(import_once(what)[0] for _ in range(steps))
    )


def main() -> int:
    """Runs the comparison."""
    options = parse(parser(__doc__, devices=None))
    report = Report("import_time", options)
    contenders = [importer(what) for what in ("replicax", BASE, f"{BASE}, flax.nnx")]
    timings = measure(contenders, options.rounds, slice_seconds=0)
    report.add_timings("imports in fresh processes", timings)

    added = import_once("replicax")[1] - import_once(BASE)[1]
    others = {name.split(".")[0] for name in added} - {"replicax", "flax", "jax"}
    report.fact("modules beyond jax, flax, optax", len(added))
    report.fact(
        "packages among them that are not in the standard library",
        sorted(others - sys.stdlib_module_names) or "none",
    )
    ours, base, _ = timings.values()
    what = f"time, import replicax / import {BASE}"
    report.add_checks([compare(what, ours, base, 1.25)])
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
