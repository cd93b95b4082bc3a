"""A worker's copy of the policy: pulled from a source that has it, and served to others.

The manifest of a version comes from the learner, its bytes from the nearest relay. Every byte is
checked against the manifest, so a relay that is slow, gone or wrong only costs time: the pull goes
on at the next source with what has arrived. Each source is asked for the delta first, if the
version before is held, then for all bytes. A tensor whose bytes are wrong is fetched again from the
next source, and the last one gets a second attempt where others sent some of the bytes.
"""

import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from services.weights.client import POLL_S, Offer, WeightClient
from services.weights.delta import Delta
from services.weights.digest import HASH_THREADS
from services.weights.service import weight_service
from services.weights.store import (
    DELTA_SHARE,
    HeldDelta,
    HeldVersion,
    UnknownVersion,
    WeightStore,
    same_layout,
)
from services.weights.transfer import (
    NotHeld,
    Transfer,
    Unreachable,
    WeightTransferError,
    arrays_of,
)
from services.wire.channel import PIECE_BYTES, Deadline
from services.wire.messages import NO_VERSION, WeightManifest
from services.wire.server import Server
from services.wire.tls import Credentials

WAIT_FRACTION = 0.8
"""Share of the time left that a server may hold a request, so that its answer is in time."""
LONGEST_ASK_S = 10.0
"""Longest time that a learner without a newer version may hold a request; it is asked again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PullStats:
    """How one version came here."""

    policy_version: int
    version_bytes: int
    """Of the version itself."""
    wire_bytes: int
    """Tensor and delta bytes received for it, from all sources; 0 if it was held already."""
    delta: bool
    """Whether it was made from the version before."""
    wait_s: float
    """Until a source offered the version."""
    seconds: float
    """From then until it was verified."""
    sources: tuple[str, ...]
    """Addresses that sent bytes, in the order in which they were asked."""
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
            chunk_timeout_s: a connection that is silent for this long is cut and opened again.
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
        """Port of `address`."""
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
            sources: addresses in order of preference, >= 1; the last is the learner's, whose
                manifest takes precedence.
            timeout_s: bound of the wait for such a version to be offered.
            transfer_timeout_s: bound of its transfer, all sources together; None is `timeout_s`.
            digest: that of `min_version`, where the caller knows it; others are refused for it.

        Raises:
            TimeoutError: naming the sources, if none offers such a version in time.
            WeightTransferError: naming each source and its failure, if it cannot be fetched whole.
                What was held before still is.
        """
        order = list(dict.fromkeys(source for source in sources if source != self.address))
        if not order:
            raise ValueError(f"a pull needs the address of a learner, got sources {list(sources)}")
        with self._pulling:
            self._connect(order)
            asked_s = time.monotonic()
            offer, offered_by = self._newest(min_version, order, timeout_s, digest)
            manifest = offer.manifest
            assert manifest is not None
            start_s = time.monotonic()
            received, failures, by_delta = collections.Counter[str](), [], False
            if not self._has(manifest):
                what = f"policy version {manifest.policy_version} from {', '.join(order)}"
                deadline = Deadline(transfer_timeout_s or timeout_s, what)
                depths = {order[-1]: 0, offered_by: offer.depth}
                version, received, failures = self._receive(manifest, order, depths, deadline)
                by_delta = version.delta is not None
                self.store.adopt(version)
            held = self.store.held(manifest.policy_version)
            stats = PullStats(
                policy_version=manifest.policy_version,
                version_bytes=manifest.nbytes,
                wire_bytes=received.total(),
                delta=by_delta,
                wait_s=start_s - asked_s,
                seconds=time.monotonic() - start_s,
                sources=tuple(received),
                depth=held.depth,
                failures=tuple(failures),
            )
            return Pulled(held.manifest, arrays_of(held.manifest, held.stream), stats)

    def close(self, grace_s: float = 0.0) -> None:
        """Ends a pull that runs, and stops serving; transfers to others get `grace_s` to end."""
        self._closed.set()
        with self._pulling:
            self._connect([])
        self._server.stop(grace_s)

    def __enter__(self) -> "Replica":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _connect(self, order: Sequence[str]) -> None:
        """Keeps a client for each of these sources, and closes the others."""
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

    def _newest(
        self, min_version: int, order: Sequence[str], timeout_s: float, digest: str | None
    ) -> tuple[Offer, str]:
        """Asks the learner for a manifest, and the relays where it does not answer.

        Returns:
            An offer with a manifest, and the address that made it.
        """
        deadline = Deadline(timeout_s, f"policy version >= {min_version} from {', '.join(order)}")
        *relays, learner = order
        while True:
            reasons: list[str] = []
            refusals = 0
            for address in (learner, *relays):
                wait_s = WAIT_FRACTION * min(deadline.remaining_s(), LONGEST_ASK_S)
                try:
                    offer = self._ask(
                        address, min_version, wait_s if address == learner else 0.0, deadline
                    )
                except WeightTransferError as error:
                    reasons.append(str(error))
                    refusals += not isinstance(error, Unreachable)
                    continue
                problem = _problem(offer, min_version, digest)
                if problem is None:
                    return offer, address
                reasons.append(f"{address} {problem}")
                if address == learner and offer.manifest is None:
                    break  # no relay can have what the learner has not
            reason = "; ".join(reasons)
            if self._closed.is_set() or refusals == len(order):
                raise WeightTransferError(f"policy version >= {min_version}: {reason}")
            if deadline.remaining_s() <= POLL_S:
                raise deadline.error(reason)
            self._closed.wait(POLL_S)

    def _ask(self, address: str, min_version: int, wait_s: float, deadline: Deadline) -> Offer:
        timeout_s = min(wait_s + self._patience_s, max(deadline.remaining_s(), POLL_S))
        return self._clients[address].ask_manifest(
            min_version, wait_s=wait_s, timeout_s=timeout_s, stopped=self._closed.is_set
        )

    def _receive(
        self,
        manifest: WeightManifest,
        order: Sequence[str],
        depths: dict[str, int],
        deadline: Deadline,
    ) -> tuple[HeldVersion, collections.Counter[str], list[str]]:
        """Fetches one version; each source gives what the ones before it did not.

        Args:
            manifest: of the version, from the learner, or from a relay where that does not answer.
            order: addresses of the sources, in order of preference, >= 1.
            depths: of sources that have offered this very version; those of others are added.
            deadline: of all sources together.

        Returns:
            The version, bytes by the address that sent them, and what was wrong with sources and
            deltas that were given up.

        Raises:
            WeightTransferError: naming what was wrong with each source.
        """
        failures: list[str] = []
        error: WeightTransferError | None = None
        with concurrent.futures.ThreadPoolExecutor(HASH_THREADS) as hashing:
            buffer = self.store.pool.take_buffer(manifest.nbytes)
            transfer = Transfer(manifest, buffer, hashing, base=self._base(manifest))
            for client, bound, patience_s in self._attempts(order, transfer, deadline):
                try:
                    if self._closed.is_set():
                        raise Unreachable("the pull was stopped")
                    if client.address not in depths:
                        depths[client.address] = self._depth_at(client, manifest)
                    delta = self._receive_delta(client, transfer, bound, patience_s, failures)
                    if delta is None:
                        transfer.base = None
                        self._fill(client, transfer, bound, patience_s)
                except WeightTransferError as failure:
                    failures.append(f"{client.address}: {failure}")
                    error = failure
                    continue
                depth = 1 + max((depths[address] for address in transfer.received), default=0)
                version = HeldVersion(manifest=manifest, stream=buffer, depth=depth, delta=delta)
                return version, transfer.received, failures
        raise WeightTransferError(
            f"policy version {manifest.policy_version} could not be pulled: " + "; ".join(failures)
        ) from error

    def _attempts(
        self, order: Sequence[str], transfer: Transfer, deadline: Deadline
    ) -> Iterator[tuple[WeightClient, Deadline, float | None]]:
        """Yields the source to ask next, until when, and how long it may send nothing."""
        *relays, last = (self._clients[address] for address in order)
        for relay in relays:
            left_s = max(deadline.remaining_s() / 2, POLL_S)
            yield (
                relay,
                Deadline(left_s, f"{deadline.waiting_for}: {relay.address}"),
                self._patience_s,
            )
        yield last, deadline, None
        if len(transfer.received) > 1 and not self._closed.is_set() and deadline.remaining_s():
            yield last, deadline, None  # what was wrong may have come from another source

    def _depth_at(self, relay: WeightClient, manifest: WeightManifest) -> int:
        """Waits until a relay has the version; returns its depth."""
        version = manifest.policy_version
        deadline = Deadline(self._patience_s, relay.address)
        while True:
            left_s = max(deadline.remaining_s(), POLL_S)
            offer = relay.ask_manifest(
                version,
                wait_s=WAIT_FRACTION * left_s,
                timeout_s=left_s,
                stopped=self._closed.is_set,
            )
            offered = offer.manifest
            if offered is not None:
                break
            if deadline.remaining_s() <= POLL_S:
                raise NotHeld(f"has nothing newer than policy version {offer.current_version}")
            time.sleep(POLL_S)
        if offered.policy_version == version and offered.digest != manifest.digest:
            raise WeightTransferError(
                f"offers policy version {version} with digest {offered.digest}, but the learner "
                f"issued {manifest.digest}"
            )
        return offer.depth

    def _receive_delta(
        self,
        client: WeightClient,
        transfer: Transfer,
        bound: Deadline,
        patience_s: float | None,
        failures: list[str],
    ) -> HeldDelta | None:
        """Makes the version from its base; None where all bytes are needed, with the reason noted.

        Raises:
            Unreachable: if the source is one of several and sends nothing: the next may go on.
        """
        base, manifest = transfer.base, transfer.manifest
        if base is None:
            return None
        left_s = max(min(bound.remaining_s(), self._patience_s), POLL_S)
        try:
            described = client.ask_delta(
                manifest,
                base.manifest,
                wait_s=WAIT_FRACTION * left_s,
                timeout_s=left_s,
                stopped=self._closed.is_set,
            )
            if described is None or described.nbytes > DELTA_SHARE * manifest.nbytes:
                return None
            stream = transfer.delta_transfer(described)
            self._fill(client, stream, bound, patience_s, base.manifest.policy_version)
            delta = Delta(manifest=described, stream=stream.buffer)
            transfer.apply_delta(delta)
        except (WeightTransferError, ValueError) as error:
            if isinstance(error, Unreachable) and patience_s is not None:
                raise
            failures.append(f"{client.address}: {error}")
            return None
        made: concurrent.futures.Future[Delta] = concurrent.futures.Future()
        made.set_result(delta)
        return HeldDelta(
            base_version=base.manifest.policy_version, base_digest=base.manifest.digest, made=made
        )

    def _fill(
        self,
        client: WeightClient,
        transfer: Transfer,
        bound: Deadline,
        patience_s: float | None,
        base_version: int | None = None,
    ) -> None:
        client.fill(
            transfer,
            bound,
            base_version=base_version,
            patience_s=patience_s,
            stopped=self._closed.is_set,
        )

    def _base(self, manifest: WeightManifest) -> HeldVersion | None:
        """The newest version held, where a delta from it to this one may exist."""
        current = self.store.current_version
        if not self._deltas or current == NO_VERSION:
            return None
        held = self.store.held(current)
        return held if same_layout(held.manifest, manifest) else None

    def _has(self, manifest: WeightManifest) -> bool:
        try:
            return self.store.held(manifest.policy_version).manifest.digest == manifest.digest
        except UnknownVersion:
            return False


def _problem(offer: Offer, min_version: int, digest: str | None) -> str | None:
    """What is wrong with an offer; None where it can be used."""
    manifest = offer.manifest
    if manifest is None:
        return f"has no policy version newer than {offer.current_version}"
    if digest and manifest.policy_version == min_version and manifest.digest != digest:
        return (
            f"offers policy version {min_version} with digest {manifest.digest}, but the learner "
            f"issued {digest}"
        )
    return None
