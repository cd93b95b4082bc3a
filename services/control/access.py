"""Address and credentials of a run's control service, in `<run>/control/`.

Any reader of the folder can control the run, so only its owner may read it.
"""

import pathlib
import shutil

from services.wire.private_folder import replace_private
from services.wire.tls import Credentials

FOLDER = "control"


class NoAccess(RuntimeError):
    """The folder holds no run that can be controlled; the message gives the reason."""


def write_access(folder: pathlib.Path, address: str, credentials: Credentials) -> None:
    """Puts the whole folder in place at once; only its owner may read it.

    Args:
        folder: of the run.
        address: `host:port` to dial.
        credentials: for the callers.
    """
    contents = {
        "address": address.encode(),
        "ca.pem": credentials.ca_pem,
        "cert.pem": credentials.cert_pem,
        "key.pem": credentials.key_pem,
    }
    replace_private(folder / FOLDER, contents)


def remove_access(folder: pathlib.Path) -> None:
    """Removes the folder at the end of the run."""
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
            f"{where} is missing: the run in {folder} is still starting, or is ending; try again "
            "in a moment"
        ) from error
    except PermissionError as error:
        raise NoAccess(
            f"{where} belongs to another user: only the user who started a run may control it"
        ) from error
