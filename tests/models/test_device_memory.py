import types
from typing import Any

import jax

from models.device_memory import device_memory


def device(stats) -> Any:
    return types.SimpleNamespace(memory_stats=lambda: stats)


def test_bytes_of_all_devices_are_added():
    stats = [{"bytes_in_use": n, "peak_bytes_in_use": 10 * n, "other": 1} for n in (1, 2)]
    assert device_memory([device(one) for one in stats]) == (3, 30)


def test_a_platform_that_does_not_tell_is_none():
    assert device_memory(jax.local_devices()) is None
    assert (
        device_memory([device({"bytes_in_use": 1, "peak_bytes_in_use": 1}), device(None)]) is None
    )
