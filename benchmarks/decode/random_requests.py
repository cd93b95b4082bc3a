"""Random requests: lengths of completions, and ids of prompts."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Lognormal:
    """Lengths of completions whose logarithm is normal."""

    mean: float
    """Of the lengths, before they are cut off."""
    most: int
    """Longer ones are cut off here, as max_new_tokens does."""
    sigma: float
    """Standard deviation of the logarithm."""

    def draw(self, count: int, seed: int) -> np.ndarray:
        """int64 [count], each from 1 to `most`."""
        location = math.log(self.mean) - self.sigma**2 / 2
        drawn = np.random.default_rng(seed).lognormal(location, self.sigma, count)
        return np.clip(np.rint(drawn).astype(np.int64), 1, self.most)


def parse_lengths(text: str) -> Lognormal:
    """Reads `lognormal:mean=220,max=1024`, with `sigma=` (0.8) if wanted.

    Raises:
        ValueError: naming the value, the rule and what to write.
    """
    kind, _, rest = text.partition(":")
    form = "write lognormal:mean=220,max=1024, with ,sigma=0.8 if wanted"
    if kind != "lognormal":
        raise ValueError(f"--lengths {text!r} is of no known kind: {form}")
    values = {"sigma": 0.8}
    for part in rest.split(","):
        name, _, number = part.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if name not in ("mean", "max", "sigma") or not value > 0 or math.isinf(value):
            raise ValueError(f"--lengths {part!r} is no positive mean, max or sigma: {form}")
        values[name] = value
    if not {"mean", "max"} <= set(values) or values["max"] % 1 or values["mean"] > values["max"]:
        raise ValueError(f"--lengths {text!r} needs a mean and a whole max above it: {form}")
    return Lognormal(values["mean"], int(values["max"]), values["sigma"])


def prompts(count: int, length: int, vocab_size: int, seed: int) -> np.ndarray:
    """int32 [count, length]: random ids."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, vocab_size, (count, length), dtype=np.int32)
