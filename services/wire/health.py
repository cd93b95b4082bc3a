"""Asks a server of the run whether it serves, or all the time whether it can be reached.

Pushes and fetches of a worker wait for a learner that is away, for minutes, since it may be
replaced meanwhile; and both may have nothing to send. `LearnerProbe` connects every few seconds
beside them. The driver compares: a learner that answers it, and not the worker, is cut off from
that worker.
"""

import threading
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.wire.channel import Deadline, open_channel
from services.wire.tls import Credentials

EVERY_S = 2.0
"""Between two questions."""
ASK_S = 4.0
"""How long one may take."""
AGAIN_S = 1.0
"""Before the next question after one without an answer."""


class NotServing(RuntimeError):
    """The server answers that it does not serve, or does not have the service."""


def check_serving(
    address: str, credentials: Credentials, *, timeout_s: float, service: str = ""
) -> None:
    """Returns once the server says SERVING.

    Args:
        address: `host:port`.
        credentials: of this process.
        timeout_s: how long the server may take, its start included.
        service: full name, such as `tandem.v1.WeightService`; empty asks for the whole server.

    Raises:
        TimeoutError: naming the server, if it does not answer in time.
        NotServing: if it answers anything else.
    """
    deadline = Deadline(timeout_s, f"the health of the server at {address}")
    request = health_pb2.HealthCheckRequest(service=service)
    with open_channel(address, credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = deadline.call(lambda left_s: stub.Check(request, timeout=left_s))  # pyright: ignore[reportAttributeAccessIssue]
        except grpc.RpcError as error:
            details = error.details()  # pyright: ignore[reportAttributeAccessIssue]
            raise NotServing(f"server at {address}, service {service!r}: {details}") from error
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        raise NotServing(f"server at {address}, service {service!r}: {status}")


def check_reachable(address: str, credentials: Credentials, *, timeout_s: float) -> None:
    """Returns once a new connection with the server is there, however busy its threads are.

    Raises:
        TimeoutError: naming the server, if there is none in time.
    """
    with open_channel(address, credentials) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout_s)
        except grpc.FutureTimeoutError:
            raise TimeoutError(f"{address} took no connection within {timeout_s:g} s") from None


class LearnerProbe:
    """Owns the thread that asks."""

    def __init__(self, ask: Callable[[str, float], None], address: str):
        """Starts at once.

        Args:
            ask: asks the server at an address, for at most so many seconds; raises TimeoutError.
            address: `host:port` of the learner.
        """
        self._ask = ask
        self._address = address
        self._silent_s = 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="learner-probe", daemon=True).start()

    @property
    def silent_s(self) -> float:
        """For how long the learner has not answered; 0 where it answered the last question.

        Each question counts for as long as it may take, so that a pause of this process does not.
        """
        return self._silent_s

    def connect(self, address: str) -> None:
        """Asks another address from the next question on."""
        with self._lock:
            if address != self._address:
                self._address, self._silent_s = address, 0.0

    def close(self) -> None:
        """Lets the thread end after its current question."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self.ask_once()
            self._closed.wait(AGAIN_S if self._silent_s else EVERY_S)

    def ask_once(self) -> None:
        """One question, and what its answer says."""
        with self._lock:
            address = self._address
        started = time.monotonic()
        answered = True
        try:
            self._ask(address, ASK_S)
        except TimeoutError:
            answered = False
        took_s = min(time.monotonic() - started, ASK_S) + AGAIN_S
        with self._lock:
            if address == self._address:
                self._silent_s = 0.0 if answered else self._silent_s + took_s
