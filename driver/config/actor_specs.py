"""What the learner and each rollout worker are given at their start."""

import dataclasses
import datetime
import os
import pathlib

from driver.config.run_config import RunConfig
from learner.learner_spec import LearnerSpec
from models.adapter import AdapterShape
from rollout_worker.worker_records import RolloutSpec
from services.process import failpoints
from services.process.driver_lease import LEASE_S
from services.trajectories.data_order import DataOrder
from services.wire.tls import RunAuthority

BUFFER_BYTES = 2 * 2**30
"""Of groups that wait in the learner: at 12 bytes a token far above any synchronous step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorSpecs:
    """Cuts the configuration of one run into what each of its processes needs."""

    config: RunConfig
    folder: pathlib.Path
    """Of the run."""
    run_id: str
    authority: RunAuthority
    driver_host: str
    """Address of the driver within the cluster."""
    order: DataOrder
    """Of the prompts of data.train, as far as they fit."""
    moment: datetime.datetime
    """The time that the chat template reads."""
    teacher_digest: str | None = None
    """Of algorithm.distillation.teacher; None without one."""
    adapter: AdapterShape | None = None
    """Of learner.lora, for the model of the run."""

    def learner(self, earlier_port: int | None = None) -> LearnerSpec:
        """The learner's, with a new certificate.

        Args:
            earlier_port: of the learner that it replaces, if it replaces one.
        """
        config = self.config
        steps = config.rollout.max_staleness + 1 + config.algorithm.resample_rounds + 1
        return LearnerSpec(
            run_id=self.run_id,
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
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            max_completion_tokens=config.rollout.max_completion_tokens,
            order=self.order,
            max_staleness=config.rollout.max_staleness,
            weights_dtype=config.weights.dtype,
            export_dtype=config.checkpoint.export_dtype,
            chunk_bytes=config.weights.chunk_bytes,
            keep_versions=config.weights.keep_versions,
            group_size=config.rollout.completions_per_prompt,
            buffer_groups=config.rollout.prompts_per_step * steps,
            buffer_bytes=BUFFER_BYTES,
            bind_host=config.placement.bind_host,
            port=config.placement.learner_port,
            earlier_port=earlier_port,
            driver_host=self.driver_host,
            credentials=self.authority.issue("learner"),
            checkpoint_folder=str(self.folder / "checkpoints"),
            keep_checkpoints=config.checkpoint.keep,
            checkpoint_wait_s=config.placement.step_timeout_s,
            rollouts_file=str(self.folder / "rollouts.bin") if config.log.record_rollouts else None,
            canary=config.weights.canary,
            reward_weights={one.name: one.weight for one in config.reward.functions},
            teacher_digest=self.teacher_digest,
            driver_lease_s=LEASE_S,
            failpoints=os.environ.get(failpoints.VARIABLE),
        )

    def worker(self, name: str, learner_address: str) -> RolloutSpec:
        """One worker's, with a certificate of its own."""
        config = self.config
        return RolloutSpec(
            name=name,
            run_id=self.run_id,
            seed=config.run.seed,
            platform=config.placement.platform,
            model_path=config.model.path,
            tokenizer=config.model.tokenizer,
            chat_template=config.model.chat_template,
            stop_tokens=config.model.stop_tokens,
            moment=self.moment,
            data=config.data,
            rollout=config.rollout,
            reward=config.reward,
            environment=config.environment,
            learner_address=learner_address,
            credentials=self.authority.issue(name),
            weights_dtype=config.weights.dtype,
            adapter=self.adapter,
            base_dtype=config.learner.compute_dtype,
            bind_host=config.placement.bind_host,
            chunk_bytes=config.weights.chunk_bytes,
            deltas=config.weights.deltas,
            canary=config.weights.canary,
            canary_bound=config.weights.canary_bound,
            run_folder=str(self.folder),
            streams=config.weights.streams,
            timeout_s=config.weights.timeout_s,
            samples_per_step=config.log.samples_per_step,
            driver_lease_s=LEASE_S,
            failpoints=os.environ.get(failpoints.VARIABLE),
        )
