"""Group-relative advantages: each completion against the others of its prompt.

Runs on the host in float64 on a few numbers per prompt; nothing here is traced.

Dimension key:
    G: completions of one prompt (the group)
"""

import numpy as np


def group_advantages(reward_G: np.ndarray, *, kind: str, eps: float) -> np.ndarray:
    """Compares the reward of each completion with those of its group.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2, for `group_norm`; Dr. GRPO
    (arXiv:2503.20783) for `group_centre`.

    Args:
        reward_G: total reward of each completion; NaN or infinite where it has none. Those are
            left out of the mean and the deviation.
        kind: `group_norm` is (r - mean) / (std + eps) with the population deviation (ddof 0);
            `group_centre` is r - mean.
        eps: in reward units; keeps the division finite.

    Returns:
        float32 [G], with mean zero over the rewarded completions. Zeros where a completion has no
        reward, and for a whole group without variance (see has_variance), exactly.

    Raises:
        ValueError: if the kind is unknown.
    """
    if kind not in ("group_norm", "group_centre"):
        raise ValueError(f"advantage must be group_norm or group_centre, got {kind!r}")
    reward_G = np.asarray(reward_G, np.float64)
    advantage_G = np.zeros(reward_G.shape, np.float32)
    if not has_variance(reward_G):
        return advantage_G
    rewarded_G = np.isfinite(reward_G)
    reward = reward_G[rewarded_G]
    centred = reward - reward.mean()
    scale = centred.std() + eps if kind == "group_norm" else 1.0
    advantage_G[rewarded_G] = centred / scale
    return advantage_G


def has_variance(reward_G: np.ndarray) -> bool:
    """Whether a group says anything: at least two rewards, and not all the same.

    Equality is exact. A deviation computed in floating point is no test, since equal rewards
    such as 0.35 can leave a residue above zero.
    """
    reward_G = np.asarray(reward_G, np.float64)
    reward = reward_G[np.isfinite(reward_G)]
    return reward.size > 1 and reward.min() != reward.max()
