"""Schemas of the dashboard's documents: JSON Schema 2020-12, as in OpenAPI 3.1."""

from typing import Any

Json = dict[str, Any]

VERSION = "1"
"""Of the interface; it changes with the meaning of something that programs read."""

TEXT: Json = {"type": "string"}
WHOLE: Json = {"type": "integer"}
FLAG: Json = {"type": "boolean"}
NUMBER: Json = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
ANY: Json = {}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _map(values: Json) -> Json:
    return {"type": "object", "additionalProperties": values}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _row(*items: Json) -> Json:
    """An array of fixed length."""
    count = len(items)
    return {"type": "array", "prefixItems": list(items), "minItems": count, "maxItems": count}


def _object(required: dict[str, Json], optional: dict[str, Json] | None = None) -> Json:
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
    }


MAYBE = _or_null(NUMBER)
_VALUES = _map(_list(MAYBE))

_RUN = _object(
    {
        "run": TEXT,
        "run_id": _or_null(TEXT),
        "folder": TEXT,
        "state": {"enum": ["running", "finished", "failed", "interrupted", "lost"]},
        "exit_code": _or_null(WHOLE),
        "reason": _or_null(TEXT),
        "step": _or_null(WHOLE),
        "steps_total": WHOLE,
        "started": MAYBE,
        "ended": MAYBE,
        "last_checkpoint": _or_null(WHOLE),
        "pid": _or_null(WHOLE),
        "host": _or_null(TEXT),
        "live": FLAG,
        "can_control": FLAG,
        "now": NUMBER,
        "processes": _list(TEXT),
        "phases": _list(TEXT),
        "scorers": _list(TEXT),
        "settings": {"type": "object"},
        "config": {"type": "object"},
        "environment": _or_null({"type": "object"}),
        "compare": FLAG,
        "version": TEXT,
    }
)

_CATALOG = _object(
    {
        "metrics": _list(
            _object(
                {"title": TEXT, "unit": TEXT, "description": TEXT, "view": TEXT, "group": TEXT},
                {"name": TEXT, "pattern": TEXT},
            )
        ),
        "phases": _list(_object({"name": TEXT, "title": TEXT, "description": TEXT, "group": TEXT})),
    }
)

_HISTORY = _object(
    {
        "first": _or_null(WHOLE),
        "last": _or_null(WHOLE),
        "bin": WHOLE,
        "steps": _list(WHOLE),
        "metrics": _VALUES,
        "processes": _list(TEXT),
        "phases": _list(TEXT),
        "wall_s": _list(MAYBE),
        "seconds": _map(_list(_or_null(_list(MAYBE)))),
        "path": _list(_or_null(_list(MAYBE))),
        "path_phases": _list(TEXT),
        "nonfinite": _map(_list(WHOLE)),
    },
    {"low": _VALUES, "high": _VALUES, "unexplained": ANY},
)

_STEP = _object(
    {
        "step": WHOLE,
        "time": NUMBER,
        "wall_s": NUMBER,
        "metrics": _map(NUMBER),
        "processes": _map(_map(NUMBER)),
        "overlap_s": _map(NUMBER),
        "absent_s": _map(NUMBER),
        "path": _map(NUMBER),
        "groups": _map({"anyOf": [_list(TEXT), WHOLE]}),
        "outstanding": WHOLE,
        "warnings": _list(TEXT),
    }
)

_TIMELINE = _object(
    {
        "start": MAYBE,
        "end": MAYBE,
        "phases": _list(TEXT),
        "steps": _list(_object({"step": WHOLE, "start": NUMBER, "end": NUMBER})),
        "lanes": _list(
            _object(
                {
                    "process": TEXT,
                    "spans": _list(_row(WHOLE, NUMBER, NUMBER)),
                    "marks": _list(_row(NUMBER, TEXT)),
                }
            )
        ),
        "gauges": _object(
            {
                "t": _list(NUMBER),
                "waiting": _list(MAYBE),
                "out": _list(MAYBE),
                "policy_version": _list(MAYBE),
            }
        ),
        "staleness": _list(_row(NUMBER, MAYBE)),
    }
)

_SAMPLE_FIELDS: dict[str, Json] = {
    "id": TEXT,
    "kind": {"enum": ["train", "eval"]},
    "step": WHOLE,
}
_SAMPLE = _object(
    _SAMPLE_FIELDS,
    {
        "prompt_id": _or_null(WHOLE),
        "group_id": _or_null(TEXT),
        "sample_index": _or_null(WHOLE),
        "worker": _or_null(TEXT),
        "completion": _or_null(TEXT),
        "rewards": _or_null(_map(MAYBE)),
        "total_reward": MAYBE,
        "reward_error": _or_null(TEXT),
        "finish_reason": _or_null(TEXT),
        "completion_tokens": _or_null(WHOLE),
        "policy_version": _or_null(WHOLE),
        "parsed": _or_null({"type": "object"}),
        "why": _or_null(TEXT),
    },
)
_SAMPLE_WHOLE = _object(
    _SAMPLE_FIELDS,
    {
        "tokens": _or_null(_list(_row(TEXT, MAYBE))),
        "tokens_cut": WHOLE,
        "prompt": _or_null(TEXT),
        "notes": _or_null(_map(TEXT)),
    },
)

_BYTES: Json = {**WHOLE, "description": "-1 if the platform does not report it."}
_WORKER = _object(
    {
        "name": TEXT,
        "state": {"enum": ["starting", "ready", "working", "draining", "gone"]},
        "policy_version": WHOLE,
        "host": TEXT,
        "pid": WHOLE,
        "restarts": WHOLE,
        "last_error": TEXT,
        "groups_leased": WHOLE,
        "groups_done": WHOLE,
        "tokens_per_s": NUMBER,
        "slots": WHOLE,
        "address": TEXT,
        "devices": TEXT,
        "host_bytes": WHOLE,
        "device_bytes": _BYTES,
        "device_peak_bytes": _BYTES,
        "pull_gb_per_s": NUMBER,
    }
)
_LEARNER = _object(
    {
        "doing": TEXT,
        "policy_version": WHOLE,
        "issued_version": WHOLE,
        "host": TEXT,
        "pid": WHOLE,
        "devices": TEXT,
        "restarts": WHOLE,
        "host_bytes": WHOLE,
        "device_bytes": _BYTES,
        "device_peak_bytes": _BYTES,
    }
)
_FLEET = _object(
    {"available": FLAG, "why": TEXT, "workers": _list(_ref("Worker"))},
    {
        "target": WHOLE,
        "min": WHOLE,
        "max": WHOLE,
        "policy": {"enum": ["fixed", "balance"]},
        "step": WHOLE,
        "policy_version": WHOLE,
        "notice": TEXT,
        "groups_waiting": MAYBE,
        "groups_out": MAYBE,
        "learner": _or_null(_ref("Learner")),
    },
)

_ALERT = _object(
    {
        "id": TEXT,
        "severity": {"enum": ["bad", "warn", "info"]},
        "text": TEXT,
        "advice": TEXT,
        "view": TEXT,
        "since_step": _or_null(WHOLE),
    }
)
_TRUST = _object(
    {
        "id": TEXT,
        "title": TEXT,
        "value": _or_null({"anyOf": [NUMBER, TEXT]}),
        "unit": TEXT,
        "bound": _or_null({"anyOf": [NUMBER, TEXT]}),
        "light": {"enum": ["ok", "warn", "bad", "none"]},
        "text": TEXT,
        "series": _list(TEXT),
    }
)
_WHAT_IF = _object(
    {
        "now": {"type": ["object", "null"]},
        "options": _list(
            _object(
                {
                    "id": TEXT,
                    "title": TEXT,
                    "step_s": MAYBE,
                    "ratio": MAYBE,
                    "note": TEXT,
                    "sure": {"enum": ["measured", "model"]},
                }
            )
        ),
        "error": {"type": ["object", "null"]},
        "past": _list({"type": "object"}),
        "changes": _list({"type": "object"}),
    }
)
_JUDGEMENT = _object(
    {
        "time": NUMBER,
        "step": _or_null(WHOLE),
        "progress": _object(
            {
                "step": _or_null(WHOLE),
                "total": WHOLE,
                "fraction": MAYBE,
                "step_s": MAYBE,
                "remaining_s": MAYBE,
                "text": TEXT,
            }
        ),
        "bottleneck": _or_null(_object({"text": TEXT})),
        "alerts": _list(_ref("Alert")),
        "trust": _list(_ref("Trust")),
        "funnel": _or_null({"type": "object"}),
        "what_if": _or_null(_WHAT_IF),
    }
)

_COMPARE = _object(
    {
        "runs": _row(_ref("Run"), _ref("Run")),
        "histories": _row(_ref("History"), _ref("History")),
        "part": _or_null(_object({"step": WHOLE, "metric": TEXT, "text": TEXT})),
        "parts": _list(_object({"metric": TEXT, "step": WHOLE, "text": TEXT})),
        "config_diff": _list(_object({"key": TEXT, "a": ANY, "b": ANY})),
        "code_diff": _list(
            _object(
                {"file": TEXT, "status": {"enum": ["added", "removed", "changed"]}, "diff": TEXT}
            )
        ),
        "environment_diff": _list(_object({"key": TEXT, "a": ANY, "b": ANY})),
    }
)

SCHEMAS: Json = {
    "Error": _object({"error": TEXT}),
    "Health": _object({"ok": FLAG}),
    "Accepted": _object({"target": WHOLE, "current": WHOLE}),
    "Run": _RUN,
    "Catalog": _CATALOG,
    "History": _HISTORY,
    "Step": _STEP,
    "Timeline": _TIMELINE,
    "Trace": _object({"traceEvents": _list({"type": "object"})}),
    "Sample": _SAMPLE,
    "Samples": _object(
        {"total": WHOLE, "offset": WHOLE, "limit": WHOLE, "items": _list(_ref("Sample"))}
    ),
    "SampleWhole": _SAMPLE_WHOLE,
    "SamplesSame": _object({"items": _list(_ref("Sample"))}),
    "Worker": _WORKER,
    "Learner": _LEARNER,
    "Fleet": _FLEET,
    "Alert": _ALERT,
    "Trust": _TRUST,
    "Judgement": _JUDGEMENT,
    "Compare": _COMPARE,
}
