"""A user's own policy term, named as `package.module:function` in `algorithm.policy_loss`.

    def my_loss(*, logprob, old_logprob, ratio, advantage, entropy):
        return -ratio * advantage

All are float32 arrays of one shape, one number a token; `logprob` and `entropy` are differentiated,
and `ratio` is exp(logprob - old_logprob), or that of the sequence. It returns what is minimised, in
the same shape. It is traced by JAX, must treat each token alone, and gets zeros at tokens that are
not in the loss. KL penalty, entropy bonus and aggregation are added as configured.

`python -m learner.objective.own_policy_loss NAME` tries one out, as the driver does before a run.
"""

import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from learner.objective.loss import POLICY_LOSSES, PolicyLoss, importance_ratio
from services.user_code.import_path import BadImportPath, load_attribute


class BadPolicyLoss(ValueError):
    """A policy loss that cannot be used; the message names it, the rule and the fix."""


def policy_loss(name: str) -> str | PolicyLoss:
    """The name of a built-in policy loss, or a user's function, which is tried on a few numbers.

    Raises:
        BadPolicyLoss: if there is none, or it breaks a rule above.
    """
    if name in POLICY_LOSSES:
        return name
    try:
        function = load_attribute(name)
    except BadImportPath as error:
        raise BadPolicyLoss(
            f"algorithm.policy_loss={name}: {error}. Built in are {', '.join(POLICY_LOSSES)}"
        ) from error
    if problem := _problem(function):
        raise BadPolicyLoss(
            f"algorithm.policy_loss={name}: {problem}: correct the function "
            "(docs/objectives.md shows one)"
        )
    return function


def _problem(function: PolicyLoss) -> str:
    """Which rule a policy loss breaks; '' for none.

    It is called on a grid of tokens, whole, in pairs and one by one, as values and as derivatives.
    """
    gap, advantage, entropy = (
        each.ravel().astype(np.float32)
        for each in np.meshgrid([-2.0, -0.1, 0.0, 0.1, 2.0], [-1.5, 0.0, 0.7], [0.0, 2.0])
    )
    # A token that is certain has the logprob 0, and the old policy may have thought so too.
    old_N = np.where(gap == 0, 0.0, -2.5).astype(np.float32)
    given = tuple(map(jnp.asarray, (old_N + gap, entropy, old_N, advantage)))

    def loss(logprob_N, entropy_N, old_N, advantage_N):
        return function(
            logprob=logprob_N,
            old_logprob=old_N,
            ratio=importance_ratio(logprob_N, old_N),
            advantage=advantage_N,
            entropy=entropy_N,
        )

    def slopes(weight_N, *token):
        weighted = lambda *two: (weight_N * loss(*two, *token[2:])).sum()
        return jax.grad(weighted, argnums=(0, 1))(*token[:2])

    # Each token counts differently: a slope that comes from another one shows.
    weight_N = jnp.linspace(0.5, 2.0, len(gap))
    one = lambda weight, *token: (loss(*token), *slopes(weight, *token))
    try:
        if problem := _form_problem(jax.jit(loss)(*given), len(gap)):
            return problem
        whole = one(weight_N, *given)
        in_pairs = one(*(each.reshape(-1, 2) for each in (weight_N, *given)))
        alone = jax.lax.map(
            lambda token: one(*token), [each[:, None] for each in (weight_N, *given)]
        )
    except (Exception, SystemExit) as error:
        return f"it raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if not np.isfinite(np.stack(whole)).all():
        place = int(np.isfinite(np.stack(whole)).all(axis=0).argmin())
        names = ("logprob", "entropy", "old_logprob", "advantage")
        values = [f"{name}={each[place]:g}" for name, each in zip(names, given, strict=True)]
        return f"value or derivative is not finite at {', '.join(values)}"
    if not np.any(whole[1]) and not np.any(whole[2]):
        return "its derivative is 0 everywhere, so that it would train nothing"
    for other in (in_pairs, alone):
        for each, expected in zip(other, whole, strict=True):
            if not np.allclose(np.ravel(each), expected, rtol=1e-4, atol=1e-5):
                return (
                    "the value or the derivative of a token depends on other tokens, which are "
                    "split up freely"
                )
    return ""


def _form_problem(found: object, tokens: int) -> str:
    """What is wrong with the form of what a policy loss returned; '' for nothing."""
    if not isinstance(found, jax.Array):
        return f"it returns {type(found).__name__}, not an array of {tokens} float32"
    if found.shape != (tokens,) or found.dtype != jnp.float32:
        return (
            f"it returns {found.dtype} {list(found.shape)} for {tokens} tokens, not a float32 each"
        )
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries out the functions named; 2 with the reason if one cannot be used, else 0."""
    for name in sys.argv[1:] if arguments is None else arguments:
        try:
            policy_loss(name)
        except BadPolicyLoss as error:
            print(error, file=sys.stderr)
            return 2
        print(f"{name} can be used")
    return 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # it is tried without any device
    sys.exit(main())
