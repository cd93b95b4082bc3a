"""The thread that writes checkpoints: in their order, whole or not at all, and what it keeps."""

import gc
import json
import threading
import tracemalloc
import weakref

import jax
import numpy as np
import pytest

from learner.config import OptimizerConfig
from learner.durable import checkpoint_writer
from learner.durable.certificate import make_certificate
from learner.durable.checkpoint import CheckpointFolder
from learner.durable.checkpoint_writer import CheckpointBroken, CheckpointJob, CheckpointWriter
from learner.durable.state_files import write_state
from learner.update.host_copy import copy_to_host
from learner.update.mesh import make_mesh
from learner.update.optimizer import learning_rate_schedule, make_optimizer
from learner.update.sharding import param_specs
from learner.update.state import TrainState, abstract_state, init_state
from services.process import failpoints
from tests.deadlines import HANG_S

pytestmark = pytest.mark.slow


def certify(state):
    return make_certificate(state, seed=0, driver_state={})


def job(step, state=None, **changes):
    given = {"step": step, "state": state or small_state(), "record": {"step": step}}
    return CheckpointJob(**{**given, "certify": certify, "scores": {}, **changes})


def small_state():
    weight = jax.numpy.arange(4.0)
    return TrainState(params={"w": weight}, opt_state=(), update_count=jax.numpy.int32(1))


def writer_of(path, *, timeout_s=HANG_S, on_certified=lambda step, saved: []):
    folder = CheckpointFolder(path, keep=2)
    return CheckpointWriter(folder, on_certified=on_certified, timeout_s=timeout_s)


def put_in_background(writer, step, **changes):
    writer.submit(lambda: job(step, **changes))
    writer.wait()


@pytest.fixture
def held(monkeypatch):
    """Holds the thread before it writes, until it is set."""
    opened = threading.Event()

    def reach(name, path=None):
        if name == "learner.copied":
            assert opened.wait(HANG_S)

    monkeypatch.setattr(failpoints, "reach", reach)
    yield opened
    opened.set()


@pytest.mark.parametrize("has_next", ["write", "submit"])
def test_a_state_is_copied_only_once_the_checkpoint_before_has_ended(tmp_path, held, has_next):
    writer, asked = writer_of(tmp_path, timeout_s=0.01), []

    def make_job():
        asked.append((writer.writing, [saved.step for saved in writer.take_ended()]))
        return job(2)

    writer.submit(lambda: job(1))
    with pytest.raises(TimeoutError, match="step 1 is still being written after 0.01 s, about to"):
        getattr(writer, has_next)(make_job)
    assert asked == [] and writer.writing == 1
    held.set()
    writer.wait(HANG_S)
    getattr(writer, has_next)(make_job)
    writer.wait(HANG_S)
    assert asked == [(None, [1])]
    assert [saved.step for saved in writer.take_ended()] == [2]


@pytest.mark.parametrize("beside", [False, True])
def test_what_became_of_each_is_reported_the_same_way_and_once(tmp_path, beside):
    folder = tmp_path / "checkpoints"
    writer = writer_of(folder, on_certified=lambda step, saved: [f"segment of {step}"])
    put = lambda step: (
        put_in_background(writer, step) if beside else writer.write(lambda: job(step))
    )
    folder.write_text("a file in its place")
    put(1)
    folder.unlink()
    put(2)
    failed, complete = writer.take_ended()
    assert (failed.step, failed.not_removed) == (1, [])
    assert failed.problem.startswith("the checkpoint of step 1 could not be written to")
    assert (complete.step, complete.problem) == (2, "")
    assert complete.not_removed == ["segment of 2"]
    assert complete.write_s > 0 and complete.blocked_s > 0
    assert beside or complete.blocked_s >= complete.write_s
    assert writer.take_ended() == [] and writer.close() == []


def broken(state):
    raise TypeError("made up")


def test_what_is_broken_is_raised_after_the_last_checkpoint_is_written(tmp_path):
    writer = writer_of(tmp_path)
    put_in_background(writer, 1, certify=broken)
    said = "checkpoint of step 1 was not written, hashing the state: TypeError: made up"
    with pytest.raises(CheckpointBroken, match=said):
        writer.submit(lambda: pytest.fail("a state is copied for nothing"))
    put_in_background(writer, 1, certify=broken)
    with pytest.raises(CheckpointBroken, match=said):
        writer.write(lambda: job(2))
    (saved,) = writer.close()
    assert (saved.step, saved.problem) == (2, "")
    assert json.loads((tmp_path / "step-00000002" / "manifest.json").read_text())["step"] == 2


def test_the_end_says_what_is_broken(tmp_path):
    writer = writer_of(tmp_path)
    put_in_background(writer, 1, certify=broken)
    with pytest.raises(CheckpointBroken, match="made up"):
        writer.close()


@pytest.fixture
def copies(monkeypatch):
    """Weak references to the arrays of each copy on the host."""
    made = []

    def noted(state):
        copied = copy_to_host(state)
        made.append([weakref.ref(leaf) for leaf in jax.tree.leaves(copied)])
        return copied

    monkeypatch.setattr(checkpoint_writer, "copy_to_host", noted)
    return made


@pytest.mark.parametrize(
    "fails, beside",
    [
        *(("not", False), ("not", True), ("disk", False), ("disk", True)),
        *(("certificate", True), ("files", True)),
    ],
)
def test_a_copy_on_the_host_goes_with_its_checkpoint_also_where_that_fails(
    tmp_path, monkeypatch, copies, fails, beside
):
    writer = writer_of(tmp_path)
    put = lambda step: (
        put_in_background(writer, step) if beside else writer.write(lambda: job(step))
    )
    put(1)  # Orbax keeps what it makes with the first one
    gc.collect()
    gc.disable()
    try:
        if fails == "disk":
            failpoints.install(tmp_path / "points")
            failpoints.arm(tmp_path / "points", "learner.checkpoint", "enospc")
        elif fails != "not":
            where = {"certificate": make_certificate, "files": write_state}[fails]
            module = {"certificate": __name__, "files": "learner.durable.checkpoint"}[fails]
            monkeypatch.setattr(f"{module}.{where.__name__}", broken_late)
        put(2)
        assert len(copies) == 2 and all(ref() is None for ref in copies[1])
    finally:
        gc.enable()
        failpoints.install(None)


def broken_late(*given, **named):
    """Fails in a frame that has the state, with a cycle through its traceback."""
    try:
        raise KeyError("first")
    except KeyError as error:
        kept = error
        raise TypeError(f"made up: {kept}") from kept


def test_files_of_a_state_on_the_host_are_written_without_another_copy(tmp_path):
    state = {"params": {str(n): np.full((256, 1024), n, np.float32) for n in range(8)}}
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    write_state(tmp_path / "first", {"params": {"w": np.ones(4, np.float32)}}, {})
    tracemalloc.start()
    try:
        write_state(tmp_path / "second", state, {})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < nbytes / 2


@pytest.mark.parametrize("beside", [False, True])
def test_a_state_over_four_devices_is_restored_bit_for_bit_on_two(tmp_path, beside):
    rng = np.random.default_rng(5)
    params = {
        "embed_tokens": {"weight": rng.normal(size=(64, 16)).astype(np.float32)},
        "norm": {"weight": rng.normal(size=16).astype(np.float32)},
    }
    config = OptimizerConfig(name="adamw", schedule="cosine", warmup_steps=2)
    optimizer = make_optimizer(config, learning_rate_schedule(config, 10))

    def laid_out(make, fsdp):
        mesh = make_mesh(data=1, fsdp=fsdp, devices=jax.devices()[:fsdp])
        return make(params, optimizer, mesh, param_specs(params, fsdp))

    noisy = lambda leaf: leaf if leaf.ndim == 0 else leaf + rng.normal(size=leaf.shape)
    begun = laid_out(init_state, 4)
    state = jax.tree.map(
        lambda leaf: jax.device_put(noisy(np.asarray(leaf)).astype(leaf.dtype), leaf.sharding),
        begun,
    )
    assert max(len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)) == 4
    writer = writer_of(tmp_path)
    (writer.submit if beside else writer.write)(lambda: job(3, state))
    assert [saved.problem for saved in writer.close()] == [""]
    restored = CheckpointFolder(tmp_path, keep=2).restore(laid_out(abstract_state, 2))
    assert restored is not None and restored.certificate == certify(state).plain()
    for ours, theirs in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True):
        assert len(ours.sharding.device_set) == 2 and ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
