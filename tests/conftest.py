"""Every test runs on eight CPU devices; what needs more is marked and skipped with its reason."""

import contextlib
import ctypes
import functools
import gc
import json
import os
import pathlib
import sys

import pytest

from tests import compiled_programs

os.environ["JAX_PLATFORMS"] = "cpu"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # else a process of pytest-xdist, or the user's
    compiled_programs.share_folder()

import hypothesis
import jax
import psutil

# The same examples in every run. How long one takes says more of the machine than of the code.
hypothesis.settings.register_profile(
    "tandem",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tandem")
jax.config.update("jax_num_cpu_devices", 8)


def compile_quickly():
    """Makes this process compile with little effort, since the tests compile far more than they
    compute: no arithmetic changes, but the order of a sum may. The processes that tests start are
    as a user's."""
    jax.config.update("jax_disable_most_optimizations", True)
    flags = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{flags or ''} --xla_cpu_use_fusion_emitters=false"
    jax.devices()  # here, and only once, XLA reads its flags
    os.environ.pop("XLA_FLAGS")
    if flags is not None:
        os.environ["XLA_FLAGS"] = flags


compile_quickly()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Keeps modules and tests, which are no garbage, from being searched for it again and again:
    such a search takes most of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    """Files with services first, then those with slow tests: none of them is to be left to one
    process at the end. Within a file the order stays."""
    first = {
        marker: {item.path for item in items if item.get_closest_marker(marker)}
        for marker in ("service", "slow")
    }
    items.sort(key=lambda item: [item.path not in paths for paths in first.values()])


MEMORY_BYTES = 2.5e9
"""Above it, a process of the tests frees the programs that it has compiled."""


@pytest.fixture(scope="module", autouse=True)
def memory_is_freed():
    """What the tests have compiled and kept would fill a machine in the course of a run."""
    yield
    if psutil.Process().memory_info().rss > MEMORY_BYTES:
        for name in [name for name in sys.modules if name.startswith("tests.")]:
            for kept in vars(sys.modules[name]).values():
                if isinstance(kept, functools._lru_cache_wrapper):
                    kept.cache_clear()
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc keeps what is free between small pieces
            ctypes.CDLL(None).malloc_trim(0)


SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder of real material beside the checkout; skips where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the material in {SHARED.name}/ beside the checkout")
    return SHARED


@pytest.fixture(scope="session")
def cases(shared):
    """Loads one file of public cases: `cases("loss")["L01"]`."""

    def load(kind: str) -> dict[str, dict]:
        document = json.loads((shared / "cases" / f"{kind}_open.json").read_text())
        return {case["id"]: case for case in document["cases"]}

    return load
