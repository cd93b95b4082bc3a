"""No run may land on another platform than the one that was asked for."""

import os
import subprocess
import sys

import pytest

from models.platform import WrongPlatform, require_platform
from tests.deadlines import HANG_S


def test_the_wanted_platform_is_returned():
    assert {device.platform for device in require_platform("cpu")} == {"cpu"}


@pytest.mark.parametrize("wanted", ["gpu", "tpu"])
def test_another_platform_is_refused_naming_wanted_and_found(wanted):
    with pytest.raises(WrongPlatform, match=f"platform={wanted}, but JAX found cpu"):
        require_platform(wanted)


def test_a_platform_that_cannot_start_is_refused_and_never_replaced_by_the_cpu():
    code = "from models.platform import require_platform; require_platform('gpu')"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ended.returncode != 0
    assert "placement.platform=gpu but JAX cannot initialise it here" in ended.stderr
