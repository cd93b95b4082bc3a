"""One gradient for every preset, however a batch is cut: over meshes, splits and packing.

By default the presets with the most unusual programs; TANDEM_EVERY_CUT=1 takes all presets x 5
meshes x 3 splits, packed and not.
"""

import dataclasses
import itertools
import os

import jax
import numpy as np
import pytest

from driver.config.presets import PRESETS
from learner.objective import batching
from services.process.phase_clock import PhaseClock
from tests.learner.builders import make_core, make_group, random_groups

pytestmark = pytest.mark.slow

MESHES = [(1, 1, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 2, 2)]
"""(data, fsdp, context)."""
SPLITS = [192, 64, 16]
CUTS = [(*mesh, split, packed) for mesh in MESHES for split in SPLITS for packed in (True, False)]
PLAIN = (1, 1, 1, 192, False)
"""One device, one micro-batch, one sequence in a row."""
CASES = [
    ("gspo", (2, 2, 1, 16, True)),
    ("gspo", (2, 1, 4, 16, True)),
    ("rloo", (1, 4, 1, 16, True)),
    ("ppo", (2, 2, 1, 16, True)),
    ("ppo", (1, 2, 2, 16, True)),
]
if os.environ.get("TANDEM_EVERY_CUT"):
    CASES = [case for case in itertools.product(PRESETS, CUTS) if case[1] != PLAIN]


def groups():
    """With rewards from two functions, for presets that tell them apart."""
    made = []
    for group in random_groups(5, seed=3):
        completions = [
            dataclasses.replace(
                one, rewards={"a": one.total_reward, "b": float(len(one.token_ids))}
            )
            for one in group.completions
        ]
        made.append(make_group(group.prompt_id, group.prompt_token_ids, completions))
    return made


@pytest.fixture(scope="module")
def change():
    """How two updates on one batch change the parameters, [P] float64; the second has ratios."""
    found = {}

    def of(preset, cut):
        if (preset, cut) in found:
            return found[preset, cut]
        data, fsdp, context, tokens, packed = cut
        core = make_core(
            data=data,
            fsdp=fsdp,
            context=context,
            microbatch_tokens=tokens,
            algorithm={"pass_k": 2} | PRESETS[preset].algorithm,
            optimizer={"name": "sgd", "learning_rate": 0.05, "clip_norm": 1e9},
            updates_per_batch=2,
            reward_weights={"a": 1.0, "b": -0.1},
        )
        flat = lambda tree: np.concatenate([np.ravel(np.float64(x)) for x in jax.tree.leaves(tree)])
        before = flat(core.state.params)
        with pytest.MonkeyPatch.context() as patched:
            if not packed:
                alone = lambda lengths, capacity: [[i] for i in range(len(lengths))]
                patched.setattr(batching, "first_fit_decreasing", alone)
            metrics = core.update(groups(), PhaseClock())
        assert metrics["train/update_skipped"] == 0
        found[preset, cut] = flat(core.state.params) - before
        return found[preset, cut]

    return of


@pytest.mark.parametrize("preset, cut", CASES, ids=str)
def test_any_cut_gives_the_same_update(preset, cut, change):
    expected, actual = change(preset, PLAIN), change(preset, cut)
    size = np.linalg.norm(expected)
    assert size > 1e-4 and np.linalg.norm(actual - expected) < 1e-5 * size
