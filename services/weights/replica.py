"""A worker's copy of the policy: pulled from whoever has it, and served to whoever asks.

The manifest of a version comes from the learner, its bytes from the nearest relay. Every byte is
checked against the manifest, so a relay can be slow, gone or wrong, and no more: the pull goes on
at the next source with what has arrived. Where both sides hold the version before, only what
changed travels.
"""

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from services.weights.client import POLL_S, WAIT_FRACTION, Answer, WeightClient
from services.weights.pull import Pull
from services.weights.service import weight_service
from services.weights.store import HeldVersion, UnknownVersion, WeightStore
from services.weights.transfer import Unreachable, WeightTransferError, arrays_of
from services.wire.channel import PIECE_BYTES, Deadline
from services.wire.messages import WeightManifest
from services.wire.server import Server
from services.wire.tls import Credentials

LONGEST_ASK_S = 10.0
"""Longest question to a learner that has no newer version; it is asked again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PullStats:
    """How one version came here."""

    policy_version: int
    version_bytes: int
    """Of the version itself."""
    wire_bytes: int
    """Tensor and delta bytes received for it, from everybody; 0 if it was held already."""
    delta: bool
    """Whether it was made from the version before."""
    wait_s: float
    """Until somebody offered the version."""
    seconds: float
    """From then until it was verified."""
    sources: tuple[str, ...]
    """Addresses that gave bytes, in the order in which they were asked."""
    depth: int
    """Transfers between the publisher and this copy."""
    failures: tuple[str, ...]
    """What was wrong with the sources and deltas that were given up."""


class Pulled(NamedTuple):
    """A verified version in host memory."""

    manifest: WeightManifest
    tensors: dict[str, np.ndarray]
    """Read-only, since they are served to others; memory is used again only when they are gone."""
    stats: PullStats


class Replica:
    """Owns what a worker has received, the server that offers it, and connections to sources."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        run_id: str,
        host: str = "127.0.0.1",
        port: int = 0,
        keep_versions: int = 1,
        deltas: bool = True,
        streams: int = 2,
        chunk_bytes: int = PIECE_BYTES,
        chunk_timeout_s: float = 30.0,
        patience_s: float = 10.0,
    ):
        """Serves from now on, at first nothing.

        Args:
            credentials: of this process.
            run_id: the run whose versions are wanted.
            host: address to listen on: `0.0.0.0` for all.
            port: 0 takes a free one.
            keep_versions: received versions held in host memory, >= 1; one comes on top during a
                pull.
            deltas: whether to ask for deltas.
            streams: connections to a source during a transfer, >= 1.
            chunk_bytes: data bytes of one message that is sent to others.
            chunk_timeout_s: a connection that is silent for so long is cut, and goes on anew.
            patience_s: how long a source that is not the last may lack the version, or send
                nothing, before the next is asked.

        Raises:
            PortUnavailable: naming host and port.
        """
        if not patience_s > 0:
            raise ValueError(f"patience_s must be positive, got {patience_s}")
        self.store = WeightStore(run_id, keep_versions, deltas=False)
        self._credentials = credentials
        self._deltas = deltas
        self._streams = streams
        self._chunk_timeout_s = chunk_timeout_s
        self._patience_s = patience_s
        self._clients: dict[str, WeightClient] = {}
        self._pulling = threading.Lock()
        self._closed = threading.Event()
        service = weight_service(self.store, chunk_bytes=chunk_bytes)
        self._server = Server(credentials, [service], host=host, port=port)

    @property
    def address(self) -> str:
        """Where others may pull from this copy, `host:port` as bound."""
        return self._server.address

    @property
    def port(self) -> int:
        return self._server.port

    def pull(
        self,
        min_version: int,
        sources: Sequence[str],
        timeout_s: float,
        *,
        transfer_timeout_s: float | None = None,
        digest: str | None = None,
    ) -> Pulled:
        """Returns the newest version that is at least `min_version`, verified; one pull at a time.

        Args:
            min_version: oldest policy version that will do.
            sources: addresses in order of preference, >= 1; the last is the learner's, whose word
                on the manifest counts.
            timeout_s: bound of the wait for such a version to be offered.
            transfer_timeout_s: bound of its transfer, all sources together; None is `timeout_s`.
            digest: that of `min_version`, where the caller knows it; others are refused for it.

        Raises:
            TimeoutError: naming the sources, if none offers such a version in time.
            WeightTransferError: naming each source and its failure, if it cannot be had whole. What
                was held before still is.
        """
        order = list(dict.fromkeys(source for source in sources if source != self.address))
        if not order:
            raise ValueError(f"a pull needs the address of a learner, got sources {list(sources)}")
        with self._pulling:
            self._connect(order)
            asked_s = time.monotonic()
            answer, authority = self._learn(min_version, order, timeout_s, digest)
            assert answer.manifest is not None
            start_s = time.monotonic()
            pull = Pull(
                answer.manifest,
                base=self._base() if self._deltas else None,
                pool=self.store.pool,
                patience_s=self._patience_s,
                stopped=self._closed.is_set,
            )
            if not self._has(answer.manifest):
                what = f"policy version {answer.manifest.policy_version} from {', '.join(order)}"
                deadline = Deadline(transfer_timeout_s or timeout_s, what)
                known = {authority: answer.depth}
                self.store.adopt(pull.run([self._clients[name] for name in order], known, deadline))
            held = self.store.held(answer.manifest.policy_version)
            return Pulled(
                held.manifest,
                arrays_of(held.manifest, held.stream),
                _stats(pull, held, wait_s=start_s - asked_s, seconds=time.monotonic() - start_s),
            )

    def close(self, grace_s: float = 0.0) -> None:
        """Ends a pull that runs, lets transfers to others end for so long, and stops serving."""
        self._closed.set()
        with self._pulling:
            self._connect([])
        self._server.stop(grace_s)

    def __enter__(self) -> "Replica":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _connect(self, order: Sequence[str]) -> None:
        """Has a client for each of these sources, and for no other."""
        for gone in [address for address in self._clients if address not in order]:
            self._clients.pop(gone).close()
        for address in order:
            if address not in self._clients:
                self._clients[address] = WeightClient(
                    address,
                    self._credentials,
                    run_id=self.store.run_id,
                    streams=self._streams,
                    chunk_timeout_s=self._chunk_timeout_s,
                )

    def _learn(
        self, min_version: int, order: Sequence[str], timeout_s: float, digest: str | None
    ) -> tuple[Answer, str]:
        """Asks the learner for a manifest, and the relays where it does not answer.

        Returns:
            An answer with a manifest, and who gave it.
        """
        deadline = Deadline(timeout_s, f"policy version >= {min_version} from {', '.join(order)}")
        *relays, learner = order
        while True:
            reasons: list[str] = []
            refusals = 0
            for address in (learner, *relays):
                wait_s = WAIT_FRACTION * min(deadline.remaining_s(), LONGEST_ASK_S)
                try:
                    answer = self._ask(
                        address, min_version, wait_s if address == learner else 0.0, deadline
                    )
                except WeightTransferError as error:
                    reasons.append(str(error))
                    refusals += not isinstance(error, Unreachable)
                    continue
                problem = _problem(answer, min_version, digest)
                if problem is None:
                    return answer, address
                reasons.append(f"{address} {problem}")
                if address == learner and answer.manifest is None:
                    break  # nobody can have what the learner has not
            reason = "; ".join(reasons)
            if self._closed.is_set() or refusals == len(order):
                raise WeightTransferError(f"policy version >= {min_version}: {reason}")
            if deadline.remaining_s() <= POLL_S:
                raise deadline.error(reason)
            self._closed.wait(POLL_S)

    def _ask(self, address: str, min_version: int, wait_s: float, deadline: Deadline) -> Answer:
        timeout_s = min(wait_s + self._patience_s, max(deadline.remaining_s(), POLL_S))
        return self._clients[address].ask(
            min_version, wait_s=wait_s, timeout_s=timeout_s, stopped=self._closed.is_set
        )

    def _base(self) -> HeldVersion | None:
        current = self.store.current_version
        return None if current < 0 else self.store.held(current)

    def _has(self, manifest: WeightManifest) -> bool:
        try:
            return self.store.held(manifest.policy_version).manifest.digest == manifest.digest
        except UnknownVersion:
            return False


def _problem(answer: Answer, min_version: int, digest: str | None) -> str | None:
    """Says what is wrong with an answer, if anything is."""
    manifest = answer.manifest
    if manifest is None:
        return f"has no policy version newer than {answer.current_version}"
    if digest and manifest.policy_version == min_version and manifest.digest != digest:
        return (
            f"offers policy version {min_version} with digest {manifest.digest}, but the learner "
            f"issued {digest}"
        )
    return None


def _stats(pull: Pull, held: HeldVersion, *, wait_s: float, seconds: float) -> PullStats:
    return PullStats(
        policy_version=held.manifest.policy_version,
        version_bytes=held.manifest.nbytes,
        wire_bytes=sum(pull.received.values()),
        delta=pull.by_delta,
        wait_s=wait_s,
        seconds=seconds,
        sources=tuple(pull.received),
        depth=held.depth,
        failures=tuple(pull.failures),
    )
