"""The compiled functions of an update: add up a micro-batch's gradient, then apply the sum.

`accumulate` runs under `shard_map`: every device differentiates the loss of its own rows, a sum
that is not yet divided by anything, and the gradients are reduced explicitly afterwards. The only
collectives that are ever differentiated are the parameter gathers, so gradients cannot pick up a
factor of the device count. `apply` divides once by the denominator of the whole batch. `score` only
computes the policy's logprobs of the tokens, for the off-policy correction.

Dimension key:
    B: rows of one micro-batch
    T: token slots of a row
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.packed_attention.ops import AttentionPlan
from learner.objective.batching import MicroBatch
from learner.objective.loss import Objective, metric_sums, token_terms, weighted_sum
from learner.update import value_head
from learner.update.context import in_order, row_attend, spread
from learner.update.distilled_head import DistilledHead, TeacherPlan
from learner.update.entropy_bonus import EntropyRule, adjusted_bonus
from learner.update.head import HeadPlan, PolicyHead
from learner.update.mesh import AXES, TOKENS
from learner.update.sharding import (
    STACKED,
    make_embed,
    make_gather,
    named_shardings,
    reduce_gradients,
)
from learner.update.state import TrainState
from models.adapter import join
from models.config import ModelConfig
from models.layer_scan import Backward, LayerLayout, Remat
from models.transformer import Params, forward

SUMS = (
    "loss",
    "active_tokens",
    "kl",
    "entropy",
    "clipped_low",
    "clipped_high",
    "distillation_kl",
)
CRITIC_SUMS = ("value_loss", "value_clipped")


class Accumulator(NamedTuple):
    """Sums over the micro-batches so far: float32, undivided. Also carries partition specs."""

    grads: Any
    """Params."""
    sums: Any
    """dict of scalars by the names in SUMS, and with a critic those in CRITIC_SUMS."""


class PolicyOptions(NamedTuple):
    """How the policy's distribution is computed; static while a step is compiled."""

    head: HeadPlan
    attention: AttentionPlan
    compute_dtype: jnp.dtype
    remat: Remat
    layout: LayerLayout = LayerLayout()
    """Of the layers, where gradients are formed."""
    adapter_scale: float = 1.0
    """Of an adapter, where the parameters have one (models/adapter.py)."""


class FrozenBase(NamedTuple):
    """What an adapter leaves as it is; static while a step is compiled."""

    specs: Params
    """PartitionSpec of every parameter of the base."""
    reference_specs: Params
    """Of the reference policy: the base's, or the base's with an adapter that is frozen too."""


class TokenData(NamedTuple):
    """What the loss needs of each token beside its scores; float32 [B, T]."""

    old_logprobs: jax.Array
    advantages: jax.Array
    weights: jax.Array
    reference_logprobs: jax.Array | None
    sequence_log_ratios: jax.Array | None
    entropy_coefs: jax.Array | None


def make_accumulate(
    mesh: Mesh,
    specs: Params,
    config: ModelConfig,
    objective: Objective,
    options: PolicyOptions,
    teacher: TeacherPlan | None = None,
    base: FrozenBase | None = None,
) -> Callable[..., tuple[Accumulator, jax.Array]]:
    """Builds `accumulate(params, reference_params, accumulator, batch, entropy_coef=None,
    teacher_params=None, base_params=None)`.

    It returns the accumulator, the one given being donated, and the policy's logprobs, float32 [B,
    T], of which only those of active tokens mean anything. The batch holds whole rows, which are
    divided here; reference_params is None without a KL penalty in the loss; entropy_coef is a
    float32 scalar where it is adaptive, and None where the objective's holds; teacher_params are
    those of the teacher whose divergence is in the loss, if any. Where specs have a value head, the
    critic's loss is added, times its coefficient. With a base, params are those of its adapter and
    base_params its own, of which no gradient is formed; it excludes a teacher in the loss.
    """
    whole_specs, reference = _whole_specs(specs, base)
    complete = lambda grads: reduce_gradients(grads, specs[STACKED])
    head, hidden_states = _policy(mesh, whole_specs, config, options)
    _, reference_states = _policy(mesh, reference, config, options)
    has_critic = value_head.NAME in specs
    teacher_coef = 0.0 if teacher is None else teacher.coef
    distilled = _distilled_head(mesh, specs, options, teacher)
    head_gradients = _head_gradients(head, distilled, is_frozen=base is not None)

    def terms_of(logprob, entropy, data):
        return token_terms(
            logprob,
            entropy,
            data.old_logprobs,
            data.advantages,
            data.weights > 0,
            objective,
            data.reference_logprobs,
            data.sequence_log_ratios,
            data.entropy_coefs,
        )

    def weighted_loss(logprob, entropy, data):
        return data.weights * terms_of(logprob, entropy, data).loss

    def local(
        params, reference_params, accumulator, batch, entropy_coef, teacher_params, base_params
    ):
        active_BT = batch.weights > 0
        whole = lambda tree: tree if base is None else join(base_params, tree)
        reference_BT = None
        if reference_params is not None:
            hidden_BTD = reference_states(reference_params, batch)
            reference_BT = head.scores(
                reference_params, hidden_BTD, batch.target_ids, active_BT
            ).logprob
        data = TokenData(
            batch.old_logprobs,
            batch.advantages,
            batch.weights,
            reference_BT,
            batch.sequence_log_ratios,
            None if entropy_coef is None else jnp.full_like(batch.weights, entropy_coef),
        )

        # The heads form their own gradients; that in the hidden states goes on through the layers,
        # whose gradients are added one by one (models/layer_scan.py).
        own = ("lm_head", value_head.NAME, STACKED)
        others = {name: tree for name, tree in params.items() if name not in own}
        so_far = accumulator.grads

        def states(others, layers_so_far):
            trained = {**others, STACKED: params[STACKED]}
            backward = Backward(options.remat, layers_so_far, complete, options.layout)
            return hidden_states(whole(trained), batch, backward)

        hidden_BTD, pull = jax.vjp(states, others, so_far[STACKED])
        given: Any = (whole(params), hidden_BTD, batch.target_ids, active_BT, data, weighted_loss)
        policy, divergence_BT, d_hidden_BTD, head_grads = head_gradients(
            given, so_far, batch, teacher_params
        )
        critic_sums, critic_grads = {}, {}
        if has_critic:
            critic_sums, d_head, d_value_BTD = value_head.value_gradients(
                params[value_head.NAME],
                hidden_BTD,
                batch.values,
                batch.returns,
                batch.weights,
                objective.value_clip,
            )
            both_BTD = d_hidden_BTD.astype(jnp.float32) + objective.value_coef * d_value_BTD
            d_hidden_BTD = both_BTD.astype(d_hidden_BTD.dtype)
            critic_grads = {
                value_head.NAME: jax.tree.map(lambda grad: objective.value_coef * grad, d_head)
            }
        grads, layers_so_far = pull(d_hidden_BTD)
        grads = {**grads, **critic_grads}
        grads = reduce_gradients(grads, {name: specs[name] for name in grads})
        so_far = {**so_far, **head_grads, STACKED: layers_so_far}

        terms = terms_of(policy.logprob, policy.entropy, data)
        sums = metric_sums(terms, policy.entropy, active_BT) | critic_sums
        sums["loss"] = weighted_sum(terms.loss, batch.weights)
        sums["distillation_kl"] = jnp.where(active_BT, divergence_BT, 0.0).sum()
        sums["loss"] += teacher_coef * weighted_sum(divergence_BT, batch.weights)
        if has_critic:
            sums["loss"] += objective.value_coef * sums["value_loss"]
        sums = jax.lax.psum(sums, AXES)
        accumulator = Accumulator(
            grads={**so_far, **jax.tree.map(jnp.add, {n: so_far[n] for n in grads}, grads)},
            sums=jax.tree.map(jnp.add, accumulator.sums, sums),
        )
        return accumulator, policy.logprob

    accumulated = Accumulator(specs, P())

    def accumulate(
        params,
        reference_params,
        accumulator,
        batch,
        entropy_coef=None,
        teacher_params=None,
        base_params=None,
    ):
        reference_specs = P() if reference_params is None else reference
        teacher_specs = P() if teacher is None else teacher.specs
        base_specs = P() if base is None else base.specs

        # Replication is not checked: `reduce_gradients` is what makes it true, and the tests
        # compare meshes. (The check would also insert its own reductions into the derivative.)
        over_devices = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(
                *(specs, reference_specs, accumulated, TOKENS, P(), teacher_specs),
                base_specs,
            ),
            out_specs=(accumulated, TOKENS),
            check_vma=False,
        )
        accumulator, logprob_BT = over_devices(
            params,
            reference_params,
            accumulator,
            spread(batch, mesh),
            entropy_coef,
            teacher_params,
            base_params,
        )
        return accumulator, in_order(logprob_BT, mesh)

    return jax.jit(accumulate, donate_argnums=2)


def make_score(
    mesh: Mesh, specs: Params, config: ModelConfig, options: PolicyOptions
) -> Callable[[Params, MicroBatch], jax.Array]:
    """Builds `score(params, batch) -> logprobs`, float32 [B, T], as `accumulate` returns them.

    The parameters are those of a policy, without a value head.
    """
    specs = value_head.policy_params(specs)
    head, hidden_states = _policy(mesh, specs, config, options)

    @jax.shard_map(mesh=mesh, in_specs=(specs, TOKENS), out_specs=TOKENS, check_vma=False)
    def score(params, batch):
        hidden_BTD = hidden_states(params, batch)
        return head.scores(params, hidden_BTD, batch.target_ids, batch.weights > 0).logprob

    return jax.jit(lambda params, batch: in_order(score(params, spread(batch, mesh)), mesh))


def make_score_values(
    mesh: Mesh, specs: Params, config: ModelConfig, options: PolicyOptions
) -> Callable[[Params, MicroBatch], tuple[jax.Array, jax.Array]]:
    """Builds `score_values(params, batch) -> logprobs, values`, float32 [B, T] each.

    The logprobs are those of `score`, and the values the critic's of the same tokens.
    """
    head, hidden_states = _policy(mesh, specs, config, options)

    @jax.shard_map(mesh=mesh, in_specs=(specs, TOKENS), out_specs=TOKENS, check_vma=False)
    def score_values(params, batch):
        hidden_BTD = hidden_states(params, batch)
        scores = head.scores(params, hidden_BTD, batch.target_ids, batch.weights > 0)
        return scores.logprob, value_head.token_values(params[value_head.NAME], hidden_BTD)

    def in_rows(params, batch):
        logprob_BT, value_BT = score_values(params, spread(batch, mesh))
        return in_order(logprob_BT, mesh), in_order(value_BT, mesh)

    return jax.jit(in_rows)


def _policy(mesh, specs, config, options):
    """The policy's head, and what gives the hidden states [B, T, D] below it."""
    gather = make_gather(specs, options.compute_dtype, options.adapter_scale)
    embed = make_embed(specs, options.compute_dtype)

    def hidden_states(params, batch, backward=None):
        hidden_BTD, _ = forward(
            params,
            config,
            batch.token_ids,
            batch.positions,
            row_attend(
                batch.segments,
                mesh,
                operand_dtype=options.compute_dtype,
                plan=options.attention,
            ),
            compute_dtype=options.compute_dtype,
            gather=gather,
            embed=embed,
            backward=backward,
        )
        return hidden_BTD

    return PolicyHead(options.head, mesh, specs, gather), hidden_states


def _whole_specs(specs: Params, base: FrozenBase | None) -> tuple[Params, Params]:
    """PartitionSpecs of all parameters, frozen ones among them, and of the reference policy."""
    if base is None:
        return specs, value_head.policy_params(specs)
    return join(base.specs, specs), base.reference_specs


def _head_gradients(head: PolicyHead, distilled: DistilledHead | None, *, is_frozen: bool):
    """The head's part of `accumulate`.

    Its result: scores of the tokens, divergence from the teacher, the gradient in the hidden
    states, and that of the head by its name among the parameters, added to what was accumulated.
    """

    def gradients(given: Any, so_far: Params, batch: MicroBatch, teacher_params: Any):
        none_BT = jnp.zeros_like(batch.weights)
        if is_frozen:
            policy, d_hidden_BTD = head.hidden_gradients(*given)
            return policy, none_BT, d_hidden_BTD, {}
        if distilled is None:
            policy, d_hidden_BTD, head_grad_VD = head.gradients(*given, accumulated=so_far)
            divergence_BT = none_BT
        else:
            policy, divergence_BT, d_hidden_BTD, head_grad_VD = distilled.distilled_gradients(
                *given, accumulated=so_far, batch=batch, teacher_params=teacher_params
            )
        return policy, divergence_BT, d_hidden_BTD, {head.name: {"weight": head_grad_VD}}

    return gradients


def _distilled_head(
    mesh: Mesh, specs: Params, options: PolicyOptions, teacher: TeacherPlan | None
) -> DistilledHead | None:
    """The policy's head beside that of its teacher, if there is one in the loss."""
    if teacher is None:
        return None
    _, states = _policy(mesh, teacher.specs, teacher.config, options)
    return DistilledHead(options.head, mesh, specs, options.compute_dtype, teacher, states)


def make_empty_accumulator(mesh: Mesh, specs: Params) -> Callable[[Params], Accumulator]:
    """Builds `empty(params) -> Accumulator` of zeros, sharded as the parameters are."""
    shardings = named_shardings(mesh, Accumulator(specs, P()))
    names = SUMS + CRITIC_SUMS * (value_head.NAME in specs)

    def empty(params):
        sums = {name: jnp.zeros((), jnp.float32) for name in names}
        return Accumulator(jax.tree.map(jnp.zeros_like, params), sums)

    return jax.jit(empty, out_shardings=shardings)


def make_apply(
    mesh: Mesh,
    shardings: TrainState,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    entropy_rule: EntropyRule | None = None,
) -> Callable[[TrainState, Accumulator, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """Builds `apply(state, accumulator, denominator) -> (state, report)`; the state is donated.

    An update whose loss or gradient is not finite leaves the state as it was, its counts
    included. The report has float32 scalars: `loss`, `grad_norm` (before the clip),
    `learning_rate` (of this update), `skipped` (1.0 where it left the state alone), and with an
    entropy_rule `entropy_coef` (of this update).
    """

    def apply(state, accumulator, denominator):
        loss = accumulator.sums["loss"] / denominator
        grads = jax.tree.map(lambda grad: grad / denominator, accumulator.grads)
        grad_norm = optax.tree.norm(grads)
        usable = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        bonus, sums = state.entropy_bonus, accumulator.sums
        if entropy_rule is not None:
            entropy = sums["entropy"] / sums["active_tokens"]
            bonus = adjusted_bonus(bonus, entropy, entropy_rule)
        updated = TrainState(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            update_count=state.update_count + 1,
            entropy_bonus=bonus,
        )
        report = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": jnp.asarray(schedule(state.update_count), jnp.float32),
            "skipped": 1.0 - usable.astype(jnp.float32),
        }
        if entropy_rule is not None:
            report["entropy_coef"] = state.entropy_bonus.coef
        return jax.tree.map(lambda new, old: jnp.where(usable, new, old), updated, state), report

    replicated = NamedSharding(mesh, P())
    return jax.jit(apply, donate_argnums=0, out_shardings=(shardings, replicated))
