"""The run of long completions, made shorter: each reaches its length and trains."""

import json

import pytest

from deploy.demo import make_model
from deploy.demo.random_reward import random_reward
from driver.config.load_config import load
from tests.driver.service_run import ROOT, Service

LONG = ROOT / "deploy" / "runs" / "long_cpu.yaml"
TOKENS = 1024

pytestmark = [pytest.mark.slow, pytest.mark.service]


def test_completions_past_the_positions_of_the_demos_model_reach_their_length_and_train(tmp_path):
    model = tmp_path / "model"
    make_model.lengthen(make_model.OUTPUT, model, TOKENS + 64)
    service = Service(
        tmp_path,
        model,
        *("--config", str(LONG), "--set", f"model.path={model}"),
        *("--set", f"run.output_dir={tmp_path / 'out'}"),
        *("--set", f"rollout.max_completion_tokens={TOKENS}"),
        *("--set", f"learner.microbatch_tokens={TOKENS + 64}"),
    )
    try:
        assert service.wait() == 0, service.text
    finally:
        service.kill()
    first, second = service.lines("metrics")
    for line in (first, second):
        assert line["rollout/completion_len_mean"] == TOKENS
        assert line["rollout/truncated_fraction"] == 1.0
        assert line["train/update_skipped"] == 0.0 and line["train/grad_norm"] > 0
        # Both sides compute in float32; 1e-3 nats is far above its rounding over so many positions.
        assert line["offpolicy/logprob_gap_max"] < 1e-3
    assert second["checkpoint/write_s"] > 0
    assert service.status["last_checkpoint"] == 2


def test_the_run_asks_for_completions_of_8192_tokens_of_a_model_that_takes_them(tmp_path):
    config = load(str(LONG))
    make_model.lengthen(make_model.OUTPUT, tmp_path / "model", config.learner.microbatch_tokens)
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config.rollout.max_completion_tokens == 8192
    assert config.sequence_tokens <= content["max_position_embeddings"]
    before = json.loads((make_model.OUTPUT / "config.json").read_text())
    assert content == before | {"max_position_embeddings": 8320}


@pytest.mark.parametrize(
    "positions, output, message",
    [
        (511, "other", "--positions 511 must be at least 512"),
        (8320, str(make_model.OUTPUT), "is the model to copy: name another folder"),
    ],
)
def test_a_copy_that_makes_no_sense_is_refused(tmp_path, positions, output, message):
    with pytest.raises(ValueError, match=message):
        make_model.lengthen(make_model.OUTPUT, tmp_path / output, positions)
    assert not (tmp_path / "other").exists()


def test_the_random_reward_follows_from_the_text_alone():
    rewards = [random_reward(text, answer="1", prompt="p", item={}) for text in ("a", "b", "a")]
    assert rewards[0] == rewards[2] != rewards[1] and all(0 <= reward < 1 for reward in rewards)
