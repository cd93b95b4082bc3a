"""Supervised training is one cross entropy, however the batch is cut; checked in float64."""

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.config import LearnerConfig, MeshConfig, OptimizerConfig
from learner.sft.sequences import train_sequence
from learner.sft.supervised_learner import SupervisedLearner
from models.device_memory import HOST_MEMORY
from models.files.checkpoint import load_model, to_named
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

WHOLE, FEW = 4096, 64
"""Token slots of a micro-batch: all sequences in one, or one to three in each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("sft") / "model")


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(str(folder))


@pytest.fixture(scope="module")
def sequences():
    """Of 2 to 40 tokens, of which one to all train, in one part or several."""
    rng = np.random.default_rng(3)
    made = []
    for number in range(13):
        count = int(rng.integers(2, 41))
        trains = rng.random(count) < rng.uniform(0.2, 1)
        trains[0], trains[-1] = False, True
        made.append(train_sequence(str(number), rng.integers(0, 259, count, np.int32), trains))
    return made


def make_learner(
    loaded, *, data=1, fsdp=1, context=1, microbatch_tokens=WHOLE, steps=4, **optimizer
):
    config = LearnerConfig(
        microbatch_tokens=microbatch_tokens,
        mesh=MeshConfig(data=data, fsdp=fsdp, context=context),
        compute_dtype="float32",
        remat="none",
        optimizer=OptimizerConfig(**{"learning_rate": 1e-2, **optimizer}),
    )
    return SupervisedLearner(
        config,
        loaded.config,
        loaded.params,
        total_steps=steps,
        valid_vocab=loaded.config.vocab_size,
        devices=jax.devices()[: data * fsdp * context],
    )


def value_and_gradient(learner, groups, tokens):
    """Mean loss and gradient of some sequences, each group of them packed by itself."""
    accumulator = learner._empty(learner.state.params)
    for group in groups:
        for batch in learner.packed(group):
            accumulator, _ = learner._accumulate(
                learner.state.params, None, accumulator, learner._placed(batch)
            )
    grads = jax.tree.map(lambda leaf: np.asarray(leaf) / tokens, accumulator.grads)
    return float(accumulator.sums["loss"]) / tokens, grads


@pytest.fixture(scope="module")
def literal(folder, sequences):
    """The same by transformers in float64, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for one in sequences:
        logits = model(torch.tensor(one.token_ids[None], dtype=torch.long)).logits[0]
        targets = torch.tensor(one.target_ids, dtype=torch.long)
        each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        total = total + each[torch.tensor(one.active)].sum()
        tokens += int(one.active.sum())
    mean = total / tokens
    mean.backward()
    grads = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    return float(mean), grads, tokens


def assert_close(found, expected):
    """Within 1e-5 of the largest number of each parameter."""
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name
        )


@pytest.mark.parametrize("data, fsdp, context", [(1, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 4)])
@pytest.mark.parametrize("microbatch_tokens", [WHOLE, FEW])
@pytest.mark.parametrize("is_packed", [True, False])
def test_value_and_gradient_are_those_of_a_float64_reference(
    loaded, sequences, literal, data, fsdp, context, microbatch_tokens, is_packed
):
    learner = make_learner(
        loaded, data=data, fsdp=fsdp, context=context, microbatch_tokens=microbatch_tokens
    )
    groups = [sequences] if is_packed else [[one] for one in sequences]
    mean, grads, tokens = literal
    value, found = value_and_gradient(learner, groups, tokens)
    assert value == pytest.approx(mean, rel=1e-6)
    assert_close(to_named(found, loaded.config), grads)


def test_the_loss_that_is_reported_is_that_before_the_step(loaded, sequences, literal):
    learner = make_learner(loaded)
    before = learner.loss(learner.packed(sequences))
    metrics = learner.update(sequences)
    assert before == pytest.approx(literal[0], rel=1e-6)
    assert metrics["train/loss"] == pytest.approx(before, rel=1e-6)
    assert metrics["train/valid_tokens"] == literal[2]
    assert learner.loss(learner.packed(sequences)) < before


def test_a_step_is_the_optimiser_on_that_gradient(loaded, sequences, literal):
    learner = make_learner(loaded, name="sgd", learning_rate=0.5, clip_norm=1e6)
    before = to_named(jax.tree.map(np.asarray, learner.state.params), loaded.config)
    learner.update(sequences)
    after = to_named(jax.tree.map(np.asarray, learner.state.params), loaded.config)
    for name, grad in literal[1].items():
        # Of float32 parameters of about 0.02, and norms of 1.
        np.testing.assert_allclose(before[name] - after[name], 0.5 * grad, rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_steps_are_the_same_on_two_meshes(loaded, sequences, name):
    losses = []
    for data, fsdp in ((1, 1), (2, 2)):
        learner = make_learner(loaded, data=data, fsdp=fsdp, microbatch_tokens=FEW, name=name)
        losses.append([learner.update(sequences)["train/loss"] for _ in range(4)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_offloaded_moments_make_the_same_steps(loaded, sequences):
    plain, offloaded = (make_learner(loaded, fsdp=2, offload=offload) for offload in (False, True))
    for _ in range(2):
        one, other = (learner.update(sequences) for learner in (plain, offloaded))
        assert one["train/loss"] == other["train/loss"]
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(offloaded.state.opt_state)}
    assert HOST_MEMORY in kinds
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((plain.state, offloaded.state)))


def test_weights_without_a_finite_gradient_stay_as_they_were(loaded, sequences):
    learner = make_learner(loaded)
    broken = jax.tree.map(lambda leaf: leaf * np.float32(np.nan), learner.state.params)
    learner.state = type(learner.state)(
        params=broken, opt_state=learner.state.opt_state, update_count=learner.state.update_count
    )
    metrics = learner.update(sequences)
    assert metrics["train/update_skipped"] == 1 and int(learner.state.update_count) == 0


def test_a_sequence_that_exceeds_the_budget_is_refused(loaded):
    long = train_sequence("long", np.zeros(66, np.int32), np.ones(66, bool))
    with pytest.raises(ValueError, match="a sequence of 65 tokens does not fit"):
        make_learner(loaded, microbatch_tokens=FEW).update([long])
