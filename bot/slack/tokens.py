"""Whether Slack takes our tokens; where not, which setting is wrong and what to do about it."""

from __future__ import annotations

import aiohttp
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from bot.slack.app import SCOPES
from bot.slack.calls import TRANSIENT
from bot.slack.desk import Home


class SlackRefused(RuntimeError):
    """Slack cannot be used. The message says which setting is wrong, or what is away, and what to do."""


class SlackAway(SlackRefused):
    """Slack is not reached, or fails: nothing is wrong with the settings, and later it may work."""


async def home_of(client: AsyncWebClient) -> Home:
    """Who the bot token makes us, and where. Raises :class:`SlackRefused`."""
    try:
        said = await client.auth_test()
    except SlackApiError as error:
        code = _code(client, error)
        raise SlackRefused(f"SLACK_BOT_TOKEN: Slack says {code}: {_advice(code, client.token)}") from error
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise _unreachable(client, error) from error
    missing = SCOPES - _scopes(said.headers)
    if missing:
        raise SlackRefused(
            f"SLACK_BOT_TOKEN lacks the scope {' and '.join(sorted(missing))}: add it under “OAuth & "
            "Permissions” (or take deploy/slack-manifest.yaml), then install the app again"
        )
    return Home(
        team=str(said.get("team", "")),
        team_id=str(said.get("team_id", "")),
        enterprise_id=str(said.get("enterprise_id") or ""),
        bot=str(said.get("user", "sysom")),
        bot_id=str(said.get("bot_id", "")),
        user_id=str(said.get("user_id", "")),
    )


async def socket_address(client: AsyncWebClient, app_token: str) -> str:
    """A one-use address for Socket Mode. Raises :class:`SlackRefused`."""
    try:
        return str((await client.apps_connections_open(app_token=app_token))["url"])
    except SlackApiError as error:
        code = _code(client, error)
        raise SlackRefused(f"SLACK_APP_TOKEN: Slack says {code}: {_app_advice(code, app_token)}") from error
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise _unreachable(client, error) from error


def _scopes(headers: object) -> frozenset[str]:
    """Scopes that the answer's headers name; all, where they name none."""
    named = headers.get("x-oauth-scopes") if hasattr(headers, "get") else None
    return frozenset(part.strip() for part in str(named).split(",")) if named else SCOPES


def _code(client: AsyncWebClient, error: SlackApiError) -> str:
    """Slack's word for what it does not like. Raises :class:`SlackRefused` where Slack itself fails."""
    data, status = getattr(error.response, "data", None), getattr(error.response, "status_code", 0)
    code = str(data.get("error", "")) if isinstance(data, dict) else ""
    if status >= 500 or status == 429 or not code or code in TRANSIENT:
        what = f"HTTP {status}{f', {code}' if code else ''}"
        raise SlackAway(
            f"{client.base_url} does not work at the moment ({what}): that says nothing about the tokens; "
            "start again in a minute, and see https://slack-status.com if it stays so"
        ) from error
    return code


def _advice(code: str, token: str | None) -> str:
    if (token or "").startswith("xapp-"):
        return "that is an app-level token (xapp-…), and a bot token is needed (xoxb-…): are the two swapped?"
    if code in ("account_inactive", "token_revoked", "token_expired"):
        return "the app was removed, or its token withdrawn: install it again and take the new token"
    return "take the “Bot User OAuth Token” (xoxb-…) from “OAuth & Permissions” of the app’s page"


def _app_advice(code: str, token: str) -> str:
    if token.startswith("xoxb-"):
        return (
            "that is a bot token (xoxb-…); the app-level token starts with xapp-: perhaps the two are swapped"
        )
    if code == "missing_scope":
        return "it lacks the scope connections:write: make a new app-level token with it"
    return (
        "take an app-level token (xapp-…) with the scope connections:write from “Basic Information” of the "
        "app’s page, and switch Socket Mode on"
    )


def _unreachable(client: AsyncWebClient, error: Exception) -> SlackAway:
    return SlackAway(
        f"{client.base_url} is not reached ({type(error).__name__}: {error}): check the network, "
        "and HTTPS_PROXY if a proxy is needed"
    )
