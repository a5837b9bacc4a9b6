"""Columns as older versions stored them, written as they wrote them: stores of that time are read as before."""

from __future__ import annotations

import base64
import zlib
from itertools import pairwise

import msgspec
import zstandard

from probes.records import RankBatch
from tests.probes.batches import SECOND

RECORDED_SECOND = zlib.decompress(
    base64.b64decode(
        "eNptks1u00AQx2eTpqngwqHnnnupSovE4xCt7Um72Nl1d9dCuXGk4mKtJc4tsUPaIA59ApSeKUi8B6/g7tipsRArebwfM7/57858"
        "erj79QYe/sSHcPk1VLNZJkXIrdIFACwMXhS7473PKi0YY1Uwt2iKHy+g/gnAgEYV2XmKxWL66rQMpievabJCaVFPpCkIzsgMyAzX"
        "Uaa5FUrS2Wi3Xk65SDAqNvebylhusRjCwH1cWBFhqVWCsDJChujdxxW3/ueIs0NmdKszKYU8o91nz9e04kFCvm5//zZIVBhjRKuD"
        "39+hHXf+ciRNZ6kVW1+Ab91e688GN8b65KTysAMF8/eNMGiEsU7YXiss78nJ+2LynpT8PwLyf9Lnf5NDP7n70L7IIhXRuJR8hktj"
        "NRqzDM+0ytLqODOov1ilYh96sNJcxpO3KrgqaVYvY9QSk01LYUSBhnJj3vE0RX38cgu6emKMOkblv6PTBsS2oPvLiqKNuw6ueRkL"
        "GTkGZcIlOmClsZg6Vq98UXVXNmi6od8DbjCkFvMR65kItZoE3Ibnrt6pwvNMxr42jzEqHMQ="
    )
)
"""A second of a rank as version 4 of the schema had it: what there is of it stands in ``test_older_seconds``."""

RECORDED_SECOND_2 = zlib.decompress(
    base64.b64decode(
        "eNqb8+/cpgtxDOfeZWswTGFiYmCYuDjN2GjS5FQGhskMjJyTzjK/Zpg4nYF9WXFJUWpx8VL90uLUogX/D008x3jycMOEIwUNAtsPMiABNijNCB"
        "N4+JUVWZ5BAIXHANPv0HE7AUQrHMk1QKZhQOHle7CRRwrA3NSzssiyjAwEAJqtMP0Nm57xgW2PLGZHpmHAwduHAQB/aTJG"
    )
)
"""A second of a rank as version 5 of the schema had it (format -2), likewise; made of ``a_rank(3)``."""

RECORDED_MINUTE_2 = zlib.decompress(
    base64.b64decode(
        "eNoBDwHw/ii1L/1g3wAtCAB0DJkCmAIEAgAABAECkaNmMzKSkwABCZNlAACRlwAHpnN0cmVzc6UvdXNlcqD/wpDECAQEBAEBBAEE3AAYzu5rKA"
        "DT/////xGU2ADOstBeAADSl7EegP7k4MCABvjOBfXg/9L6Ch8AzRAA0eDV+g4AzgHJw4DOv+1N/0W8SMDSot4kYNLppfRA0rk4MCDOAe/pIM7r"
        "ll0gEeuUxAIAAMQAxQEgAMqaOwBlzR0BEAAAAPD//wAQAAAAgLLmDkBZcwdAS0wBAAAAxAAaAHsgAAGAYgACgILd08wFdm+rBR/zQg7BisDCCB"
        "CE+gQO7OLDpbArs0IABIELX6zSsdmeKBEklU2dNc3/w3DQ"
    )
)
"""That second and the next, packed by that version (format 2): see ``test_packing``."""


class _Second(msgspec.Struct, array_like=True):
    start_ns: int
    end_ns: int
    collectives: object
    threads: object
    occupants: object


def second(start_ns: int, end_ns: int, rank: RankBatch) -> bytes:
    """A row of ``tail`` before there were operations."""
    return msgspec.msgpack.encode(_Second(start_ns, end_ns, rank.collectives, rank.threads, rank.occupants))


def minute(instants: list[int], running: list[int]) -> bytes:
    """A minute of a rank with one thread and nothing else, as format 1 had it: first value, width and differences
    of each column by itself."""

    def column(values):
        steps = [after - before for before, after in pairwise(values)]
        return [
            len(values),
            values[0],
            8,
            b"".join(step.to_bytes(8, "little", signed=True) for step in steps),
        ]

    nothing = [0, 0, 1, b""]
    batches = [column([at - SECOND for at in instants]), column(instants)]
    thread = [column(instants), column(running), *[column([0] * len(instants))] * 4]
    stolen = [column(instants), column([7] * len(instants))]
    packed = [batches, [nothing] * 8, [], [[101, 0, 0]], [thread], [stolen], [nothing] * 4, []]
    return zstandard.compress(msgspec.msgpack.encode(packed))
