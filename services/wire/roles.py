"""Which process of a run may call which rpc of its servers.

Every process has a certificate of the run, and the handshake lets every one of them in. What it may
ask for follows from its role, which its common name says: `learner`, or `rollout-3`.
"""

import enum
import re
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf import descriptor_pool

DETAILS_CHARS = 1000
"""Longest error text sent back: gRPC refuses trailers above 8 KiB."""


class Role(enum.Enum):
    """What the holder of a certificate is."""

    LEARNER = "learner"
    ROLLOUT = "rollout"
    DRIVER = "driver"
    CONTROL = "control"
    """A person's command or the dashboard, which have the credentials in `<run>/control/`."""


_WORKERS = frozenset({Role.ROLLOUT})
_COMMANDERS = frozenset({Role.CONTROL, Role.DRIVER})

CALLERS: Mapping[str, frozenset[Role]] = {
    "/grpc.health.v1.Health/Check": frozenset(Role),
    "/tandem.v1.TrajectoryService/PushGroup": _WORKERS,
    "/tandem.v1.WeightService/GetManifest": _WORKERS,
    "/tandem.v1.WeightService/GetDelta": _WORKERS,
    "/tandem.v1.WeightService/FetchWeights": _WORKERS,
    "/tandem.v1.ControlService/ScaleRollout": _COMMANDERS,
    "/tandem.v1.ControlService/DrainWorker": _COMMANDERS,
    "/tandem.v1.ControlService/GetFleet": _COMMANDERS,
}
"""The roles that may call each rpc; one that is not listed is refused to all."""


def role_of(common_name: str) -> Role | None:
    """The role of a certificate; None for a name that has none."""
    if re.fullmatch(r"rollout-[0-9]+", common_name):
        return Role.ROLLOUT
    return {role.value: role for role in Role if role is not Role.ROLLOUT}.get(common_name)


def check_listed(service: str) -> None:
    """Checks that every rpc of a service names its callers.

    Args:
        service: full name, such as `tandem.v1.WeightService`.

    Raises:
        ValueError: naming the rpc.
    """
    for method in descriptor_pool.Default().FindServiceByName(service).methods:
        if not CALLERS.get(path := f"/{service}/{method.name}"):
            raise ValueError(f"{path} has no roles: add its callers to CALLERS in {__name__}")


class RoleCheck(grpc.ServerInterceptor):
    """Refuses every call of a role that CALLERS does not list, before its handler sees it."""

    def intercept_service(self, continuation, handler_call_details):
        """As grpc.ServerInterceptor says."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        kind = (handler.request_streaming, handler.response_streaming)
        name, wrap = _KINDS[kind]
        return wrap(
            _checked(getattr(handler, name), handler_call_details.method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


_KINDS: Mapping[tuple[bool, bool], tuple[str, Callable[..., grpc.RpcMethodHandler]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def _checked(behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
    callers = CALLERS.get(method, frozenset())

    def call(request, context):
        names = [name.decode() for name in context.auth_context().get("x509_common_name", ())]
        if not any(role_of(name) in callers for name in names):
            may = ", ".join(sorted(role.value for role in callers)) or "none"
            context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"the certificate of {', '.join(names) or 'no name'} may not call {method}; the "
                f"roles that may: {may}"[:DETAILS_CHARS],
            )
        return behavior(request, context)

    return call
