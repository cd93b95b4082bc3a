"""The programs that compete in the bench, value and gradient each, and the arrays they run on.

All programs of one kind have one signature, so that they do the same work:

    logits:  (logits, ids, data)                            -> loss, loss_N, d_logits
    head:    (hidden, head, ids, active, data, head_grad)   -> loss, loss_N, d_hidden, head_grad

`head_grad` is the float32 gradient accumulator; it is donated, and added to. Autodiff of whole
logits makes a gradient of its own first, which is part of what such a program costs.

Dimension key:
    B: sequences
    T: tokens of each
    N: tokens, B x T
    D: model width
    V: vocabulary
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import random_problems
from benchmarks.kernels.case import LOG_SOFTMAX, Case, CompetitorSpec
from kernels import choose
from kernels.linear_objective import reference as head_reference
from kernels.linear_objective.schedule import HeadOptions, chunk_size, value_and_gradients
from kernels.token_logprob import ops
from kernels.token_logprob.reference import TokenLogprob


class LogitsInputs(NamedTuple):
    """What a logits program reads."""

    logits_BTV: Any
    ids_BT: Any
    data: random_problems.GrpoData
    """[B, T] each."""


class HeadInputs(NamedTuple):
    """What a head program reads, the accumulator excepted."""

    hidden_ND: Any
    head_VD: Any
    ids_N: Any
    active_N: Any
    """bool, or None where all tokens are active."""
    data: random_problems.GrpoData


def objective_of(case: Case) -> Callable:
    """The per-token objective of a case: `grpo_objective` with its clip and entropy bonus."""
    return functools.partial(
        random_problems.grpo_objective, entropy_coef=case.entropy_coef, **case.clip
    )


def logits_program(spec: CompetitorSpec, case: Case) -> Callable:
    """A jitted logits program."""
    objective = objective_of(case)

    def loss(logits_BTV, ids_BT, data):
        if spec.impl == LOG_SOFTMAX:
            scored = _log_softmax(logits_BTV, ids_BT, case.temperature)
        else:
            scored = ops.token_logprob(
                logits_BTV, ids_BT, temperature=case.temperature, impl=spec.impl
            )
        loss_BT = objective(scored.logprob, scored.entropy, data)
        return loss_BT.sum(), loss_BT

    def program(logits_BTV, ids_BT, data):
        (value, loss_BT), d_logits = jax.value_and_grad(loss, has_aux=True)(
            logits_BTV, ids_BT, data
        )
        return value, loss_BT, d_logits

    return jax.jit(program)


def head_program(spec: CompetitorSpec, case: Case) -> Callable:
    """A jitted head program."""
    objective = objective_of(case)
    if spec.schedule is None:
        return jax.jit(_whole_head(spec, case, objective), donate_argnums=5)
    options = _options(spec, case)

    def program(hidden_ND, head_VD, ids_N, active_N, data, head_grad_VD):
        found = value_and_gradients(
            hidden_ND, head_VD, ids_N, active_N, data, objective, options, head_grad_VD=head_grad_VD
        )
        loss_N = _token_losses(found.scores, active_N, data, objective)
        return loss_N.sum(), loss_N, found.hidden_TD, found.head_VD

    return jax.jit(program, donate_argnums=5)


def chunk_tokens(spec: CompetitorSpec, case: Case, tokens: int, *, masked: bool) -> int | None:
    """Tokens of a chunk of a head program over `tokens`; None where there are no chunks."""
    if spec.schedule is None:
        return None
    assert case.hidden is not None, "a schedule works through a head"
    head_shape = (case.vocab, case.hidden)
    dtype = jnp.dtype(case.dtype)
    return chunk_size(tokens, head_shape, dtype, _options(spec, case), masked=masked)


def _options(spec: CompetitorSpec, case: Case) -> HeadOptions:
    assert spec.schedule is not None, "whole logits have no schedule"
    return HeadOptions(
        schedule=spec.schedule,
        impl=spec.impl,
        temperature=case.temperature,
        chunk_tokens=spec.chunk_tokens,
    )


def _whole_head(spec, case, objective):
    """Autodiff of whole logits: the reference, or the baseline."""

    def loss(hidden_ND, head_VD, ids_N, active_N, data):
        if spec.impl == choose.REFERENCE:
            found = head_reference.linear_objective(
                hidden_ND, head_VD, ids_N, active_N, data, objective, temperature=case.temperature
            )
            scored = TokenLogprob(found.logprob_T, found.logprob_T, found.entropy_T)
        else:
            logits_NV = jnp.matmul(hidden_ND, head_VD.T, preferred_element_type=jnp.float32)
            scored = _log_softmax(logits_NV, ids_N, case.temperature)
        loss_N = _token_losses(scored, active_N, data, objective)
        return loss_N.sum(), loss_N

    def program(hidden_ND, head_VD, ids_N, active_N, data, head_grad_VD):
        gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, loss_N), (d_hidden, d_head) = gradient(hidden_ND, head_VD, ids_N, active_N, data)
        return value, loss_N, d_hidden, head_grad_VD + d_head.astype(jnp.float32)

    return program


def _token_losses(scored, active_N, data, objective):
    if active_N is None:
        return objective(scored.logprob, scored.entropy, data)
    loss_N = objective(scored.logprob, scored.entropy, head_reference.mask_data(data, active_N))
    return jnp.where(active_N, loss_N, 0.0)


def _log_softmax(logits, ids, temperature):
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
    logprob = jnp.take_along_axis(log_p, ids[..., None], axis=-1)[..., 0]
    entropy = -(jnp.exp(log_p) * log_p).sum(axis=-1)
    return TokenLogprob(logprob, logprob, entropy)


def make_logits_inputs(case: Case) -> tuple[LogitsInputs, TokenLogprob]:
    """Random arrays on the device, and what the policy says of the tokens, float32 [N]."""
    logits_key, token_key, data_key = jax.random.split(jax.random.key(case.seed), 3)
    logits_NV = random_problems.normal(
        logits_key,
        random_problems.LOGITS_STD,
        rows=case.tokens,
        columns=case.vocab,
        dtype=jnp.dtype(case.dtype),
    )
    ids_N, scored = random_problems.draw_from_logits(token_key, logits_NV, case.temperature)
    data = random_problems.make_data(data_key, scored.logprob, case.noise)
    shape = (case.batch, case.time)
    inputs = LogitsInputs(
        logits_NV.reshape(*shape, case.vocab),
        ids_N.reshape(shape),
        jax.tree.map(lambda leaf: leaf.reshape(shape), data),
    )
    return inputs, scored


def make_head_inputs(case: Case) -> tuple[HeadInputs, TokenLogprob]:
    """The same for the head; the tokens that count are spread at random."""
    assert case.hidden is not None, "a head has a width"
    hidden_key, head_key, token_key, data_key, mask_key = jax.random.split(
        jax.random.key(case.seed), 5
    )
    make = functools.partial(
        random_problems.normal, columns=case.hidden, dtype=jnp.dtype(case.dtype)
    )
    hidden_ND = make(hidden_key, 1.0, rows=case.tokens)
    head_VD = make(head_key, random_problems.LOGITS_STD / case.hidden**0.5, rows=case.vocab)
    ids_N, scored = random_problems.draw_from_head(token_key, hidden_ND, head_VD, case.temperature)
    data = random_problems.make_data(data_key, scored.logprob, case.noise)
    active_N = None
    if case.active_fraction is not None:
        place_N = jax.random.permutation(mask_key, case.tokens)
        active_N = place_N < case.active_tokens
    return HeadInputs(hidden_ND, head_VD, ids_N, active_N, data), scored


def without_padding(inputs: HeadInputs, case: Case) -> HeadInputs:
    """The batch of the tokens that count, and nothing else."""
    token_N = jnp.nonzero(inputs.active_N, size=case.active_tokens)[0]
    take = lambda leaf: leaf[token_N]
    return HeadInputs(
        take(inputs.hidden_ND),
        inputs.head_VD,
        take(inputs.ids_N),
        None,
        jax.tree.map(take, inputs.data),
    )
