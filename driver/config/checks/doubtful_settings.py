"""Settings that work but are probably not meant: what is slow, inexact, idle, or never happens."""

import math

from driver.config.run_config import RunConfig
from driver.config.wording import say_bytes
from kernels import choose

NOTED_SCORE_BYTES = 10**9
"""Of the whole scores of one row, from which on they are mentioned."""


def doubtful_settings(
    config: RunConfig, *, impls: dict[str, str], score_bytes: int, programs: int
) -> tuple[str, ...]:
    """One line for each.

    Args:
        impls: by key, which implementation runs, of `kernels.choose.IMPLEMENTATIONS`.
        score_bytes: of the attention of one layer and one row, where they are whole.
        programs: that a worker can come to need.
    """
    found = [*_speed(config, impls), *_shares(config), *_best(config)]
    if config.learner.attention == choose.REFERENCE and score_bytes >= NOTED_SCORE_BYTES:
        found.append(
            f"learner.attention=reference holds {say_bytes(score_bytes)} of scores for each row in "
            "each layer: `auto` goes through them in blocks"
        )
    decode = config.rollout.decode
    if decode.compile_budget is not None and decode.compile_budget < programs:
        found.append(
            f"rollout.decode.compile_budget={decode.compile_budget} is below the {programs} "
            "programs that a worker can come to need"
        )
    for one in config.held_out_sets:
        rules = one.rules
        if rules.temperature == 0 and (rules.top_k, rules.top_p, rules.min_p) != (0, 1, 0):
            key = f"{one.key}: " if one.name else "eval."
            found.append(
                f"{key}temperature=0 takes the likeliest token, whatever top_k, top_p or min_p"
            )
    return tuple(found)


def _speed(config: RunConfig, impls: dict[str, str]) -> list[str]:
    """What is slower, or less exact, than it need be."""
    found, decode = [], config.rollout.decode
    if decode.attention == "bf16" and decode.compute_dtype == "float32":
        found.append(
            "rollout.decode.attention=bf16 with compute_dtype=float32: the worker's logprobs are "
            "those of bfloat16 attention, which the learner does not repeat; `auto` and f32 are not"
        )
    if decode.loop == "python":
        found.append(
            "rollout.decode.loop=python has the host wait for every token: `while` does not"
        )
    found += [
        f"{key}=pallas is interpreted on {config.placement.platform}: exact, and slow; `auto` is "
        "not"
        for key, impl in impls.items()
        if impl == choose.PALLAS_INTERPRET
    ]
    if config.learner.lora is not None and impls["learner.loss_impl"] != choose.XLA:
        found.append(
            "learner.lora: updates compute the head by xla, whatever learner.loss_impl says: it is "
            "what can leave out the gradient of a head that stays as it is"
        )
    if config.weights.dtype == "float32" and decode.compute_dtype == "bfloat16":
        found.append(
            "weights.dtype=float32 with rollout.decode.compute_dtype=bfloat16: every token step "
            "reads the float32 weights, twice the bytes; bfloat16 weights are read as they are"
        )
    return found


def _best(config: RunConfig) -> list[str]:
    """Where no checkpoint can be the best one."""
    evaluated, saved = config.eval.every_steps, config.checkpoint.every_steps
    if not (config.checkpoint.keep_best and evaluated and saved):
        return []
    if math.lcm(evaluated, saved) < config.run.steps:
        return []
    return [
        f"eval.every_steps={evaluated} and checkpoint.every_steps={saved} have no step before the "
        "last in common: checkpoint.keep_best has nothing to compare"
    ]


def _shares(config: RunConfig) -> list[str]:
    """Where slots or workers are idle."""
    found, rollout = [], config.rollout
    workers, prompts = rollout.workers.at_start, rollout.prompts_per_step
    if config.placement.mode == "colocated" and rollout.max_staleness:
        found.append(
            f"rollout.max_staleness={rollout.max_staleness} with placement.mode=colocated: "
            "learner and worker take turns on the same devices, so that little more than the work "
            "of their hosts overlaps"
        )
    most = -(-prompts // workers) * rollout.completions_per_prompt
    if most < rollout.decode.slots:
        found.append(
            f"a worker has at most {most} completions a step, so {rollout.decode.slots - most} of "
            f"rollout.decode.slots={rollout.decode.slots} are never filled in training, and "
            "decoded for nothing"
        )
    if prompts % workers:
        found.append(
            f"rollout.prompts_per_step={prompts} does not divide by rollout.workers={workers}: "
            "some workers wait for others"
        )
    return found
