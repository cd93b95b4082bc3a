"""The files of groups that did not train, and a disk that does not take them."""

import errno
import json
import os

import pytest

from learner.durable import rejected_groups
from learner.durable.rejected_groups import write_rejected, write_unfit
from tests.learner.builders import make_completion, make_group

GROUP = make_group(0, [5, 6], [make_completion([7, 8], float("inf"))])


def test_groups_are_kept_with_what_is_not_finite_as_text(tmp_path):
    write_rejected(tmp_path / "rejected", 3, [GROUP])
    (line,) = (tmp_path / "rejected" / "version-00000003.jsonl").read_text().splitlines()
    kept = json.loads(line)
    assert (kept["group_id"], kept["completions"][0]["total_reward"]) == (GROUP.group_id, "inf")
    write_unfit(tmp_path / "rejected", [(GROUP, "a token beyond the vocabulary")])
    (line,) = (tmp_path / "rejected" / "unfit.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "a token beyond the vocabulary"


def test_nothing_is_written_where_all_groups_trained(tmp_path):
    write_rejected(tmp_path / "rejected", 3, [])
    write_unfit(tmp_path / "rejected", [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_does_not_take_them_is_a_warning(tmp_path, monkeypatch, caplog, number):
    def refuse(path, text):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(rejected_groups, "write_whole", refuse)
    write_rejected(tmp_path / "rejected", 3, [GROUP])
    write_unfit(tmp_path / "rejected", [(GROUP, "unfit")])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all(os.strerror(number) in text for text in said)
