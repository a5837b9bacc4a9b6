"""Batches that arrive at a store."""

from tests.probes.batches import SECOND


def add(store, *batches, late_s=0):
    """Each batch as if it came ``late_s`` after its end; whether it was new."""
    return [store.add(batch, batch.end_ns + batch.utc_offset_ns + late_s * SECOND) for batch in batches]
