"""What the learner needs: the objective (`algorithm`) and the update (`learner`)."""

import dataclasses
from typing import Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from services.process.config_section import Section

Remat = Literal["none", "layer", "dots", "attention", "mlp", "offload"]
REMATS = get_args(Remat)
"""Values of models.layer_scan.Remat."""
_BOOLEAN = TypeAdapter(bool)


class OffPolicyConfig(Section):
    """What is done about groups that an older policy, or other numerics, sampled.

    Null leaves a bound out. Any of them costs one forward pass over the batch before the update.
    learner/objective/off_policy.py says what is computed.
    """

    token_truncate: float | None = Field(default=None, ge=1, le=1e6)
    """Highest importance weight of a token (TIS), 2 for instance. The ratio is then taken against
    the learner's policy before the update, and this weight stands for what lies before that."""
    sequence_low: float | None = Field(default=None, gt=0, le=1)
    """A sequence trains if the geometric mean of its tokens' weights is at least this, ..."""
    sequence_high: float | None = Field(default=None, ge=1, le=1e6)
    """... and at most this."""


class DistillationConfig(Section):
    """A teacher whose distribution the policy learns, on the completions that it samples itself:
    the divergence KL(policy || teacher) of each token (docs/objectives.md).
    """

    teacher: str = Field(min_length=1)
    """HF folder, .gguf file or HF hub id. It may be larger or smaller, with the same tokenizer."""
    form: Literal["full", "top_k", "sampled"] = "full"
    """`full` sums over the whole vocabulary; `top_k` over the teacher's likeliest tokens, with all
    others taken together; `sampled` takes the token that was sampled, as an advantage."""
    top_k: int = Field(default=64, ge=1, le=4096)
    """How many tokens `top_k` tells apart."""
    coef: float = Field(default=1.0, gt=0, le=1000)
    """Weight of the divergence."""
    advantage_coef: float = Field(default=0.0, ge=0, le=1000)
    """Weight of the advantages that rewards make. At 0 the policy learns from the teacher alone,
    and rewards are only measured."""


class AlgorithmConfig(Section):
    """The objective: how rewards become advantages, and advantages a loss (docs/objectives.md)."""

    advantage: Literal[
        "group_norm",
        "group_centre",
        "leave_one_out",
        "batch_norm",
        "group_centre_batch_norm",
        "reward_norm",
        "pass_at_k",
        "gae",
    ] = "group_norm"
    """`group_norm` is the reward minus the group's mean, divided by its standard deviation (GRPO);
    `group_centre` does not divide (Dr. GRPO); `leave_one_out` compares with the mean of the others
    (RLOO); `batch_norm` standardises over the whole batch (REINFORCE++), `group_centre_batch_norm`
    after the group's mean is taken off; `reward_norm` standardises each reward function alone
    (GDPO); `pass_at_k` counts what a completion does for the pass@k of its group; `gae` compares
    each token with what a critic expected before it (PPO), whatever the other completions are."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """With `gae`: the discount of rewards for each token that lies before them."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """With `gae`: 1 trusts what was paid, 0 the critic's value of the next token."""
    value_coef: float = Field(default=0.1, gt=0, le=1000)
    """With `gae`: weight of the critic's loss, which also trains the layers it shares with the
    policy."""
    value_rate_factor: float = Field(default=10.0, ge=0.001, le=1e6)
    """With `gae`: learning rate of the value head, in multiples of the policy's, which the layers
    that both share have."""
    value_clip: float | None = Field(default=0.2, gt=0, le=1e6)
    """With `gae`: how far updates on one batch may move a value towards its target, in units of
    reward; null for no bound."""
    pass_k: int = Field(default=4, ge=1, le=4096)
    """The k of `pass_at_k`."""
    correct_from: float = 1.0
    """Total reward from which a completion is correct, for `pass_at_k` and `length_coef`."""
    overlong_share: float | None = Field(default=None, gt=0, le=1)
    """Last share of max_completion_tokens over which the reward falls, by 1 at the end (DAPO)."""
    length_coef: float = Field(default=0.0, ge=0, le=1000)
    """Weight of a reward for being short among the completions of a prompt (Kimi k1.5)."""
    policy_loss: str = Field(
        default="clip", pattern=r"^(clip|cispo|soft_gate|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"
    )
    """`clip` (PPO, GRPO), `cispo` (clips the weight, so that no token loses its gradient),
    `soft_gate` (SAPO), or a function of your own, `package.module:function`."""
    ratio: Literal["token", "sequence"] = "token"
    """What is weighed and clipped: each token's ratio, or the geometric mean over its sequence
    (GSPO), which costs one more forward pass for each update."""
    advantage_eps: float = Field(default=1e-6, ge=1e-12, le=1)
    """Keeps the division by the standard deviation finite; in reward units."""
    aggregation: Literal["token_mean", "seq_mean", "constant"] = "token_mean"
    """`token_mean` divides the loss by the number of trained tokens, `seq_mean` averages the means
    of the sequences, `constant` divides by sequences x max_completion_tokens (Dr. GRPO)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is held above 1 - clip_low; 1 is no bound."""
    clip_high: float = Field(default=0.2, gt=0, le=1e6)
    """The ratio is held below 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1, le=1e6)
    """With `clip`: a token with a negative advantage loses at most this times its advantage."""
    gate_positive: float = Field(default=1.0, gt=0, le=1000)
    """With `soft_gate`: how fast the gate closes for tokens with a positive advantage, ..."""
    gate_negative: float = Field(default=1.05, gt=0, le=1000)
    """... and with a negative one."""
    kl_coef: float = Field(default=0.0, ge=0, le=1000)
    """Weight of the penalty against the frozen reference policy; 0 keeps no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of the KL divergence per token; k3 is never negative. k1 has the
    derivative of k2, whose expectation is that of the divergence."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss` adds the penalty to each token's loss; `reward` takes its sum over a completion, by k1
    against the policy that sampled, off the reward before advantages are made of it (RLOO), and
    with `gae` that of each token off the token's reward (InstructGPT)."""
    entropy_coef: float = Field(default=0.0, ge=0, le=1000)
    """Weight of the entropy bonus in nats per token; with `entropy_target` where it starts."""
    entropy_target: float | None = Field(default=None, gt=0, le=100)
    """Mean entropy in nats per token that the coefficient is steered towards (Skywork-OR1); null
    keeps it fixed."""
    entropy_delta: float = Field(default=1e-4, gt=0, le=1000)
    """With `entropy_target`: how far the coefficient moves after each update."""
    entropy_max: float = Field(default=0.005, gt=0, le=1000)
    """With `entropy_target`: the largest coefficient; the least is 0."""
    zero_variance: Literal["keep", "mask", "resample"] = "keep"
    """A group whose rewards are all equal: `keep` trains it with advantages of 0, so its tokens
    count in the denominator; `mask` leaves it out; `resample` does too and takes more prompts."""
    resample_rounds: int = Field(default=3, ge=1, le=1000)
    """With `resample`: how often a step may ask for more prompts before it trains on fewer."""
    truncated: Literal["keep", "mask"] = "keep"
    """`mask` leaves completions that ended by length out of the loss, not out of the baseline. A
    group of which nothing is left ends as dropped_truncated in the ledger."""
    off_policy: OffPolicyConfig = OffPolicyConfig()
    distillation: DistillationConfig | None = None

    @property
    def teacher_in_loss(self) -> bool:
        """Whether the divergence from a teacher is a term of the loss."""
        return self.distillation is not None and self.distillation.form != "sampled"

    @property
    def has_critic(self) -> bool:
        """Whether the learner trains a value head beside the policy."""
        return self.advantage == "gae"

    @model_validator(mode="after")
    def _check_critic(self):
        if self.has_critic and self.zero_variance != "keep":
            raise ValueError(
                f"advantage=gae with zero_variance={self.zero_variance}: a critic tells "
                "completions apart whose rewards are all equal, so that none is to be left out: "
                "set zero_variance to keep"
            )
        return self

    @model_validator(mode="after")
    def _check_entropy(self):
        if self.entropy_target is not None and self.entropy_coef > self.entropy_max:
            raise ValueError(
                f"entropy_coef={self.entropy_coef:g} is where the coefficient starts, and must be "
                f"at most entropy_max={self.entropy_max:g}: lower the one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _check(self):
        tells_apart = self.advantage == "reward_norm" or self.length_coef or self.kl_in == "reward"
        if self.zero_variance != "keep" and tells_apart:
            raise ValueError(
                f"zero_variance={self.zero_variance} drops groups whose total rewards are all "
                "equal, but advantage=reward_norm, length_coef and kl_in=reward tell such "
                "completions apart: set zero_variance to keep"
            )
        if self.distillation is not None:
            _check_distillation(self, self.distillation)
        if self.kl_in == "reward" and not self.kl_coef:
            raise ValueError("kl_in=reward needs a weight: set kl_coef above 0, or kl_in to loss")
        if self.kl_in == "reward" and self.kl_estimator != "k1":
            raise ValueError(
                f"kl_in=reward takes the penalty by k1, not {self.kl_estimator}: set kl_estimator "
                "to k1"
            )
        if self.dual_clip is not None and self.policy_loss != "clip":
            raise ValueError(
                f"dual_clip={self.dual_clip} bounds policy_loss=clip, not {self.policy_loss}: "
                "set dual_clip to null"
            )
        adds = self.overlong_share or self.length_coef or self.kl_in == "reward"
        if self.advantage == "pass_at_k" and adds:
            raise ValueError(
                "advantage=pass_at_k counts correct completions, and neither length nor divergence "
                "changes that: set overlong_share to null, length_coef to 0 and kl_in to loss"
            )
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip={self.dual_clip} must be above 1 + clip_high={1 + self.clip_high:g}"
            )
        return self


def _check_distillation(algorithm: AlgorithmConfig, distillation: DistillationConfig) -> None:
    """Refuses what takes the teacher's signal away.

    Raises:
        ValueError: with value, rule and fix.
    """
    if algorithm.zero_variance != "keep":
        raise ValueError(
            f"zero_variance={algorithm.zero_variance} drops groups whose rewards are all equal, of "
            "whose tokens distillation.teacher has something to say: set zero_variance to keep"
        )
    if algorithm.has_critic and not distillation.advantage_coef:
        raise ValueError(
            f"advantage={algorithm.advantage} trains a critic on rewards, but "
            "distillation.advantage_coef=0 trains on none: set advantage_coef above 0, or take "
            "another advantage"
        )
    if algorithm.kl_in == "reward" and not distillation.advantage_coef:
        raise ValueError(
            "kl_in=reward takes the penalty off rewards, but distillation.advantage_coef=0 trains "
            "on none: set advantage_coef above 0, or kl_in to loss"
        )


class OptimizerConfig(Section):
    """One optax chain: clip by global norm, then the named rule with a schedule."""

    name: Literal["adamw", "lion", "sgd", "muon", "adafactor"] = "adamw"
    """Update rule; sgd is without momentum. `muon` makes the update of each matrix of a layer
    orthogonal, for which rates of 1e-3 to 2e-2 are usual, and has Adam with Nesterov momentum at a
    tenth of the rate for embedding, head, norms and biases. `adafactor` keeps a row and a column of
    the second moment of a matrix and no first moment: next to no memory."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the moments (adamw, lion, muon); bfloat16 halves their memory. They are rounded at
    random, by a key that follows from the number of updates, so that small changes count."""
    offload: bool = False
    """Keep the moments in the memory of the host between updates, where the platform has such a
    kind of memory (docs/long-sequences.md). Weights and arithmetic stay as they are."""
    learning_rate: float = Field(default=1e-6, ge=0, le=1)
    """The peak, reached after `warmup_steps`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises linearly from 0."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """The rate at the last step, as a fraction of the peak."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment (adamw, and the Adam of muon), or weight of the momentum in an
    update (lion)."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment (adamw, and the Adam of muon), or of the momentum (lion)."""
    eps: float = Field(default=1e-8, ge=1e-30, le=1)
    """Added to the denominator of adamw and muon."""
    weight_decay: float = Field(default=0.0, ge=0, le=1000)
    """Applied to matrices only, never to norms and biases."""
    clip_norm: float = Field(default=1.0, ge=1e-12)
    """Largest global norm of the gradient; a longer one is scaled down."""


CONTEXT_SIZES = (1, 2, 4, 8, 16, 32)
"""Of learner.mesh.context: every row that is compiled, a power of 2 from 64 or the whole budget
(learner/objective/batching.py), has chunks of equal length then."""


class MeshConfig(Section):
    """Axis sizes of the learner's device mesh; one of the first two may be -1 (all devices that
    remain).
    """

    data: int = 1
    """Copies of the model; each takes a share of the batch."""
    fsdp: int = -1
    """Devices over which parameters and optimizer state are sharded, times those of `context`."""
    context: int = 1
    """Devices that share the tokens of each row, a power of 2: a row may have `microbatch_tokens`
    of each of them (docs/long-sequences.md)."""

    @model_validator(mode="after")
    def _check(self):
        sizes = (self.data, self.fsdp)
        if any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
            raise ValueError(
                f"mesh axes must be positive and at most one may be -1, got "
                f"data={self.data}, fsdp={self.fsdp}"
            )
        if self.context not in CONTEXT_SIZES:
            raise ValueError(
                f"context={self.context}: rows are cut into 2 x context equal chunks, and the "
                f"shortest row has 64 tokens; set it to one of {CONTEXT_SIZES}"
            )
        return self


class LoraConfig(Section):
    """Low-rank adapters (LoRA): they train, and the model itself stays as it is (docs/lora.md)."""

    rank: int = Field(ge=1, le=65_536)
    """Inner size r of the two matrices that stand beside each projection, A [r, in] and
    B [out, r]."""
    alpha: float = Field(default=16.0, gt=0, le=1e6)
    """What they add is multiplied by alpha / rank, as in PEFT."""
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
    )
    """Which linear projections of the layers have an adapter: names such as
    `model.layers.0.self_attn.q_proj`, or ends of them, as patterns with `*`, `?` and `[..]`."""
    init_from: str | None = Field(default=None, min_length=1)
    """Folder of PEFT with the adapter to start from, of this rank, alpha and targets; null starts
    from one that changes nothing. With `algorithm.kl_coef` it belongs to the reference."""


class LearnerConfig(Section):
    """How one batch of groups becomes one optimiser step."""

    microbatch_tokens: int = Field(default=8192, ge=16, le=2**24)
    """Token slots of one micro-batch on one device, padding included. The longest row has as many,
    times `mesh.context`."""
    updates_per_batch: int = Field(default=1, ge=1, le=1000)
    """Optimiser updates on the same groups; from the second on the clip has work to do."""
    mesh: MeshConfig = MeshConfig()
    remat: Remat = "layer"
    """What the forward pass keeps of each layer; the backward pass computes all else again. `none`
    keeps everything (false), `layer` the layer's input (true), `offload` the same in the memory of
    the host. `dots`, `attention` and `mlp` also keep the results of all products with weights, of
    attention, or of the first two products of the MLP (docs/long-sequences.md)."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of activations and matrix products; master weights stay float32."""
    lm_head: Literal["logits", "fast", "lean"] = "fast"
    """`logits` has the logits of a micro-batch whole; `fast` and `lean` never do. `lean` needs the
    least memory, for one matrix product more."""
    loss_impl: Literal["auto", "reference", "xla", "pallas"] = "auto"
    """Implementation of head and logprob; `auto` is the fastest measured on the platform."""
    attention: Literal["auto", "reference", "xla", "pallas"] = "auto"
    """Implementation of attention. `reference` has the scores of a row whole, which are the square
    of its tokens; `xla` and `pallas` go through them in blocks (docs/long-sequences.md). `auto` is
    `pallas` on a TPU and `xla` elsewhere, and `reference` for rows that are short."""
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None

    @property
    def longest_row(self) -> int:
        """Token slots of the longest row of a micro-batch, on all devices that share it."""
        return self.microbatch_tokens * self.mesh.context

    @property
    def say_longest_row(self) -> str:
        """The keys that it follows from, with their values."""
        context = self.mesh.context
        shared = f" x learner.mesh.context={context} = {self.longest_row}" * (context > 1)
        return f"learner.microbatch_tokens={self.microbatch_tokens}{shared}"

    @model_validator(mode="after")
    def _check_rows(self):
        if self.mesh.context > 1 and self.microbatch_tokens % 2:
            raise ValueError(
                f"microbatch_tokens={self.microbatch_tokens} with mesh.context="
                f"{self.mesh.context}: each device has two equal chunks of a row; set "
                "microbatch_tokens to an even number"
            )
        return self

    @field_validator("remat", mode="before")
    @classmethod
    def _name_remat(cls, value: object):
        if value in REMATS:
            return value
        try:
            return "layer" if _BOOLEAN.validate_python(value) else "none"
        except ValidationError:
            raise ValueError(f"{value!r} is none of {', '.join(REMATS)}, true or false") from None

    @model_validator(mode="after")
    def _check_head(self):
        if self.loss_impl == "reference" and self.lm_head != "logits":
            raise ValueError(
                f"lm_head={self.lm_head} with loss_impl=reference: the reference has whole logits; "
                "set lm_head to logits, or loss_impl to auto"
            )
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What a learner needs to train, beside the model and its devices."""

    algorithm: AlgorithmConfig
    learner: LearnerConfig
    total_steps: int
    """Batches of the whole run, which the learning rate plans with."""
    temperature: float
    """Of the rollout."""
    valid_vocab: int | None
    """Ids below it can be sampled; None for the whole embedding."""
    max_completion_tokens: int
    """Of the rollout; the constant of aggregation `constant`."""
    reward_weights: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of each reward function, by name; for advantage `reward_norm`."""
    seed: int = 0
    """Of the run; what a fresh adapter is drawn from."""
