"""A learner of a tiny model and the groups of its steps, the same in every run."""

import dataclasses
import pathlib

from learner.config import AlgorithmConfig, LearnerConfig, MeshConfig, OptimizerConfig
from learner.learner_spec import LearnerSpec
from learner.recorded_learner import RecordedLearner
from services.wire.messages import Group, PushOutcome
from services.wire.tls import RunAuthority
from tests.deadlines import HANG_S
from tests.learner.builders import random_groups

RUN_STATE = {
    "book": {"seed": 0, "prompt_count": 8, "cursor": 4, "unfinished": [[3, 1]]},
    "rewards": [],
}
WAIT_S = HANG_S


def learner_spec(
    model: pathlib.Path, authority: RunAuthority, folder: pathlib.Path, **changes
) -> LearnerSpec:
    """Of a learner of the run `run`, which leaves its files in a folder."""
    settings = dict(
        run_id="run",
        seed=0,
        platform="cpu",
        model_path=str(model),
        tokenizer=None,
        chat_template=None,
        stop_tokens=(),
        algorithm=AlgorithmConfig(),
        learner=LearnerConfig(
            microbatch_tokens=256,
            compute_dtype="float32",
            mesh=MeshConfig(data=1, fsdp=-1),
            optimizer=OptimizerConfig(learning_rate=1e-2),
        ),
        total_steps=10,
        temperature=1.0,
        max_prompt_tokens=192,
        max_completion_tokens=16,
        order=None,
        max_staleness=1,
        weights_dtype="bfloat16",
        export_dtype=None,
        chunk_bytes=4096,
        keep_versions=2,
        group_size=4,
        buffer_groups=16,
        buffer_bytes=2**20,
        bind_host="127.0.0.1",
        port=0,
        driver_host="127.0.0.1",
        credentials=authority.issue("learner"),
        checkpoint_folder=str(folder / "checkpoints"),
        keep_checkpoints=2,
    )
    return LearnerSpec(**{**settings, **changes})


def names(step: int) -> list[str]:
    return [f"g{step}-{number}" for number in range(2)]


def groups_of(learner: RecordedLearner, step: int, *, version: int | None = None) -> list[Group]:
    """The groups of a step, the same in every run, sampled under the version before it."""
    version = step - 1 if version is None else version
    return [
        dataclasses.replace(
            group,
            group_id=name,
            policy_version=version,
            weight_digest=learner.digest(version, WAIT_S),
        )
        for name, group in zip(names(step), random_groups(2, seed=step), strict=True)
    ]


def push(learner: RecordedLearner, groups: list[Group]) -> list[PushOutcome]:
    return [learner.buffer.put_group(group) for group in groups]


def train(learner: RecordedLearner, *steps: int) -> list[str]:
    """Digest of each version made."""
    digests = []
    for step in steps:
        push(learner, groups_of(learner, step))
        report = learner.update(names(step), [], WAIT_S)
        assert (report.policy_version, report.replayed) == (step, None)
        assert set(report.outcomes.values()) <= {"trained", "dropped_zero_variance"}
        digests.append(learner.digest(step, WAIT_S))
    return digests


def replayed(learner, restored):
    """Makes again what was begun, and returns how each version came out."""
    learner.publish()
    results = []
    for update in restored.replay:
        report = learner.update(update.group_ids, update.dropped_ids, WAIT_S)
        assert (report.digest == update.digest) == (report.replayed == "equal")
        results.append((report.policy_version, report.replayed))
    return results
