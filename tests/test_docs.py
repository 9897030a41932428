"""What the documentation says runs, and nothing public is left out of it."""

import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import replicax as rx

ROOT = Path(__file__).resolve().parents[1]
RUNNABLE = re.compile(r"^```(python|pycon|\{code-cell\})", re.MULTILINE)
DOCUMENTED = re.compile(r"^\.\. auto\w+:: replicax\.([\w.]+)$", re.MULTILINE)

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNABLE_BLOCKS = {
    page.relative_to(ROOT).as_posix(): len(RUNNABLE.findall(page.read_text("utf-8")))
    for page in PAGES
}


@pytest.mark.parametrize("page", [p for p, count in RUNNABLE_BLOCKS.items() if count])
def test_every_block_of_the_page_runs(page, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            ROOT / "tests" / "run_markdown.py",
            ROOT / page,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{RUNNABLE_BLOCKS[page]} blocks ran"


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("```python\nx = 1\n```\n```pycon\n>>> x + 1\n2\n```\n", False),
        ("```python\nx = 1 / 0\n```\n", True),
        ("```pycon\n>>> 1 + 1\n3\n```\n", True),
        (
            "```pycon\n>>> 1 / 0\nTraceback (most recent call last):\nTypeError\n```",
            True,
        ),
        ("```python\nx = 1\n", True),
        ("```text\nx = 1 / 0\n```\n", False),
    ],
)
def test_the_runner_notices_what_is_wrong(text, fails, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "run_markdown.py", page], capture_output=True
    )
    assert (done.returncode != 0) is fails, done.stdout + done.stderr


def test_the_reference_documents_every_public_name():
    documented = DOCUMENTED.findall((ROOT / "docs" / "api.md").read_text("utf-8"))
    in_datasets = set(rx.datasets.__all__) - set(rx.__all__)
    public = {*rx.__all__, *(f"datasets.{name}" for name in in_datasets)}
    assert sorted(documented) == sorted(public)


WRAPPERS = (property, functools.cached_property, classmethod, staticmethod)


def public_things():
    """Public names, and the public methods and properties of public classes."""
    for package in (rx, rx.datasets):
        for name in package.__all__:
            thing = getattr(package, name)
            yield f"{package.__name__}.{name}", thing
            members = vars(thing) if inspect.isclass(thing) else {}
            for member, value in members.items():
                is_code = inspect.isroutine(value) or isinstance(value, WRAPPERS)
                if is_code and not member.startswith("_"):
                    yield f"{package.__name__}.{name}.{member}", value


def test_everything_public_has_a_docstring():
    bare = [
        name
        for name, thing in public_things()
        if not isinstance(thing, int) and not inspect.getdoc(thing)
    ]
    assert bare == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_of_the_page_is_overlooked(page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"^[ >]+```.*$", text, re.MULTILINE), "Begin it in column 0."
    kinds = set(re.findall(r"^```(\S+)", text, re.MULTILINE))
    shown = {"text", "bash", "{toctree}", "{eval-rst}"}
    assert kinds <= shown | {"python", "pycon", "{code-cell}"}


def test_every_page_is_in_the_table_of_contents():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        if page.name != "index.md":
            assert re.search(rf"^{page.stem}$", index, re.MULTILINE), page.name


# -- the table of tf.distribute ------------------------------------------------------

TF_PAGE = (ROOT / "docs" / "coming_from_tf_distribute.md").read_text("utf-8")
TF_NAMES = (ROOT / "tests" / "golden" / "tf_distribute_names.txt").read_text("utf-8")
CODE = re.compile(r"`([^`]+)`")


def tf_verdicts():
    """What the page says of each name: a word, or what it is called here."""
    verdicts = {}
    _, tables = TF_PAGE.split("## Every name")
    for table in tables.split("| in `tf.distribute` | here | |\n")[1:]:
        for row in table.split("\n\n")[0].splitlines()[1:]:
            names, verdict = row.split(" | ")[:2]
            for name in CODE.findall(names):
                assert name not in verdicts, f"{name} is listed twice."
                verdicts[name] = verdict.strip()
    return verdicts


def is_here(name):
    """Whether a name of tf.distribute leads to something here."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0].islower():
        del parts[0]
    found = rx
    for part in parts:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
        if found is rx.Strategy:  # some attributes are those of an instance
            found = rx.get_strategy()
    return True


def test_every_name_of_tf_distribute_is_spoken_of():
    verdicts, names = tf_verdicts(), TF_NAMES.split()
    missing = [
        name
        for name in names
        if name not in verdicts
        # A class that is not here has no methods here.
        and verdicts.get(name.rpartition(".")[0]) not in ("absent", "planned")
    ]
    assert missing == []
    assert sorted(set(verdicts) - set(names)) == []


def test_what_is_said_of_tf_distribute_is_so():
    wrong = []
    for name, verdict in tf_verdicts().items():
        renamed = CODE.fullmatch(verdict)
        said_here = bool(renamed) or verdict in ("same", "differs")
        assert said_here or verdict in ("absent", "planned"), f"{name}: {verdict}?"
        found = is_here(renamed[1] if renamed else name)
        if verdict != "absent" and found != said_here:
            wrong.append((name, verdict))
    assert wrong == []
