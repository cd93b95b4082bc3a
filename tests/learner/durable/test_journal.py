"""The journal: what it holds in memory is bounded, and what it cut is known."""

from learner.durable.journal import Journal
from tests.services.group_rules import group_rules


def make_journal(folder, max_staleness=1):
    return Journal(
        folder,
        group_rules("run", group_size=2),
        capacity_groups=8,
        capacity_bytes=1 << 20,
        max_staleness=max_staleness,
        check_trainable=lambda group: None,
    )


def test_the_digests_in_memory_do_not_grow_with_the_versions(tmp_path):
    """Without a checkpoint in between, as with checkpoint.every_steps: 0."""
    journal = make_journal(tmp_path / "spool")
    journal.start()
    for version in range(50):
        journal.issue(version, f"d{version}")
    known = [version for version in range(50) if journal.digest_of(version)]
    assert known == [48, 49]


def test_versions_that_are_repeated_are_forgotten_as_they_age(tmp_path):
    first = make_journal(tmp_path / "spool", max_staleness=0)
    first.start()
    for version in range(20):
        first.issue(version, f"d{version}")
    first.close()
    again = make_journal(tmp_path / "spool", max_staleness=0)
    again.resume(0, 0, {"consumed_group_ids": []})
    for version in range(20):
        again.issue(version, f"d{version}")
        assert again.replayed(version) == "equal"
    assert [version for version in range(20) if again.replayed(version)] == [19]


def test_a_tail_that_was_cut_is_known_after_the_resume(tmp_path):
    first = make_journal(tmp_path / "spool")
    first.start()
    first.issue(0, "d0")
    first.close()
    assert first.repaired == ""
    with (tmp_path / "spool" / "step-00000000.bin").open("ab") as file:
        file.write(bytes(4096))
    again = make_journal(tmp_path / "spool")
    again.resume(0, 0, {"consumed_group_ids": []})
    assert "cut 4096 bytes off its end" in again.repaired
