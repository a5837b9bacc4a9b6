"""What every command needs at the terminal: words out, errors in words, ending by signals, times in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

import click

log = logging.getLogger(__name__)

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""


SHORTEST_WINDOW_S = 30
"""Shorter windows hold too few steps to tell ranks apart."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def window_ns(text: str | None) -> int | None:
    """Nanoseconds of "30s", "10m", "2h"; None stays None. Raises ``click.BadParameter``."""
    if text is None:
        return None
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS_S or not number.isascii() or not number.isdecimal() or len(number) > 6:
        raise click.BadParameter(
            f"{text!r} is not a time: a whole number and s, m, h or d, as in 30s, 10m, 2h"
        )
    seconds = int(number) * _UNITS_S[unit]
    if seconds < SHORTEST_WINDOW_S:
        raise click.BadParameter(
            f"{text} is too short: {SHORTEST_WINDOW_S}s at the least, below that too few steps are seen"
        )
    return seconds * 1_000_000_000


def printable(words: str, *, keep: str = "\n") -> str:
    """``words`` without characters that act on a terminal: what comes from outside may hold some."""
    return "".join(c if c.isprintable() or c in keep else "�" for c in words)


class PrintableFormatter(logging.Formatter):
    """One message is one line, and neither it nor a traceback can act on the terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return printable(super().formatMessage(record), keep="")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def say(words: str) -> None:
    """To the person at the terminal, while there is one: what runs ends in order without it, too."""
    with contextlib.suppress(OSError):
        click.echo(printable(words))


def fail(words: str) -> NoReturn:
    """Say what is wrong and end with status 2."""
    with contextlib.suppress(OSError):
        click.echo(f"sysom: {printable(words)}", err=True)
    sys.exit(EXIT_ERROR)


@contextlib.contextmanager
def errors_in_words() -> Iterator[None]:
    """Status 1 says "slow": whatever fails ends with words and another one."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter fails once more when it ends
        sys.exit(EXIT_ERROR)
    except ModuleNotFoundError as error:
        log.info("an import failed", exc_info=True)
        fail(f"{error.name or error} is not installed here: pip install 'sysom[server]'")
    except Exception as error:
        log.info("it failed here", exc_info=True)
        fail(_words(error))


def _words(error: Exception) -> str:
    """What our own errors say is meant for people; of others the kind is said, too."""
    said = str(error)
    # OSError comes from the kernel, with the name of the file or address; ours are made in our own packages.
    ours = type(error).__module__.partition(".")[0] in ("bot", "diagnosis", "probes")
    if said and (ours or isinstance(error, OSError)):
        return said
    kind = type(error).__name__
    return f"unexpected {kind}{': ' if said else ''}{said} (sysom -v … shows where)"


def has_terminal() -> bool:
    """Whether a terminal controls this process: it would send SIGHUP when it goes."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def ending_signals() -> list[signal.Signals]:
    """SIGHUP among them, the terminal's end, unless whoever started us wants it ignored (nohup)."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def run_until_stopped(main_part: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run until a signal says to end. A second one cuts the ending short, a third ends at once."""

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        me = asyncio.current_task()
        assert me is not None

        def end() -> None:
            if not stop.is_set():
                stop.set()
            elif not me.cancelling():
                me.cancel()
            else:
                os._exit(EXIT_INTERRUPTED)

        for number in ending_signals():
            loop.add_signal_handler(number, end)
        await main_part(stop)

    try:
        asyncio.run(run())
    except asyncio.CancelledError:
        sys.exit(EXIT_INTERRUPTED)
