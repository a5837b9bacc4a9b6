"""Where a rank stands in the layout and how far it came on each communicator: the newest that is known of both.

Joined in any order and however often it gives the same: what is newer counts, of two that are equally new the
greater.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import msgspec

from probes.records import Place, RankBatch


class Reached(NamedTuple):
    """``probes.records.Progress`` with the instant of the batch that told it (monotonic)."""

    communicator: int
    at_ns: int
    enqueued: int
    started: int
    completed: int


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """See the module. ``place_ns`` is the instant of the batch that told the place; ``reached`` has one entry per
    communicator, in order."""

    place_ns: int = -1
    place: Place = Place()
    reached: list[Reached] = []

    def joined(self, other: Standing) -> Standing:
        newest = max(self, other, key=lambda one: (one.place_ns, msgspec.structs.astuple(one.place)))
        of_communicator: dict[int, Reached] = {}
        for one in (*self.reached, *other.reached):
            of_communicator[one.communicator] = max(one, of_communicator.get(one.communicator, one))
        return Standing(
            newest.place_ns, newest.place, [reached for _, reached in sorted(of_communicator.items())]
        )

    def renumbered(self, places: Sequence[int]) -> Standing:
        """With each communicator's number replaced by ``places[number]``; those without one are left out."""
        reached = [
            one._replace(communicator=places[one.communicator])
            for one in self.reached
            if one.communicator < len(places)
        ]
        return Standing(self.place_ns, self.place, sorted(reached))


NOWHERE = Standing()
"""Nothing is known, as of what agents watch."""
_NO_PLACE = Place()


def of_rank(at_ns: int, rank: RankBatch) -> Standing:
    """What one batch that ended at ``at_ns`` tells."""
    if not rank.progress and rank.place == _NO_PLACE:
        return NOWHERE
    told = Standing(at_ns, rank.place) if rank.place != _NO_PLACE else NOWHERE
    reached = (
        Standing(reached=[Reached(one.communicator, at_ns, one.enqueued, one.started, one.completed)])
        for one in rank.progress
    )
    return reduce(Standing.joined, reached, told)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Standing)


def pack(standing: Standing) -> bytes | None:
    """To be read by :func:`unpack`; None when nothing is known."""
    return None if standing == NOWHERE else _encoder.encode(standing)


def unpack(blob: bytes | None) -> Standing:
    """Raises ``msgspec.DecodeError`` for what did not come from :func:`pack`."""
    return NOWHERE if blob is None else _decoder.decode(blob)
