"""What a submitted job adds to its record in the cluster, over a store that is a dict."""

import json

import pytest
from ray.exceptions import RaySystemError

from driver.fleet import ray_job

KEY = "_ray_internal_job_info_job-7"
URL = {"tandem_dashboard": "http://127.0.0.1:8470"}


@pytest.fixture
def store(monkeypatch):
    """The cluster's key-value store, with the record of one job that was submitted."""
    store = {KEY: json.dumps({"status": "RUNNING", "metadata": {"owner": "me"}})}

    def get(key, namespace):
        assert namespace == b"job"
        return store[key].encode() if key in store else None

    def put(key, value, namespace):
        assert namespace == b"job"
        store[key] = value

    monkeypatch.setattr(ray_job, "_internal_kv_get", get)
    monkeypatch.setattr(ray_job, "_internal_kv_put", put)
    return store


def submitted(monkeypatch, job: str) -> None:
    config = {"metadata": {"job_submission_id": job, "job_name": job}}
    monkeypatch.setenv(ray_job.CONFIG_VARIABLE, json.dumps(config))


def test_metadata_is_added_to_what_the_job_was_submitted_with(store, monkeypatch):
    submitted(monkeypatch, "job-7")
    assert ray_job.add_metadata(URL)
    assert json.loads(store[KEY]) == {"status": "RUNNING", "metadata": {"owner": "me", **URL}}


def test_a_record_without_metadata_gets_some(store, monkeypatch):
    submitted(monkeypatch, "job-7")
    store[KEY] = json.dumps({"status": "RUNNING", "metadata": None})
    assert ray_job.add_metadata(URL)
    assert json.loads(store[KEY])["metadata"] == URL


@pytest.mark.parametrize("config", [None, "{}", '{"metadata": null}', "no JSON"])
def test_what_is_no_submitted_job_has_no_record(store, monkeypatch, config):
    before = dict(store)
    monkeypatch.delenv(ray_job.CONFIG_VARIABLE, raising=False)
    if config is not None:
        monkeypatch.setenv(ray_job.CONFIG_VARIABLE, config)
    assert not ray_job.add_metadata(URL)
    assert store == before


def test_a_job_that_has_no_record_and_a_store_that_fails_are_no_reason_not_to_run(
    store, monkeypatch
):
    submitted(monkeypatch, "job-8")
    before = dict(store)
    assert not ray_job.add_metadata(URL)
    assert store == before

    def fail(key, namespace):
        raise RaySystemError("the store is gone")

    submitted(monkeypatch, "job-7")
    monkeypatch.setattr(ray_job, "_internal_kv_get", fail)
    assert not ray_job.add_metadata(URL)
