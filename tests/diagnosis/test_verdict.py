"""The verdict as an object that other programs read: its published schema is what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diagnosis.verdict import Culprit, Verdict, Window, json_schema, to_json

ROOT = Path(__file__).resolve().parents[2]
WINDOW = Window(start="2026-01-02T03:04:05.000Z", end="2026-01-02T03:14:05.000Z")


def test_the_published_schema_is_the_one_of_this_version() -> None:
    assert (ROOT / "docs" / "verdict.schema.json").read_text() == json_schema(), (
        "write it anew: Path('docs/verdict.schema.json').write_text(diagnosis.verdict.json_schema())"
    )


def test_a_verdict_is_printed_with_every_field_that_the_schema_names() -> None:
    culprit = Culprit(
        rank=3,
        node="node-7",
        gpu=None,
        layer="os",
        cause="cpu-contention",
        owner="node",
        confidence=0.8,
        cost_ms_per_step=12.5,
        share_explained=0.9,
        detail="updatedb (pid 12)",
    )
    printed = json.loads(to_json(Verdict(job="job-1", window=WINDOW, status="slow", culprits=[culprit])))
    schema = json.loads(json_schema())
    fits(printed, schema["$ref"], schema["$defs"])


def fits(value: Any, reference: str, definitions: dict[str, Any]) -> None:
    """Names and requirements alone: enough to see that both are of one version."""
    wanted = definitions[reference.rsplit("/", 1)[1]]
    assert set(value) == set(wanted["properties"]), reference
    assert set(wanted["required"]) <= set(value)
    for name, part in wanted["properties"].items():
        item = part.get("items", {}).get("$ref")
        for inner in value[name] if item else []:
            fits(inner, item, definitions)
        if "$ref" in part:
            fits(value[name], part["$ref"], definitions)
