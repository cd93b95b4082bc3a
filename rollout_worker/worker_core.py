"""A rollout worker without threads and connections, built from what its process is given."""

import logging
from collections.abc import Sequence

import jax

from models.files.checkpoint import load_model, read_model_config
from models.load_tokenizer import load_tokenizer
from rollout_worker.canary import CanaryCheck
from rollout_worker.config.reward_config import RewardConfig, held_out_reward
from rollout_worker.data.data_digests import DataDigests, digest_data
from rollout_worker.data.training_set import load_held_out, load_training
from rollout_worker.engine.decode_request import SamplingSettings
from rollout_worker.engine_setup import EngineSetup
from rollout_worker.environments.environment_pool import EnvironmentPool
from rollout_worker.evaluation.held_out import HeldOut
from rollout_worker.leased_group import LeasedGroup
from rollout_worker.policy.live_weights import AdapterOnBase
from rollout_worker.rewards.processes.reward_process import Allowance
from rollout_worker.rewards.reward_pool import RewardPool
from rollout_worker.rewards.spending import SpendingAccount
from rollout_worker.sample_record import Sample, SampleRecords
from rollout_worker.worker import GroupSettings, RolloutWorker
from rollout_worker.worker_records import EvalItem, EvalRequest, RolloutSpec
from services.process.phase_clock import PhaseClock

log = logging.getLogger(__name__)


class WorkerCore:
    """Owns the worker, its prompts and its reward processes."""

    def __init__(self, spec: RolloutSpec, devices: Sequence[jax.Device], clock: PhaseClock):
        """Args:
        clock: gets the seconds of each phase.
        """
        self._clock = clock
        tokenizer = load_tokenizer(
            spec.model_path,
            tokenizer=spec.tokenizer,
            chat_template=spec.chat_template,
            stop_tokens=spec.stop_tokens,
            moment=spec.moment,
            template_args=spec.data.template_args,
            tools=spec.data.tools,
        )
        setup = EngineSetup(
            rollout=spec.rollout,
            model=read_model_config(spec.model_path),
            platform=spec.platform,
            weights_dtype=spec.weights_dtype,
            several_turns=spec.environment is not None,
            adapter=spec.adapter,
        )
        engine = setup.engine(devices, tokenizer, clock=clock, warn=log.warning)
        weights = None
        if spec.adapter is not None:
            weights = AdapterOnBase(
                engine.spec.layout,
                load_model(spec.model_path).params,
                base_dtype=spec.base_dtype,
                weights_dtype=spec.weights_dtype,
            )

        longest = spec.rollout.max_prompt_tokens
        self._train = load_training(spec.data, tokenizer=tokenizer, max_prompt_tokens=longest)
        self._held_out = load_held_out(spec.data, tokenizer=tokenizer, max_prompt_tokens=longest)
        self._environment, self._rollout = spec.environment, spec.rollout
        self._pools: list[tuple[RewardConfig, RewardPool | EnvironmentPool]] = []
        self._account = SpendingAccount(spec.reward.budget)
        rewards = self._pool(spec.reward)
        self.worker = RolloutWorker(
            name=spec.name,
            run_id=spec.run_id,
            seed=spec.seed,
            settings=GroupSettings(
                completions=spec.rollout.completions_per_prompt,
                sampling=SamplingSettings(temperature=spec.rollout.temperature),
                max_prompt_tokens=longest,
                max_new_tokens=spec.rollout.max_completion_tokens,
                stop_set=setup.stop_set,
            ),
            engine=engine,
            tokenizer=tokenizer.with_tools(rewards.tools)
            if isinstance(rewards, EnvironmentPool)
            else tokenizer,
            rewards=rewards,
            train=self._train.prompts,
            held_out=[
                HeldOut(
                    name=name,
                    prompts=read.prompts,
                    rewards=self._pool(held_out_reward(source, spec.reward)),
                )
                for source, name, read in zip(
                    spec.data.eval_sources, spec.data.eval_names, self._held_out, strict=True
                )
            ],
            clock=clock,
            canary=CanaryCheck(engine.spec, clock, bound=spec.canary_bound)
            if spec.canary
            else None,
            weights=weights,
        )
        self._records = SampleRecords(
            tokenizer.decode,
            tokenizer.decode_completion,
            per_step=spec.samples_per_step,
            reads_numbers=any(one.name == "gsm8k_answer" for one in spec.reward.functions),
        )

    @property
    def data_digests(self) -> DataDigests:
        """Of the data that this process reads."""
        return digest_data(self._train.sets, self._held_out)

    def evaluate(self, request: EvalRequest) -> list[EvalItem]:
        """Completes and scores held-out prompts, in the phase `eval`."""
        with self._clock.phase("eval"):
            return self.worker.evaluate(
                request.held_out,
                request.positions,
                samples=request.samples,
                sampling=request.sampling,
            )

    def samples(self, leased: LeasedGroup) -> tuple[Sample, ...]:
        """What is logged of a group that was accepted."""
        assert leased.group is not None
        prompt = self._train.prompts[leased.lease.position]
        return self._records.of_group(
            leased.group, prompt, marked=leased.lease.logged, notes=leased.notes
        )

    def close(self) -> None:
        """Ends the processes of scorers and environments."""
        for _, pool in self._pools:
            pool.close()

    def _pool(self, reward: RewardConfig) -> RewardPool | EnvironmentPool:
        """Processes with these scorers, or the environment: one pool for each different section."""
        for before, pool in self._pools:
            if before == reward:
                return pool
        if self._environment is not None:
            pool = EnvironmentPool(
                self._environment,
                reward,
                account=self._account,
                temperature=self._rollout.temperature,
                stop_strings=self._rollout.stop_strings,
            )
        else:
            pool = RewardPool(
                reward.functions,
                processes=reward.processes,
                timeout_s=reward.timeout_s,
                allowance=Allowance.of(reward),
                in_flight=reward.in_flight,
                combine=reward.combine,
                account=self._account,
            )
        self._pools.append((reward, pool))
        return pool
