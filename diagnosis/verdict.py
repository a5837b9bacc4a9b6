"""The verdict: one object per diagnosis. Slack, the page, the terminal and ``--json`` are made from it alone.

Units: ``*_ms`` are milliseconds (per step where the name says so), instants are RFC 3339 in UTC.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from typing import Literal

import msgspec

SCHEMA = 1

Status = Literal["healthy", "slow", "hang", "insufficient"]
Layer = Literal["os", "gpu", "nccl", "job"]
Owner = Literal["node", "job", "network", "storage", "unknown"]

EXIT_STATUS: dict[Status, int] = {"healthy": 0, "slow": 1, "hang": 1, "insufficient": 3}
"""Exit status of ``sysom diagnose``; 2 is an error in the call or the evidence."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    start: str
    end: str


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What the job's steps took before the change."""

    step_ms: float
    start: str
    end: str
    steps: int


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that causes the delay."""

    rank: int
    node: str
    gpu: int | None
    layer: Layer | None
    """None: the rank is known and the layer is not."""
    cause: str | None
    """Id in the catalogue (diagnosis/causes.py); None when no cause explains enough."""
    owner: Owner
    confidence: float
    cost_ms_per_step: float
    """Step time minus what it would be if this rank alone ran like its peers."""
    share_explained: float
    """Share of this rank's extra time that the cause explains."""
    detail: str
    """The thing at fault in words a person can act on: process, pid, CPU, limit."""


class AccountLine(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the costliest culprit's mean step (with none: of the median rank's), and its peers'. Of a trace's
    operations: what the phase adds to the time of the rank that is furthest, step by step."""

    part: str
    """A key of ``diagnosis.accounting.PARTS``, or of a trace's operations (``diagnosis/layers/pipeline.py``)."""
    layer: Layer
    ms: float
    peers_ms: float


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """By how much one part of the mean step grew since the baseline, in the mean over ranks."""

    part: str
    """A key of ``diagnosis.accounting.PARTS``."""
    layer: Layer
    ms: float


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """A tested finding."""

    layer: Layer
    metric: str
    rank: int
    value: float
    peers: float
    """Median of the peers."""
    unit: str
    effect: float
    """value − peers, as the test estimates it (paired, per step)."""
    q: float | None
    """p-value corrected for everything that was tested; None for what is counted and not tested."""


class Cleared(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that looks involved and is not to blame."""

    rank: int
    why: str


class RuledOut(msgspec.Struct, frozen=True, kw_only=True):
    cause: str
    why: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    window: Window
    status: Status
    since: str | None = None
    """When the steps turned slow; None when that is not known or nothing did."""
    baseline: Baseline | None = None
    step_ms: float | None = None
    """Median step in the time since the change (the window, when there was none)."""
    steps: int = 0
    """Steps that the verdict rests on."""
    world_size: int = 0
    ranks_seen: int = 0
    culprits: list[Culprit] = []
    layer: Layer | None = None
    cause: str | None = None
    also: list[str] = []
    """Ids of what else makes the steps long, the costliest first; ``cause`` and culprits aside."""
    owner: Owner | None = None
    confidence: float = 0.0
    cost_ms_per_step: float = 0.0
    joint_cost_ms_per_step: float = 0.0
    share_explained: float = 0.0
    account: list[AccountLine] = []
    unexplained_ms: float = 0.0
    """Mean step minus the sum of the account; negative allowed."""
    slowdown: list[Growth] = []
    """What the slowdown against the baseline went to; with the next field exactly the growth of the mean
    step. Empty without a baseline."""
    slowdown_unexplained_ms: float = 0.0
    summary: str = ""
    """Plain text, a few short sentences. Contains names from outside: escape it where it is shown."""
    evidence: list[Evidence] = []
    cleared: list[Cleared] = []
    ruled_out: list[RuledOut] = []
    not_seen: list[str] = []
    actions: list[str] = []
    links: dict[str, str] = {}
    schema: int = SCHEMA


def to_json(verdict: Verdict) -> str:
    """One JSON object, indented."""
    return msgspec.json.format(msgspec.json.encode(verdict), indent=2).decode()


def json_schema() -> str:
    """The JSON Schema of the object, as docs/verdict.schema.json has it; descriptions are this file's words."""
    schema = msgspec.json.schema(Verdict)
    for node in ast.parse(inspect.getsource(sys.modules[__name__])).body:
        if isinstance(node, ast.ClassDef) and node.name in schema["$defs"]:
            for field, words in itertools.pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and isinstance(words, ast.Expr):
                    assert isinstance(field.target, ast.Name)
                    text = " ".join(str(ast.literal_eval(words.value)).split())
                    schema["$defs"][node.name]["properties"][field.target.id]["description"] = text
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Verdict of sysom"} | schema
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"
