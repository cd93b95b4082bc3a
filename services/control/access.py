"""The way to a run's control service, as its driver leaves it in `<run>/control/`.

Whoever may read the folder may control the run, so it is for its owner alone.
"""

import pathlib
import shutil

from services.wire.private_folder import replace_private
from services.wire.tls import Credentials

FOLDER = "control"


class NoAccess(RuntimeError):
    """The folder holds no run that can be talked to; the message says why."""


def write_access(folder: pathlib.Path, address: str, credentials: Credentials) -> None:
    """Puts the whole folder in place at once; only its owner may look into it.

    Args:
        folder: of the run.
        address: `host:port` to dial.
        credentials: that the caller is to show.
    """
    contents = {
        "address": address.encode(),
        "ca.pem": credentials.ca_pem,
        "cert.pem": credentials.cert_pem,
        "key.pem": credentials.key_pem,
    }
    replace_private(folder / FOLDER, contents)


def remove_access(folder: pathlib.Path) -> None:
    """Takes it away, where the run ends."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def read_access(folder: pathlib.Path) -> tuple[str, Credentials]:
    """Address and credentials that the run in this folder has left.

    Raises:
        NoAccess: if they are not there or not for this user.
    """
    where = folder / FOLDER
    try:
        return (where / "address").read_text(), Credentials(
            ca_pem=(where / "ca.pem").read_bytes(),
            cert_pem=(where / "cert.pem").read_bytes(),
            key_pem=(where / "key.pem").read_bytes(),
        )
    except FileNotFoundError as error:
        raise NoAccess(
            f"{where} is not there: the run in {folder} has not got so far yet, or is ending; try "
            "again in a moment"
        ) from error
    except PermissionError as error:
        raise NoAccess(
            f"{where} belongs to another user: only who started a run may control it"
        ) from error
