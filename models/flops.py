"""Operations of a training pass, and what a chip could do at most.

Counted are the products of matrices alone, two operations for each multiply and add, as the field
counts model FLOPs: the layers' projections, the head over the whole vocabulary, and the scores and
sums of attention over the tokens that each token sees. A backward pass takes twice the forward
pass. What an implementation does beyond that, such as computing a layer again or padding, does not
count.
"""

from collections.abc import Sequence

import jax

from models.config import ModelConfig

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
}
"""bfloat16 operations a second of a chip, dense, by the start of JAX's name of the device: of their
makers' data sheets. Of several starts the longest counts."""


def forward_flops(config: ModelConfig, lengths: Sequence[int]) -> float:
    """Of sequences with so many input tokens each."""
    seen = sum(n * (n + 1) // 2 for n in lengths)
    attended = 4.0 * config.num_layers * config.num_heads * config.head_dim * seen
    return 2.0 * _matrices(config) * sum(lengths) + attended


def _matrices(config: ModelConfig) -> int:
    """Elements of all matrices that each token is multiplied with."""
    c = config
    query, key_value = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    projections = c.hidden_size * (2 * query + 2 * key_value + 3 * c.intermediate_size)
    return c.num_layers * projections + c.hidden_size * c.vocab_size


def training_flops(config: ModelConfig, lengths: Sequence[int], *, frozen: bool = False) -> float:
    """Of forward and backward pass.

    Args:
        frozen: an adapter trains in place of the model, so that no gradient of a matrix is formed.
            The adapter's own thin products are not counted.
    """
    of_matrices = 2.0 * _matrices(config) * sum(lengths) if frozen else 0.0
    return 3.0 * forward_flops(config, lengths) - of_matrices


def peak_flops(device: jax.Device, compute_dtype: str) -> float | None:
    """Of one chip, a second; None where it is not known, as in float32."""
    starts = [start for start in PEAK_FLOPS if device.device_kind.startswith(start)]
    if compute_dtype != "bfloat16" or not starts:
        return None
    return PEAK_FLOPS[max(starts, key=len)]


def flops_metrics(
    flops: float, seconds: float, devices: Sequence[jax.Device], compute_dtype: str
) -> dict[str, float]:
    """What an update's operations say of its speed.

    Args:
        flops: of all devices together.
        devices: at least one, all of a kind.
    """
    per_chip = flops / seconds / len(devices)
    metrics = {"throughput/train/model_tflops_per_chip_update": per_chip / 1e12}
    if peak := peak_flops(devices[0], compute_dtype):
        metrics["throughput/train/mfu_update"] = per_chip / peak
    return metrics
