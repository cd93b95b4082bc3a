"""What tests of whole learners share: a model, the run's authority, and the programs."""

import functools
from unittest import mock

import pytest

from models.load_tokenizer import load_tokenizer
from services.wire.tls import RunAuthority
from tests.learner.builders import functions_made_once
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
