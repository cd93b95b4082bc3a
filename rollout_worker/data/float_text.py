"""The text of a float, as a record or a prompt shows it."""

import numpy as np


def number_text(number: float | np.floating) -> str:
    """The shortest digits, without exponent, that read back as this float of its own width.

    `0.1` of a float32 0.1, `5` of 5.0, `100000000000000000000` of 1e20.
    """
    return np.format_float_positional(number, trim="-")
