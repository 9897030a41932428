"""What the documentation says runs, and nothing public is left out of it."""

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


def test_every_page_is_in_the_table_of_contents():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        if page.name != "index.md":
            assert re.search(rf"^{page.stem}$", index, re.MULTILINE), page.name
