"""The OpenAPI document holds every route, and every answer has the form that it promises."""

import itertools

import pytest
from jsonschema import Draft202012Validator

from benchmarks.made_run.made_run import MadeRun, make_run
from benchmarks.made_run.made_steps import RunPlan
from dashboard.app import DOCUMENT, ENDPOINTS
from dashboard.runs.driver_client import fleet_json
from dashboard.runs.run_follower import RunFollower
from diagnosis.catalog import catalog
from services.control.messages import (
    FleetStatus,
    LearnerStatus,
    ScalingPolicy,
    WorkerState,
    WorkerStatus,
)
from services.wire.strict_json import encode
from tests.dashboard.served import events, served, strict, until

pytestmark = pytest.mark.slow

FILLED = {"step": "5", "id": "t1"}


def validator(schema: dict) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def check(name: str, document) -> None:
    """Holds a document to a schema, strictly."""
    schema = {"$ref": f"#/components/schemas/{name}"}
    wrong = [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
        for error in validator(schema).iter_errors(document)
    ]
    assert not wrong, wrong[:5]


def operations():
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_every_route_is_described_and_no_other():
    there = {(one.path, one.method.lower()) for one in ENDPOINTS} | {("/static/{path}", "get")}
    assert {(path, method) for path, method, _ in operations()} == there


def test_schemas_are_valid_and_every_reference_resolves():
    for name, schema in DOCUMENT["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert schema["required"], name
    names = set(DOCUMENT["components"]["schemas"])
    assert set(references(DOCUMENT)) <= {f"#/components/schemas/{name}" for name in names}


def references(value) -> list[str]:
    if isinstance(value, list):
        return list(itertools.chain.from_iterable(map(references, value)))
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if "$ref" in value else []
    return own + list(itertools.chain.from_iterable(map(references, value.values())))


def test_parameters_in_paths_are_declared_and_operations_have_all_they_need():
    for path, method, operation in operations():
        named = {one["name"] for one in operation.get("parameters", []) if one["in"] == "path"}
        assert named == {part[1:-1] for part in path.split("/") if part.startswith("{")}
        assert operation["summary"] and "200" in operation["responses"], (path, method)
        assert ("requestBody" in operation) == (method == "post")


@pytest.fixture(scope="module", params=["plain", "hostile"])
def site(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    hostile = request.param == "hostile"
    make_run(folder, steps=30, workers=2, nonfinite=hostile, hostile=hostile)
    other = RunFollower(folder)
    with served(folder) as site:
        until(lambda: site.get("/api/run").json()["step"] == 30, "the log to be read")
        yield site, other


@pytest.mark.parametrize(
    "path, operation",
    [
        (path, operation)
        for path, method, operation in operations()
        if method == "get" and path not in ("/api/stream", "/api/compare", "/static/{path}", "/")
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_answers_have_the_form_that_is_promised(site, path, operation):
    site, _ = site
    response = site.get(path.format(**FILLED))
    (kind, promised), *_ = operation["responses"]["200"]["content"].items()
    assert response.headers["content-type"].startswith(kind)
    if kind == "application/json":
        document = strict(response.content)
        assert not list(validator(promised["schema"]).iter_errors(document)) or check(
            promised["schema"]["$ref"].rpartition("/")[2], document
        )


def test_a_comparison_has_the_form_that_is_promised(site):
    site, other = site
    with served(site.follower.folder, compared=other) as both:
        document = strict(both.get("/api/compare").content)
        check("Compare", document)
        assert both.get("/api/run").json()["compare"] is True
        assert document["runs"][0]["run_id"] == document["runs"][1]["run_id"]
        assert document["part"] is None and document["config_diff"] == []


def test_binned_history_and_one_with_names_have_the_form_that_is_promised(site):
    site, _ = site
    check("History", strict(site.get("/api/history", points=10).content))
    check("History", strict(site.get("/api/history", names="train/loss,no/such").content))
    check("Timeline", strict(site.get("/api/timeline", last_s=5).content))


def test_refusals_have_the_form_that_is_promised(site):
    site, _ = site
    for path in ("/api/step/999", "/api/history?first=x", "/nowhere", "/api/compare"):
        check("Error", strict(site.get(path).content))


def test_an_unknown_path_parameter_of_every_operation_is_refused_as_it_says(site):
    site, _ = site
    for path, method, operation in operations():
        if method == "get" and "422" in operation["responses"]:
            assert site.get(path, frist=1).status_code in (404, 422), path


def test_a_run_that_has_not_written_anything_yet_has_the_same_forms(tmp_path):
    (tmp_path / "status.json").write_text('{"run": "new", "run_id": "new-1", "state": "running"}')
    with served(tmp_path) as site:
        for path, method, operation in operations():
            content = operation["responses"]["200"]["content"].get("application/json", {})
            if method == "get" and "$ref" in content.get("schema", {}) and "{" not in path:
                response = site.get(path)
                if path != "/api/compare":
                    assert response.status_code == 200, (path, response.text)
                    check(content["schema"]["$ref"].rpartition("/")[2], strict(response.content))
        assert site.get("/metrics").status_code == 200


def test_events_have_the_forms_of_their_documents(tmp_path):
    run = MadeRun(tmp_path / "run", RunPlan(steps=50, workers=2))
    for _ in range(3):
        run.write_step()
    run.progress()
    forms = {"run": "Run", "fleet": "Fleet", "judgement": "Judgement", "step": "Step"}
    seen = set()
    with (
        served(run.folder) as site,
        site.client() as client,
        client.stream("GET", "/api/stream") as response,
    ):
        told = events(response)
        assert next(told).kind == "run"
        run.write_step()
        while not seen >= {"step", "timeline", "samples"}:
            event = next(told)
            seen.add(event.kind)
            if event.kind in forms:
                check(forms[event.kind], event.data)
    assert seen <= {*forms, "timeline", "samples", "reload"}


def test_a_whole_fleet_has_the_form_that_is_promised():
    workers = (WorkerStatus(name="rollout-0", state=WorkerState.WORKING),)
    fleet = FleetStatus(
        target=1,
        least=1,
        most=4,
        policy=ScalingPolicy.BALANCE,
        workers=workers,
        learner=LearnerStatus(doing="update"),
    )
    document = strict(encode(fleet_json(fleet)))
    check("Fleet", document)
    schemas = DOCUMENT["components"]["schemas"]
    assert set(document) == set(schemas["Fleet"]["properties"])
    assert set(document["workers"][0]) == set(schemas["Worker"]["properties"])
    assert set(document["learner"]) == set(schemas["Learner"]["properties"])


def test_the_catalog_is_the_one_of_the_program():
    check("Catalog", catalog.catalog_json())
