"""The whole configuration of a run, and the rules that span its sections.

`load_config.py` reads YAML and `--set` into these models. Derived sizes are properties;
nothing here touches a device, a file or the network.
"""

import dataclasses
from typing import Any, Literal

from pydantic import Field, model_validator

from learner.config import AlgorithmConfig, LearnerConfig
from rollout_worker.config.data_config import DataConfig, EvalSource, SourceConfig
from rollout_worker.config.environment_config import ENVIRONMENT_REWARD, EnvironmentConfig
from rollout_worker.config.reward_config import RewardConfig, held_out_reward
from rollout_worker.config.rollout_config import RolloutConfig
from rollout_worker.engine.decode_request import SamplingSettings
from services.process.config_section import Section, validated

WEEK_S = 604_800.0
"""Longest wait of a run: past it a deadline is as good as none."""


class NamedRun(Section):
    """What a run is called, where it writes, and what its random draws follow from."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    """Name in messages, of the output folder and on W&B: letters, digits, `.`, `_` and `-`."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the data order and of every sampled token."""
    output_dir: str = "runs/{name}"
    """Folder of logs, checkpoints and exports, relative to where the run starts; `{name}` and
    `{time}` are replaced."""
    resume: bool | Literal["auto"] = False
    """Continue from the newest complete checkpoint in output_dir and the groups accepted since;
    without it the folder must be new or empty. `auto` continues where there is a run and starts one
    where there is none, for a scheduler that submits the same command again."""


class RunSection(NamedRun):
    """What the run is called, how long it is, and where it writes."""

    steps: int = Field(default=100, ge=1, le=10**9)
    """Training steps of the whole run, those before a resume included."""


class ModelSection(Section):
    """Which weights to start from."""

    path: str
    """HF folder, .gguf file, or HF hub id."""
    tokenizer: str | None = None
    """Folder or hub id of another tokenizer; null takes the model's own."""
    chat_template: str | None = None
    """A Jinja template that replaces the tokenizer's; needed where it has none. It must show the
    system prompt and the question, and open the assistant's turn. The time that it reads is that of
    the run's first start."""
    stop_tokens: tuple[str, ...] = ()
    """Further stop tokens, beside those of tokenizer and generation config."""


class WeightsConfig(Section):
    """How a policy version travels to the workers."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights on the wire and in the workers."""
    chunk_bytes: int = Field(default=2**20, ge=1024, le=3 * 2**20)
    """Size of one message of a weight transfer."""
    streams: int = Field(default=2, ge=1, le=16)
    """Parallel gRPC streams of one transfer."""
    timeout_s: float = Field(default=600.0, ge=0.01, le=WEEK_S)
    """How long the transfer of one version may take."""
    keep_versions: int = Field(default=2, ge=1, le=64)
    """Published versions that the learner keeps in host memory."""
    relay_fanout: int = Field(default=2, ge=0, le=64)
    """Workers that fetch from the learner, and from each worker that has fetched; 0 has every
    worker fetch from the learner."""
    deltas: bool = True
    """Send only the elements that changed, to a worker that has the version before."""
    canary: bool = True
    """Have every worker score a fixed probe under each version, and compare its logprobs with the
    learner's."""
    canary_bound: float | None = Field(default=None, gt=0, le=100)
    """Largest gap of a logprob on the probe, in nats; null takes a bound for the dtypes."""


class CheckpointConfig(Section):
    """When the state of the run is saved, and how much of it stays."""

    every_steps: int = Field(default=10, ge=0)
    """0 writes one only at the end and on a signal."""
    keep: int = Field(default=2, ge=1)
    """Complete checkpoints that remain; an older one goes after the newer one is verified."""
    asynchronous: bool = True
    """Write the checkpoints between the first step and the last beside the training, which waits
    only for a copy of the state in the memory of the host; false lets it wait until the checkpoint
    is on the disk and read back. One that a kill or an error interrupts counts as little as
    without."""
    keep_best: bool = True
    """Keep one more in checkpoints/best where an older one has a better evaluation: the accuracy of
    the first set of data.eval, or, in supervised training, the lowest held-out loss."""
    export_hf: bool = True
    """Write the final policy as an HF folder."""
    export_dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the exported tensors; null gives each the type that it came in, and bfloat16 where
    the model was quantised."""


class EvalConfig(Section):
    """Held-out evaluation on data.eval. Where that has several sets, each may have its own of the
    keys from samples_per_prompt on.
    """

    every_steps: int = Field(default=0, ge=0)
    """0 evaluates only at start and end, as the next two keys say."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    beside_training: bool = True
    """Where rollout.max_staleness is above 0 and learner and workers have processes of their own,
    training goes on during an evaluation between the first step and the last. Its prompts are
    completed by workers that have nothing else to do, under the version of its step, which each
    worker keeps on its devices so long; its result is in the metrics of the step in which it is
    complete. Training waits for it before the next one is due."""
    prompts: int | None = Field(default=None, ge=1)
    """Number of prompts, from the start of each set; null takes all."""
    samples_per_prompt: int = Field(default=1, ge=1, le=65_536)
    """Completions of each held-out prompt."""
    temperature: float = Field(default=0.0, ge=0, le=100)
    """0 is greedy."""
    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Only the k most likely tokens are drawn; 0 is off."""
    top_p: float = Field(default=1.0, ge=1e-9, le=1)
    """Only the most likely tokens that together have this probability; 1 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Only tokens at least this fraction as likely as the most likely one; 0 is off."""
    pass_k: tuple[int, ...] = (1,)
    """Values of k for which pass@k is reported; each at most samples_per_prompt."""
    correct_from: float | None = Field(default=None, allow_inf_nan=False)
    """A held-out completion is right if the first of reward.functions gives it at least this. null
    takes 1, and reports no accuracy and no pass@k where a completion gets more than 1."""

    @property
    def sampling(self) -> SamplingSettings:
        """As the decode engine takes it."""
        return SamplingSettings(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    @model_validator(mode="after")
    def _check(self):
        too_many = [k for k in self.pass_k if not 1 <= k <= self.samples_per_prompt]
        if too_many:
            raise ValueError(
                f"eval.pass_k={list(self.pass_k)} must lie between 1 and "
                f"samples_per_prompt={self.samples_per_prompt}"
            )
        if 0 < self.temperature < 0.01:
            raise ValueError(
                f"eval.temperature={self.temperature:g} must be 0 (greedy) or at least 0.01"
            )
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"eval.samples_per_prompt={self.samples_per_prompt} at temperature 0 gives equal "
                "samples: set eval.temperature above 0 or samples_per_prompt to 1"
            )
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutSet:
    """One held-out set, and how it is evaluated."""

    key: str
    """How messages name it."""
    name: str
    """In logs and metrics; empty for a set that is no list."""
    source: SourceConfig
    rules: EvalConfig
    reward: RewardConfig

    @property
    def scorer(self) -> str:
        """The reward function that decides what is right."""
        return self.reward.functions[0].name

    def used_prompts(self, found: int) -> int:
        """How many prompts are evaluated of those that fit."""
        return min(self.rules.prompts or found, found)


class WandbConfig(Section):
    """Weights & Biases as a second place for the metrics."""

    mode: Literal["online", "offline", "disabled"] = "disabled"
    """`offline` writes files for a later `wandb sync`; the API key is read from WANDB_API_KEY."""
    project: str = "tandem"
    """Project on W&B."""
    entity: str | None = None
    """User or team on W&B; null takes the default of the API key."""


class DashboardConfig(Section):
    """The web page that the run serves of itself (docs/dashboard.md)."""

    enabled: bool = True
    """Serve the page while the run goes on."""
    host: str = "127.0.0.1"
    """Address to listen on; its tokens cross the network unencrypted where it is not loopback."""
    port: int | None = Field(default=None, ge=0, le=65535)
    """null takes 8470, or a free one where that is taken; 0 a free one."""


class TrackersConfig(Section):
    """Where the metrics of every step go beside metrics.jsonl."""

    wandb: WandbConfig = WandbConfig()
    tensorboard: bool = False
    """Write the metrics of every step to event files in `tensorboard` of the run's folder."""


class LogConfig(TrackersConfig):
    """What the run writes about itself, and where."""

    samples_per_step: int = Field(default=4, ge=0, le=10_000)
    """Completions written to samples.jsonl at every step. At most two are of one group, its first
    and one chosen for a reason, so that a step of few groups writes fewer."""
    record_rollouts: bool = False
    """Append the groups of every update to rollouts.bin, to train on them again with
    `python -m learner.ab`. A step that cannot be written, as on a full disk, ends the run."""
    unexplained_fraction: float = Field(default=0.05, gt=0, le=1)
    """A step warns if a larger fraction of its seconds belongs to no phase."""
    dashboard: DashboardConfig = DashboardConfig()
    timeline: bool = True
    """Write the phases of each process with their times to timeline.jsonl: a few kB a step."""


class Resources(Section):
    """What one actor asks of the Ray cluster."""

    cpus: float = Field(default=1.0, ge=0)
    """CPU cores that Ray reserves."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves."""
    tpus: float = Field(default=0.0, ge=0)
    """TPU chips that Ray reserves (its resource `TPU`)."""


class PlacementConfig(Section):
    """Where the processes run, and how long the driver waits for them."""

    mode: Literal["separate", "colocated"] = "separate"
    """`separate`: every role has processes of its own. `colocated`: the learner and one rollout
    worker share a process and all of its devices, which `learner` asks for; they take turns there,
    and a policy version stays on these devices."""
    platform: Literal["cpu", "gpu", "tpu"] = "cpu"
    """Accelerator that both roles need; no process ever falls back to another platform."""
    learner: Resources = Resources()
    """Resources of the learner's process."""
    rollout: Resources = Resources()
    """Resources of each rollout worker; not to be set where mode is colocated."""
    bind_host: str = "127.0.0.1"
    """Address the learner's gRPC server listens on: 0.0.0.0 on a cluster of several hosts, `::`
    where they have IPv6; without brackets."""
    private_network: bool = False
    """That only the cluster's hosts can listen on the network between them, such as a VPC or a VPN.
    A bind_host that other hosts reach needs this, or Ray with TLS (RAY_USE_TLS=1): Ray's token does
    not encrypt, and Ray carries the keys of the run's processes."""
    learner_port: int = Field(default=0, ge=0, le=65535)
    """Port of that server; 0 takes a free one."""
    startup_timeout_s: float = Field(default=300.0, ge=0.01, le=WEEK_S)
    """How long a process may take until it is ready."""
    resources_timeout_s: float = Field(default=60.0, ge=0.01, le=WEEK_S)
    """How long the cluster may take to provide the resources, at the start and to a run that has
    lost its learner or all of its workers."""
    step_timeout_s: float = Field(default=3600.0, ge=0.01, le=WEEK_S)
    """How long a call of a step, such as the update or an evaluation, may take. A process that
    makes no progress for a twelfth of this, and neither compiles nor writes a checkpoint, is
    replaced."""
    worker_restarts: int = Field(default=3, ge=0)
    """Restarts of rollout workers on one host within an hour; the pause before each restart of one
    worker grows. The loss of a host is one event, whatever ran there, and counts apart, up to the
    same number for each host."""
    learner_restarts: int = Field(default=3, ge=0)
    """Restarts of the learner on one host within an hour, each from the last checkpoint; losses of
    its host count apart, up to the same number for each host."""


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
