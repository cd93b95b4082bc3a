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

from learner.objective.batching import MicroBatch
from learner.objective.loss import Objective, metric_sums, token_terms, weighted_sum
from learner.update.head import HeadPlan, PolicyHead
from learner.update.mesh import AXES
from learner.update.sharding import make_embed, make_gather, named_shardings, reduce_gradients
from learner.update.state import TrainState
from models.config import ModelConfig
from models.transformer import Params, forward, packed_attend

SUMS = ("loss", "active_tokens", "kl", "entropy", "clipped_low", "clipped_high")


class Accumulator(NamedTuple):
    """Sums over the micro-batches so far: float32, undivided. Also carries partition specs."""

    grads: Any
    """Params."""
    sums: Any
    """dict of scalars by the names in SUMS."""


class PolicyOptions(NamedTuple):
    """How the policy's distribution is computed; static while a step is compiled."""

    head: HeadPlan
    compute_dtype: jnp.dtype
    remat: bool


class TokenData(NamedTuple):
    """What the loss needs of each token beside its scores; float32 [B, T]."""

    old_logprobs: jax.Array
    advantages: jax.Array
    weights: jax.Array
    reference_logprobs: jax.Array | None
    sequence_log_ratios: jax.Array | None


def make_accumulate(
    mesh: Mesh, specs: Params, config: ModelConfig, objective: Objective, options: PolicyOptions
) -> Callable[[Params, Params | None, Accumulator, MicroBatch], tuple[Accumulator, jax.Array]]:
    """Builds `accumulate(params, reference_params, accumulator, batch) -> accumulator, logprobs`.

    The accumulator is donated. Rows of the batch are divided over all devices; reference_params
    is None without a KL penalty. The logprobs are the policy's, float32 [B, T]; only those of
    active tokens mean anything.
    """
    head, hidden_states = _policy(mesh, specs, config, options)

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
        )

    def weighted_loss(logprob, entropy, data):
        return data.weights * terms_of(logprob, entropy, data).loss

    def local(params, reference_params, accumulator, batch):
        active_BT = batch.weights > 0
        reference_BT = None
        if reference_params is not None:
            hidden_BTD = hidden_states(reference_params, batch)
            reference_BT = head.scores(
                reference_params, hidden_BTD, batch.target_ids, active_BT
            ).logprob
        data = TokenData(
            batch.old_logprobs,
            batch.advantages,
            batch.weights,
            reference_BT,
            batch.sequence_log_ratios,
        )

        # The head forms its own gradient; that in the hidden states goes on through the layers.
        layers = {name: tree for name, tree in params.items() if name != "lm_head"}
        hidden_BTD, pull = jax.vjp(lambda layers: hidden_states(layers, batch), layers)
        policy, d_hidden_BTD, head_grad_VD = head.gradients(
            params, hidden_BTD, batch.target_ids, active_BT, data, weighted_loss, accumulator.grads
        )
        (grads,) = pull(d_hidden_BTD)
        grads = reduce_gradients(grads, {name: specs[name] for name in layers})
        so_far = {**accumulator.grads, head.name: {"weight": head_grad_VD}}

        terms = terms_of(policy.logprob, policy.entropy, data)
        sums = metric_sums(terms, policy.entropy, active_BT)
        sums["loss"] = weighted_sum(terms.loss, batch.weights)
        sums = jax.lax.psum(sums, AXES)
        accumulator = Accumulator(
            grads={**so_far, **jax.tree.map(jnp.add, {n: so_far[n] for n in layers}, grads)},
            sums=jax.tree.map(jnp.add, accumulator.sums, sums),
        )
        return accumulator, policy.logprob

    accumulated = Accumulator(specs, P())

    # Replication is not checked: `reduce_gradients` is what makes it true, and the tests compare
    # meshes. (The check would also insert its own reductions into the derivative.)
    @jax.shard_map(
        mesh=mesh,
        in_specs=(specs, specs, accumulated, P(AXES)),
        out_specs=(accumulated, P(AXES)),
        check_vma=False,
    )
    def with_reference(params, reference_params, accumulator, batch):
        return local(params, reference_params, accumulator, batch)

    @jax.shard_map(
        mesh=mesh,
        in_specs=(specs, accumulated, P(AXES)),
        out_specs=(accumulated, P(AXES)),
        check_vma=False,
    )
    def without_reference(params, accumulator, batch):
        return local(params, None, accumulator, batch)

    def accumulate(params, reference_params, accumulator, batch):
        if reference_params is None:
            return without_reference(params, accumulator, batch)
        return with_reference(params, reference_params, accumulator, batch)

    return jax.jit(accumulate, donate_argnums=2)


def make_score(
    mesh: Mesh, specs: Params, config: ModelConfig, options: PolicyOptions
) -> Callable[[Params, MicroBatch], jax.Array]:
    """Builds `score(params, batch) -> logprobs`, float32 [B, T], as `accumulate` returns them."""
    head, hidden_states = _policy(mesh, specs, config, options)

    @jax.shard_map(mesh=mesh, in_specs=(specs, P(AXES)), out_specs=P(AXES), check_vma=False)
    def score(params, batch):
        hidden_BTD = hidden_states(params, batch)
        return head.scores(params, hidden_BTD, batch.target_ids, batch.weights > 0).logprob

    return jax.jit(score)


def _policy(mesh, specs, config, options):
    """The policy's head, and `hidden_states(params, batch) -> [B, T, D]` below it."""
    gather = make_gather(specs, options.compute_dtype)
    embed = make_embed(specs, options.compute_dtype)

    def hidden_states(params, batch):
        hidden_BTD, _ = forward(
            params,
            config,
            batch.token_ids,
            batch.positions,
            packed_attend(batch.segments, operand_dtype=options.compute_dtype),
            compute_dtype=options.compute_dtype,
            gather=gather,
            embed=embed,
            remat=options.remat,
        )
        return hidden_BTD

    return PolicyHead(options.head, mesh, specs, gather), hidden_states


def make_empty_accumulator(mesh: Mesh, specs: Params) -> Callable[[Params], Accumulator]:
    """Builds `empty(params) -> Accumulator` of zeros, sharded as the parameters are."""
    shardings = named_shardings(mesh, Accumulator(specs, P()))

    def empty(params):
        sums = {name: jnp.zeros((), jnp.float32) for name in SUMS}
        return Accumulator(jax.tree.map(jnp.zeros_like, params), sums)

    return jax.jit(empty, out_shardings=shardings)


def make_apply(
    mesh: Mesh,
    shardings: TrainState,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
) -> Callable[[TrainState, Accumulator, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """Builds `apply(state, accumulator, denominator) -> (state, report)`; the state is donated.

    An update whose loss or gradient is not finite leaves the state as it was, its counts
    included. The report has float32 scalars: `loss`, `grad_norm` (before the clip),
    `learning_rate` (of this update), `skipped` (1.0 where it left the state alone).
    """

    def apply(state, accumulator, denominator):
        loss = accumulator.sums["loss"] / denominator
        grads = jax.tree.map(lambda grad: grad / denominator, accumulator.grads)
        grad_norm = optax.tree.norm(grads)
        usable = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        updated = TrainState(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            update_count=state.update_count + 1,
        )
        report = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": jnp.asarray(schedule(state.update_count), jnp.float32),
            "skipped": 1.0 - usable.astype(jnp.float32),
        }
        return jax.tree.map(lambda new, old: jnp.where(usable, new, old), updated, state), report

    replicated = NamedSharding(mesh, P())
    return jax.jit(apply, donate_argnums=0, out_shardings=(shardings, replicated))
