"""The three passes of schedule.py over global arrays, on one device or on a mesh.

Each is a `shard_map` of its own and returns complete sums, so that the derivative of a `shard_map`
is never taken: that would divide the cotangents of what is the same on every device of an axis.

Dimension key:
    T: tokens
    D: model width
    V: vocabulary (rows of the head)
"""

from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.linear_objective import schedule
from kernels.linear_objective.reference import Objective
from kernels.linear_objective.schedule import HeadGradients, HeadOptions
from kernels.token_logprob.ops import check_apart, check_divides
from kernels.token_logprob.reference import TokenLogprob


class HeadOnMesh:
    """The passes, with tokens cut over `token_axes` and the head over the options' vocab_axis."""

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
            axis = self._options.vocab_axis
            check_divides(self._mesh, "vocabulary", V, (axis,) if axis else ())
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
