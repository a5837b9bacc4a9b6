"""Real Bolt apps in the workspace, by Socket Mode and by HTTP: the party that knows Slack better than we do."""

import contextlib
from collections.abc import AsyncIterator, Callable

from slack_bolt.adapter.socket_mode.async_handler import AsyncSocketModeHandler
from slack_bolt.adapter.starlette.async_handler import AsyncSlackRequestHandler
from slack_bolt.app.async_app import AsyncApp
from slack_sdk.web.async_client import AsyncWebClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bot.web.listening import listening
from bot.workspace import Workspace


def app_in(ws: Workspace) -> AsyncApp:
    """An app without listeners."""
    client = AsyncWebClient(ws.bot_token, base_url=ws.api_url)
    return AsyncApp(client=client, signing_secret=ws.signing_secret)


@contextlib.asynccontextmanager
async def running(ws: Workspace, app: AsyncApp) -> AsyncIterator[None]:
    """The app, connected by Socket Mode."""
    handler = AsyncSocketModeHandler(app, ws.app_token)
    await handler.connect_async()
    await ws.wait_for(lambda: ws.connections)
    try:
        yield
    finally:
        await handler.close_async()


@contextlib.asynccontextmanager
async def serving(
    ws: Workspace,
    app: AsyncApp,
    seen: Callable[[Request, bytes], Response | None] = lambda request, body: None,
) -> AsyncIterator[str]:
    """The app behind a Request URL that the workspace uses; `seen` may look at requests, and answer itself."""
    handler = AsyncSlackRequestHandler(app)

    async def endpoint(request: Request) -> Response:
        own = seen(request, await request.body())
        return await handler.handle(request) if own is None else own

    routes = [Route("/slack/events", endpoint, methods=["POST"])]
    async with listening(Starlette(routes=routes), "127.0.0.1", 0) as origin:
        await ws.use_request_url(f"{origin}/slack/events")
        yield origin
