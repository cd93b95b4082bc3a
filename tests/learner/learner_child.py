"""A learner in a process of its own, to be killed: resumes from what it left."""

import pathlib

from learner.actor import LearnerActor
from services.wire.tls import RunAuthority
from tests.learner.tiny_learner import RUN_STATE, WAIT_S, groups_of, learner_spec, names, push

DIGEST = "digest.txt"
"""File in the run's folder with the digest of the last version."""


def main(
    model: pathlib.Path, folder: pathlib.Path, points: pathlib.Path, steps: int, background: bool
) -> None:
    """Args:
    points: folder of failpoints.
    steps: after which it ends.
    background: whether checkpoints are written beside the training.
    """
    spec = learner_spec(model, RunAuthority.create("run"), folder, failpoints=str(points))
    learner = LearnerActor(spec)
    restored = learner.restore()
    learner.publish()
    for update in restored.replay if restored else []:
        report = learner.update(update.group_ids, update.dropped_ids, WAIT_S)
        assert report.replayed in ("equal", None), report
        assert update.digest in (None, report.digest), report
    step = learner.health().policy_version
    while step < steps:
        step += 1
        held = {report.group_id for report in learner.reports()}
        groups = groups_of(learner._learner, step)
        push(learner._learner, [group for group in groups if group.group_id not in held])
        learner.update(names(step), [], WAIT_S)
        (learner.begin_save if background else learner.save)(step, RUN_STATE, {})
    (folder / DIGEST).write_text(learner.digest(steps, WAIT_S))
    learner.close()
