"""A learner of an adapter: what it keeps, how it resumes, and which base it goes on with."""

import shutil

import jax
import numpy as np
import pytest

from driver.verify_resume import main as verify_resume
from learner.config import AlgorithmConfig, LearnerConfig, LoraConfig, OptimizerConfig
from learner.durable.checkpoint_manifest import verify_checkpoint
from learner.first_adapter import check_first_adapter
from learner.recorded_learner import RecordedLearner
from models.adapter import AdapterShape, init_adapter, join, merge
from models.files.checkpoint import load_model, read_model_config, to_named
from models.files.peft_folder import load_peft, write_peft
from services.process.phase_clock import PhaseClock
from tests.learner.builders import functions_made_once, make_core
from tests.learner.tiny_learner import (
    RUN_STATE,
    WAIT_S,
    groups_of,
    learner_spec,
    names,
    push,
    train,
)
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

LEARNER = LearnerConfig(
    microbatch_tokens=256,
    compute_dtype="float32",
    optimizer=OptimizerConfig(learning_rate=1e-2),
    lora=LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj")),
)


@pytest.fixture
def start(model, authority, compiled):
    started = []

    def make(folder, model=model, **changes) -> RecordedLearner:
        for other in started:
            other._journal.close()  # it is dead
        spec = learner_spec(model, authority, folder, **{"learner": LEARNER, **changes})
        learner = RecordedLearner(spec, jax.devices()[:1], PhaseClock())
        learner._core._programs.compiled = compiled
        started.append(learner)
        return learner

    yield make
    for learner in started:
        learner.close()


def test_a_checkpoint_holds_the_adapter_and_a_resume_goes_on_bit_for_bit(start, tmp_path):
    learner = start(tmp_path)
    learner.publish()
    train(learner, 1)
    (saved,) = learner.save(1, RUN_STATE)
    digests = train(learner, 2)
    tree = verify_checkpoint(tmp_path / "checkpoints" / "step-00000001")["tree"]
    assert (saved.step, saved.problem) == (1, "")
    # Two matrices of each target of all layers: master weights and two moments, and two counts.
    assert sum(len(entry) > 1 for entry in tree.values()) == 4 * 3

    after = start(tmp_path)
    restored = after.restore()
    assert (restored.step, [update.digest for update in restored.replay]) == (1, digests)
    after.publish()
    report = after.update(restored.replay[0].group_ids, (), 60.0)
    assert report.replayed == "equal" and report.digest == digests[0]


def test_a_run_that_saved_nothing_yet_starts_from_the_same_adapter(start, tmp_path):
    learner = start(tmp_path, seed=3)
    learner.publish()
    digests = train(learner, 1)
    after = start(tmp_path, seed=3)
    restored = after.restore()
    after.publish()
    assert after.update(restored.replay[0].group_ids, (), 60.0).digest == digests[0]


def test_a_resume_with_another_base_or_adapter_is_refused(start, tmp_path):
    learner = start(tmp_path)
    learner.publish()
    train(learner, 1)
    learner.save(1, RUN_STATE)
    other = write_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(
        ValueError, match=r"an adapter of the model with digest \w{12}, but the model at"
    ):
        start(tmp_path, model=other).restore()
    with functions_made_once([]):
        wider = LEARNER.model_copy(update={"lora": LoraConfig(rank=8)})
        with pytest.raises(ValueError, match="learner.lora"):
            start(tmp_path, learner=wider).restore()
        whole = LEARNER.model_copy(update={"lora": None})
    with functions_made_once([]), pytest.raises(ValueError, match="learner.lora"):
        start(tmp_path, learner=whole).restore()


def test_a_recorded_step_is_made_again_by_the_check(start, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("learner.resume_check.require_platform", lambda _: jax.devices()[:1])
    learner = start(tmp_path)
    learner.publish()
    train(learner, 1)
    learner.save(1, RUN_STATE)
    train(learner, 2)
    learner.close()
    copy = shutil.copytree(tmp_path, tmp_path.parent / "copy")
    assert verify_resume([str(copy)]) == 0
    assert capsys.readouterr().out.endswith("step 2 made again, weights equal\n")


def test_adapter_and_merged_model_are_exported_and_the_adapter_is_a_start(start, tmp_path, model):
    learner = start(tmp_path)
    learner.publish()
    train(learner, 1, 2)
    with pytest.raises(ValueError, match="there is no adapter"):
        make_core().host_adapter()
    learner.export_adapter(str(tmp_path / "adapter"))
    learner.export(str(tmp_path / "export"))
    config = read_model_config(str(model))
    read = load_peft(tmp_path / "adapter", config)
    trained = jax.device_get(learner._core.state.params)
    jax.tree.map(np.testing.assert_array_equal, read.params, trained)
    base, merged = (load_model(str(path)).params for path in (model, tmp_path / "export"))
    expected = to_named(merge(join(base, read.params), read.shape.scale), config)
    for name, leaf in to_named(merged, config).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-6, atol=1e-6)

    lora = LEARNER.lora.model_copy(update={"init_from": str(tmp_path / "adapter")})
    changed = LEARNER.model_copy(update={"lora": lora})
    with functions_made_once([]):
        again = start(tmp_path / "again", learner=changed, algorithm=AlgorithmConfig(kl_coef=0.1))
    again._core._programs.compiled = {}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again._core.state.params), trained)
    again.publish()
    # The reference is where it starts, with that adapter: nothing has moved yet.
    push(again, groups_of(again, 1))
    assert abs(again.update(names(1), [], WAIT_S).metrics["train/kl"]) < 1e-6


def test_what_no_adapter_touches_is_exported_as_it_came_in(start, tmp_path, model):
    """The devices hold the model in the type of the products, which may be narrower."""
    narrow = LEARNER.model_copy(update={"compute_dtype": "bfloat16"})
    with functions_made_once([]):
        learner = start(tmp_path, learner=narrow)
    learner.export(str(tmp_path / "export"))
    before, after = (load_model(str(path)) for path in (model, tmp_path / "export"))
    assert set(before.stored_dtypes.values()) == {np.dtype(np.float32)}
    # B is 0 before the first step, so that nothing has changed at all.
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)


def test_an_adapter_of_another_shape_is_no_start(start, tmp_path, model):
    config = read_model_config(str(model))
    shape = AdapterShape(rank=8, alpha=8.0, modules=("mlp.up_proj",))
    write_peft(tmp_path / "adapter", init_adapter(shape, config, 0), shape, base_model="x")
    lora = LEARNER.lora.model_copy(update={"init_from": str(tmp_path / "adapter")})
    with pytest.raises(
        ValueError,
        match="of rank 8, alpha 8, at mlp.up_proj, but learner.lora asks for rank 4, .* set rank",
    ):
        check_first_adapter(lora, config)
    check_first_adapter(LEARNER.lora, config)
