"""Slack delivers again what it is not sure of: what was here before is known by its id."""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 2000
"""Ids that are kept; Slack's last delivery of an event comes within minutes, a command's at once."""


class Once:
    """The ids of what was handled, the newest of them."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._remembered = remembered

    def again(self, id: str) -> bool:
        """Whether this id was here before; from now on it was. What has no id is always new."""
        if not id:
            return False
        if id in self._seen:
            return True
        self._seen[id] = None
        if len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        return False
