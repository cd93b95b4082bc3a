"""What of a run works, but is probably not meant."""

from driver.config.run_config import RunConfig
from kernels import choose


def notes(config: RunConfig, *, decode_impl: str, loss_impl: str, programs: int) -> tuple[str, ...]:
    """One line for each such thing.

    Args:
        decode_impl, loss_impl: which implementations run, of `kernels.choose.IMPLEMENTATIONS`.
        programs: that a worker can come to need.
    """
    found = [*_speed(config, decode_impl, loss_impl), *_shares(config)]
    decode, evaluation = config.rollout.decode, config.eval
    if decode.compile_budget is not None and decode.compile_budget < programs:
        found.append(
            f"rollout.decode.compile_budget={decode.compile_budget} is below the {programs} "
            "programs that a worker can come to need"
        )
    cut_off = (evaluation.top_k, evaluation.top_p, evaluation.min_p) != (0, 1, 0)
    if evaluation.temperature == 0 and cut_off:
        found.append("eval.temperature=0 takes the likeliest token, whatever top_k, top_p or min_p")
    return tuple(found)


def _speed(config: RunConfig, decode_impl: str, loss_impl: str) -> list[str]:
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
    for key, value, impl in (
        ("learner.loss_impl", config.learner.loss_impl, loss_impl),
        ("rollout.decode.attention", decode.attention, decode_impl),
    ):
        if impl == choose.PALLAS_INTERPRET:
            found.append(
                f"{key}={value} is interpreted on {config.placement.platform}: exact, and slow; "
                "`auto` is not"
            )
    if config.weights.dtype == "float32" and decode.compute_dtype == "bfloat16":
        found.append(
            "weights.dtype=float32 with rollout.decode.compute_dtype=bfloat16: every token step "
            "reads the float32 weights, twice the bytes; bfloat16 weights are read as they are"
        )
    return found


def _shares(config: RunConfig) -> list[str]:
    """Where slots or workers stand idle."""
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
            "decoded in vain"
        )
    if prompts % workers:
        found.append(
            f"rollout.prompts_per_step={prompts} does not divide by rollout.workers={workers}: "
            "some workers wait for others"
        )
    return found
