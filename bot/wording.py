"""The words and numbers in which every surface says a verdict: Slack, the terminal and the pages share them.

Pure functions, plain text out. Names from outside pass through as they are: each surface escapes them.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.cells import cell_len

from diagnosis import causes
from diagnosis.accounting import PARTS
from diagnosis.verdict import AccountLine, Culprit, Owner, Status, Verdict, Window
from diagnosis.wording import IN_PART, MINUS, listed
from diagnosis.wording import ms as ms
from diagnosis.wording import percent as percent
from diagnosis.wording import ranks as ranks

INSTANT = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z")
"""An instant within a text; each surface shows it as it shows instants."""
MAX_SENTENCE = 600
"""Longest sentence from outside that is shown, in characters; the rest is left out, and said to be."""

STATUS: dict[Status, str] = {
    "healthy": "is healthy",
    "slow": "is slow",
    "hang": "hangs",
    "insufficient": "not enough evidence",
}
LAYER: dict[str | None, str] = {
    "os": "operating system",
    "gpu": "GPU",
    "nccl": "collective communication",
    "job": "the job itself",
    None: "layer unknown",
}
OWNER: dict[Owner, str] = {
    "node": "whoever runs the node",
    "job": "whoever runs the job",
    "network": "the network's owner",
    "storage": "the storage's owner",
    "unknown": "not known",
}
METRICS: dict[str, str] = {
    "own": "own time",
    "growth": "own time grew by",
    "lateness": "late into collectives",
    **{part: known.label for part, known in PARTS.items()},
}
"""Short words for what is tested (``diagnosis.case.METRICS``)."""
CONFIDENCE: tuple[tuple[float, str], ...] = (
    (0.95, "almost certain"),
    (0.80, "very likely"),
    (0.60, "likely"),
    (0.40, "possible"),
    (0.0, "a weak guess"),
)
"""The least confidence for each word. The engine's number always stands beside it."""


def number(value: float) -> str:
    """Three significant digits, thousands apart: ``1,234``, ``52.1``, ``0.42``."""
    if not math.isfinite(value):
        return "unknown"
    size = abs(value)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    text = f"{size:,.{digits}f}"
    return MINUS + text if value < 0 and float(text.replace(",", "")) else text


def signed(value: float) -> str:
    """:func:`number` with its sign: ``+19.1``, ``−0.30``; ``±0`` when nothing is left of it."""
    text = number(value)
    if text == "0.00":
        return "±0"
    return text if text[0] in f"{MINUS}u" else f"+{text}"


def change(now: float, before: float) -> str:
    """How much ``now`` is above ``before``: ``+58 %``; empty when there is nothing to compare with."""
    if not (before > 0 and math.isfinite(now) and math.isfinite(before)):
        return ""
    rounded = round((now / before - 1) * 100)
    return f"{MINUS}{-rounded:,} %" if rounded < 0 else f"+{rounded:,} %"


def confidence(value: float) -> str:
    """In words and per cent: ``very likely (92 %)``."""
    word = next((word for least, word in CONFIDENCE if value >= least), CONFIDENCE[-1][1])
    return f"{word} ({percent(value)})"


def q_value(q: float) -> str:
    return "q < 0.001" if q < 0.001 else f"q = {q:.3f}"


def count(value: int, noun: str) -> str:
    """``1 rank``, ``4 ranks``, ``1,234 steps``."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def words(identifier: str) -> str:
    """An identifier as words: ``cpu-contention`` → ``cpu contention``, ``run_queue`` → ``run queue``."""
    text = " ".join(identifier[:200].replace("_", " ").replace("-", " ").split())
    return " ".join(
        word.upper() if word in ("cpu", "gpu", "io", "irq", "nccl", "os") else word
        for word in text.split(" ")
    )


def cause(identifier: str) -> str:
    """A cause's title in the catalogue: ``cpu-contention`` → ``CPU contention``; an unknown id as words."""
    text = causes.TITLES.get(identifier) or words(identifier)
    return text[:1].upper() + text[1:]


def metric(identifier: str) -> str:
    """What was tested, at the start of a line: ``runnable`` → ``Waiting for a CPU``."""
    text = METRICS.get(identifier) or words(identifier)
    return text[:1].upper() + text[1:]


def unseen(verdict: Verdict) -> list[str]:
    """What was not seen, without what the summary says already."""
    return [gap for gap in verdict.not_seen if not (tells_by_summary(verdict) and gap in verdict.summary)]


def hides(verdict: Verdict) -> list[str]:
    """Of what was not seen, what may hide something: without what probes that work cannot see on such a machine."""
    return [gap for gap in unseen(verdict) if IN_PART not in gap]


def cleared(verdict: Verdict) -> list[tuple[str, str]]:
    """``(ranks, why)``, the ranks that were cleared for one reason together."""
    together: dict[str, list[int]] = {}
    for entry in verdict.cleared:
        together.setdefault(entry.why, []).append(entry.rank)
    return [(ranks(numbers), why) for why, numbers in together.items()]


def instant(text: str) -> datetime | None:
    """An RFC 3339 instant; None for what is not one."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)


def utc(text: str) -> str:
    """``2026-01-02 14:05:12 UTC``; what is no instant stays as it is."""
    moment = instant(text)
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else text


def span(window: Window) -> str:
    """``2026-01-02 14:00:00 to 14:10:00 UTC``; both dates when the days differ."""
    start, end = instant(window.start), instant(window.end)
    if start and end and start.date() == end.date():
        return f"{start:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S} UTC"
    return f"{utc(window.start)} to {utc(window.end)}"


NO_DATE_NS = 10 * 365 * 86_400 * 1_000_000_000
"""Instants in the seventies are of traces that tell no date."""


def age(then_ns: int, now_ns: int) -> str:
    """How long ago, in its largest unit: ``3 s ago``, ``12 min ago``, ``5 h ago``, ``2 days ago``; ``no date`` for
    what was imported without one, which counts from 1970."""
    if then_ns < NO_DATE_NS:
        return "no date"
    seconds = (now_ns - then_ns) // 1_000_000_000
    if seconds < 1:
        return "just now"
    if seconds < 120:
        return f"{seconds} s ago"
    if seconds < 2 * 3600:
        return f"{seconds // 60} min ago"
    if seconds < 48 * 3600:
        return f"{seconds // 3600} h ago"
    return f"{seconds // 86_400} days ago"


def place(culprit: Culprit) -> str:
    """``rank 2 on node-7``, with its GPU when the fault is there; the rank alone where no node is told."""
    gpu = f", GPU {culprit.gpu}" if culprit.layer == "gpu" and culprit.gpu is not None else ""
    return f"rank {culprit.rank}{f' on {culprit.node}' if culprit.node else ''}{gpu}"


def headline(verdict: Verdict) -> str:
    """The one line that says what is going on."""
    job = shown(verdict.job, 60)
    if verdict.status == "insufficient":
        return f"{job}: {STATUS['insufficient']}"
    said = f"{job} {STATUS[verdict.status]}"
    if verdict.status == "healthy":
        return said
    if not verdict.culprits:
        if verdict.status != "slow":
            return said
        why = [cause(one) for one in (verdict.cause, *verdict.also) if one]
        because = f", but {listed([one[:1].lower() + one[1:] for one in why])}" if why else ""
        return f"{said}: no single rank is to blame{because}"
    others = len(verdict.culprits) - 1
    more = f" and {others:,} more" if others else ""
    return f"{said}: {shown(place(verdict.culprits[0]), 60)}{more}"


def tells_by_summary(verdict: Verdict) -> bool:
    """Whether the engine’s own sentence leads. With the culprit of a slow job its facts say the same."""
    return verdict.status != "slow" or not verdict.culprits


def summary(verdict: Verdict) -> str:
    """The engine's own sentences, without the words that the headline has said already."""
    text = verdict.summary
    for said in ("Healthy: ", "Not enough evidence: "):
        text = text.removeprefix(said)
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """A piece of text as a sentence. A name at its start keeps its case: processes know no capitals."""
    own = text.partition(" ")[0] in ("rank", "ranks", "it")
    end = "" if text.endswith((".", "!", "?", "…")) else "."
    return (text[:1].upper() if own else text[:1]) + text[1:] + end


def visible(text: str) -> str:
    """The text with nothing in it that hides, reorders or breaks what stands around it.

    White space and line breaks become single spaces; control characters (a terminal's escapes among them),
    zero-width and direction marks, and what is no character become ``�``; of a pile of combining marks
    the first two stay.
    """
    if text.isascii() and text.isprintable():
        return " ".join(text.split())
    kept: list[str] = []
    marks = 0
    for character in text:
        category = unicodedata.category(character)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if marks > 2:
            continue
        if character.isspace() or category in ("Zs", "Zl", "Zp"):
            kept.append(" ")
        elif category in ("Cc", "Cf", "Cs", "Cn", "Co"):
            kept.append("�")
        else:
            kept.append(character)
    return " ".join("".join(kept).split())


def shown(text: str, limit: int) -> str:
    """:func:`visible`, and at most ``limit`` characters; says how many it left out: ``abc… (+120)``."""
    looked_at = text[: 2 * limit]  # the time that this takes is bounded, however long the text is
    clean = visible(looked_at)
    length = len(clean) + len(text) - len(looked_at)
    if length <= limit:
        return clean
    kept = max(limit - len(f"… (+{length})"), 1)
    return f"{clean[:kept]}… (+{length - min(kept, len(clean))})"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in aligned columns, two spaces apart: the first to the left, the others to the right."""
    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell + pad if column == 0 else pad + cell
            for column, cell in enumerate(row)
            for pad in [" " * (widths[column] - cell_len(cell))]
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def account_table(verdict: Verdict, limit: int | None = None) -> str:
    """Where the time went, milliseconds per step: the parts with the largest difference first.

    With ``limit`` the parts that differ least are summed in one row; so are those of no time at all, if their
    sum is some. The rows add up to the last one, the whole step.
    """
    if not verdict.account:
        return ""
    lines = sorted(verdict.account, key=_weight, reverse=True)
    whole = sum(line.ms for line in lines) + verdict.unexplained_ms
    alone = [line for line in lines if _matters(line)]
    if limit is not None and len(alone) > limit:
        alone = alone[: limit - 1]
    rest = [line for line in lines if line not in alone]
    entries = [(part(line.part), line.ms, line.peers_ms) for line in alone]
    smaller = (sum(line.ms for line in rest), sum(line.peers_ms for line in rest))
    if any(round(value, 1) for value in smaller):
        entries.append((count(len(rest), "other part"), *smaller))
    who = f"rank {verdict.culprits[0].rank}" if verdict.culprits else "median rank"
    if not any(line.part in PARTS for line in lines):  # a trace's phases: of whoever is furthest in each
        who = "furthest rank"
    rows = [["ms per step", who, "peers", "more"]]
    rows += [
        [name, _fixed(own), _fixed(peers), _fixed(own - peers, plus=True)] for name, own, peers in entries
    ]
    rows.append(["unexplained", _fixed(verdict.unexplained_ms), "", ""])
    rows.append(["whole step (mean)", _fixed(whole), "", ""])
    return table(rows)


def slowdown(verdict: Verdict) -> str:
    """What the slowdown went to, in one sentence; empty where there is no baseline."""
    told = [line for line in verdict.slowdown if round(line.ms, 1)]
    if not told:
        return ""
    whole = sum(line.ms for line in verdict.slowdown) + verdict.slowdown_unexplained_ms
    parts = [f"{part(line.part)} {_fixed(line.ms, plus=True)}" for line in told]
    parts.append(f"unexplained {_fixed(verdict.slowdown_unexplained_ms, plus=True)}")
    return f"The mean step grew by {_fixed(whole)} ms (mean over ranks): {', '.join(parts)}."


def part(identifier: str) -> str:
    """A part of the step, as the first cell of a row."""
    return shown(PARTS[identifier].label if identifier in PARTS else words(identifier), 30)


def _weight(line: AccountLine) -> tuple[float, float, float]:
    """For the order of rows: of equal differences the own time stands before the others' wait for it."""
    difference = round(line.ms - line.peers_ms, 1)
    return abs(difference), difference, line.ms


def _matters(line: AccountLine) -> bool:
    return not (math.isfinite(line.ms) and math.isfinite(line.peers_ms)) or bool(
        round(line.ms, 1) or round(line.peers_ms, 1)
    )


def _fixed(value: float, *, plus: bool = False) -> str:
    """One decimal, so that a column of milliseconds can be added up by eye."""
    if not math.isfinite(value):
        return "unknown"
    rounded = round(value, 1) + 0.0
    text = f"{rounded:+,.1f}" if plus and rounded else f"{rounded:,.1f}"
    return text.replace("-", MINUS)
