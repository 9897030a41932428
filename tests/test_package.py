"""The package as it is shipped: its contents, its face, and what importing it does."""

import __future__

import ast
import graphlib
import importlib
import importlib.metadata
import importlib.resources
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import types
import zipfile
from pathlib import Path

import pytest

import replicax as rx

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "replicax": "replicax",
    "replicax.datasets": "datasets",
    "replicax.strategies": "strategies",
}


def sources(room: str) -> list[Path]:
    """The Python files of a room, relative to the root."""
    return sorted(p.relative_to(ROOT) for p in (ROOT / ROOMS[room]).rglob("*.py"))


def module_path(file: Path) -> Path:
    """Where a file of the tree stands in the installed package."""
    return file if file.parts[0] == "replicax" else Path("replicax", file)


ALL_SOURCES = [file for room in ROOMS for file in sources(room)]


def python(code: str, cwd: Path) -> str:
    """Runs code in a process of its own, outside the tree, and returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- what is shipped ---------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with an sdist and the wheel made from it, of a copy of the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for folder in ROOMS.values():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", tree],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(built):
    """The wheel's files, by name."""
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_the_tree(wheel):
    shipped = {name: data for name, data in wheel.items() if name.endswith(".py")}
    tree = {
        module_path(file).as_posix(): (ROOT / file).read_bytes() for file in ALL_SOURCES
    }
    assert shipped.keys() == tree.keys()
    assert shipped == tree


def test_the_sdist_holds_the_tree(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        shipped = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    assert {*ALL_SOURCES, Path("LICENSE"), Path("replicax/py.typed")} <= shipped


def test_the_wheel_installs_one_top_level_name(wheel):
    dist_info = f"replicax-{rx.__version__}.dist-info"
    assert {Path(name).parts[0] for name in wheel} == {"replicax", dist_info}


def test_the_wheel_tells_type_checkers_that_it_is_typed(wheel):
    assert "replicax/py.typed" in wheel
    assert importlib.resources.files("replicax").joinpath("py.typed").is_file()


def test_every_package_is_listed():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {file.parent for file in ALL_SOURCES}
    without_init = [f for f in folders if not (ROOT / f / "__init__.py").is_file()]
    assert not without_init, "A folder of modules needs an __init__.py to be shipped."
    expected = {".".join(module_path(folder).parts) for folder in folders}
    assert set(setup["packages"]) == expected
    for package, folder in setup["package-dir"].items():
        assert ".".join(module_path(Path(folder)).parts) == package


def test_the_version_is_the_metadata_version():
    assert rx.__version__ == importlib.metadata.version("replicax")


# -- what importing does -----------------------------------------------------------


def test_import_starts_no_backend(tmp_path):
    code = """
import replicax, jax
jax.config.update("jax_num_cpu_devices", 3)  # raises once a backend has started
print(len(jax.devices()))
"""
    assert python(code, tmp_path).split() == ["3"]


def test_import_brings_nothing_that_jax_flax_and_optax_do_not(tmp_path):
    code = "import {}, sys; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    ours = set(python(code.format("replicax"), tmp_path).split())
    theirs = set(python(code.format("jax, flax.nnx, optax"), tmp_path).split())
    assert ours - theirs - sys.stdlib_module_names == {"replicax"}


def test_import_brings_no_heavy_module(tmp_path):
    code = """
import jax, flax.nnx, optax, sys
before = set(sys.modules)
import replicax
print(*sorted(set(sys.modules) - before))
"""
    brought = python(code, tmp_path).split()
    heavy = {"grain", "orbax", "ray", "sklearn", "tensorboardX", "tensorflow", "torch"}
    assert [name for name in brought if name.split(".")[0] in heavy] == []


def test_the_rooms_do_not_take_top_level_names(tmp_path):
    code = """
import importlib.util, replicax
for name in ("datasets", "strategies"):
    spec = importlib.util.find_spec(name)
    print(name, spec.origin if spec else None)
"""
    for line in python(code, tmp_path).splitlines():
        assert str(ROOT) not in line


# -- the face ----------------------------------------------------------------------


def test_all_is_sorted_and_complete():
    assert list(rx.__all__) == sorted(set(rx.__all__))
    loaded = {name: getattr(rx, name) for name in rx.__all__}  # some come when asked
    public = {
        name
        for name, value in vars(rx).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType | __future__._Feature)
    }
    modules = {n for n, value in loaded.items() if isinstance(value, types.ModuleType)}
    assert modules <= {"datasets"}
    assert set(rx.__all__) - modules - {"__version__"} == public


@pytest.mark.parametrize("name", rx.__all__)
def test_a_public_name_says_where_it_can_be_imported_from(name):
    value = getattr(rx, name)
    if not hasattr(value, "__module__"):
        return
    module = importlib.import_module(value.__module__)
    assert not any(part.startswith("_") for part in value.__module__.split("."))
    assert getattr(module, value.__qualname__) is value


@pytest.mark.parametrize("name", rx.__all__)
def test_a_public_name_is_documented(name):
    if name != "__version__":
        assert getattr(rx, name).__doc__


# -- the floors --------------------------------------------------------------------


def imported(file: Path) -> set[str]:
    """The absolute names of the modules that a file imports."""
    package = module_path(file).parent.parts
    names = set()
    tree = without_types_only(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{stem}.{alias.name}" for alias in node.names}
    return names


def is_face(file: Path) -> bool:
    return file == Path("replicax/__init__.py")


def within(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in packages)


@pytest.mark.parametrize("file", ALL_SOURCES, ids=str)
def test_a_floor_imports_only_from_those_below(file):
    above = {
        "replicax": ("replicax.strategies", "replicax.datasets"),
        "datasets": ("replicax.strategies",),
        "strategies": (),
    }[file.parts[0]]
    if not is_face(file):
        names = imported(file)
        assert not [name for name in names if within(name, *above)]
        assert "replicax" not in names, "Import the module that defines the name."


def without_types_only(tree: ast.AST) -> ast.AST:
    """A module without what stands under ``if TYPE_CHECKING:``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return tree


def test_no_module_imports_itself_by_way_of_others():
    # Imports inside of functions count: they only hide a circle.
    modules = {
        ".".join(module_path(file).with_suffix("").parts): file for file in ALL_SOURCES
    }
    graph = {
        name: {
            target
            for found in imported(file)
            for target in (found, found.rpartition(".")[0])
            if target in modules and target != name and not is_face(modules[target])
        }
        for name, file in modules.items()
        if file.name != "__init__.py"
    }
    assert graph["replicax.strategies.run"] >= {"replicax.strategies.program"}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises on a circle


@pytest.mark.parametrize("file", ALL_SOURCES, ids=str)
def test_private_jax_stands_in_compat_alone(file):
    if file.name != "_compat.py":
        assert not [name for name in imported(file) if within(name, "jax._src")]
