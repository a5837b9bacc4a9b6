"""What people ask of agents: of which nodes, kept with who asked; the agents are told with their next batches."""

from __future__ import annotations

import os
import pwd
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from bot.settings import Settings
from bot.wording import age
from diagnosis.store import Store, StoreError, names_like, open_store
from probes.records import Command

EXPIRES_S = 300
"""An agent that has not sent for this long is not asked any more: by then it is another moment."""
LATELY_S = 120
"""A rank whose newest data is older than this is not there to be watched."""


class NobodyToAsk(ValueError):
    """No agent can be asked; the message says why and what to do."""


def nodes_with(store: Store, job: str, now_ns: int) -> list[str]:
    """The nodes where ranks of ``job`` run. Raises ``UnknownJob`` and :class:`NobodyToAsk`."""
    seen = store.nodes_of(job)
    lately = sorted(node for node, at_ns in seen.items() if now_ns - at_ns <= LATELY_S * 1_000_000_000)
    if lately:
        return lately
    if not seen:
        raise NobodyToAsk(f"all ranks of job {job!r} have ended: nothing runs that could be watched")
    newest = max(seen, key=seen.__getitem__)
    raise NobodyToAsk(
        f"no rank of job {job!r} was seen in the last {LATELY_S // 60} minutes (the newest data is of "
        f"{age(seen[newest], now_ns)}, from {newest}): nothing runs that could be watched"
    )


def known_node(store: Store, node: str) -> str:
    """``node``, when an agent of it ever sent something. Raises :class:`NobodyToAsk`."""
    known = sorted(store.probes())
    if node in known:
        return node
    if not known:
        raise NobodyToAsk("no agent has sent anything yet: there is no node to ask")
    nearest = names_like(known, node)
    hint = f"did you mean {', '.join(nearest)}?" if nearest else f"known nodes: {', '.join(known[:3])}"
    raise NobodyToAsk(f"no agent of a node named {node!r} is known; {hint}")


def ask(settings: Settings, nodes: Sequence[str], command: Callable[[str], Command]) -> None:
    """Have the agents of ``nodes`` told; ``command`` makes one from its id. Raises ``StoreError``."""
    store = open_store(settings.store_url())
    try:
        now_ns = time.time_ns()
        for node in nodes:
            asked = command(secrets.token_hex(8))
            store.add_command(node, asked, now_ns, now_ns + EXPIRES_S * 1_000_000_000, person())
    except StoreError as error:
        raise StoreError(f"nothing was asked: {error}") from error
    finally:
        store.close()


def person(environ: Mapping[str, str] = os.environ) -> str:
    """Who asks: the user of the operating system, and who became that with sudo."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = f"user {os.getuid()}"
    before = environ.get("SUDO_USER", "")
    return f"{name} (sudo by {before})" if before and before != name else name


def told(nodes: Sequence[str]) -> str:
    """How to see what becomes of what was asked."""
    who = (
        nodes[0]
        if len(nodes) == 1
        else f"{len(nodes)} nodes ({', '.join(nodes[:5])}{', …' * (len(nodes) > 5)})"
    )
    return (
        f"asked of {who}. An agent is told with its next batch, within a second, if it has the server's key "
        f"(SYSOM_COMMAND_KEY), and for {EXPIRES_S // 60} minutes at the longest.\nsysom commands says what became "
        "of it."
    )
