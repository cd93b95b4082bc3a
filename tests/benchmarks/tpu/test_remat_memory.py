"""What is kept of a layer, counted by hand."""

import pytest

from benchmarks.decode.model_shapes import SHAPES
from benchmarks.tpu.remat_memory import layer_kept_bytes
from models.layer_scan import Remat

T, D, F, N, K, H = 8192, 2048, 11008, 16, 2, 128
INPUT = 2 * T * D


@pytest.mark.parametrize(
    "remat, beyond",
    [
        (Remat.LAYER, 0),
        (Remat.OFFLOAD, 0),
        (Remat.ATTENTION, 2 * T * N * H + 4 * T * N),
        (Remat.MLP, 2 * T * 2 * F),
        # down_proj's result is only added to the stream: no derivative asks for it.
        (Remat.DOTS, 2 * T * (N * H + 2 * K * H + D + 2 * F)),
    ],
)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_bytes_of_a_layer_of_qwen25_3b(platform, remat, beyond):
    assert layer_kept_bytes(SHAPES["qwen2.5-3b"], T, remat, platform) == INPUT + beyond
