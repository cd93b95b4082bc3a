"""The bench: what it reports is right, and it refuses what cannot work."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import random_problems
from benchmarks.kernels import cli as bench
from benchmarks.kernels.case import CompetitorSpec, DoesNotFit, check_fits, parse_competitor
from benchmarks.report_file import json_values
from benchmarks.timing import step_times, time_interleaved

pytestmark = pytest.mark.slow

LOGITS = ("logits", "--batch", "2", "--time", "12", "--vocab", "131", "--iters", "2")
HEAD = ("lm_head", "--time", "40", "--hidden", "16", "--vocab", "131", "--iters", "1")


def run(capsys, *flags):
    code = bench.main(list(flags))
    return code, *capsys.readouterr()


def strict(text):
    """JSON without NaN or Infinity, which Python would read."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def test_logits_are_measured_in_turn(capsys, tmp_path):
    file = tmp_path / "bench.json"
    flags = (*LOGITS, "--compare", "log_softmax,xla", "--entropy-coef", "0.1", "--dtype", "float32")
    code, out, _ = run(capsys, *flags, "--json", str(file))
    document = strict(file.read_text())
    assert code == 0 and "xla / log_softmax" in out
    assert [each["impl"] for each in document["runs"]] == ["log_softmax", "xla"]
    for measured in document["runs"]:
        # float32 sums over 131 columns
        assert measured["errors"]["logits_grad"]["rel_l2"] < 1e-5
        assert measured["errors"]["loss"]["rel_l2"] < 1e-5
        assert 0 < measured["p50_ms"] <= measured["p90_ms"]
        assert measured["first_call_s"] > measured["compile_s"] > 0
        assert measured["mem_after_run"] is None  # a CPU keeps no such counts
    assert document["ratios"]["xla / log_softmax"] > 0


def test_the_head_is_measured_beside_its_valid_tokens(capsys):
    flags = ("--active-fraction", "0.25", "--schedule", "lean", "--chunk-tokens", "30", "--json")
    code, out, _ = run(capsys, *HEAD, *flags)
    document = strict(out)
    assert code == 0
    assert [(each["batch_kind"], each["schedule"]) for each in document["runs"]] == [
        ("padded", "lean"),
        ("valid", "lean"),
    ]
    losses = [each["loss"] for each in document["runs"]]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)  # float32 sums in another order
    for measured in document["runs"]:
        errors = measured["errors"]
        assert errors["checked_tokens"] == 10
        # a gradient rounded to bfloat16, from one that was
        assert errors["hidden_grad"]["rel_l2"] < 4e-3 and errors["head_grad"]["rel_l2"] < 4e-3
        assert errors.get("padding_grad_is_zero", True)
    # below the bound of 30: 40 tokens are two chunks, of a multiple of eight; 10 are one
    assert [each["chunk_tokens"] for each in document["runs"]] == [24, 10]
    assert "auto:lean (padded) / valid" in document["ratios"]


def test_the_error_of_a_wrong_gradient_shows(capsys, monkeypatch):
    monkeypatch.setattr(
        "benchmarks.kernels.competitors.ops.token_logprob",
        lambda logits, ids, *, temperature, impl: random_problems.reference.token_logprob(
            jnp.roll(logits, 1, axis=-1), ids, temperature=temperature
        ),
    )
    _, out, _ = run(capsys, *LOGITS, "--iters", "0", "--impl", "xla", "--json")
    (measured,) = strict(out)["runs"]
    assert measured["errors"]["logits_grad"]["rel_l2"] > 0.5
    assert measured["p50_ms"] is None


def test_what_is_not_finite_exits_with_1(capsys, monkeypatch):
    monkeypatch.setattr(
        "benchmarks.kernels.competitors.ops.token_logprob",
        lambda logits, ids, *, temperature, impl: random_problems.reference.token_logprob(
            logits * jnp.nan, ids, temperature=temperature
        ),
    )
    code, out, err = run(capsys, *LOGITS, "--iters", "0", "--impl", "xla", "--json")
    assert code == 1 and "not finite: xla" in err
    assert strict(out)["runs"][0]["loss"] is None


@pytest.mark.parametrize(
    "flags, part",
    [
        (["logits", "--impl", "cuda"], "an implementation is one of auto, reference, xla, pallas"),
        (["logits", "--impl", "xla:fast"], "xla has no schedules here: write 'xla'"),
        (["lm_head", "--impl", "xla:slow"], "a schedule is one of fast, lean; got 'slow'"),
        (["lm_head", "--impl", "log_softmax:fast"], "log_softmax has no schedules here"),
        (["lm_head", "--impl", "reference", "--schedule", "lean"], "lean is for none of reference"),
        (["logits", "--json", "no/such/x.json"], "its folder does not exist"),
        (["logits", "--json", "."], "--json '.' is a folder: name a file in it"),
        (["logits", "--vocab", "1"], "--vocab must be at least 2, got 1"),
        (["logits", "--vocab", "1" + 400 * "0"], "--vocab must be at most"),
        (["logits", "--seed", "4294967296"], "--seed must be at least 0 and below 4294967296"),
        (["logits", "--compare", "xla,xla"], "names an implementation twice"),
        (["logits", "--time", "0"], "--time must be at least 1, got 0"),
        (["lm_head", "--hidden", "-4"], "--hidden must be at least 1, got -4"),
        (["lm_head", "--chunk-tokens", "0"], "--chunk-tokens must be at least 1, got 0"),
        (["lm_head", "--active-fraction", "0"], "above 0 and at most 1, got 0.0"),
        (["logits", "--temperature", "0"], "--temperature must be above 0, got 0.0"),
        (["logits", "--clip-low", "-0.1"], "--clip-low must be at least 0, got -0.1"),
        (["logits", "--warmup", "-1"], "--warmup must be at least 0, got -1"),
        (["logits", "--vocab", "1000000000000"], "GB: lower --batch, --time or --vocab"),
    ],
)
def test_wrong_arguments_exit_with_2(capsys, flags, part):
    code, out, err = run(capsys, *flags)
    assert code == 2 and part in err and out == ""


def test_what_belongs_to_the_head_says_so(capsys):
    with pytest.raises(SystemExit) as exit:
        run(capsys, "logits", "--active-fraction", "0.5")
    assert exit.value.code == 2 and "it belongs to lm_head" in capsys.readouterr().err


def a_run(name, kernel, p50):
    times = {"p50_ms": p50, "p90_ms": p50, "avg_step_ms": p50}
    clip = {"ratio_low": 0, "ratio_high": 0, "clipped": 0}
    compiler, case = {"temp_bytes": 10**9}, {"hidden": 16}
    errors = {"loss": {"rel_l2": 1e-7}, "hidden_grad": {"rel_l2": 1e-3}}
    return dict(name=name, kernel=kernel, chunk_tokens=8, **times) | {
        "clip": clip,
        "compiler": compiler,
        "case": case,
        "errors": errors,
    }


def test_the_table_keeps_its_columns_apart_and_marks_what_is_interpreted():
    runs = [a_run("x", "xla", 123456.7), a_run("pallas", "pallas_interpret", 1.0)]
    _, titles, first, second, note = bench.table({"runs": runs, "ratios": {}})
    assert first.split() == ["x"] + 3 * ["123456.700"] + ["1.000", "8", "1.0e-07", "1.0e-03", "-"]
    assert "chunk tokens" in titles and "hidden grad error  head grad error" in titles
    assert second.startswith("pallas*") and "interpreted" in note


def test_pallas_is_refused_on_a_gpu():
    with pytest.raises(ValueError, match="no Pallas kernel for platform 'gpu'"):
        parse_competitor("pallas", platform="gpu", schedule=None)


def test_a_schedule_in_the_name_wins():
    options = {"schedule": "fast", "chunk_tokens": 8}
    found = parse_competitor("auto:lean", platform="tpu", **options)
    assert found == CompetitorSpec("auto", "pallas_tpu", "lean", 8)
    assert parse_competitor("reference", platform="tpu", **options) == CompetitorSpec(
        "reference", "reference", None
    )


def test_zero_is_a_value():
    arguments = bench._parser().parse_args(
        [
            *("probe", "--clip-low", "0", "--clip-high", "0", "--entropy-coef", "0", "--seed", "0"),
            *("--behavior-noise", "0", "--iters", "0", "--warmup", "0", "--check-tokens", "0"),
        ]
    )
    case, _, effort = bench.read_arguments(arguments)
    assert (case.clip_low, case.clip_high, case.entropy_coef, case.noise) == (0, 0, 0, 0)
    assert (effort.iters, effort.warmup, effort.check_tokens) == (0, 0, 0)


def test_the_probe_is_of_its_size():
    case, _, _ = bench.read_arguments(bench._parser().parse_args(["probe"]))
    assert (case.batch, case.time, case.vocab, case.hidden) == (8, 1024, 16384, None)
    assert case.entropy_coef > 0


def test_what_does_not_fit_names_both_sizes():
    with pytest.raises(DoesNotFit, match="xla needs 3.00 GB and the device has 2.00 GB"):
        check_fits("xla", 3 * 10**9, 2 * 10**9)
    check_fits("xla", 3 * 10**9, None)


def test_steps_take_turns_and_only_their_own_time():
    order, now = [], [0.0]

    def step(name, seconds):
        def run():
            order.append(name)
            now[0] += seconds

        return run

    steps = [step("a", 1.0), step("b", 3.0)]
    seconds = time_interleaved(steps, warmup=1, iters=2, clock=lambda: now[0])
    assert order == ["a", "b"] * 3
    assert seconds == [[1.0, 1.0], [3.0, 3.0]]


def test_times_are_mean_median_and_percentile():
    times = step_times([0.001] * 9 + [0.011])
    assert times == pytest.approx({"avg_step_ms": 2.0, "p50_ms": 1.0, "p90_ms": 2.0})
    assert set(step_times([]).values()) == {None}


def test_json_holds_no_nan():
    assert json_values({"a": [float("nan"), 1.5], "b": np.float32(2)}) == {
        "a": [None, 1.5],
        "b": 2.0,
    }


def test_logits_have_spread_in_every_piece(monkeypatch):
    monkeypatch.setattr(random_problems, "PIECE_ROWS", 4)
    monkeypatch.setattr(random_problems, "PIECE_VALUES", 4)
    values = random_problems.normal(
        jax.random.key(0), 3.0, rows=10, columns=400, dtype=jnp.bfloat16
    )
    # 4000 normal values: their deviation errs by 1.1 %, that of a row of 400 by 3.5 %
    assert values.dtype == jnp.bfloat16 and abs(float(values.std()) - 3) < 0.15
    assert (abs(values.astype(jnp.float32).std(axis=1) - 3) < 0.45).all()
    assert len(np.unique(np.asarray(values[:, 0]))) > 5


def test_tokens_are_drawn_from_the_logits():
    logits = jnp.log(jnp.asarray([0.25, 0.75])) * jnp.ones((4000, 1))
    ids, scored = random_problems.draw_from_logits(jax.random.key(0), logits, 1.0)
    assert abs(float(ids.mean()) - 0.75) < 0.03  # four standard deviations
    np.testing.assert_allclose(
        scored.logprob, np.log(np.where(np.asarray(ids) == 1, 0.75, 0.25)), rtol=1e-5
    )


def test_ratios_fall_on_both_sides_of_the_clip_off_policy_alone():
    logprob = -jnp.linspace(0.1, 9.0, 1000)
    off = random_problems.make_data(jax.random.key(0), logprob, 0.3)
    shares = random_problems.clip_shares(logprob, off, clip_low=0.2, clip_high=0.2)
    assert min(shares) > 0.1
    on = random_problems.make_data(jax.random.key(0), logprob, 0.0)
    assert random_problems.clip_shares(logprob, on, clip_low=0.2, clip_high=0.2) == (0, 0, 0)
    assert (on.advantage_N > 0).any() and (on.advantage_N < 0).any()


def test_wandb_gets_a_run_for_each_competitor(capsys, monkeypatch):
    logged = []
    monkeypatch.setattr(bench, "_log_to_wandb", lambda *arguments: logged.append(arguments))
    flags = (*LOGITS, "--iters", "0", "--check-tokens", "0", "--impl", "xla")
    run(capsys, *flags, "--wandb-project", "p", "--wandb-mode", "disabled")
    assert logged == []
    run(capsys, *flags, "--wandb-project", "p", "--wandb-mode", "offline")
    ((document, project, mode),) = logged
    assert (project, mode, len(document["runs"])) == ("p", "offline", 1)
