"""Executes the Python of a Markdown file, top to bottom, in one namespace.

``python`` blocks and MyST code cells are run; ``pycon`` blocks are doctests, whose
printed results and errors are compared. The error of a failing block names the file's
own line.
"""

import doctest
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^(?P<fence>`{3,})(?P<info>.*)$")
RUN = re.compile(r"^(python|\{code-cell\}.*)$")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(text: str) -> Iterator[tuple[str, int, str]]:
    """Yields every fenced block: its info string, its first line's number, its text."""
    fence, info, start, lines = "", "", 0, []
    for number, line in enumerate(text.splitlines(), 1):
        match = FENCE.match(line)
        if not fence and match:
            fence, info = match["fence"], match["info"].strip()
            start, lines = number + 1, []
        elif fence and line.rstrip() == fence:
            yield info, start, "\n".join(lines) + "\n"
            fence = ""
        elif fence:
            lines.append(line)
    if fence:
        raise SyntaxError(f"The block that starts at line {start - 1} never ends.")


def run(path: Path) -> int:
    """Runs the file's blocks and returns how many there were."""
    # JAX would add a note about its own frames to errors, which pages need not show.
    os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
    namespace = {"__name__": "__main__", "__file__": str(path)}
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    count = 0
    for info, start, source in blocks(path.read_text(encoding="utf-8")):
        if RUN.match(info):
            source = re.sub(r"^:\w+:.*$", "", source, flags=re.MULTILINE)
            code = compile("\n" * (start - 1) + source, str(path), "exec")
            exec(code, namespace)
        elif info == "pycon":
            test = doctest.DocTestParser().get_doctest(
                source, {}, path.name, str(path), start - 1
            )
            test.globs = namespace
            if runner.run(test, clear_globs=False).failed:
                raise SystemExit(1)
        else:
            continue
        count += 1
    return count


if __name__ == "__main__":
    print(f"{run(Path(sys.argv[1]))} blocks ran")
