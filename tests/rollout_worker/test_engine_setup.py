"""What a configuration makes of a worker's devices, before there are any and with them."""

import dataclasses

import jax
import numpy as np
import pytest

from kernels import choose
from models.config import ModelConfig
from rollout_worker.config.rollout_config import DecodeConfig, RolloutConfig
from rollout_worker.engine.decode_programs import device_bytes
from rollout_worker.engine_setup import EngineSetup

MODEL = ModelConfig(
    model_type="qwen2",
    vocab_size=66,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    tie_word_embeddings=True,
)


def setup_of(*, weights_dtype="bfloat16", several_turns=False, rollout=None, **decode):
    rollout = RolloutConfig(
        **(rollout or {}),
        max_prompt_tokens=40,
        max_completion_tokens=13,
        decode=DecodeConfig(**{"slots": 8, "prefixes": 4, **decode}),
    )
    return EngineSetup(
        rollout=rollout,
        model=MODEL,
        platform="cpu",
        weights_dtype=weights_dtype,
        several_turns=several_turns,
    )


@pytest.mark.parametrize("devices, tensor", [(1, 1), (4, 1), (4, 2), (4, 4)])
def test_sizes_without_devices_are_those_of_the_arrays_on_devices(devices, tensor):
    setup = setup_of(tensor=tensor)
    programs = setup.programs(setup.abstract_mesh(devices))
    here = setup.programs(setup.mesh(jax.devices()[:devices]))
    assert here.geometry == programs.geometry
    assert device_bytes(here.params_struct()) == device_bytes(programs.params_struct())

    slots, pool = here.compile_empty()()
    on_device = lambda tree: sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree)
    )
    assert on_device(slots.cache) == programs.cache_bytes(programs.geometry.widths[0])
    assert on_device(pool) == programs.pool_bytes()


def test_slots_and_prefixes_are_those_of_all_devices_together():
    setup = setup_of(tensor=2, slots=12, prefixes=6)
    programs = setup.programs(setup.abstract_mesh(6))
    assert (programs.spec.lanes, programs.spec.slots, programs.geometry.prefixes) == (3, 4, 2)


@pytest.mark.parametrize(
    "rollout, parked, expected",
    [
        # 3 groups of 3 fill 8 slots, one more waits: 12 episodes over two lanes.
        (dict(completions_per_prompt=3), None, 6),
        (dict(completions_per_prompt=1), None, 5),
        ({}, 6, 3),
        ({}, 0, 0),
    ],
)
def test_episodes_are_kept_for_all_devices_together(rollout, parked, expected):
    setup = setup_of(several_turns=True, rollout=rollout, parked=parked)
    programs = setup.programs(setup.abstract_mesh(2))
    assert (programs.geometry.parked, programs.geometry.prefixes) == (expected, 2)


def test_a_run_without_an_environment_keeps_no_episode_and_plans_no_program_for_it():
    plain, several = (
        (setup := setup_of(parked=6, several_turns=turns)).programs(setup.abstract_mesh(1))
        for turns in (False, True)
    )
    assert plain.geometry.parked == 0
    assert plain.rows_struct().parking_R is None
    names = [
        [(name, *sizes.items()) for name, sizes, _ in one.planned()] for one in (plain, several)
    ]
    later = [("prefill", ("chunk", size), ("later chunk", 1)) for size in several.geometry.chunks]
    assert [one for one in names[1] if one not in names[0] and one[0] != "prefill"] == []
    assert set(later) <= set(names[1]) and not set(later) & set(names[0])


@pytest.mark.parametrize(
    "weights, compute, expected",
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_the_copy_holds_every_published_value(weights, compute, expected):
    setup = setup_of(weights_dtype=weights, compute_dtype=compute)
    assert setup.copy_dtype == np.dtype(expected)


@pytest.mark.parametrize(
    "platform, long, short",
    [("cpu", choose.XLA, 64), ("gpu", choose.XLA, 2048), ("tpu", choose.PALLAS_TPU, 512)],
)
def test_prefill_of_long_prompts_goes_block_by_block(platform, long, short):
    setup = dataclasses.replace(setup_of(), platform=platform)
    plan = setup.spec(setup.abstract_mesh(1), valid_vocab=64).prefill_attention
    assert plan.impl_for(short) == choose.REFERENCE and plan.impl_for(short + 1) == long


def test_the_kernel_gets_one_cache_of_whole_blocks():
    widths = lambda attention: (
        (setup := setup_of(attention=attention)).programs(setup.abstract_mesh(1)).geometry.widths
    )
    assert widths("bf16") == (53,)
    assert widths("pallas") == (128,)


@pytest.mark.parametrize(
    ("slots", "group", "held", "groups"),
    [
        (64, 8, {}, 10),
        (40, 8, {}, 6),
        (4, 8, {}, 2),
        (64, 8, {"held_per_slot": 1.0}, 9),
        (16, 4, {"held_per_slot": 4}, 16),
        (15, 4, {"held_per_slot": 2.5}, 10),
        (40, 4, {"held_per_slot": 1.2}, 12),
        (80, 4, {"held_per_slot": 1.15}, 23),
    ],
)
def test_a_worker_holds_what_fills_its_slots_and_more(slots, group, held, groups):
    rollout = RolloutConfig(completions_per_prompt=group, decode=DecodeConfig(slots=slots), **held)
    assert rollout.worker_groups == groups
