"""The bench of the decode engine, on a model of a few thousand parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.decode import cli
from benchmarks.decode.batching import occupancy_while_waiting
from benchmarks.decode.engine_passes import Pass, Turn, full_turns
from benchmarks.decode.random_requests import Lognormal, parse_lengths
from benchmarks.decode.run import measure
from benchmarks.decode.settings import DecodeSettings
from benchmarks.decode.token_step import StepBytes
from benchmarks.decode.variants import Variant, parse_variants
from benchmarks.decode.weights import weight_bytes
from models.config import ModelConfig
from rollout_worker.engine.engine import EngineCounts

pytestmark = pytest.mark.slow

TINY = ModelConfig(
    model_type="qwen2",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    qkv_bias=True,
    tie_word_embeddings=True,
)
FLOAT32 = Variant(attention="f32", compute_dtype="float32", segment_tokens=2, prefill_tokens=32)
SETTINGS = DecodeSettings(
    shape="tiny",
    model=TINY,
    path=None,
    dtype="float32",
    variants={"while": FLOAT32},
    slots=(2,),
    tensor=1,
    prompt=6,
    new=8,
    cache=None,
    repeat=1,
    seed=0,
)
TURN = Turn(
    seconds=1.0,
    token_steps=4,
    tokens=8,
    prefill_calls=0,
    resizes=0,
    compilations=0,
    finished=0,
    tokens_so_far=0,
    slot_steps_so_far=0,
)


def report_of(settings):
    return measure(settings, settings.layout(jax.devices()[:1]), lambda line: None)


def a_pass(turns):
    return Pass(
        seconds=1.0, prefill_s=0.0, compile_s=0.0, counts=EngineCounts(), turns=turns, rows=[]
    )


def test_variants_are_the_base_with_their_changes():
    found = parse_variants(Variant(), "loop=python,attention=f32+segment_tokens=8")
    assert list(found.values()) == [
        Variant(),
        Variant(loop="python"),
        Variant(attention="f32", segment_tokens=8),
    ]


@pytest.mark.parametrize(
    "text, part",
    [
        ("loop", "'loop' is no change: write NAME=VALUE"),
        ("lop=python", "did you mean loop=?"),
        ("loop=fast", "loop=fast must be one of while, python"),
        ("segment_tokens=few", "segment_tokens takes a whole number"),
        ("segment_tokens=0", "segment_tokens must be from 1 to 1048576, got 0"),
        ("loop=while", "names one variant twice"),
    ],
)
def test_a_comparison_that_says_nothing_is_refused(text, part):
    with pytest.raises(ValueError, match="(?s)" + part.replace("?", r"\?")):
        parse_variants(Variant(), text)


def test_lengths_have_the_mean_asked_for_and_end_at_the_most():
    drawn = Lognormal(mean=220, most=10_000, sigma=0.8).draw(100_000, seed=1)
    assert drawn.mean() == pytest.approx(220, rel=0.02)  # its standard error is 0.3 %
    cut = parse_lengths("lognormal:mean=220,max=300").draw(1000, seed=1)
    assert (cut.min() >= 1, cut.max()) == (True, 300)
    np.testing.assert_array_equal(
        cut, parse_lengths("lognormal:mean=220,max=300").draw(1000, seed=1)
    )


@pytest.mark.parametrize(
    "text", ["normal:mean=2,max=3", "lognormal:mean=2", "lognormal:mean=9,max=3", "lognormal:mean="]
)
def test_lengths_that_say_nothing_are_refused(text):
    with pytest.raises(ValueError, match="write lognormal:mean=220,max=1024"):
        parse_lengths(text)


def test_a_turn_counts_where_token_steps_were_all_it_did():
    prefill = dataclasses.replace(TURN, prefill_calls=1)
    half_empty = dataclasses.replace(TURN, tokens=7)
    over = dataclasses.replace(TURN, finished=1)
    turns = [prefill, TURN, TURN, half_empty, TURN, over]
    # The turn after a prefill waits for it; the first of all may have something before it.
    assert full_turns(a_pass(turns), slots=2) == [turns[2], turns[4]]


def test_occupancy_is_read_where_the_last_request_enters():
    turns = [
        dataclasses.replace(TURN, finished=done, tokens_so_far=tokens, slot_steps_so_far=steps)
        for done, tokens, steps in ((1, 8, 8), (4, 15, 16), (6, 18, 32))
    ]
    assert occupancy_while_waiting(a_pass(turns), requests=6, slots=2) == 15 / 16


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_step_are_weights_once_and_used_columns(tied):
    settings = dataclasses.replace(
        SETTINGS, model=dataclasses.replace(TINY, tie_word_embeddings=tied)
    )
    layout = settings.layout(jax.devices()[:1])
    q_k_v_o = 16 * 16 + 2 * 8 * 16 + 16 * 16
    biases_and_norms = 16 + 8 + 8 + 3 * 16
    values = 64 * 16 + q_k_v_o + 3 * 32 * 16 + biases_and_norms  # one table, tied or not
    assert weight_bytes(layout) == 4 * values
    # A column has a key and a value of 8 numbers, in one layer.
    assert StepBytes(layout, jnp.dtype("bfloat16")).of(10) == 4 * values + 10 * 2 * 8 * 2


def test_token_steps_are_timed_and_counted_for_every_variant():
    python = dataclasses.replace(FLOAT32, loop="python")
    settings = dataclasses.replace(SETTINGS, variants={"while": FLOAT32, "python": python})
    found = report_of(settings)["runs"]
    assert [run["name"] for run in found] == ["while", "python"]
    for run in found:
        assert run["step_ms"] > 0 and run["turns"] > 0 and run["roofline_share"] > 0
        assert 0.5 < run["occupancy"] <= 1
        assert run["compilations"] == len(run["compiled"]) == 3
        assert {one["because"] for one in run["compiled"]} == {"first use"}
        assert run["compilations_after_first_pass"] == 0
    assert found[0]["step_ratio"] == 1.0
    assert found[1]["step_ratio"] == found[1]["step_ms"] / found[0]["step_ms"]


def test_static_batches_wait_for_their_longest_and_slots_do_not():
    lengths = Lognormal(mean=4, most=8, sigma=1.0)
    settings = dataclasses.replace(SETTINGS, lengths=lengths, requests=8)
    (run,) = report_of(settings)["runs"]
    drawn = lengths.draw(8, seed=0)
    assert run["completion_tokens"] == drawn.sum()
    static_steps = drawn.reshape(4, 2).max(axis=1).sum()
    assert run["static"]["token_steps"] >= static_steps
    assert run["continuous"]["token_steps"] < run["static"]["token_steps"]
    assert run["continuous"]["occupancy"] > run["static"]["occupancy"]
    assert run["compilations_after_first_pass"] == 0


def test_a_group_is_timed_beside_a_single_completion():
    (run,) = report_of(dataclasses.replace(SETTINGS, group=2, repeat=2))["runs"]
    assert (run["group"], run["prompt_tokens"]) == (2, 6)
    assert run["ratio"] == pytest.approx(run["group_ms"] / run["single_ms"])


@pytest.mark.slow
def test_transformers_decodes_the_same_tokens():
    pytest.importorskip("torch")
    found = report_of(dataclasses.replace(SETTINGS, against="hf"))["against"]
    assert found[0]["same_tokens"]["float32"] == 1.0
    assert found[0]["ratio"] * found[0]["ours_ms"] == pytest.approx(
        min(found[0]["hf_float32_ms"], found[0]["hf_bfloat16_ms"])
    )


RANDOM = ("--random-weights", "--shape")


@pytest.mark.parametrize(
    "argv, part",
    [
        (["--shape", "demo"], "--shape demo has no weights: add --random-weights"),
        ([*RANDOM, "gpt"], "--shape 'gpt' must be one of qwen2.5-3b"),
        ([*RANDOM, "demo", "--layers", "4"], "--layers 4 must be from 1 to the model's 3 layers"),
        ([*RANDOM, "demo", "--slots", "8,x"], "--slots takes whole numbers"),
        ([*RANDOM, "demo", "--slots", "12"], "must be a positive multiple of the 8 lanes"),
        ([*RANDOM, "demo", "--tensor", "3"], "--tensor 3 must divide the 8 devices"),
        ([*RANDOM, "demo", "--tensor", "4"], "tensor=4 does not fit"),
        ([*RANDOM, "demo", "--new", "100"], "raise --new to 192, or lower --segment-tokens"),
        ([*RANDOM, "demo", "--new", "9000"], "max_position_embeddings=8192"),
        ([*RANDOM, "demo", "--repeat", "0"], "--repeat must be at least 1"),
        ([*RANDOM, "demo", "--slots", "8", "--group", "16"], "--group 16 must be at most --slots"),
        ([*RANDOM, "demo", "--group", "2", "--against", "hf"], "--against takes neither"),
        ([*RANDOM, "qwen2.5-3b", "--slots", "65536"], "and the device has"),
        ([*RANDOM, "demo", "--json", "/no/such/folder/x"], "its folder does not exist"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line_before_the_work(argv, part, capsys, monkeypatch):
    monkeypatch.setattr(cli, "measure", None)
    assert cli.main([*argv, *([] if "--slots" in argv else ["--slots", "16"])]) == 2
    said = capsys.readouterr().err
    assert part in said and said.startswith("bench: ") and said.count("\n") == 1


def test_a_compilation_in_a_later_pass_ends_with_1(capsys, monkeypatch):
    environment = {"devices": 1, "device": "cpu", "lanes": 1, "tensor": 1}
    found = {
        "environment": environment | {"copy": {"bytes_per_s": 1e9}},
        "question": {"shape": "demo"},
        "runs": [
            {
                "name": "while",
                "what": "other",
                "compilations_after_first_pass": 1,
                "late_programs": ["segment (cache width 128 -> 256)"],
            }
        ],
    }
    monkeypatch.setattr(cli, "measure", lambda *_: found)
    monkeypatch.setattr(cli, "check_settings", lambda *_: None)
    assert cli.main(["--shape", "demo", "--random-weights"]) == 1
    said = capsys.readouterr().err
    assert "compiled in a later pass: while: segment (cache width 128 -> 256)" in said
