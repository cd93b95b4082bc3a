"""The steered coefficient of the entropy bonus: by hand, and in updates without a recompilation."""

import jax
import numpy as np
import pytest

from learner.config import AlgorithmConfig
from learner.update.entropy_bonus import EntropyRule, adjusted_bonus, first_bonus
from services.process.phase_clock import PhaseClock
from tests.learner.builders import make_core, random_groups

RULE = EntropyRule(target=0.5, delta=0.25, most=0.6)


def test_the_coefficient_follows_the_entropy_worked_out_by_hand():
    bonus, found = first_bonus(0.125), []
    for entropy in (0.4, 0.3, 0.3, 0.7, 0.5, 0.9, 0.9, 0.9, 0.1):
        bonus = adjusted_bonus(bonus, np.float32(entropy), RULE)
        found.append((float(bonus.level), float(bonus.coef)))
    # Up by 0.25 to at most 0.6; down with no bonus at all; at the target it stays; never below 0.
    levels = [0.375, 0.6, 0.6, 0.35, 0.35, 0.1, 0.0, 0.0, 0.25]
    coefs = [0.375, 0.6, 0.6, 0.0, 0.35, 0.0, 0.0, 0.0, 0.25]
    np.testing.assert_allclose(found, np.transpose([levels, coefs]), rtol=1e-6, atol=1e-7)


def test_a_start_above_the_largest_coefficient_is_refused():
    with pytest.raises(ValueError, match="entropy_coef=0.01 is where .* entropy_max=0.005"):
        AlgorithmConfig(entropy_target=0.2, entropy_coef=0.01)


SGD = {"name": "sgd", "learning_rate": 0.05, "clip_norm": 1e9}


@pytest.mark.slow
def test_an_update_has_the_coefficient_of_the_measurement_before_without_recompilation():
    """The entropy of the untrained model is near log 22 = 3.1: below 4, and above 1."""
    core = make_core(
        algorithm={"entropy_target": 4.0, "entropy_delta": 0.1, "entropy_max": 1.0}, optimizer=SGD
    )
    first = core.update(random_groups(), PhaseClock())
    clock = PhaseClock()
    second = core.update(random_groups(seed=1), clock)
    assert (first["train/entropy_coef"], second["train/entropy_coef"]) == (0.0, np.float32(0.1))
    assert float(core.state.entropy_bonus.coef) == np.float32(0.2)
    assert clock.take_timing().seconds["compile"] == 0

    # The second one is an update with a fixed coefficient of 0.1.
    fixed = make_core(algorithm={}, optimizer=SGD)
    fixed.update(random_groups(), PhaseClock())
    weighed = make_core(algorithm={"entropy_coef": 0.1}, optimizer=SGD)
    weighed.resume(fixed.state, policy_version=1)
    expected = weighed.update(random_groups(seed=1), PhaseClock())
    assert second["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)
    for name, array in core.named_weights("float32").items():
        np.testing.assert_allclose(
            array, weighed.named_weights("float32")[name], rtol=1e-5, atol=1e-7
        )

    above = make_core(
        algorithm={"entropy_target": 1.0, "entropy_coef": 0.005, "entropy_delta": 0.001},
        optimizer=SGD,
    )
    coefs = [above.update(random_groups(), PhaseClock())["train/entropy_coef"] for _ in range(2)]
    assert coefs == [np.float32(0.005), 0.0], "above the target there is no bonus"
    assert float(above.state.entropy_bonus.level) == pytest.approx(0.003)


@pytest.mark.slow
def test_a_skipped_update_leaves_the_coefficient():
    core = make_core(algorithm={"entropy_target": 4.0}, optimizer=SGD)
    core.update(random_groups(), PhaseClock())
    before = jax.device_get(core.state.entropy_bonus)
    groups = random_groups(seed=1)
    groups[0].completions[0].behavior_logprobs[:] = np.nan
    assert core.update(groups, PhaseClock())["train/update_skipped"] == 1
    assert jax.device_get(core.state.entropy_bonus) == before
