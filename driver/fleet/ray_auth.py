"""A token for a Ray cluster of our own; it must be set before Ray is imported."""

import secrets
from collections.abc import Mapping, MutableMapping


def joins_cluster(environ: Mapping[str, str]) -> bool:
    """Whether the environment names a cluster: RAY_ADDRESS, which a submitted job has too."""
    return bool(environ.get("RAY_ADDRESS"))


def set_token(environ: MutableMapping[str, str]) -> None:
    """Has the cluster that this process will start use a random token.

    A cluster that is joined has its own rules, and a token that the user has set stays. Ray reads
    both variables once, when it is imported.
    """
    if joins_cluster(environ) or "RAY_AUTH_MODE" in environ:
        return
    environ["RAY_AUTH_MODE"] = "token"
    environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
