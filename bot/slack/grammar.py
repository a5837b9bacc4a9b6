"""What may be typed after ``/sysom``: a closed grammar. Text in, a command or an error in words out.

>>> parse("diagnose `job-123`")
Diagnose(job='job-123')
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from dataclasses import dataclass

COMMAND = "/sysom"
USAGE = "diagnose JOB | jobs | help"
VERBS = ("diagnose", "jobs", "help")

MAX_TEXT = 1000
"""Longest text that is read at all, in characters: no job name needs more."""
MAX_JOB = 253
"""Longest job name: that of a Kubernetes object."""

_HELP = frozenset({"help", "-h", "--help", "?"})
_MARKS = {"*": "*", "_": "_", "~": "~"}
"""Slack's bold, italic and strike-through, which come along when a name is copied from a message."""
_QUOTES = {"`": "`", '"': '"', "'": "'", "“": "”", "„": "“", "‘": "’", "‚": "‘", "«": "»", "”": "”", "’": "’"}
_AUTOLINK = re.compile(r"<(?:https?://|mailto:)[^<>|]*\|([^<>|]+)>")


@dataclass(frozen=True)
class Diagnose:
    job: str


@dataclass(frozen=True)
class Jobs:
    pass


@dataclass(frozen=True)
class Help:
    pass


Command = Diagnose | Jobs | Help


class GrammarError(ValueError):
    """A text that is no command. ``str(error)`` says what is wrong; ``suggestions`` are whole commands to
    type. Both may hold what the user typed: escape them where they are shown."""

    def __init__(self, problem: str, *suggestions: str) -> None:
        super().__init__(problem)
        self.suggestions = suggestions


def parse(text: str) -> Command:
    """Read what stands after ``/sysom``. Nothing at all is a call for help.

    Raises :class:`GrammarError`.
    """
    if len(text) > MAX_TEXT:
        raise GrammarError(
            f"That is {len(text):,} characters long; a command has at most {MAX_TEXT:,}.",
            f"{COMMAND} diagnose JOB",
        )
    words = _unwrap(_clean(text))[0]
    head, _, rest = words.partition(" ")
    if head.casefold() in (COMMAND, COMMAND.lstrip("/")):
        head, _, rest = rest.strip().partition(" ")
    verb = _unwrap(head)[0].casefold()
    rest = rest.strip()
    if not verb or verb in _HELP:
        return Help()
    if verb == "jobs":
        if rest:
            raise GrammarError("“jobs” stands alone: it lists all jobs.", f"{COMMAND} jobs", _diagnose(rest))
        return Jobs()
    if verb == "diagnose":
        return Diagnose(_job(rest))
    raise _unknown(head, rest)


def _job(rest: str) -> str:
    if not rest:
        raise GrammarError("Which job?", f"{COMMAND} diagnose JOB", f"{COMMAND} jobs")
    job, quoted = _unwrap(rest)
    job = job.strip()
    if not job:
        raise GrammarError("The job's name is empty.", f"{COMMAND} jobs")
    if " " in job and not quoted:
        first = _unwrap(job.split(" ", 1)[0])[0] or "JOB"
        raise GrammarError(
            f"“diagnose” takes one job, and these are {len(job.split())} words. "
            "A name with spaces in it goes between quotes.",
            _diagnose(first),
            f'{COMMAND} diagnose "{_short(job)}"',
        )
    if len(job) > MAX_JOB:
        raise GrammarError(
            f"No job has a name of {len(job):,} characters (the most is {MAX_JOB}).", f"{COMMAND} jobs"
        )
    return job


def _unknown(head: str, rest: str) -> GrammarError:
    verb = _unwrap(head)[0]
    problem = f"“{_short(verb)}” is not a command."
    near = difflib.get_close_matches(verb.casefold(), VERBS, n=1, cutoff=0.6)
    if near == ["diagnose"]:
        return GrammarError(problem, _diagnose(rest or "JOB"))
    if near:
        return GrammarError(problem, f"{COMMAND} {near[0]}")
    if not rest:
        return GrammarError(problem, _diagnose(verb), f"{COMMAND} help")
    return GrammarError(problem, f"{COMMAND} help")


def _diagnose(job: str) -> str:
    return f"{COMMAND} diagnose {_short(_unwrap(job)[0])}"


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _clean(text: str) -> str:
    """One line, single spaces, nothing invisible, Slack's three entities and its automatic links undone."""
    text = _AUTOLINK.sub(r"\1", text)
    text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    kept = []
    for character in text:
        category = unicodedata.category(character)
        if category in ("Cf", "Cs"):  # zero-width and direction marks; halves of broken characters
            continue
        kept.append(" " if category == "Cc" else character)
    return " ".join("".join(kept).split())


def _unwrap(text: str) -> tuple[str, bool]:
    """The text without quotes, backticks and marks around it, and whether it was quoted."""
    quoted = False
    while len(text) >= 2:
        first, last, inside = text[0], text[-1], text[1:-1]
        if _QUOTES.get(first) == last and first not in inside and last not in inside:
            quoted = True
        elif not (_MARKS.get(first) == last and not quoted and first not in inside):
            break
        text = inside.strip()
    return text, quoted
