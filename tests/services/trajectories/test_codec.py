import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from services.trajectories import codec
from services.wire.messages import Completion, FinishReason, Group
from tests.services.wire_tools import same_group

INT64 = st.integers(-(2**63), 2**63 - 1)
LENGTH = st.integers(0, 20)
TEXT = st.text(max_size=8)
REWARDS = st.dictionaries(TEXT, st.floats(), max_size=3)


INT32S = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3).map(tuple)


@st.composite
def completions(draw) -> Completion:
    T, M = draw(LENGTH), draw(LENGTH)
    return Completion(
        sample_index=draw(INT64),
        token_ids=draw(hnp.arrays(np.int32, T)),
        behavior_logprobs=draw(hnp.arrays(np.float32, M, elements=st.floats(width=32))),
        finish_reason=draw(st.sampled_from(FinishReason)),
        rewards=draw(REWARDS),
        total_reward=draw(st.floats()),
        reward_error=draw(TEXT),
        segment_tokens=draw(INT32S),
        record_starts=draw(INT32S),
    )


GROUPS = st.builds(
    Group,
    run_id=TEXT,
    group_id=TEXT,
    attempt=INT64,
    prompt_id=INT64,
    epoch=INT64,
    policy_version=INT64,
    weight_digest=TEXT,
    worker=TEXT,
    prompt_token_ids=LENGTH.flatmap(lambda P: hnp.arrays(np.int32, P)),
    completions=st.lists(completions(), max_size=3).map(tuple),
    phase_s=REWARDS,
)


@given(GROUPS)
def test_group_round_trip_is_exact(group):
    assert same_group(codec.decode_group(codec.encode_group(group)), group)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_group_are_value_errors(raw):
    with contextlib.suppress(ValueError):
        codec.decode_group(raw)


def test_group_of_one_turn_has_the_bytes_of_before_there_were_segments():
    completion = Completion(
        sample_index=1,
        token_ids=np.array([11, 2], np.int32),
        behavior_logprobs=np.array([-1.5, -0.5], np.float32),
        finish_reason=FinishReason.STOP,
        rewards={"a": 1.0},
        total_reward=1.0,
    )
    group = Group(
        run_id="run",
        group_id="g00000000",
        attempt=0,
        prompt_id=3,
        epoch=1,
        policy_version=2,
        weight_digest="ab",
        worker="rollout-0",
        prompt_token_ids=np.array([5, 6], np.int32),
        completions=(completion,),
        phase_s={"decode": 1.0},
    )
    written_before = (
        "0a0372756e12096730303030303030302003280130023a0261624209726f6c6c6f75742d304a08050000000600"
        "0000522f080112080b000000020000001a080000c0bf000000bf20012a0c0a016111000000000000f03f310000"
        "00000000f03f5a110a066465636f646511000000000000f03f"
    )
    assert codec.encode_group(group).hex() == written_before


def test_received_arrays_are_writable(make_group):
    group = codec.decode_group(codec.encode_group(make_group()))
    group.prompt_token_ids[0] = 9
    group.completions[0].token_ids[0] = 9
    group.completions[0].behavior_logprobs[0] = -9.0
    assert group.completions[1].token_ids[0] == 11


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": np.array([1, 2, 3])},
        {"behavior_logprobs": np.array([-1.0, -1.0, -1.0])},
        {"token_ids": np.zeros((3, 1), np.int32)},
    ],
)
def test_array_that_would_be_converted_is_refused(changes, make_group, make_completion):
    with pytest.raises(ValueError, match="must be (int32|float32) of one dimension"):
        codec.encode_group(make_group(completions=(make_completion(**changes),)))
