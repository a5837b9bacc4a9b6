"""Jinja2 environments, and the terminal's form of a verdict.

The sentences stand once, in ``templates/verdict``; each surface brings its own ``name``, ``strong``, ``when``
and ``link`` filters. Every value that a template prints goes through the surface's escaping first: a template
cannot forget it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jinja2
from rich.cells import cell_len

from bot import wording
from diagnosis.store import JobInfo
from diagnosis.verdict import Verdict

WIDTH = 100
"""Columns of the terminal form."""

_FILTERS: dict[str, Callable[..., Any]] = {
    "age": wording.age,
    "cause": wording.cause,
    "confidence": wording.confidence,
    "count": wording.count,
    "metric": wording.metric,
    "ms": wording.ms,
    "number": wording.number,
    "percent": wording.percent,
    "q": wording.q_value,
    "sentence": wording.sentence,
    "signed": wording.signed,
    "words": wording.words,
}
_GLOBALS: dict[str, Any] = {
    "LAYER": wording.LAYER,
    "OWNER": wording.OWNER,
    "change": wording.change,
}


def environment(escape: Callable[[object], str], **surface: Callable[..., object]) -> jinja2.Environment:
    """An environment for one surface. ``escape`` gets every printed value; ``surface`` are its own filters.

    ``autoescape`` stays off: it writes HTML entities, and neither Slack nor a terminal reads those.
    """
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("templates", ""),
        autoescape=False,  # noqa: S701
        finalize=escape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
    )
    made.filters.update(_FILTERS | surface)
    made.globals.update(_GLOBALS)
    return made


@cache
def terminal() -> jinja2.Environment:
    return environment(
        _plain,
        name=_plain,
        strong=_plain,
        when=wording.utc,
        span=wording.span,
        link=lambda url, label: f"{label}: {url}",
    )


class _Table(str):
    """Lines that were made here, cell by cell, and keep their breaks."""

    __slots__ = ()


def _plain(value: object) -> str:
    """Any value as one line without control characters: no escape sequence of a terminal gets through."""
    if isinstance(value, _Table):
        return value
    text = wording.shown(str(value), wording.MAX_SENTENCE)
    return wording.INSTANT.sub(lambda found: wording.utc(found[0]), text)


def verdict_text(verdict: Verdict) -> str:
    """The verdict as plain text of at most 100 columns; ends with a line break."""
    return _fold(
        terminal()
        .get_template("terminal/verdict.txt.j2")
        .render(
            v=verdict,
            headline=wording.headline(verdict),
            summary=wording.summary(verdict),
            told=wording.tells_by_summary(verdict),
            account=_Table(wording.account_table(verdict)),
            slowdown=wording.slowdown(verdict),
            cleared=wording.cleared(verdict),
            unseen=wording.unseen(verdict),
        )
    )


def jobs_text(jobs: list[JobInfo], now_ns: int) -> str:
    """The list of jobs as plain text; ``now_ns`` is UTC. Ends with a line break."""
    rows = [["job", "ranks", "nodes", "newest data", "first seen"]]
    for job in jobs:
        rows.append(
            [
                wording.shown(job.job, 40),
                f"{job.ranks_seen} of {job.world_size}",
                str(job.nodes or "–"),
                wording.age(job.last_ns, now_ns),
                wording.age(job.first_ns, now_ns),
            ]
        )
    listing = _Table(wording.table(rows)) if jobs else ""
    return _fold(terminal().get_template("terminal/jobs.txt.j2").render(listing=listing))


def _fold(text: str) -> str:
    """Lines of at most :data:`WIDTH` columns; a folded line goes on under its own text, not its bullet."""
    folded: list[str] = []
    for line in text.rstrip().split("\n"):
        if line.strip() or (folded and folded[-1]):  # never two empty lines together
            folded += _fold_line(line.rstrip())
    return "\n".join(folded) + "\n"


def _fold_line(line: str) -> list[str]:
    if cell_len(line) <= WIDTH:
        return [line]
    current = re.match(r" *(?:• |\d+\. )?", line)[0]  # type: ignore[index]  # matches anything
    bare, indent = line[len(current) :], " " * min(len(current), 20)
    lines: list[str] = []
    empty = True
    for word in bare.split(" "):
        while True:
            gap = "" if empty else " "
            if cell_len(current) + len(gap) + cell_len(word) <= WIDTH:
                current += gap + word
                empty = False
                break
            if empty:  # one word longer than the line
                fits = _prefix(word, WIDTH - cell_len(current))
                current, word = current + word[:fits], word[fits:]
            lines.append(current)
            current, empty = indent, True
    return [*lines, current]


def _prefix(word: str, columns: int) -> int:
    """How many characters of a word fit, at least one."""
    used = 0
    for position, character in enumerate(word):
        used += cell_len(character)
        if used > columns:
            return max(position, 1)
    return len(word)
