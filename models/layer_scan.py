"""Stacked layers one after another, with a backward pass that adds each layer's gradient in place.

Left to jax, the derivative of a scan over layers is an array with the gradients of all of them,
which then stands beside the sums that it is added to. Here the sums go into the scan as one more
input, and the derivative in them is defined as what they become: the backward loop carries them,
and adds a layer's gradient to its slice as soon as it is known. So the derivative of `scan_layers`
in `so_far` is no mathematical one, and that in the layers themselves is none.

What the forward pass keeps of a layer for the backward one is that layer's `Remat`. A layer's whole
weights are never kept: they are gathered again.

Dimension key: that of transformer.py
"""

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core as jaxprs

from kernels.packed_attention.reference import KEPT_NAME

Layer = Callable[[jax.Array, Any], jax.Array]
"""(x_BTD, whole weights of one layer) -> x_BTD."""
PRODUCT, MLP = "product", "mlp"
"""Names that a layer gives to what may be kept, as attention names its own: the result of each
product with weights, and the first two of the MLP (`jax.ad_checkpoint.checkpoint_name`)."""


class Remat(enum.StrEnum):
    """What is kept of each layer; the backward pass makes all else again."""

    NONE = "none"
    """Everything that the backward pass needs."""
    LAYER = "layer"
    """The layer's input."""
    DOTS = "dots"
    """Its input and the results of its products with weights."""
    ATTENTION = "attention"
    """Its input and what attention found that goes block by block: its result, and one number for
    each token and head. Attention with whole scores would have to make those again in any case, so
    that nothing of it is kept."""
    MLP = "mlp"
    """Its input and the two products with which the MLP begins."""
    OFFLOAD = "offload"
    """The layer's input, in the memory of the host."""


class LayerLayout(NamedTuple):
    """How the same layers are laid out for a compiler; what they give is the same."""

    flat: bool = False
    """The tokens of all rows lie on one axis, but for attention: [B T, D]. So products of [B, T]
    are products of matrices, of which XLA:CPU transposes an operand without a copy."""
    unrolled: int = 0
    """Up to so many layers follow one another without a loop, where everything is kept of them:
    what a loop keeps is stacked, and XLA:CPU fills each stack with zeros before, on one core."""


_CPU = LayerLayout(flat=True, unrolled=8)


def layout_for(platform: str) -> LayerLayout:
    """What suits a platform, as `jax.Device.platform` has it."""
    return _CPU if platform == "cpu" else LayerLayout()


class Backward(NamedTuple):
    """How the gradients of stacked layers are formed."""

    remat: Remat
    so_far: Any
    """float32 sums, stacked, of those leaves of the layers that train."""
    complete: Callable[[Any], Any]
    """A gradient of one layer as this device has it -> what is added to the sums."""
    layout: LayerLayout = LayerLayout()

    def unrolls(self, layers: int) -> bool:
        """Whether so many layers are no loop."""
        # What is made again would be found to be there already, outside a loop, and kept.
        return self.remat is Remat.NONE and layers <= self.layout.unrolled


def scan_layers(
    layer: Layer, x_BTD: jax.Array, layers: Any, gather: Callable[[Any], Any], backward: Backward
) -> jax.Array:
    """Runs all layers.

    Args:
        x_BTD: [B T, D] where the layers take it so.
        layer: may close over arrays in which nothing is differentiated.
        layers: tree with a leading layer axis.
        gather: makes the weights of one layer whole.

    Returns:
        As x_BTD. Its derivative in `backward.so_far` is so_far with the layers' gradients added,
        and in `layers` zero.
    """
    first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)
    traced = _traced(layer, x_BTD, jax.eval_shape(gather, first), backward)
    offloads = backward.remat is Remat.OFFLOAD
    count = len(jax.tree.leaves(layers)[0])
    unroll = backward.unrolls(count)

    @jax.custom_vjp
    def run(x_BTD, layers, so_far):
        return jax.lax.scan(lambda x, weights: (layer(x, gather(weights)), None), x_BTD, layers)[0]

    def forward(x_BTD, layers, so_far):
        def step(x_BTD, weights):
            x_BTD, kept = traced.forward(x_BTD, gather(weights))
            return x_BTD, _to_memory(kept, jax.memory.Space.Host) if offloads else kept

        x_BTD, kept_L = jax.lax.scan(step, x_BTD, layers, unroll=unroll)
        return x_BTD, (kept_L, layers, so_far)

    def pull(residuals, d_x_BTD):
        kept_L, layers, so_far = residuals

        def step(carry, xs):
            d_x_BTD, so_far = carry
            number, weights, kept = xs
            if offloads:
                kept = _to_memory(kept, jax.memory.Space.Device)

            def gathered(trained):
                whole = gather(_with(weights, trained))
                return _part(whole, so_far), whole

            _, pull_gather, whole = jax.vjp(gathered, _part(weights, so_far), has_aux=True)
            d_x_BTD, d_whole = traced.pull(kept, whole)(d_x_BTD)
            grads = backward.complete(pull_gather(d_whole)[0])
            added = lambda sums, grad: sums.at[number].add(grad)
            return (d_x_BTD, jax.tree.map(added, so_far, grads)), None

        start, xs = (d_x_BTD, so_far), (jax.numpy.arange(count), layers, kept_L)
        (d_x_BTD, so_far), _ = jax.lax.scan(step, start, xs, reverse=True, unroll=unroll)
        return d_x_BTD, None, so_far

    run.defvjp(forward, pull)
    return run(x_BTD, layers, backward.so_far)


def kept_bytes(
    layer: Layer, x_BTD: Any, layers: Any, gather: Callable[[Any], Any], backward: Backward
) -> int:
    """What the forward pass keeps of one layer; the arguments are those of `scan_layers`, or their
    shapes.
    """
    first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)
    return sum(
        each.aval.size * each.aval.dtype.itemsize
        for each in _traced(layer, x_BTD, jax.eval_shape(gather, first), backward)._kept
    )


class _Traced(NamedTuple):
    """A layer and its derivative, whose residuals are known one by one."""

    closed: Any
    """Jaxpr of (x_BTD, *whole weights) -> (x_BTD, *residuals)."""
    structure: Any
    """Of the derivative, a tree of its residuals."""

    @property
    def _kept(self) -> list[Any]:
        """Variables of the residuals that only the forward pass has, each once."""
        jaxpr = self.closed.jaxpr
        given = {*jaxpr.invars[1:], *jaxpr.constvars}
        variables = [out for out in jaxpr.outvars[1:] if not isinstance(out, jaxprs.Literal)]
        return [out for out in dict.fromkeys(variables) if out not in given]

    def forward(self, x_BTD, whole):
        """The layer's result and what is kept of it."""
        out = jaxprs.jaxpr_as_fun(self.closed)(x_BTD, *jax.tree.leaves(whole))
        variables = self.closed.jaxpr.outvars
        return out[0], [out[variables.index(each, 1)] for each in self._kept]

    def pull(self, kept, whole):
        """The derivative: (gradient in the result) -> (in x_BTD, in whole weights that train)."""
        jaxpr = self.closed.jaxpr
        values = dict(zip(self._kept, kept, strict=True))
        values |= zip(jaxpr.invars[1:], jax.tree.leaves(whole), strict=True)
        values |= zip(jaxpr.constvars, self.closed.consts, strict=True)
        residuals = [
            out.val if isinstance(out, jaxprs.Literal) else values[out] for out in jaxpr.outvars[1:]
        ]
        return jax.tree.unflatten(self.structure, residuals)


def _traced(layer: Layer, x_BTD: jax.Array, whole: Any, backward: Backward) -> _Traced:
    """Traces one layer with its derivative.

    Args:
        whole: shapes of the weights.
    """
    structure = None

    def with_residuals(x_BTD, *leaves):
        nonlocal structure
        weights = jax.tree.unflatten(jax.tree.structure(whole), leaves)
        run = lambda x_BTD, trained: layer(x_BTD, _with(weights, trained))
        if backward.remat is not Remat.NONE:
            # The two passes are loops of their own: nothing of one is there in the other.
            run = jax.checkpoint(run, policy=_policy(backward.remat), prevent_cse=False)
        x_BTD, pull = jax.vjp(run, x_BTD, _part(weights, backward.so_far))
        residuals, structure = jax.tree.flatten(pull)
        return x_BTD, *residuals

    closed = jax.make_jaxpr(with_residuals)(x_BTD, *jax.tree.leaves(whole))
    return _Traced(closed, structure)


def _policy(remat: Remat):
    names = {Remat.DOTS: PRODUCT, Remat.ATTENTION: KEPT_NAME, Remat.MLP: MLP}
    if remat in names:
        return jax.checkpoint_policies.save_only_these_names(names[remat])
    return jax.checkpoint_policies.nothing_saveable


def _to_memory(arrays: list[jax.Array], space: Any) -> list[jax.Array]:
    return [jax.device_put(array, space) for array in arrays]


def _part(tree: Any, like: Any) -> Any:
    """What a tree has in the places of another one, which may lack some."""
    if not isinstance(like, Mapping):
        return tree
    return {name: _part(tree[name], below) for name, below in like.items()}


def _with(tree: Any, part: Any) -> Any:
    """The tree with a part of it replaced: the inverse of `_part`."""
    if not isinstance(part, Mapping):
        return part
    return {**tree, **{name: _with(tree[name], below) for name, below in part.items()}}
