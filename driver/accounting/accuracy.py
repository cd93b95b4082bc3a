"""Statistics of right and wrong answers, for evaluation reports."""

import dataclasses
import math


def wilson_interval(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Returns the Wilson score interval of a success rate.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    JASA 22 (1927). Unlike the normal approximation it stays inside [0, 1] and has a width where
    all or none succeed.

    Args:
        successes: right answers, 0 to n; a mean over several samples of each may be fractional.
        n: answers in all, at least 1, drawn independently.
        z: quantile of the normal distribution; 1.96 gives 95 %.

    Returns:
        (low, high), each in [0, 1].

    Raises:
        ValueError: if n < 1 or successes lies outside [0, n].
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(
            f"an interval needs 0 <= successes <= n and n >= 1, got {successes=}, {n=}"
        )
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # The bounds are exactly 0 and 1 at the ends; rounding must not move them inwards.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the chance that at least one of k completions is right, estimated without bias.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374),
    equation 1: 1 - C(n-c, k) / C(n, k), the share of k-subsets of the n completions that hold a
    right one.

    Args:
        n: completions drawn of the prompt.
        c: right ones among them.
        k: completions that are looked at, 1 to n.

    Raises:
        ValueError: unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got {n=}, {c=}, {k=}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def sign_test(better: int, worse: int) -> float:
    """Returns the two-sided p-value of the exact sign test.

    Under the hypothesis of no change, each pair that changed is as likely to have become better as
    worse. Where each of a pair is right or wrong, this is the exact form of McNemar's test.

    Source: Q. McNemar, "Note on the sampling error of the difference between correlated proportions
    or percentages", Psychometrika 12 (1947); the p-value is the binomial one, not the chi-square.

    Args:
        better, worse: pairs that changed; those that did not change say nothing.

    Raises:
        ValueError: if a number is negative.
    """
    if better < 0 or worse < 0:
        raise ValueError(f"numbers of pairs must not be negative, got {better=}, {worse=}")
    pairs = better + worse
    term = tail = 1
    for drawn in range(min(better, worse)):
        term = term * (pairs - drawn) // (drawn + 1)
        tail += term
    return min(1.0, 2 * tail / 2**pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Right answers of one evaluation."""

    correct: int
    total: int
    correct_from: float = 1.0
    """The reward from which an answer is right."""

    def __post_init__(self):
        if not 0 <= self.correct <= self.total or self.total < 1:
            raise ValueError(f"{self.correct} right answers of {self.total} are impossible")

    @property
    def fraction(self) -> float:
        """Right answers per answer, 0 to 1."""
        return self.correct / self.total

    def __str__(self) -> str:
        low, high = wilson_interval(self.correct, self.total)
        return (
            f"{self.fraction:.3f} ({self.correct} of {self.total} with a reward of at least "
            f"{self.correct_from:g}; "
            f"95 % interval {low:.3f} to {high:.3f})"
        )
