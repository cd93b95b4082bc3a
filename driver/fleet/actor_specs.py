"""What each actor is told at its start, made from the configuration of the run."""

import os
import pathlib

from driver.config.run_config import RunConfig
from learner.learner_spec import LearnerSpec
from rollout_worker.actor import RolloutSpec
from services.process import failpoints
from services.wire.tls import RunAuthority

BUFFER_BYTES = 2 * 2**30
"""Of groups that wait in the learner: at 12 bytes a token far above any synchronous step."""


def learner_spec(
    config: RunConfig,
    folder: pathlib.Path,
    run_id: str,
    authority: RunAuthority,
    driver_host: str,
) -> LearnerSpec:
    """The learner's part of the configuration, with its certificate."""
    steps = config.rollout.max_staleness + 1 + config.algorithm.resample_rounds + 1
    return LearnerSpec(
        run_id=run_id,
        seed=config.run.seed,
        platform=config.placement.platform,
        model_path=config.model.path,
        tokenizer=config.model.tokenizer,
        chat_template=config.model.chat_template,
        stop_tokens=config.model.stop_tokens,
        algorithm=config.algorithm,
        learner=config.learner,
        total_steps=config.run.steps,
        temperature=config.rollout.temperature,
        max_completion_tokens=config.rollout.max_completion_tokens,
        max_staleness=config.rollout.max_staleness,
        weights_dtype=config.weights.dtype,
        chunk_bytes=config.weights.chunk_bytes,
        keep_versions=config.weights.keep_versions,
        buffer_groups=config.rollout.prompts_per_step * steps,
        buffer_bytes=BUFFER_BYTES,
        bind_host=config.placement.bind_host,
        port=config.placement.learner_port,
        driver_host=driver_host,
        credentials=authority.issue("learner"),
        checkpoint_folder=str(folder / "checkpoints"),
        keep_checkpoints=config.checkpoint.keep,
        rollouts_file=str(folder / "rollouts.bin") if config.log.record_rollouts else None,
        canary=config.weights.canary,
        failpoints=os.environ.get(failpoints.VARIABLE),
    )


def rollout_spec(
    config: RunConfig,
    folder: pathlib.Path,
    name: str,
    run_id: str,
    authority: RunAuthority,
    learner_address: str,
) -> RolloutSpec:
    """One worker's part of the configuration, with a certificate of its own."""
    return RolloutSpec(
        name=name,
        run_id=run_id,
        seed=config.run.seed,
        platform=config.placement.platform,
        model_path=config.model.path,
        tokenizer=config.model.tokenizer,
        chat_template=config.model.chat_template,
        stop_tokens=config.model.stop_tokens,
        data=config.data,
        rollout=config.rollout,
        reward=config.reward,
        learner_address=learner_address,
        credentials=authority.issue(name),
        weights_dtype=config.weights.dtype,
        bind_host=config.placement.bind_host,
        chunk_bytes=config.weights.chunk_bytes,
        deltas=config.weights.deltas,
        canary=config.weights.canary,
        canary_bound=config.weights.canary_bound,
        run_folder=str(folder),
        streams=config.weights.streams,
        timeout_s=config.weights.timeout_s,
        samples_per_step=config.log.samples_per_step,
        failpoints=os.environ.get(failpoints.VARIABLE),
    )
