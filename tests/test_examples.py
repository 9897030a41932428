"""The examples, run as a user runs them, with small settings."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("rich")

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def last_line(example, *flags):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error"}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *flags],
        capture_output=True,
        text=True,
        env=environment,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("devices", "batch_size"), [(4, 96), (3, 360)])
def test_digits(devices, batch_size):
    flags = ("--epochs=1", f"--devices={devices}", f"--batch-size={batch_size}")
    line = last_line("digits.py", *flags)
    found = re.fullmatch(
        rf"demo: replicas={devices} test_accuracy=(0\.\d{{4}}) "
        r"single_device_max_abs_diff=(\d\.\de[-+]\d\d)",
        line,
    )
    assert found, line
    assert float(found[1]) > 0.15
    assert float(found[2]) < 1e-5


def test_digits_linen():
    line = last_line("digits_linen.py", "--epochs=1", "--devices=4")
    found = re.fullmatch(
        r"digits_linen: replicas=4 rows=357 test_accuracy=(0\.\d{4})", line
    )
    assert found, line
    assert float(found[1]) > 0.5


@pytest.mark.parametrize("devices", [1, 4])
def test_matmul(devices):
    line = last_line("matmul.py", f"--devices={devices}")
    assert re.fullmatch(
        rf"matmul: replicas={devices} max_abs_diff=\d\.\de[-+]\d\d", line
    ), line
