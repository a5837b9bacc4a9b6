"""`local-slack`, an independent Slack on this machine, as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.bot.crosscheck import LOCAL_SLACK

T = TypeVar("T")
CHANNEL, ADA, BOT = "C0TRAINING", "U0ADA", "U0SYSOM"
START_S = 30.0
APPEARS_S = 20.0
LOOK_AGAIN_S = 0.05


class LocalSlack:
    """A running one with one channel, one person and our app. It has no limits, and takes any block."""

    def __init__(self, origin: str, http: httpx.AsyncClient, bot_token: str, app_token: str) -> None:
        self.api_url = f"{origin}/api/"
        self.bot_token = bot_token
        self.app_token = app_token
        self._http = http

    async def command(self, text: str) -> None:
        """Ada types `/sysom …`; returns when the app has acknowledged it, or gave no answer."""
        await self._post("command", channel=CHANNEL, user=ADA, command="/sysom", text=text)

    async def say(self, text: str, thread_ts: str | None = None) -> None:
        """Ada writes."""
        await self._post("message", channel=CHANNEL, user=ADA, text=text, thread_ts=thread_ts)

    async def messages(self) -> list[dict[str, Any]]:
        """What the channel holds, in order; with `ephemeral_to` where one person sees it."""
        return list((await self._get(f"messages/{CHANNEL}"))["messages"])

    async def log(self) -> list[dict[str, Any]]:
        """All that went between it and the app."""
        return list((await self._get("log"))["log"])

    async def wait_for(self, found: Callable[[list[dict[str, Any]]], T | None]) -> T:
        """Until `found(messages)` gives something. Raises TimeoutError with what is there instead."""
        loop = asyncio.get_running_loop()
        end = loop.time() + APPEARS_S
        while True:
            messages = await self.messages()
            if value := found(messages):
                return value
            if loop.time() > end:
                raise TimeoutError(f"not among {json.dumps(messages, indent=1)}")
            await asyncio.sleep(LOOK_AGAIN_S)  # it tells nobody when something changes

    async def _post(self, what: str, **body: Any) -> None:
        (await self._http.post(f"/_control/{what}", json=body)).raise_for_status()

    async def _get(self, what: str) -> dict[str, Any]:
        answer = await self._http.get(f"/_control/{what}")
        answer.raise_for_status()
        return dict(answer.json())


@contextlib.asynccontextmanager
async def running_local_slack(
    folder: Path, *, request_url: str = "", signing_secret: str = ""
) -> AsyncIterator[LocalSlack]:
    """One for the length of an `async with`: by Socket Mode, or with a `request_url` by HTTP.

    It listens on all addresses of the machine and cannot be told otherwise, so its tokens are drawn anew.
    """
    bot_token, app_token = f"xoxb-{secrets.token_hex(12)}", f"xapp-{secrets.token_hex(12)}"
    app = {
        "appId": "A0SYSOM",
        "botUserId": BOT,
        "botName": "sysom",
        "botToken": bot_token,
        "appToken": app_token,
        "mode": "events" if request_url else "socket",
        "slashCommands": ["/sysom"],
    }
    if request_url:
        app |= {"requestUrl": request_url, "signingSecret": signing_secret}
    config = {
        "workspace": {"name": "lab", "domain": "lab", "teamId": "T0LAB"},
        "app": app,
        "users": [{"id": ADA, "name": "ada"}],
        "channels": [{"id": CHANNEL, "name": "training", "members": [ADA, BOT]}],
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    files = folder / "files"
    process = await asyncio.create_subprocess_exec(
        LOCAL_SLACK,
        *("--config", path, "--port", "0", "--base-host", "127.0.0.1", "--files-dir", files),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(START_S):
            origin = await _origin(process)
        async with httpx.AsyncClient(base_url=origin, trust_env=False, timeout=30) as http:
            yield LocalSlack(origin, http, bot_token, app_token)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _origin(process: asyncio.subprocess.Process) -> str:
    """Its address, from what it prints."""
    assert process.stdout is not None
    said = ""
    while line := (await process.stdout.readline()).decode():
        said += line
        if found := re.search(r"Web API base:\s+(http://\S+)/api/", line):
            return found[1]
    raise RuntimeError(f"local-slack did not start: {said}")
