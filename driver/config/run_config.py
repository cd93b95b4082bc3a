"""The whole configuration of a run, and the rules that span its sections.

`load_config.py` reads YAML and `--set` into these models. Derived sizes are properties;
nothing here touches a device, a file or the network.
"""

from typing import Any

from pydantic import model_validator

from driver.config.sections.checkpoint import CheckpointConfig
from driver.config.sections.evaluation import EvalConfig, HeldOutSet
from driver.config.sections.log import LogConfig
from driver.config.sections.model import ModelSection
from driver.config.sections.placement import PlacementConfig, Resources
from driver.config.sections.run import RunSection
from driver.config.sections.weights import WeightsConfig
from learner.config import AlgorithmConfig, LearnerConfig
from rollout_worker.config.data_config import DataConfig, EvalSource, SourceConfig
from rollout_worker.config.environment_config import ENVIRONMENT_REWARD, EnvironmentConfig
from rollout_worker.config.reward_config import RewardConfig, held_out_reward
from rollout_worker.config.rollout_config import RolloutConfig
from services.process.config_section import Section, validated


class RunConfig(Section):
    """One run: `python -m driver --config run.yaml --set section.key=value`."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig | None = None
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    placement: PlacementConfig = PlacementConfig()

    @property
    def sequence_tokens(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens

    @property
    def evaluates_beside_training(self) -> bool:
        """Whether an evaluation may go on while later steps are trained."""
        asynchronous = self.rollout.max_staleness > 0 and self.placement.mode == "separate"
        return self.eval.beside_training and asynchronous and self.eval.every_steps > 1

    @property
    def held_out_sets(self) -> tuple[HeldOutSet, ...]:
        """The sets of data.eval, in its order."""
        data = self.data
        return tuple(
            HeldOutSet(
                key=key,
                name=name,
                source=source,
                rules=self._rules_of(key, source),
                reward=held_out_reward(source, self.reward),
            )
            for key, name, source in zip(
                data.eval_keys, data.eval_names, data.eval_sources, strict=True
            )
        )

    def _rules_of(self, key: str, source: SourceConfig) -> EvalConfig:
        if not isinstance(source, EvalSource):
            return self.eval
        try:
            return validated(EvalConfig, self.eval.model_dump() | source.own_rules)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None

    @model_validator(mode="before")
    @classmethod
    def _reward_of_the_environment(cls, values: Any) -> Any:
        """With an environment, its reward takes the place of the default of reward.functions."""
        if not isinstance(values, dict) or values.get("environment") is None:
            return values
        reward = values.get("reward") or {}
        if not isinstance(reward, dict) or "functions" in reward:
            return values
        return values | {"reward": reward | {"functions": [{"name": ENVIRONMENT_REWARD}]}}

    @model_validator(mode="after")
    def _check_environment(self):
        rewards = [self.reward, *(one.reward for one in self.held_out_sets)]
        names = {function.name for reward in rewards for function in reward.functions}
        if self.environment is None and ENVIRONMENT_REWARD in names:
            raise ValueError(
                f"reward.functions names {ENVIRONMENT_REWARD!r}, the reward of an environment, but "
                "there is none: set environment.name, or name a scorer"
            )
        if self.environment is not None and names != {ENVIRONMENT_REWARD}:
            raise ValueError(
                f"environment.name={self.environment.name} rewards each episode itself, so that "
                f"{sorted(names - {ENVIRONMENT_REWARD})} would score nothing: leave "
                "reward.functions and the scorers of data.eval out"
            )
        least, group = self.close_at_least, self.rollout.completions_per_prompt
        if least is not None and least >= group:
            raise ValueError(
                f"environment.close_at_least={least} must be less than the {group} of "
                "rollout.completions_per_prompt: lower it, or null waits for all"
            )
        return self

    @property
    def records_per_completion(self) -> int:
        """Sequences that a completion trains as, at most: each turn may begin one."""
        environment = self.environment
        if environment is None or environment.history != "new_record":
            return 1
        return environment.max_turns

    @property
    def close_at_least(self) -> int | None:
        """`environment.close_at_least`; None without an environment."""
        return None if self.environment is None else self.environment.close_at_least

    @model_validator(mode="after")
    def _check_group(self):
        advantage = self.algorithm.advantage
        if self.rollout.completions_per_prompt == 1 and advantage not in ("gae", "batch_norm"):
            raise ValueError(
                f"rollout.completions_per_prompt=1 must be at least 2 with algorithm.advantage="
                f"{advantage}, which compares the completions of a prompt: raise it, or set "
                "algorithm.advantage to gae or batch_norm"
            )
        if self.rollout.completions_per_prompt == 1 and self.algorithm.zero_variance != "keep":
            raise ValueError(
                f"rollout.completions_per_prompt=1 with algorithm.zero_variance="
                f"{self.algorithm.zero_variance} leaves every group out, since one reward has no "
                "variance: set zero_variance to keep"
            )
        return self

    @model_validator(mode="after")
    def _check_ends(self):
        if not self.rollout.ignore_stop_tokens:
            return self
        if self.environment is not None:
            raise ValueError(
                f"rollout.ignore_stop_tokens=true with environment.name={self.environment.name}: a "
                "turn of the model would never end, and the environment never answer; set it to "
                "false"
            )
        if self.algorithm.truncated == "mask" and not self.rollout.stop_strings:
            raise ValueError(
                "rollout.ignore_stop_tokens=true cuts every completion at "
                "rollout.max_completion_tokens, and algorithm.truncated=mask leaves those out, so "
                "that nothing trains: set algorithm.truncated to keep"
            )
        return self

    @model_validator(mode="after")
    def _check_pass_k(self):
        completions = self.rollout.completions_per_prompt
        if self.algorithm.advantage == "pass_at_k" and self.algorithm.pass_k >= completions:
            raise ValueError(
                f"algorithm.pass_k={self.algorithm.pass_k} must be below "
                f"rollout.completions_per_prompt={completions}: drawn whole, every group passes or "
                "none does, and nothing is learnt; lower the one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _check_reward_norm(self):
        gates = [function.name for function in self.reward.functions if function.gate is not None]
        if self.algorithm.advantage == "reward_norm" and (gates or self.reward.combine != "sum"):
            found = f"gates={gates}" if gates else f"reward.combine={self.reward.combine}"
            raise ValueError(
                "algorithm.advantage=reward_norm standardises each reward function alone and adds "
                f"them up, so that {found} would have no effect: use another advantage, or plain "
                "weights with reward.combine=sum"
            )
        return self

    @model_validator(mode="after")
    def _check_held_out_sets(self):
        _ = self.held_out_sets  # raises where the rules of one contradict each other
        return self

    @model_validator(mode="after")
    def _check_budget(self):
        budget, prices = self.reward.budget, ("prompt_price", "completion_price")
        rewards = [self.reward, *(one.reward for one in self.held_out_sets)]
        functions = [function for reward in rewards for function in reward.functions]
        judges = [one for one in functions if one.name == "judge"]
        if budget.bounded and not judges:
            raise ValueError(
                "reward.budget bounds what `judge` spends, but no scorer is judge, only "
                f"{sorted({one.name for one in functions})}: remove it, or add judge"
            )
        free = [one for one in judges if not any(one.params.get(name) for name in prices)]
        if budget.cost is not None and free:
            raise ValueError(
                f"reward.budget.cost={budget.cost:g} is never reached, since judge has no price: "
                f"set its params.{' and params.'.join(prices)}, or bound tokens or requests"
            )
        return self

    @model_validator(mode="after")
    def _check_lora(self):
        if self.learner.lora is not None and self.algorithm.teacher_in_loss:
            assert self.algorithm.distillation is not None
            raise ValueError(
                f"learner.lora with algorithm.distillation.form={self.algorithm.distillation.form}"
                ": the gradient of that divergence is formed for a head that trains; set form to "
                "sampled, or learner.lora to null"
            )
        return self

    @model_validator(mode="after")
    def _check_colocated(self):
        if self.placement.mode != "colocated":
            return self
        workers, tensor = self.rollout.workers, self.rollout.decode.tensor
        if (workers.min, workers.at_start, workers.policy) != (1, 1, "fixed"):
            raise ValueError(
                "placement.mode=colocated has one rollout worker, in the learner's process: set "
                f"rollout.workers=1 (it starts with {workers.at_start}, policy {workers.policy}), "
                "or placement.mode=separate"
            )
        if self.placement.rollout != Resources():
            raise ValueError(
                "placement.rollout must not be set where placement.mode=colocated: the process of "
                "both roles has what placement.learner asks for, so add it there"
            )
        if tensor != 1:
            raise ValueError(
                f"rollout.decode.tensor={tensor} must be 1 where placement.mode=colocated: a "
                "policy version stays where it lies on each device"
            )
        return self

    @model_validator(mode="after")
    def _check(self):
        if self.learner.longest_row < self.sequence_tokens:
            raise ValueError(
                f"{self.learner.say_longest_row} cannot hold one "
                f"sequence of rollout.max_prompt_tokens + max_completion_tokens = "
                f"{self.sequence_tokens} tokens: raise it or lower one of the two"
            )
        evaluates = self.eval.every_steps or self.eval.at_start or self.eval.at_end
        if evaluates and self.data.eval is None:
            raise ValueError(
                "eval asks for held-out prompts but data.eval is not set: set it, or set "
                "eval.every_steps=0, eval.at_start=false and eval.at_end=false"
            )
        return self
