"""`linear_objective` as a differentiable function, on one device or on a mesh.

Dimension key:
    T: tokens
    D: model width
    V: vocabulary (rows of the head)
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.linear_objective import schedule
from kernels.linear_objective.arguments import check_arrays, check_objective
from kernels.linear_objective.reference import LinearObjective, Objective, sum_objective
from kernels.linear_objective.schedule import HeadGradients, HeadOptions
from kernels.token_logprob.ops import axis_names, check_apart, check_divides
from kernels.token_logprob.reference import TokenLogprob

__all__ = ["HeadOptions", "LinearObjective", "linear_objective"]


def linear_objective(
    hidden_TD: jax.Array,
    head_VD: jax.Array,
    ids_T: jax.Array,
    active_T: jax.Array | None,
    data: Any,
    objective: Objective,
    options: HeadOptions,
    *,
    mesh: Mesh | None = None,
    token_axes: tuple[str, ...] = (),
) -> LinearObjective:
    """Same contract as reference.linear_objective, with its arguments checked.

    Under `jax.grad` the gradient of the loss is formed in the forward pass and scaled in the
    backward pass. Cotangents of the per-token outputs are served as well, by a second pass that
    runs only where they are asked for.

    Args:
        options: schedule, implementation, temperature and support; with a vocab_axis the head is
            cut over that axis of the mesh, otherwise every device of the mesh holds it whole.
        mesh: where several devices share the work; the call then stands outside `shard_map`.
        token_axes: the axes of the mesh over which the tokens are cut.

    Raises:
        ValueError: if the arrays do not belong together, or do not fit the mesh.
    """
    check_arrays(hidden_TD, head_VD, ids_T, active_T, data)
    data = jax.tree.map(jnp.asarray, data)
    check_objective(objective, data)
    head = _HeadOnMesh(options, mesh, token_axes)
    head.check(T=hidden_TD.shape[0], V=head_VD.shape[0])
    floats, rest = _split(data)

    def summed(scores, floats, rest, active_T):
        data = _join(floats, rest)
        return sum_objective(scores.logprob, scores.entropy, active_T, data, objective)

    @jax.custom_vjp
    def operation(hidden_TD, head_VD, floats, ids_T, active_T, rest):
        scores = head.score(hidden_TD, head_VD, ids_T, active_T)
        return summed(scores, floats, rest, active_T)

    def forward(*primals):
        is_primal = lambda x: hasattr(x, "perturbed")
        given = jax.tree.map(lambda primal: primal.value, primals, is_leaf=is_primal)
        hidden_TD, head_VD, floats, ids_T, active_T, rest = given
        data = _join(floats, rest)
        found = head.value_and_gradients(hidden_TD, head_VD, ids_T, active_T, data, objective)
        return summed(found.scores, floats, rest, active_T), (given, found)

    def backward(residuals, cotangents):
        (hidden_TD, head_VD, floats, ids_T, active_T, rest), found = residuals
        d_loss, d_logprob_T, d_entropy_T = cotangents
        d_hidden_TD, d_head_VD, d_floats = jax.tree.map(
            jnp.zeros_like, (hidden_TD, head_VD, floats)
        )
        if not isinstance(d_loss, SymbolicZero):
            d_hidden_TD = d_loss * found.hidden_TD
            d_head_VD = d_loss * found.head_VD
            loss = lambda floats: summed(found.scores, floats, rest, active_T).loss
            d_floats = jax.vjp(loss, floats)[1](d_loss)[0]
        per_token = [_instantiated(each) for each in (d_logprob_T, d_entropy_T)]
        if any(each is not None for each in per_token):
            zeros_T = jnp.zeros(ids_T.shape, jnp.float32)
            d_logprob_T, d_entropy_T = (zeros_T if each is None else each for each in per_token)
            wanted = TokenLogprob(d_logprob_T, zeros_T, d_entropy_T)
            extra = head.pull_back(hidden_TD, head_VD, ids_T, active_T, wanted)
            d_hidden_TD = d_hidden_TD + extra.hidden_TD
            d_head_VD = d_head_VD + extra.head_VD
        return (
            d_hidden_TD.astype(hidden_TD.dtype),
            d_head_VD.astype(head_VD.dtype),
            d_floats,
            *jax.tree.map(_no_gradient, (ids_T, active_T, rest)),
        )

    operation.defvjp(forward, backward, symbolic_zeros=True)
    return operation(hidden_TD, head_VD, floats, ids_T, active_T, rest)


def _split(data):
    """The float leaves and the others, each as a tree with None in the places of the rest."""
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
    floats = jax.tree.map(lambda leaf: leaf if is_float(leaf) else None, data)
    return floats, jax.tree.map(lambda leaf: None if is_float(leaf) else leaf, data)


def _join(floats, rest):
    return jax.tree.map(
        lambda one, other: other if one is None else one, floats, rest, is_leaf=lambda x: x is None
    )


def _instantiated(cotangent):
    return None if isinstance(cotangent, SymbolicZero) else cotangent


def _no_gradient(leaf):
    return np.zeros(leaf.shape, jax.dtypes.float0)


class _HeadOnMesh:
    """The passes of schedule.py over global arrays, on one device or on a mesh.

    Tokens are cut over `token_axes`, the head over the options' vocab_axis. Each pass is a
    `shard_map` of its own and returns complete sums, so that the derivative of a `shard_map` is
    never taken: that would divide the cotangents of what is the same on every device of an axis.
    """

    def __init__(self, options: HeadOptions, mesh: Mesh | None, token_axes: tuple[str, ...]):
        """Args:
            mesh: None for one device; its other axes hold everything whole.

        Raises:
            ValueError: if axes are named without a mesh, or one for both.
        """
        check_apart(token_axes, options.vocab_axis)
        if mesh is None and (token_axes or options.vocab_axis):
            raise ValueError(
                f"token_axes={token_axes} and vocab_axis={options.vocab_axis!r} need a mesh"
            )
        self._options = options
        self._mesh = mesh
        self._token_axes = token_axes
        self._tokens, self._head = P(token_axes), P(options.vocab_axis)

    def check(self, *, T: int, V: int) -> None:
        """Refuses sizes that the axes cannot cut.

        Raises:
            ValueError: with size and axes.
        """
        if self._mesh is not None:
            axes = axis_names(self._options.vocab_axis)
            check_divides(self._mesh, "vocabulary", V, axes)
            check_divides(self._mesh, "number of tokens", T, self._token_axes)

    def score(self, hidden_TD, head_VD, ids_T, active_T) -> TokenLogprob:
        """As schedule.score."""

        def local(hidden_TD, head_VD, ids_T, active_T):
            return schedule.score(hidden_TD, head_VD, ids_T, active_T, self._options)

        return self._map(local, 2, self._tokens)(hidden_TD, head_VD, ids_T, active_T)

    def value_and_gradients(
        self, hidden_TD, head_VD, ids_T, active_T, data: Any, objective: Objective
    ) -> HeadGradients:
        """As schedule.value_and_gradients, the sums over the mesh taken."""

        def local(hidden_TD, head_VD, ids_T, active_T, data):
            found = schedule.value_and_gradients(
                hidden_TD, head_VD, ids_T, active_T, data, objective, self._options
            )
            return self._completed(found, hidden_TD.dtype)

        return self._map(local, 3, self._gradient_specs)(hidden_TD, head_VD, ids_T, active_T, data)

    def pull_back(self, hidden_TD, head_VD, ids_T, active_T, cotangents) -> HeadGradients:
        """As schedule.pull_back, the sums over the mesh taken."""

        def local(hidden_TD, head_VD, ids_T, active_T, cotangents):
            found = schedule.pull_back(
                hidden_TD, head_VD, ids_T, active_T, cotangents, self._options
            )
            return self._completed(found, hidden_TD.dtype)

        run = self._map(local, 3, self._gradient_specs)
        return run(hidden_TD, head_VD, ids_T, active_T, cotangents)

    @property
    def _gradient_specs(self) -> Any:
        """Of HeadGradients."""
        specs: Any = (self._tokens, self._tokens, self._head)
        return HeadGradients(*specs)

    def _completed(self, found: HeadGradients, dtype) -> HeadGradients:
        if self._mesh is None:
            return found
        hidden_TD, head_VD = found.hidden_TD, found.head_VD
        if self._options.vocab_axis is not None:
            hidden_TD = jax.lax.psum(hidden_TD, self._options.vocab_axis)
        if self._token_axes:
            head_VD = jax.lax.psum(head_VD, self._token_axes)
        return found._replace(hidden_TD=hidden_TD.astype(dtype), head_VD=head_VD)

    def _map(self, local, per_token: int, out_specs):
        """`local(hidden, head, per-token arguments..)` over each device's part."""
        if self._mesh is None:
            return local
        return jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=(self._tokens, self._head, *[self._tokens] * per_token),
            out_specs=out_specs,
            check_vma=False,  # a Pallas call says nothing of what varies over which axis
        )
