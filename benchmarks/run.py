"""Runs all benchmarks, one process each, and prints one table of ratios and bars."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _harness import Check, print_checks

HERE = Path(__file__).parent
PROGRAMS = [
    ["import_time.py"],
    ["run_overhead.py", "--devices", "2"],
    ["variables.py", "--devices", "2"],
    ["train_mlp.py", "--devices", "2"],
    ["train_mlp.py", "--devices", "8"],
    ["train_convnet.py", "--devices", "2"],
    ["train_convnet.py", "--devices", "2", "--max-pool"],
    ["communication.py", "--devices", "2"],
    ["input_pipeline.py", "--devices", "2"],
    ["many_launches.py"],
    ["many_epochs.py"],
]
WITH_PEERS = ("train_mlp.py", "input_pipeline.py")


def run_program(command: list[str], options: argparse.Namespace) -> dict | None:
    """Runs one benchmark; returns its JSON, or None if it failed."""
    command = [sys.executable, str(HERE / command[0]), *command[1:]]
    if not options.full:
        command.append("--quick")
    if Path(command[1]).name in WITH_PEERS:
        command += ["--peer-python", options.peer_python]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        done = subprocess.run([*command, "--json", str(result)], check=False)
        if done.returncode:
            print(f"{' '.join(command)} failed with {done.returncode}.")
            return None
        return json.loads(result.read_text())


def markdown(reports: list[dict], checks: list[Check]) -> str:
    """The summary as a Markdown table, under a line that says where it comes from."""
    env = reports[-1]["environment"]
    versions = {k: v for r in reports for k, v in r["environment"]["versions"].items()}
    named = ", ".join(f"{k} {v}" for k, v in versions.items())
    lines = [
        f"{env['date']}, a {env['cores']}-core {env.get('device_kind', 'cpu').upper()}"
        f" (load before the run {reports[0]['environment']['load_average']:.1f}); "
        f"{named}.",
        "",
        "| | value | quartiles of single rounds | bar | |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for check in checks:
        what, value, low, middle, high, bar, verdict = check.cells()
        spread = f"{low} / {middle} / {high}" if low else ""
        lines.append(f"| {what} | {value} | {spread} | {bar} | {verdict} |")
    return "\n".join(lines) + "\n"


def write_between_marks(path: Path, text: str) -> None:
    """Replaces what stands between the marks of a file, or all of one without."""
    begin, end = "<!-- results -->\n", "<!-- end of results -->\n"
    old = path.read_text() if path.exists() else ""
    if begin in old and end in old:
        before, after = old.split(begin)[0], old.split(end)[1]
        text = f"{before}{begin}\n{text}\n{end}{after}"
    path.write_text(text)


def main() -> int:
    """Runs the benchmarks and prints the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--full", action="store_true", help="long slices, for figures to keep"
    )
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        help="an interpreter that has the peers' libraries (default: this one)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write JSON")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="also write the summary there, between the marks if it has them",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a bar is missed"
    )
    options = parser.parse_args()
    start = time.perf_counter()
    reports = [run_program(command, options) for command in PROGRAMS]
    whole = [report for report in reports if report is not None]
    checks = []
    for report in whole:
        for fields in report["checks"]:
            fields = {k: v for k, v in fields.items() if k != "met"}
            checks.append(Check(**fields))
    minutes = (time.perf_counter() - start) / 60
    print_checks(f"Summary ({minutes:.1f} minutes)", checks)
    if options.json:
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    if options.markdown and whole:
        write_between_marks(options.markdown, markdown(whole, checks))
    failed = len(whole) < len(PROGRAMS)
    missed = any(check.met is False for check in checks)
    return int(failed or (options.check and missed))


if __name__ == "__main__":
    sys.exit(main())
