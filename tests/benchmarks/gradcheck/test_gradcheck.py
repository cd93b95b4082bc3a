"""The gradient check passes what is right, and fails each fault that it exists to find."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import float64_reference
from benchmarks.gradcheck import cli as gradcheck
from benchmarks.gradcheck.cases import CASES, head_problem, logits_problem, token_objective
from benchmarks.gradcheck.gradient_errors import (
    TOLERANCES,
    Candidate,
    Tolerance,
    check_gradient,
    head_candidate,
    judge,
    logits_candidate,
    worst_row,
)
from kernels.token_logprob import ops

pytestmark = pytest.mark.slow

CASE = {case.name: case for case in CASES}
SIZES = {"tokens": 24, "vocab": 131, "seed": 0}
WIDER = "bfloat16"
"""The dtype with the wider tolerances: a fault that they find, the others find too."""


def failures(problem, candidate):
    """What the default tolerances say against a candidate."""
    dtype = str(next(iter(problem.arrays.values())).dtype)
    findings = check_gradient(problem, candidate, TOLERANCES[dtype])
    return [text for finding in findings for text in finding.problems]


def failures_at_logits(case, dtype, score):
    return failures(
        logits_problem(CASE[case], dtype=dtype, **SIZES), logits_candidate("fault", score)
    )


@pytest.mark.parametrize("case", CASE)
def test_what_is_right_passes(case):
    assert failures_at_logits(case, "float32", ops.token_logprob) == []


@pytest.mark.parametrize(
    "impl, schedule, dtype",
    [("xla", "fast", "float32"), ("pallas_interpret", "lean", "bfloat16")],
)
def test_the_head_passes(impl, schedule, dtype):
    problem = head_problem(CASE["seq_mean"], dtype=dtype, width=32, **SIZES)
    assert failures(problem, head_candidate(impl, schedule)) == []


@pytest.mark.parametrize("case", ["entropy", "hard"])
def test_a_dropped_cotangent_of_the_entropy_fails(case):
    def score(logits, ids, **support):
        scored = ops.token_logprob(logits, ids, **support)
        return scored._replace(entropy=jax.lax.stop_gradient(scored.entropy))

    assert failures_at_logits(case, WIDER, score)


@pytest.mark.parametrize("case", ["kl_k1", "kl_k2", "kl_k3"])
def test_a_dropped_cotangent_of_the_kl_fails(case):
    problem = logits_problem(CASE[case], dtype=WIDER, **SIZES)
    objective = problem.case.objective

    def loss_of(problem, arrays):
        scored = ops.token_logprob(arrays["logits"], problem.ids, **problem.support)
        with_kl = token_objective(objective)(scored.logprob, scored.entropy, problem.data)
        without = token_objective(objective._replace(kl_coef=0.0))(
            scored.logprob, scored.entropy, problem.data
        )
        return (without + jax.lax.stop_gradient(with_kl - without)).sum()

    assert failures(problem, Candidate("fault", loss_of))


def test_logits_off_by_one_column_fail():
    def score(logits, ids, **support):
        return ops.token_logprob(jnp.roll(logits, 1, axis=-1), ids, **support)

    assert failures_at_logits("surrogate", WIDER, score)


def test_logits_off_by_one_token_fail():
    def score(logits, ids, **support):
        return ops.token_logprob(jnp.roll(logits, 1, axis=1), ids, **support)

    assert failures_at_logits("surrogate", WIDER, score)


def test_a_forgotten_temperature_fails():
    def score(logits, ids, *, temperature, **support):
        return ops.token_logprob(logits, ids, **support)

    assert failures_at_logits("seq_mean", WIDER, score)


def test_a_forgotten_temperature_of_the_gradient_alone_fails():
    def score(logits, ids, *, temperature, **support):
        right = ops.token_logprob(logits, ids, temperature=temperature, **support)
        scaled = jax.tree.map(lambda leaf: leaf * temperature, right)
        return jax.tree.map(
            lambda value, slope: slope + jax.lax.stop_gradient(value - slope), right, scaled
        )

    assert failures_at_logits("seq_mean", WIDER, score)


def test_a_zero_gradient_fails():
    def score(logits, ids, **support):
        return ops.token_logprob(jax.lax.stop_gradient(logits), ids, **support)

    assert "the gradient is zero" in failures_at_logits("surrogate", "float32", score)


def test_a_gradient_in_the_padding_fails():
    problem = logits_problem(CASE["seq_mean"], dtype="float32", **SIZES)
    right = logits_candidate("", ops.token_logprob)

    def loss_of(problem, arrays):
        padding = np.flatnonzero(np.asarray(problem.data.weight) == 0)
        stray = 1e-12 * arrays["logits"][padding].sum()
        return right.loss_of(problem, arrays) + stray

    assert any("row inf" in text for text in failures(problem, Candidate("fault", loss_of)))


def test_a_tolerance_of_zero_is_honoured():
    zero = Tolerance(loss=0, rel_l2=0, cosine=0, row=0)
    assert judge({"rel_l2": 1e-300}, zero, np.ones(2)) != []
    assert judge({"rel_l2": 0.0}, zero, np.ones(2)) == []


def test_a_nan_fails_any_tolerance():
    assert judge({"rel_l2": float("nan")}, TOLERANCES["bfloat16"], np.ones(2)) != []


def test_the_worst_row_is_found_beside_a_large_one():
    expected = np.array([[1e6, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    actual = np.array([[1e6, 0.0], [1.5, 0.0], [1.0, 0.0], [0.0, 0.0]])
    assert worst_row(actual, expected) == 0.5


def test_a_tiny_row_counts_as_a_hundredth_of_the_median():
    expected = np.array([[1.0], [1.0], [1e-6]])
    assert worst_row(expected + np.array([[0.0], [0.0], [1e-4]]), expected) == pytest.approx(0.01)


def test_the_exact_gradient_is_that_of_the_exact_scores():
    rng = np.random.default_rng(0)
    logits, ids = rng.normal(0, 2, (3, 5)), np.array([0, 4, 2])
    support = {"temperature": 0.7, "valid_vocab": 5}
    slopes = float64_reference.Cotangents(np.zeros(3), rng.normal(size=3), rng.normal(size=3))

    def value(logits):
        scored = float64_reference.scores(logits, ids, **support)
        return (slopes.logprob * scored.logprob + slopes.entropy * scored.entropy).sum()

    numeric, h = np.zeros_like(logits), 1e-6
    for place in np.ndindex(*logits.shape):
        step = np.zeros_like(logits)
        step[place] = h
        numeric[place] = (value(logits + step) - value(logits - step)) / (2 * h)
    scores = float64_reference.scores(logits, ids, **support)
    actual = float64_reference.logits_gradient(logits, np.arange(5), ids, scores, slopes, **support)
    np.testing.assert_allclose(actual, numeric, atol=1e-8)  # central differences err by h^2


def run(capsys, *flags):
    code = gradcheck.main(list(flags))
    return code, *capsys.readouterr()


SMALL = ("--case", "surrogate", "--schedule", "fast", "--vocab", "64", "--tokens", "24")


def test_the_command_passes_and_lists_its_findings(capsys):
    code, out, err = run(capsys, *SMALL, "--json")
    document = json.loads(out)
    assert code == 0 and document["passed"] and "6 of 6 gradients pass" in err
    assert {finding["array"] for finding in document["findings"]} == {"logits", "hidden", "head"}


def test_a_file_gets_the_findings_beside_the_table(capsys, tmp_path, monkeypatch):
    finding = gradcheck.GradientError("c", "float32", "x", "logits", 0.0, 0.0, 0.0, None, [])
    monkeypatch.setattr(gradcheck, "run_checks", lambda *arguments: [finding])
    monkeypatch.setattr(gradcheck, "run_attention_checks", lambda *arguments: [])
    code, out, _ = run(capsys, "--json", str(tmp_path / "found.json"))
    assert code == 0 and "tolerances of float32: loss 1e-05" in out and "1 of 1" in out
    document = json.loads((tmp_path / "found.json").read_text())
    assert len(document["findings"]) == 1 and document["settings"]["tokens"] == 45


def test_a_model_is_asked_what_was_asked():
    settings = gradcheck.Settings(case=("kl_k1", "hard"), tokens=24, vocab=64)
    total = lambda problem, arrays: jnp.stack([each.sum() for each in arrays.values()]).sum()
    at_logits = [Candidate("wrong", total)]
    rng = np.random.default_rng(0)
    arrays = {
        "hidden": rng.normal(size=(24, 8)).astype(np.float32),
        "head": rng.normal(size=(64, 8)).astype(np.float32),
    }
    ids = rng.integers(0, 57, 24)
    names = {each.case for each in gradcheck.run_checks(settings, at_logits, [], (arrays, ids))}
    assert {"model kl_k1", "model hard"} <= names


def test_the_header_says_that_pallas_is_interpreted():
    device = jax.devices()[0]
    header = lambda *impl: "\n".join(gradcheck.header(gradcheck.Settings(impl=impl), device))
    assert "interpreted" in header("xla", "pallas") and "interpreted" not in header("xla")


def test_the_command_exits_with_1_where_a_tolerance_is_zero(capsys, tmp_path):
    (tmp_path / "check.json").write_text(
        json.dumps({"impl": ["reference"], "tolerance": {"float32": {"rel_l2": 0}}})
    )
    code, out, _ = run(capsys, *SMALL, "--config", str(tmp_path / "check.json"))
    assert code == 1 and "is above 0.0e+00" in out


@pytest.mark.parametrize(
    "flags, part",
    [
        (["--impl", "cuda"], "--impl takes of auto, reference, xla, pallas; got 'cuda'"),
        (["--schedule", ""], "--schedule takes of fast, lean; got ''"),
        (["--tokens", "25"], "--tokens must be a multiple of 3, got 25"),
        (["--seed", "-1"], "--seed must be a whole number of at least 0, got -1"),
        (["--tolerance", "float16.row=1"], "got 'float16.row'"),
        (["--tolerance", "float32.row=x"], "float32.row must be a finite number, got 'x'"),
        (["--tolerance", "float32.row=inf"], "float32.row must be a finite number, got 'inf'"),
        (["--tolerance", "float32.row=-1"], "row must be at least 0, got -1.0"),
        (["--config", "absent.json"], "absent.json"),
        (["--model", "absent.gguf"], "absent.gguf"),
        (["--json", "no/such/x.json"], "its folder does not exist"),
        (["--json", "."], "--json '.' is a folder: name a file in it"),
        (["--vocab", "1000000000000"], "GB: lower --tokens, --width or --vocab"),
    ],
)
def test_wrong_arguments_exit_with_2(capsys, flags, part):
    code, _, err = run(capsys, *flags)
    assert code == 2 and part in err


@pytest.mark.parametrize(
    "config, part",
    [
        ('{"impl": 5}', "--impl must be a list of names, got 5"),
        ('{"case": true}', "--case must be a list of names, got True"),
        ('{"impl": [["xla"]]}', "--impl takes of auto, reference, xla, pallas; got ['xla']"),
        ('{"width": "64"}', "--width must be a whole number of at least 1, got '64'"),
        ('{"vocab": 1' + 400 * "0" + "}", "--vocab must be at most"),
        ('{"tolerance": {"float32": {"row": NaN}}}', "row must be a finite number, got nan"),
        ('{"tolerance": {"float32": {"row": true}}}', "row must be a finite number, got True"),
        ('{"tolerance": {"float32": {"row": 1' + 400 * "0" + "}}}", "must be a finite number"),
    ],
)
def test_a_wrong_value_in_the_config_exits_with_2(capsys, tmp_path, config, part):
    (tmp_path / "check.json").write_text(config)
    code, out, err = run(capsys, "--config", str(tmp_path / "check.json"))
    assert code == 2 and part in err and err.count("\n") == 1 and out == ""


def test_an_unknown_key_of_the_config_exits_with_2(capsys, tmp_path):
    (tmp_path / "check.json").write_text('{"implementation": "xla"}')
    code, _, err = run(capsys, "--config", str(tmp_path / "check.json"))
    assert code == 2 and "'implementation'; its keys are impl, schedule" in err


@pytest.mark.slow
def test_a_model_passes(capsys):
    code, out, _ = run(
        capsys, "--case", "surrogate", "--schedule", "fast", "--model", "deploy/demo/model"
    )
    assert code == 0 and "model surrogate" in out


def test_every_setting_has_a_flag():
    flags = vars(gradcheck._parser().parse_args([]))
    assert {field.name for field in dataclasses.fields(gradcheck.Settings)} <= set(flags)
