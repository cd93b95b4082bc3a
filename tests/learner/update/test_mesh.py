"""Mesh sizes, and which parameter is cut where."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from learner.update.mesh import make_mesh, mesh_shape
from learner.update.optimizer import matrices
from learner.update.sharding import param_specs
from models.transformer import abstract_params
from tests.learner.builders import TINY


@pytest.mark.parametrize(
    "data, fsdp, devices, expected",
    [(1, -1, 8, (1, 8)), (-1, 2, 8, (4, 2)), (2, 4, 8, (2, 4)), (-1, 1, 1, (1, 1))],
)
def test_minus_one_takes_what_remains(data, fsdp, devices, expected):
    assert mesh_shape(data=data, fsdp=fsdp, devices=devices) == expected


@pytest.mark.parametrize(
    "data, fsdp, message",
    [
        (3, -1, "8 devices are not divisible by 3"),
        (2, 2, "= 4 must equal the 8 devices"),
        (4, 4, "= 16 must equal the 8 devices"),
        (0, 8, "must be positive"),
        (-1, -1, "at most one"),
    ],
)
def test_impossible_mesh_is_refused_with_the_numbers(data, fsdp, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(data=data, fsdp=fsdp, devices=jax.devices())


def test_largest_divisible_axis_is_cut_and_never_the_layers():
    specs = param_specs(abstract_params(TINY), 8)
    layer = specs["layers"]
    assert specs["embed_tokens"]["weight"] == P("fsdp", None)  # [24, 16]
    assert layer["mlp"]["gate_proj"]["weight"] == P(None, "fsdp", None)  # [2, 32, 16]
    assert layer["mlp"]["down_proj"]["weight"] == P(None, None, "fsdp")  # [2, 16, 32]
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
