"""What tests of whole learners share: a model, the run's authority, and the programs."""

import functools
import gc
import pathlib
from unittest import mock

import jax
import pytest

from learner.recorded_learner import RecordedLearner
from models.load_tokenizer import load_tokenizer
from services.process import failpoints
from services.process.phase_clock import PhaseClock
from services.wire.tls import RunAuthority
from tests.learner.builders import functions_made_once
from tests.learner.tiny_learner import learner_spec, train
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def authority():
    return RunAuthority.create("run")


@pytest.fixture(scope="module")
def compiled():
    """Programs that all learners of this file share, since they differ in nothing that counts."""
    tokenizer = functools.cache(load_tokenizer)
    with functions_made_once([]), mock.patch("learner.recorded_learner.load_tokenizer", tokenizer):
        yield {}


@pytest.fixture
def start(model, authority, compiled):
    """Starts learners in a folder, each as after a restart; stops them at the end."""
    started = []
    gc.freeze()  # as the actor does: each update collects, and would go through all modules

    def make(folder: pathlib.Path, **changes) -> RecordedLearner:
        for other, its_folder in started:
            if its_folder == folder:
                other._journal.close()  # it is dead
        spec = learner_spec(model, authority, folder, **changes)
        learner = RecordedLearner(spec, jax.devices()[:1], PhaseClock())
        learner._core._programs.compiled = compiled
        started.append((learner, folder))
        return learner

    yield make
    failpoints.install(None)
    for learner, _ in started:
        learner.close()


@pytest.fixture(scope="module")
def undisturbed():
    """Digests of versions 1 to 4 of a run that nothing stopped, made once."""
    return {}


@pytest.fixture
def digests(start, tmp_path, undisturbed):
    if not undisturbed:
        learner = start(tmp_path / "undisturbed")
        learner.publish()
        undisturbed.update(enumerate(train(learner, 1, 2, 3, 4), 1))
        assert len(set(undisturbed.values())) == 4
    return undisturbed
