"""Our messages, drawn by others: what a reader sees in them, and no markup left over.

Each theme is one picture beside the test's other files (pytest's `--basetemp` says where), to be looked at. Hostile
text is not checked here: the library undoes Slack's escaping before it looks for mentions.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from bot.slack import grammar, messages
from bot.slack.blocks import Message
from diagnosis.store import JobInfo, UnknownJob
from tests.bot import verdicts
from tests.bot.browser import CHROMIUM, QUIET, in_browser
from tests.bot.crosscheck import FOLDER, needs_renderer

HOUR_NS = 3600 * 10**9
THEN_NS = 1_796_000_000 * 1_000_000_000
ADA = "U123ABC"


def _details() -> Message:
    found = messages.details(verdicts.SLOW)
    assert found is not None
    return found


def _mistake() -> grammar.GrammarError:
    with pytest.raises(grammar.GrammarError) as caught:
        grammar.parse("diagnos job-123")
    return caught.value


WRITTEN = {
    "progress": messages.progress("job-123", ADA, 6),
    "slow": messages.root(verdicts.SLOW, ADA),
    "evidence": _details(),
    "healthy": messages.root(verdicts.HEALTHY, ADA),
    "insufficient": messages.root(verdicts.INSUFFICIENT, ADA),
    "unknown": messages.unknown_job(UnknownJob("jab-123", ["job-123"])),
    "jobs": messages.jobs([JobInfo("job-123", 4, 4, 1, THEN_NS, THEN_NS)], THEN_NS + HOUR_NS),
    "help": messages.help_(),
    "mistake": messages.not_understood(_mistake()),
}
READ = {
    "progress": ["@ada asked about job-123", "(6 s)"],
    "slow": [
        "job-123 is slow: rank 2 on node-7",
        "The median step takes 52.1 ms since",
        "CPU contention on rank 2, node-7 (operating system)",
        "How sure: almost certain (97 %). Owner of the fix: whoever runs the node.",
        "1. Stop or move pid 4411 (stress-7f) on node-7",
        "waiting for a CPU             19.9    0.4  +19.5",
        "Asked by @ada · evidence and the rest in the thread · page",
    ],
    "evidence": [
        "Late into collectives (nccl), rank 2: 19.2 ms/step",
        "q < 0.001",
        "ranks 0, 1 and 3: waited for rank 2",
    ],
    "healthy": ["job-123 is healthy", "18,000 steps"],
    "insufficient": ["job-123: not enough evidence", "ranks 1–3: no agent reported them"],
    "unknown": ["No job named jab-123 is known. Did you mean job-123?"],
    "jobs": ["job-123 · 4 of 4 ranks on 1 node · data 60 min ago"],
    "help": ["/sysom diagnose JOB – since when a job is slow"],
    "mistake": ["is not a command"],
}


async def drawn(theme: str) -> str:
    """All messages as an HTML page."""
    blocks = json.dumps({title: message.blocks for title, message in WRITTEN.items()})
    process = await asyncio.create_subprocess_exec(
        *("node", Path(__file__).with_name("render.mjs"), FOLDER, theme),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    page, said = await process.communicate(blocks.encode())
    assert process.returncode == 0, said.decode()
    return page.decode()


@needs_renderer
@in_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_people_read_what_was_meant(theme: str, tmp_path: Path) -> None:
    page_file = tmp_path / "messages.html"
    page_file.write_text(await drawn(theme))
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = await browser.new_page(viewport={"width": 800, "height": 600}, locale="en-GB")
        await page.goto(page_file.as_uri())
        for title, words in READ.items():
            seen = (await page.locator(f"section#{title}").inner_text()).replace("\xa0", " ")
            assert [said for said in words if said not in seen] == [], seen
            assert not any(mark in seen for mark in ("<!", "<@", "<http", "*", "&lt;", "&amp;")), seen
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        await page.screenshot(path=tmp_path / "messages.png", full_page=True)
        await browser.close()


def test_every_message_is_read() -> None:
    assert READ.keys() == WRITTEN.keys()
