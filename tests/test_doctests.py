"""The examples in the docstrings run as they stand, each in a namespace of its own."""

import doctest
import importlib
import pkgutil

import pytest

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
ROOMS = ["replicax", "replicax.datasets", "replicax.strategies"]


def modules():
    """The package's modules. The rooms lie elsewhere on disk than they import from."""
    for room in ROOMS:
        package = importlib.import_module(room)
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{room}."):
            if found.name not in ROOMS:
                yield importlib.import_module(found.name)


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in modules():
        for test in finder.find(module, module.__name__, globs={}):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("example", list(examples()))
def test_example(example, capsys):
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    failures = runner.run(example).failed
    assert not failures, f"{example.filename}\n{capsys.readouterr().out}"
