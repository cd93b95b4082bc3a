"""A user's own policy loss: one that works, and every way in which one does not."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.config import AlgorithmConfig
from learner.objective import loss as loss_lib
from learner.objective.own_policy_loss import BadPolicyLoss, main, policy_loss

MODULE = """
import jax, jax.numpy as jnp, numpy as np

def squared(*, logprob, old_logprob, ratio, advantage, entropy):
    return -ratio * advantage + 0.5 * (logprob - old_logprob) ** 2

def of_the_batch(*, ratio, advantage, **_):
    return -ratio * (advantage - advantage.mean())

def gradient_of_the_batch(*, logprob, ratio, advantage, **_):
    mean = logprob.mean()
    return -ratio * advantage + mean - jax.lax.stop_gradient(mean)

def by_shape(*, ratio, advantage, **_):
    return -ratio * advantage * (1.0 if ratio.ndim == 1 else 2.0)

def half(*, ratio, advantage, **_):
    return (-ratio * advantage).astype(jnp.bfloat16)

def trains_nothing(*, old_logprob, advantage, **_):
    return -advantage * old_logprob

def a_sum(*, ratio, advantage, **_):
    return -(ratio * advantage).sum()

def whole_numbers(*, advantage, **_):
    return advantage.astype(jnp.int32)

def a_text(**_):
    return "loss"

def without_gradient(*, logprob, **_):
    return jnp.sqrt(jnp.abs(logprob - logprob))

def not_finite(*, logprob, **_):
    return jnp.log(logprob)

def of_a_certain_token(*, logprob, old_logprob, advantage, **_):
    return -advantage * logprob / old_logprob

def slope_of_a_certain_token(*, logprob, advantage, **_):
    return advantage * jnp.sqrt(-logprob)

def returns_nothing(**_):
    pass

def two(*, ratio, advantage, **_):
    return -ratio * advantage, ratio

def ends(**_):
    raise SystemExit(0)

def raises(*, ratio, **_):
    raise KeyError("beta")

def wrong_names(logprob, old):
    return logprob

def of_numpy(*, logprob, **_):
    return np.exp(logprob)

number = 3
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_losses.py").write_text(MODULE)
    (folder / "broken_losses.py").write_text("import no_such_package")
    (folder / "ending_losses.py").write_text("raise SystemExit(3)")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        yield


def test_its_value_and_gradient_are_the_tokens():
    objective = loss_lib.Objective(
        0.2, 0.2, 0.0, "k3", 0.1, policy_loss=policy_loss("own_losses:squared")
    )
    logprob, old = jnp.array([-1.0, -0.5, -9.0]), jnp.array([-1.2, -0.4, 0.0])
    advantage, entropy = jnp.array([1.0, -2.0, 7.0]), jnp.array([0.3, 0.6, 5.0])
    active = jnp.array([True, True, False])

    def total(logprob):
        terms = loss_lib.token_terms(logprob, entropy, old, advantage, active, objective)
        return loss_lib.weighted_sum(terms.loss, active), terms

    (value, terms), gradient = jax.value_and_grad(total, has_aux=True)(logprob)
    gap = np.array([0.2, -0.1])
    expected = -np.exp(gap) * [1, -2] + 0.5 * gap**2 - 0.1 * np.array([0.3, 0.6])
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient, [*(-np.exp(gap) * [1, -2] + gap), 0.0], rtol=1e-5)
    assert not (terms.clipped_low | terms.clipped_high).any()


@pytest.mark.parametrize(
    "name, rule",
    [
        ("own_losses:of_the_batch", "depends on other tokens"),
        ("own_losses:gradient_of_the_batch", "the derivative of a token depends on other tokens"),
        ("own_losses:by_shape", "depends on other tokens"),
        ("own_losses:half", r"it returns bfloat16 \[30\] .* not a float32 each"),
        ("own_losses:trains_nothing", "derivative is 0 everywhere"),
        ("own_losses:a_sum", r"it returns float32 \[\] for 30 tokens, not a float32 each"),
        ("own_losses:whole_numbers", "it returns int32"),
        ("own_losses:a_text", "it raises TypeError"),
        ("own_losses:without_gradient", "value or derivative is not finite"),
        ("own_losses:not_finite", "value or derivative is not finite"),
        ("own_losses:of_a_certain_token", "not finite at logprob=0, .*old_logprob=0"),
        ("own_losses:slope_of_a_certain_token", "value or derivative is not finite at logprob=0"),
        ("own_losses:returns_nothing", "it returns NoneType, not an array of 30 float32"),
        ("own_losses:two", "it returns tuple, not an array"),
        ("own_losses:ends", "it raises SystemExit"),
        ("own_losses:raises", "it raises KeyError: 'beta'"),
        ("own_losses:wrong_names", "it raises TypeError: .*unexpected keyword"),
        ("own_losses:of_numpy", "it raises TracerArrayConversionError"),
        ("own_losses:number", "it raises TypeError: 'int' object is not callable"),
        ("own_losses:absent", "has no 'absent'.* Built in are clip, cispo, soft_gate"),
        ("no_such_module:loss", "cannot import 'no_such_module' .*it must be importable from"),
        ("broken_losses:loss", r"No module named 'no_such_package' \(.*broken_losses.py:1\)"),
        ("ending_losses:loss", r"it calls sys.exit\(3\)"),
    ],
)
def test_one_that_breaks_a_rule_is_refused_with_its_name(name, rule):
    with pytest.raises(BadPolicyLoss, match=rf"algorithm.policy_loss={name}: .*{rule}"):
        policy_loss(name)


def test_built_in_names_are_themselves():
    assert [policy_loss(name) for name in loss_lib.POLICY_LOSSES] == ["clip", "cispo", "soft_gate"]


def test_the_command_says_what_is_wrong_in_one_line(capsys):
    assert main(["own_losses:squared"]) == 0
    assert capsys.readouterr().out == "own_losses:squared can be used\n"
    assert main(["own_losses:raises"]) == 2
    assert capsys.readouterr().err.startswith("algorithm.policy_loss=own_losses:raises: it raises")


@pytest.mark.parametrize("document", ["docs/objectives.md", "README.md"])
def test_the_one_in_the_document_can_be_used(tmp_path, monkeypatch, document):
    text = (pathlib.Path(__file__).parents[3] / document).read_text()
    [code] = re.findall(r"```python\n *(# my_pkg/losses.py\n.*?)```", text, re.DOTALL)
    code = re.sub("^  ", "", code, flags=re.M) if document == "README.md" else code
    [name] = re.findall(r'policy_loss: "(.*?)"', text)
    for module in ("my_pkg", "my_pkg.losses"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    folder = tmp_path / "my_pkg"
    folder.mkdir()
    (folder / "losses.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert callable(policy_loss(name))


def test_every_built_in_name_is_taken_by_the_configuration_and_no_other():
    for name in [*loss_lib.POLICY_LOSSES, "my_pkg.losses:one"]:
        assert AlgorithmConfig(policy_loss=name).policy_loss == name
    for name in ("clipped", "my_pkg.losses", ":one", "a b:c"):
        with pytest.raises(ValueError, match="policy_loss"):
            AlgorithmConfig(policy_loss=name)
