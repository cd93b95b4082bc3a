"""The objectives of published methods, as settings of `algorithm`: `--preset NAME`.

A preset gives the values of its source where the source names them, and what it leaves out takes
its default. It replaces what the file sets of `algorithm`, and `--set` comes after it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from driver.errors import RunError


class Preset(NamedTuple):
    """One method."""

    source: str
    algorithm: dict[str, Any]


class NoSuchPreset(RunError):
    """The message lists those that there are."""

    exit_code = 2


PRESETS = {
    "grpo": Preset(
        "DeepSeekMath, arXiv:2402.03300, section 4.2",
        {
            "advantage": "group_norm",
            "aggregation": "seq_mean",
            "kl_coef": 0.04,
            "kl_estimator": "k3",
        },
    ),
    "dr_grpo": Preset(
        "Dr. GRPO, arXiv:2503.20783, section 3.2",
        {"advantage": "group_centre", "aggregation": "constant"},
    ),
    "dapo": Preset(
        "DAPO, arXiv:2503.14476, sections 3 and 4.1",
        {
            "advantage": "group_norm",
            "aggregation": "token_mean",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "zero_variance": "resample",
            "overlong_share": 0.2,
        },
    ),
    "gspo": Preset(
        "GSPO, arXiv:2507.18071, section 5.1",
        {
            "advantage": "group_norm",
            "aggregation": "seq_mean",
            "ratio": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
        },
    ),
    "rloo": Preset(
        "RLOO, arXiv:2402.14740, equation 8; the coefficient of the KL term is ours",
        {
            "advantage": "leave_one_out",
            "aggregation": "constant",
            "kl_coef": 0.03,
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
    ),
    "reinforce_pp": Preset(
        "REINFORCE++, arXiv:2501.03262; the coefficient of the KL term is ours",
        {
            "advantage": "batch_norm",
            "aggregation": "token_mean",
            "kl_coef": 0.01,
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
    ),
    "reinforce_pp_baseline": Preset(
        "REINFORCE++-baseline, arXiv:2501.03262; the coefficient of the KL term is ours",
        {
            "advantage": "group_centre_batch_norm",
            "aggregation": "token_mean",
            "kl_coef": 0.01,
            "kl_estimator": "k2",
        },
    ),
    "cispo": Preset(
        "CISPO, MiniMax-M1, arXiv:2506.13585, section 3.1, without a lower bound; the upper one "
        "of the weight, 5, is ours",
        {
            "advantage": "group_norm",
            "aggregation": "token_mean",
            "policy_loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
        },
    ),
    "sapo": Preset(
        "SAPO, arXiv:2511.20347",
        {
            "advantage": "group_norm",
            "aggregation": "seq_mean",
            "policy_loss": "soft_gate",
            "gate_positive": 1.0,
            "gate_negative": 1.05,
        },
    ),
    "gdpo": Preset(
        "GDPO, arXiv:2601.05242",
        {"advantage": "reward_norm", "aggregation": "seq_mean"},
    ),
    "ppo": Preset(
        "PPO, arXiv:1707.06347, with the values of arXiv:1909.08593 and of its code; the penalty "
        "per token and its coefficient are those of InstructGPT, arXiv:2203.02155; the value "
        "head's learning rate is ours",
        {
            "advantage": "gae",
            "aggregation": "token_mean",
            "gamma": 1.0,
            "gae_lambda": 0.95,
            "value_coef": 0.1,
            "value_clip": 0.2,
            "value_rate_factor": 10.0,
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_coef": 0.02,
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
    ),
    "pass_at_k": Preset(
        "Pass@k training, arXiv:2508.10751",
        {"advantage": "pass_at_k", "aggregation": "token_mean"},
    ),
}


def preset(name: str) -> Preset:
    """The preset of a name.

    Raises:
        NoSuchPreset: if there is none.
    """
    if name not in PRESETS:
        raise NoSuchPreset(f"--preset {name}: there is none; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def explain(name: str | None, replaced: Mapping[str, Any]) -> str:
    """Lines for the terminal: what the preset sets, where that is from, and what it replaces; ''
    for None.

    Args:
        replaced: the section `algorithm` of the file.
    """
    if name is None:
        return ""
    chosen = preset(name)
    values = ", ".join(f"{key}={value}" for key, value in chosen.algorithm.items())
    lines = f"preset {name}: {values} ({chosen.source})\n"
    lost = [f"{key}={value}" for key, value in replaced.items() if key not in chosen.algorithm]
    if lost:
        lines += f"note: it replaces the file's section algorithm, so that {', '.join(lost)} of it "
        lines += "does not count: give with --set what is to stay\n"
    return lines
