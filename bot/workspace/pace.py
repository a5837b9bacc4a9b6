"""How fast an app may call: Slack's rates, which answer with 429 beyond them.

Sources: docs.slack.dev/apis/web-api/rate-limits (one message per second and channel; tier 3 is 50 a minute).
"""

import math
from collections import deque

from bot.workspace.clock import Clock
from bot.workspace.world import Json, World

POSTS = 1, 1.0  # calls in seconds, for each channel
UPDATES = 50, 60.0  # for the whole workspace
_POSTING = frozenset({"chat.postMessage", "chat.postEphemeral"})


class Pace:
    """Counts calls in sliding windows of the workspace's clock."""

    def __init__(self, world: World, clock: Clock) -> None:
        self._world = world
        self._clock = clock
        self._taken: dict[str, deque[float]] = {}

    def take(self, method: str, arguments: Json) -> int | None:
        """Count one call; gives the whole seconds to wait where it comes too early, and then counts nothing."""
        if method in _POSTING:
            name = str(arguments.get("channel"))
            channel = self._world.channel(name)
            return self._take(f"{method} {name if channel is None else channel.id}", *POSTS)
        return self._take(method, *UPDATES) if method == "chat.update" else None

    def _take(self, what: str, calls: int, seconds: float) -> int | None:
        now = self._clock.now()
        taken = self._taken.setdefault(what, deque(maxlen=calls))
        if len(taken) == calls and taken[0] + seconds > now:
            return max(1, math.ceil(taken[0] + seconds - now))
        taken.append(now)
        return None
