"""Mesh sizes, and which parameter is cut where."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from learner.update.mesh import SHARDS, MeshShape, make_mesh, mesh_shape
from learner.update.optimizer import matrices
from learner.update.sharding import param_specs
from models.transformer import abstract_params
from tests.learner.builders import TINY


@pytest.mark.parametrize(
    "data, fsdp, context, devices, expected",
    [
        (1, -1, 1, 8, (1, 8, 1)),
        (-1, 2, 1, 8, (4, 2, 1)),
        (2, 4, 1, 8, (2, 4, 1)),
        (-1, 1, 1, 1, (1, 1, 1)),
        (1, -1, 2, 8, (1, 4, 2)),
        (-1, 2, 4, 8, (1, 2, 4)),
    ],
)
def test_minus_one_takes_what_remains(data, fsdp, context, devices, expected):
    assert mesh_shape(data=data, fsdp=fsdp, context=context, devices=devices) == expected


def test_rows_and_shards_of_a_mesh_are_over_different_devices():
    mesh = make_mesh(data=2, fsdp=1, context=4, devices=jax.devices())
    shape = MeshShape.of(mesh)
    assert (shape.rows, shape.shards) == (2, 4)


@pytest.mark.parametrize(
    "data, fsdp, context, message",
    [
        (3, -1, 1, "8 devices are not divisible by 3"),
        (2, 2, 1, "data x fsdp = 4 must equal the 8 devices"),
        (4, 4, 1, "= 16 must equal the 8 devices"),
        (0, 8, 1, "must be positive"),
        (-1, -1, 1, "at most one"),
        (3, -1, 2, "context=2: 8 devices are not divisible by 6"),
        (1, 2, 2, "data x fsdp x context = 4 must equal the 8 devices"),
        (1, -1, 0, "context must be positive; set it to 1"),
    ],
)
def test_impossible_mesh_is_refused_with_the_numbers(data, fsdp, context, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(data=data, fsdp=fsdp, context=context, devices=jax.devices())


def test_largest_divisible_axis_is_cut_and_never_the_layers():
    specs = param_specs(abstract_params(TINY), 8)
    layer = specs["layers"]
    assert specs["embed_tokens"]["weight"] == P(SHARDS, None)  # [24, 16]
    assert layer["mlp"]["gate_proj"]["weight"] == P(None, SHARDS, None)  # [2, 32, 16]
    assert layer["mlp"]["down_proj"]["weight"] == P(None, None, SHARDS)  # [2, 16, 32]
    assert layer["self_attn"]["q_proj"]["bias"] == P()
    assert layer["input_layernorm"]["weight"] == specs["norm"]["weight"] == P()


def test_matrix_that_does_not_divide_is_replicated():
    specs = param_specs({"embed_tokens": {"weight": np.zeros((10, 6))}}, 4)
    assert specs["embed_tokens"]["weight"] == P()
    specs = param_specs({"layers": {"w": np.zeros((4, 6, 10))}}, 4)
    assert specs["layers"]["w"] == P()


def test_decay_touches_matrices_only():
    mask = matrices(abstract_params(TINY))
    assert mask["embed_tokens"]["weight"] and mask["layers"]["mlp"]["up_proj"]["weight"]
    assert not mask["layers"]["self_attn"]["k_proj"]["bias"]
    assert not mask["layers"]["post_attention_layernorm"]["weight"] and not mask["norm"]["weight"]
