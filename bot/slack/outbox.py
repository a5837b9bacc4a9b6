"""One outgoing queue per channel: slow enough for Slack, and nothing that matters is lost in silence.

A :class:`Posting` is one message: it says what should be shown, and the queue sees to it. However often the
text changes while the queue waits, only the newest goes out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from bot.slack import limits
from bot.slack.blocks import Message, cut_bytes
from bot.slack.calls import Call, RateLimitedError, RefusedError, UnavailableError
from bot.slack.clock import Clock

log = logging.getLogger(__name__)

CHANNEL_EVERY_S = 1.05
"""Slack takes about one message per second and channel."""
UPDATE_EVERY_S = 3.0
"""Between two edits of one message, unless the new one is the answer."""
ATTEMPTS = 6
"""Tries while Slack is not available: 1 + 2 + 4 + 8 + 16 s apart."""
RATE_LIMITED_ATTEMPTS = 30
"""Tries while Slack asks for silence; each waits as long as it was told to."""
IDLE_LANES = 500
"""Channels whose pace is remembered."""

_BLOCKS_REFUSED = frozenset(
    {"invalid_blocks", "invalid_blocks_format", "msg_blocks_too_long", "invalid_arguments"}
)
_MESSAGE_GONE = frozenset({"message_not_found", "cant_update_message", "edit_window_closed"})
_CHANNEL_CLOSED = frozenset(
    {
        "channel_not_found",
        "not_in_channel",
        "is_archived",
        "restricted_action",
        "access_denied",
        "no_permission",
    }
)


class NotDeliveredError(RuntimeError):
    """A message did not reach its channel. ``closed``: the bot may not write there."""

    def __init__(self, channel: str, why: str, *, closed: bool = False) -> None:
        super().__init__(f"message to {channel} not delivered: {why}")
        self.closed = closed


class Posting:
    """One message in one channel, or a reply in the thread of another."""

    def __init__(self, outbox: Outbox, channel: str, newest: Message, parent: Posting | None) -> None:
        self.channel = channel
        self.parent = parent
        self.newest = newest
        self.shown: Message | None = None
        self.ts: str | None = None
        self.failure: NotDeliveredError | None = None
        self.urgent = False
        self.due = 0.0
        self.failures = 0
        self.silences = 0
        self._outbox = outbox
        self._changed = asyncio.Event()

    @property
    def settled(self) -> bool:
        """Shown as it should be, or given up."""
        return self.failure is not None or self.shown is self.newest

    @property
    def held(self) -> bool:
        """A reply waits until the message above it is there."""
        return self.parent is not None and self.parent.ts is None and self.parent.failure is None

    def show(self, message: Message, *, urgent: bool = False) -> None:
        """Change the message. ``urgent``: it is the answer, and does not wait for the pace of edits."""
        self.newest = message
        if urgent:
            self.urgent = True
            self.due = 0.0 if not self.failures else self.due
        self._outbox.push(self)

    async def delivered(self) -> None:
        """Until the newest text is shown. Raises :class:`NotDeliveredError`."""
        while not self.settled:
            self._changed.clear()
            await self._changed.wait()
        if self.failure is not None:
            raise self.failure

    def tell(self) -> None:
        self._changed.set()


@dataclass
class _Lane:
    waiting: list[Posting] = field(default_factory=list)
    ready: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    worker: asyncio.Task[None] | None = None


class Outbox:
    """Posts and edits messages through ``call``, each channel at its own pace."""

    def __init__(self, call: Call, clock: Clock) -> None:
        self._call = call
        self._clock = clock
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()

    @property
    def waiting(self) -> int:
        """How many messages are to be sent or changed."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    def post(self, channel: str, message: Message, *, parent: Posting | None = None) -> Posting:
        """Queue a new message; ``parent``: as a reply in its thread."""
        posting = Posting(self, channel, message, parent)
        self.push(posting)
        return posting

    def push(self, posting: Posting) -> None:
        """Queue what a posting should show now."""
        if posting.failure is not None:
            return
        lane = self._lanes.setdefault(posting.channel, _Lane())
        self._lanes.move_to_end(posting.channel)
        if posting not in lane.waiting:
            lane.waiting.append(posting)
        lane.wake.set()
        if lane.worker is None or lane.worker.done():
            lane.worker = asyncio.create_task(self._work(lane), name=f"outbox {posting.channel}")
        self._forget_idle()

    async def close(self, seconds: float) -> None:
        """Send what waits, for at most so long; what is left then is logged."""
        workers = [lane.worker for lane in self._lanes.values() if lane.worker and not lane.worker.done()]
        if workers:
            limit = asyncio.create_task(self._clock.sleep(seconds))
            everything = asyncio.gather(*workers, return_exceptions=True)
            both: set[asyncio.Future[Any]] = {limit, everything}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in (limit, *workers):
                task.cancel()
            await asyncio.gather(limit, everything, return_exceptions=True)
        for lane in self._lanes.values():
            for posting in lane.waiting:
                self._give_up(posting, "sysom stops")

    async def _work(self, lane: _Lane) -> None:
        while lane.waiting:
            now = self._clock.now()
            posting = min(
                (one for one in lane.waiting if not one.held),
                key=lambda one: (max(one.due, now), not one.urgent),  # of equals the one that came first
            )
            wait = max(lane.ready, posting.due) - now
            if wait > 0:
                await self._pause(lane, wait)
                continue
            if not posting.settled:
                try:
                    await self._send(lane, posting)
                except Exception as error:
                    log.exception("a message to %s could not be sent", posting.channel)
                    self._give_up(posting, f"{type(error).__name__}: {error}")
            if posting.settled:
                lane.waiting.remove(posting)

    async def _pause(self, lane: _Lane, seconds: float) -> None:
        """Sleep, or until something new comes: it may be due sooner."""
        lane.wake.clear()
        ends: set[asyncio.Future[Any]] = {
            asyncio.ensure_future(self._clock.sleep(seconds)),
            asyncio.ensure_future(lane.wake.wait()),
        }
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    async def _send(self, lane: _Lane, posting: Posting) -> None:
        message = self._sendable(posting)
        method, arguments = "chat.postMessage", _body(posting.channel, message)
        if posting.ts is not None:
            method, arguments["ts"] = "chat.update", posting.ts
        elif posting.parent is not None:
            if posting.parent.ts is None:
                self._give_up(posting, "the message it belongs under was not delivered")
                return
            arguments["thread_ts"] = posting.parent.ts
        lane.ready = self._clock.now() + CHANNEL_EVERY_S
        try:
            answer = await self._call(method, arguments)
        except RateLimitedError as error:
            self._silence(lane, posting, error)
        except UnavailableError as error:
            self._failed(posting, error)
        except RefusedError as error:
            self._refused(posting, message, error)
        else:
            await self._succeeded(posting, message, answer)

    def _sendable(self, posting: Posting) -> Message:
        """The newest message, without its blocks if Slack would refuse them."""
        message = posting.newest
        found = limits.problems(message.text, message.blocks)
        if found:
            log.error(
                "message to %s breaks Slack's limits, sent as text: %s", posting.channel, "; ".join(found)
            )
            message = Message(cut_bytes(message.text, limits.TEXT_BYTES) or "(empty message)")
            posting.newest = message
        return message

    async def _succeeded(self, posting: Posting, message: Message, answer: Any) -> None:
        posting.failures = posting.silences = 0
        posting.due = self._clock.now() + UPDATE_EVERY_S
        posting.urgent = posting.urgent and posting.newest is not message
        if posting.ts is None:
            posting.ts = str(answer["ts"])
            if posting.parent is not None and answer.get("message", {}).get("thread_ts") != posting.parent.ts:
                await self._stray(posting)
                return
        posting.shown = message
        if posting.urgent:
            posting.due = 0.0
        posting.tell()

    async def _stray(self, posting: Posting) -> None:
        """The message above is gone, so Slack put the reply into the channel: take it back."""
        with contextlib.suppress(RateLimitedError, UnavailableError, RefusedError):
            await self._call("chat.delete", {"channel": posting.channel, "ts": posting.ts})
        self._give_up(posting, "the message it belongs under was deleted")

    def _silence(self, lane: _Lane, posting: Posting, error: RateLimitedError) -> None:
        posting.silences += 1
        lane.ready = self._clock.now() + error.seconds
        log.warning("%s; channel %s waits", error, posting.channel)
        if posting.silences >= RATE_LIMITED_ATTEMPTS:
            self._give_up(posting, str(error))

    def _failed(self, posting: Posting, error: UnavailableError) -> None:
        posting.failures += 1
        if posting.failures >= ATTEMPTS:
            self._give_up(posting, str(error))
            return
        posting.due = self._clock.now() + 2.0 ** (posting.failures - 1)
        log.warning("%s; try %d of %d follows", error, posting.failures + 1, ATTEMPTS)

    def _refused(self, posting: Posting, message: Message, error: RefusedError) -> None:
        if error.error in _BLOCKS_REFUSED and message.blocks:
            log.error("%s; the message goes out as text", error)
            if posting.newest is message:
                posting.newest = message.plain()
        elif error.error == "msg_too_long" and len(message.text) > 500:
            log.error("%s; the message goes out cut", error)
            if posting.newest is message:
                posting.newest = Message(cut_bytes(message.text, 500))
        elif error.error in _MESSAGE_GONE and posting.ts is not None and posting.urgent:
            log.warning("%s; the message is posted anew", error)
            posting.ts = None
        elif error.error in _MESSAGE_GONE and posting.ts is not None:
            posting.shown = posting.newest  # a lost progress line; the answer will be posted anew
            posting.tell()
        else:
            self._give_up(posting, str(error), closed=error.error in _CHANNEL_CLOSED)

    def _give_up(self, posting: Posting, why: str, *, closed: bool = False) -> None:
        posting.failure = NotDeliveredError(posting.channel, why, closed=closed)
        level = logging.WARNING if closed else logging.ERROR  # a closed channel: its asker is told
        log.log(level, "%s; it said: %s", posting.failure, posting.newest.text)
        posting.tell()

    def _forget_idle(self) -> None:
        for channel in list(self._lanes):
            if len(self._lanes) <= IDLE_LANES:
                return
            if not self._lanes[channel].waiting:
                del self._lanes[channel]


def _body(channel: str, message: Message) -> dict[str, Any]:
    """Nothing in a text becomes a mention or a preview by itself; an empty list takes old blocks off."""
    return {
        "channel": channel,
        "text": message.text,
        "blocks": list(message.blocks),
        "parse": "none",
        "link_names": False,
        "unfurl_links": False,
        "unfurl_media": False,
    }
