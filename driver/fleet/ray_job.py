"""What the run says of itself in the list of a Ray cluster's jobs."""

import json
import os
from collections.abc import Mapping

from ray.exceptions import RaySystemError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""By which Ray tells a submitted job what it was submitted with."""
_NAMESPACE = b"job"
_RECORD = "_ray_internal_job_info_{}"


def add_metadata(metadata: Mapping[str, str]) -> bool:
    """Adds to what `ray job list` shows of the submitted job that this process is.

    A driver that was not submitted has its metadata from `ray.init`. For one that was, Ray lists
    what came with the submission, and has no call to add to it: the record is in its key-value
    store, where the job's supervisor writes only when the job begins and ends. Best effort.

    Returns:
        Whether it stands there; false where this is no submitted job.
    """
    try:
        submitted = json.loads(os.environ.get(CONFIG_VARIABLE, "{}")).get("metadata") or {}
        key = _RECORD.format(submitted["job_submission_id"])
        record = json.loads(_internal_kv_get(key, namespace=_NAMESPACE) or "")
        record["metadata"] = {**(record.get("metadata") or {}), **metadata}
        _internal_kv_put(key, json.dumps(record), namespace=_NAMESPACE)
    except (KeyError, ValueError, RaySystemError):
        return False
    return True
