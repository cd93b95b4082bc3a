"""Which policy versions a learner has issued, and what a group must show to be from one of them."""

from collections.abc import Mapping

from services.wire.messages import NO_VERSION, Group


class StaleGroup(Exception):
    """The policy version is older than the staleness bound allows."""


class UnknownReceipt(Exception):
    """The weight digest is not the one issued for the policy version."""


class NotOpen(Exception):
    """The learner has no policy yet, or is still restoring its state after a restart."""


class Receipts:
    """The versions of one run that groups may name; not safe from several threads."""

    def __init__(self, max_staleness: int):
        """Starts without a version.

        Args:
            max_staleness: oldest version that may train, in versions behind the learner's, >= 0.
        """
        self._max_staleness = max_staleness
        self._issued: dict[int, str] = {}
        self.issued_version = NO_VERSION
        """Newest that workers can have."""
        self.learner_version = NO_VERSION
        """May be ahead of that, while a version is still being published."""

    def issue(self, policy_version: int, digest: str) -> None:
        """Makes a version known.

        Raises:
            ValueError: if versions do not rise.
        """
        if policy_version <= self.issued_version:
            raise ValueError(
                f"issued versions must rise from 0: got {policy_version} after "
                f"{self.issued_version}"
            )
        self.issued_version = policy_version
        self._issued[policy_version] = digest
        self.advance(policy_version)

    def advance(self, policy_version: int) -> None:
        """Records the version that the learner holds; staleness counts from it."""
        self.learner_version = max(self.learner_version, policy_version)
        self._issued = {v: d for v, d in self._issued.items() if not self.is_stale(v)}

    def revoke(self, policy_version: int) -> None:
        """Withdraws this version and later ones."""
        self._issued = {v: d for v, d in self._issued.items() if v < policy_version}

    def restore_issued(self, issued: Mapping[int, str], policy_version: int) -> None:
        """Adds versions that the learner process before had issued, later ones included.

        Args:
            policy_version: the learner's now.
        """
        self._issued |= issued
        self.advance(policy_version)

    def is_stale(self, policy_version: int) -> bool:
        """Whether a group of that version is too old to train."""
        return self.learner_version - policy_version > self._max_staleness

    def is_reached(self, policy_version: int) -> bool:
        """Whether the learner has reached that version; after a restart it may be behind."""
        return policy_version <= self.learner_version

    def check_group(self, group: Group) -> None:
        """Checks the origin of a group.

        Raises:
            NotOpen: if the learner has no version yet.
            StaleGroup: if its version is too old.
            UnknownReceipt: if its version was never issued, or under another digest.
        """
        version = group.policy_version
        if self.learner_version == NO_VERSION:
            raise NotOpen(
                f"group {group.group_id!r} was pushed before the learner has a policy: it is "
                "starting, or restores its state"
            )
        if self.is_stale(version):
            raise StaleGroup(
                f"group {group.group_id!r} was sampled under policy version {version}; the "
                f"current one is {self.learner_version} and max_staleness {self._max_staleness}"
            )
        if self._issued.get(version) != group.weight_digest:
            raise UnknownReceipt(
                f"group {group.group_id!r} from {group.worker!r} names weight digest "
                f"{group.weight_digest!r} for policy version {version}, for which "
                f"{self._issued.get(version)!r} was issued"
            )
