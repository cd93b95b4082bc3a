import os
import subprocess
import sys

import pytest

from driver.config.load_config import ConfigError
from driver.config.sections.placement import Resources
from driver.config.shell_switches import FIXED, check_xla_flags, cpu_devices, overridden
from driver.fleet.launch import platform_environment
from tests.deadlines import HANG_S

pytestmark = pytest.mark.slow

SHOW = """
import jax, jax.numpy as jnp
x = jnp.ones((2, 3)) @ jnp.ones((3, 2)) + jax.random.normal(jax.random.key(0), (2, 2))
print(x.dtype, jnp.arange(3).dtype, x.tolist(), jnp.log(-x).sum(), jnp.ones((2, 2)) + jnp.ones(2))
text = jax.jit(lambda a: a @ a + jnp.int32(1)).lower(x).as_text()
print("\\n".join(line for line in text.splitlines() if "module" not in line))
"""


def run(switches):
    """What a process with these variables computes."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    command = [sys.executable, "-c", SHOW]
    return subprocess.run(
        command, env=environment | switches, capture_output=True, text=True, timeout=HANG_S
    ).stdout


def test_an_actor_computes_alike_whatever_its_shell_says_N30():
    brought = {
        "JAX_ENABLE_X64": "1",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_DEBUG_NANS": "True",
        "JAX_DISABLE_JIT": "1",
        "JAX_RANDOM_SEED_OFFSET": "7",
    }
    plain = run({"JAX_PLATFORMS": "cpu"})
    assert plain.startswith("float32 int32")
    assert run(brought | platform_environment("cpu", Resources())) == plain
    assert run(brought | {"JAX_PLATFORMS": "cpu"}) != plain


@pytest.mark.parametrize(
    "name, value",
    [
        ("JAX_ENABLE_X64", "1"),
        ("JAX_ENABLE_X64", "true"),
        ("JAX_DEBUG_NANS", "True"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "float32"),
        ("JAX_DEFAULT_PRNG_IMPL", "rbg"),
    ],
)
def test_a_switch_that_does_not_hold_is_named(name, value):
    (line,) = overridden({name: value, "JAX_PLATFORMS": "cpu", "HOME": "/h"})
    assert f"{name}={value} of this shell does not hold" in line and FIXED[name] in line


def test_a_switch_that_says_the_same_is_not():
    same = {"JAX_ENABLE_X64": "False", "JAX_DEBUG_NANS": "off", "JAX_THREEFRY_PARTITIONABLE": "y"}
    assert overridden(same) == overridden(FIXED) == overridden({}) == []


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--xla_cpu_enable_fast_math=true", "--xla_cpu_enable_fast_math=true"),
        ("--xla_cpu_enable_fast_math", "--xla_cpu_enable_fast_math=true"),
        ("--xla_dump_to=/x --xla_gpu_enable_fast_min_max=1", "--xla_gpu_enable_fast_min_max=1"),
        ("--xla_allow_excess_precision=False", "--xla_allow_excess_precision=False"),
    ],
)
def test_flags_of_xla_that_change_numbers_are_refused_by_name(flags, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        check_xla_flags({"XLA_FLAGS": flags})
    (tmp_path / "flags").write_text(flags)
    with pytest.raises(ConfigError, match=named):
        check_xla_flags({"XLA_FLAGS": str(tmp_path / "flags")})


@pytest.mark.parametrize("text", ["xla_cpu_enable_fast_math=true " * 20, "a\0b", "no/such/file"])
def test_a_text_that_is_neither_flags_nor_a_file_has_no_flags(text):
    check_xla_flags({"XLA_FLAGS": text})


def test_other_flags_of_xla_pass():
    check_xla_flags({})
    check_xla_flags(
        {
            "XLA_FLAGS": "--xla_cpu_enable_fast_math=false --xla_allow_excess_precision=true "
            "--xla_force_host_platform_device_count=8 --xla_dump_to=/tmp/--xla"
        }
    )


@pytest.mark.parametrize(
    "environ, count",
    [
        ({}, 1),
        ({"XLA_FLAGS": "--xla_dump_to=/x --xla_force_host_platform_device_count=4"}, 4),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_NUM_CPU_DEVICES": "8"}, 8),
        ({"JAX_NUM_CPU_DEVICES": "-1"}, 1),
        ({"JAX_NUM_CPU_DEVICES": "²"}, 1),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=0"}, 1),
    ],
)
def test_the_devices_of_a_cpu(environ, count):
    assert cpu_devices(environ) == count
