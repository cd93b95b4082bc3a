"""Uploads an exported model to the Hugging Face hub."""

import pathlib

import httpx
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

_REFUSALS = (
    *(HFValidationError, HfHubHTTPError, httpx.HTTPError, httpx.InvalidURL),
    *(OSError, ValueError, RuntimeError),
)
"""A RuntimeError is what the upload of a large file ends with."""


class HubRefused(OSError):
    """The hub did not take the folder; the message has its reason."""


def upload_model(folder: pathlib.Path, repository: str, *, message: str, private: bool) -> str:
    """Uploads a folder as a model, in one commit.

    The token is that of the environment (HF_TOKEN) or of a login of huggingface_hub.

    Args:
        repository: `owner/name`; made where there is none.
        message: of the commit.
        private: of a repository that is made.

    Returns:
        the address of the commit.

    Raises:
        HubRefused: if it cannot be reached, or refuses name, token or files.
    """
    hub = huggingface_hub.HfApi()
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        commit = hub.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except _REFUSALS as error:
        reason = " ".join(str(error).split())
        raise HubRefused(
            f"the upload to {repository} failed: {reason}. Check the name, and HF_TOKEN, which "
            "must be allowed to write"
        ) from error
    return commit.commit_url
