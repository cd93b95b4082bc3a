"""What the tests of the TPU commands share."""

import importlib

import pytest

from driver.chip_plan.chips import LIBTPU_ENVIRONMENT


@pytest.fixture
def tpu_command(monkeypatch):
    """Imports a module of benchmarks/tpu that sets, for good, what libtpu reads when it starts."""

    def load(name):
        for variable, value in LIBTPU_ENVIRONMENT.items():
            monkeypatch.setenv(variable, value)
        return importlib.import_module(f"benchmarks.tpu.{name}")

    return load
