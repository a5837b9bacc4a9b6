"""Every message that the bot writes: a verdict or an answer in, blocks and fallback text out."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jinja2

from bot import rendering, wording
from bot.slack import grammar, mrkdwn
from bot.slack.blocks import Block, Message, context, header, message, preformatted, section
from diagnosis.store import JobInfo, StoreError, UnknownJob
from diagnosis.verdict import Status, Verdict

DOT: dict[Status, str] = {"healthy": "🟢", "slow": "🔴", "hang": "⛔", "insufficient": "⚪"}
ACCOUNT_ROWS = 5
"""Parts of the step in the root message; the thread has all of them."""
DOUBTS = 4
"""Blind spots that the root message lists where the verdict hangs on them; elsewhere its footer says the first."""
JOBS = 20
"""Jobs that one list shows."""


@cache
def environment() -> jinja2.Environment:
    return rendering.environment(
        mrkdwn.escape,
        name=mrkdwn.name,
        strong=mrkdwn.strong,
        when=mrkdwn.when,
        span=mrkdwn.span,
        link=mrkdwn.link,
        person=mrkdwn.person,
    )


def root(verdict: Verdict, asker: str, *, thread: bool = True) -> Message:
    """The answer in the channel: what is going on, what caused it and how sure, what next. One screen.

    ``thread``: whether the details come in its thread, or as a message below.
    """
    detailed = bool(_detail_blocks(verdict))
    values = _values(verdict) | {"asker": asker, "detailed": detailed, "thread": thread}

    def said(block: str) -> list[Block]:
        text = _render("slack/verdict.j2", block, values)
        return [section(text, 1500)] if text else []

    account = wording.account_table(verdict, ACCOUNT_ROWS) if verdict.culprits else ""
    return message(
        _render("slack/verdict.j2", "text", values),
        header(f"{DOT[verdict.status]} {wording.headline(verdict)}"),
        *said("now"),
        *said("cause"),
        *said("others"),
        *said("doubt"),
        *said("next"),
        *([preformatted(account)] if account else []),
        context(_render("slack/verdict.j2", "footer", values)),
    )


def details(verdict: Verdict) -> Message | None:
    """The reply in the thread: evidence, cleared ranks, what was ruled out and not seen; None without any."""
    blocks = _detail_blocks(verdict)
    return message(_render("slack/details.j2", "text", _values(verdict)), *blocks) if blocks else None


def _detail_blocks(verdict: Verdict) -> list[Block]:
    values = _values(verdict)
    texts = [
        _render("slack/details.j2", block, values)
        for block in ("slowdown", "evidence", "others", "cleared", "ruled_out", "not_seen", "actions")
    ]
    blocks = [section(text, 2000) for text in texts if text]
    account = wording.account_table(verdict)
    if account and (not verdict.culprits or account != wording.account_table(verdict, ACCOUNT_ROWS)):
        blocks.insert(0, preformatted(account))
    return blocks


def _values(verdict: Verdict) -> dict[str, Any]:
    unseen = wording.unseen(verdict)
    return {
        "v": verdict,
        "unseen": unseen,
        "hides": wording.hides(verdict),
        "summary": wording.summary(verdict),
        "doubts": unseen[:DOUBTS] if verdict.status == "insufficient" else [],
        "headline": wording.headline(verdict),
        "told": wording.tells_by_summary(verdict),
        "cleared": wording.cleared(verdict),
        "slowdown": wording.slowdown(verdict),
    }


def progress(job: str, asker: str, seconds: float = 0) -> Message:
    """While the answer is sought; ``seconds`` since it was asked for."""
    return _answer("progress", job=job, asker=asker, seconds=int(seconds))


def help_() -> Message:
    return _answer("help")


def not_understood(error: grammar.GrammarError) -> Message:
    return _answer("grammar", problem=str(error), suggestions=error.suggestions)


def jobs(known: list[JobInfo], now_ns: int) -> Message:
    """The list of jobs; ``now_ns`` is UTC."""
    return _answer("jobs", jobs=known, now_ns=now_ns, limit=JOBS)


def unknown_job(error: UnknownJob) -> Message:
    return _answer("unknown_job", job=error.job, nearest=error.nearest, known=error.known)


def store_failed(error: StoreError, job: str = "") -> Message:
    return _answer("store", job=job, error=str(error))


def unexpected(error_id: str, job: str = "") -> Message:
    return _answer("unexpected", job=job, error_id=error_id)


def patience_over(job: str, seconds: float) -> Message:
    return _answer("patience", job=job, seconds=int(seconds))


def stopped(job: str) -> Message:
    return _answer("stopped", job=job)


def busy(job: str) -> Message:
    return _answer("busy", job=job)


def uninvited(bot: str) -> Message:
    """The bot may not write where it was asked; ``bot`` is its user name."""
    return _answer("uninvited", bot=re.sub(r"[^\w.-]", "", bot) or "sysom")


def outsider() -> Message:
    return _answer("outsider")


def _answer(block: str, **values: Any) -> Message:
    text = _render("slack/answers.j2", block, {"command": grammar.COMMAND, **values})
    return message(text, section(text))


def _render(template: str, block: str, values: dict[str, Any]) -> str:
    """One block of a template, without empty lines: Slack shows each as a gap."""
    found = environment().get_template(template)
    text = "".join(found.blocks[block](found.new_context(values)))
    return "\n".join(line.strip() for line in text.split("\n") if line.strip())
