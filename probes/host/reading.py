"""What a probe of the host says of one interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from probes.records import Event, Metric


@dataclass(frozen=True)
class Reading:
    """Values over the time since the last reading; what did not happen is left out."""

    node: Sequence[Metric] = ()
    ranks: Mapping[int, Sequence[Metric]] = field(default_factory=dict)
    """By the pid of a rank's process."""
    events: Sequence[Event] = ()
