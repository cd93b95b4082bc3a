"""What a user's choice of implementation means on each platform."""

import pytest

from kernels import choose


@pytest.mark.parametrize(
    "choice, platform, expected",
    [
        ("auto", "tpu", choose.PALLAS_TPU),
        ("auto", "gpu", choose.XLA),
        ("auto", "cpu", choose.XLA),
        ("pallas", "tpu", choose.PALLAS_TPU),
        ("pallas", "cpu", choose.PALLAS_INTERPRET),
        ("xla", "tpu", choose.XLA),
        ("reference", "gpu", choose.REFERENCE),
    ],
)
def test_choice_becomes_one_implementation(choice, platform, expected):
    assert choose.resolve(choice, platform) == expected


def test_kernels_that_do_not_exist_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match="no Pallas kernel for platform 'gpu': take `xla`"):
        choose.resolve("pallas", "gpu")
    with pytest.raises(ValueError, match="got 'triton'"):
        choose.resolve("triton", "gpu")
