"""The optimiser: one optax chain over float32 master weights.

Clip by global norm, the rule, decoupled weight decay on matrices, then the learning rate of the
number of updates made so far, which lives in the optimiser's state and so survives a resume.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from learner.config import OptimizerConfig
from learner.update import value_head
from learner.update.moments import rounded_moments
from learner.update.sharding import own_ndim
from models.transformer import Params

ADAM_OF_MUON = 0.1
"""Learning rate of what muon leaves to Adam, as a fraction of its own."""
WHOLE_MOMENTS = ("adamw", "lion", "muon")
"""Rules with moments of their parameters' shapes, which `moments_dtype` is about."""
_ADAFACTOR_DECAY = 0.8
"""Exponent of the number of updates in the decay of adafactor's moment: the paper's."""
_FACTORED_FROM = 128
"""Smaller matrices keep their whole moment."""


def learning_rate_schedule(config: OptimizerConfig, total_updates: int) -> optax.Schedule:
    """Learning rate by the count of updates already made.

    It rises linearly from 0 at count 0 to the peak at count `warmup_steps`, then stays, or falls
    to `final_fraction` of the peak at count `total_updates` (linearly or along half a cosine) and
    stays there.

    Raises:
        ValueError: if the warm-up does not end before the run does.
    """
    decay_updates = total_updates - config.warmup_steps
    if decay_updates < 1:
        raise ValueError(
            f"learner.optimizer.warmup_steps={config.warmup_steps} must be below the "
            f"{total_updates} updates of the run (run.steps x learner.updates_per_batch)"
        )
    peak = config.learning_rate
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, peak * config.final_fraction, decay_updates)
    else:
        after = optax.cosine_decay_schedule(peak, decay_updates, alpha=config.final_fraction)
    if config.warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(0.0, peak, config.warmup_steps)
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, *, value_rate_factor: float | None = None
) -> optax.GradientTransformation:
    """adamw, lion, sgd (without momentum), muon or adafactor.

    Args:
        value_rate_factor: multiplies the learning rate of a value head; None where there is none.
    """
    rules = {
        "adamw": lambda: optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        "lion": lambda: optax.scale_by_lion(config.beta1, config.beta2),
        "sgd": optax.identity,
        "muon": lambda: _muon(config),
        "adafactor": _adafactor,
    }
    rule = rules[config.name]()
    if config.moments_dtype == "bfloat16" and config.name in WHOLE_MOMENTS:
        rule = rounded_moments(rule)
    chain = [
        optax.clip_by_global_norm(config.clip_norm),
        rule,
        optax.add_decayed_weights(config.weight_decay, mask=matrices),
        optax.scale_by_learning_rate(schedule),
    ]
    if value_rate_factor is not None:
        chain.append(optax.stateless(lambda updates, _: _faster(updates, value_rate_factor)))
    return optax.chain(*chain)


def _faster(updates: Any, factor: float) -> Any:
    """The updates with those of the value head multiplied."""
    head = jax.tree.map(lambda update: factor * update, updates[value_head.NAME])
    return {**updates, value_head.NAME: head}


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, Adam with Nesterov momentum for all else.

    Source: K. Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024).
    """
    return optax.chain(
        optax.contrib.muon(
            1.0,
            eps=config.eps,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            adam_learning_rate=ADAM_OF_MUON,
            muon_weight_dimension_numbers=_layer_matrices,
        ),
        optax.scale(-1.0),  # it comes as what is added to the parameters
    )


def _adafactor() -> optax.GradientTransformation:
    """The second moment of a matrix as a row and a column, without a first moment.

    Source: N. Shazeer and M. Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"
    (2018): updates are clipped to a root mean square of 1, and the decay of the moment rises with
    the number of updates. The rate is that of the schedule, not relative to the parameters.
    """
    return optax.chain(
        optax.scale_by_factored_rms(
            min_dim_size_to_factor=_FACTORED_FROM, decay_rate=_ADAFACTOR_DECAY
        ),
        optax.stateless(lambda updates, _: _clipped_by_rms(updates)),
    )


def _clipped_by_rms(updates: Any) -> Any:
    """The updates of each parameter, of stacked ones each layer's, with a root mean square of at
    most 1.
    """

    def clipped(path, update):
        axes = tuple(range(update.ndim - own_ndim(path, update), update.ndim))
        mean = jnp.mean(update * update, axis=axes, keepdims=True)
        return update / jnp.maximum(1.0, jnp.sqrt(mean))

    return jax.tree_util.tree_map_with_path(clipped, updates)


def _layer_matrices(params: Any) -> Any:
    """The dimensions of every stacked matrix of the layers, [L, out, in]; None for all else."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)
    return jax.tree.map(lambda leaf: matrix if leaf.ndim == 3 else None, params)


def matrices(params: Params) -> Params:
    """True for every matrix of the model, False for its norms and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: own_ndim(path, leaf) >= 2, params)
