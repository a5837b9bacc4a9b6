"""All faults, by name."""

from __future__ import annotations

from tests.scenarios import cpu, job, memory, network, process, python, storage
from tests.scenarios.fault import Fault

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for family in (cpu, process, python, storage, memory, network, job)
    for fault in family.FAULTS
}
