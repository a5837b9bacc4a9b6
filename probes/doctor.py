"""What this node offers to the agent: each point with what to do where it is missing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from probes import bpf
from probes.bpf import BpfUnavailable, Kernel
from probes.discovery import Discovery
from probes.host.thread_time import ThreadTimeProbe
from probes.nccl.gloo import LIBRARY, GlooProbe

OLDEST_KERNEL = (5, 8)
TELLS_STATE = (5, 18)


@dataclass(frozen=True)
class Finding:
    """One line of ``sysom doctor``."""

    name: str
    ok: bool
    words: str


def examine(cache: Path) -> list[Finding]:
    """Look at everything the agent needs, load the probes, and take them away again."""
    findings = [_root(), _kernel(), *_tracing(), _bcc(), _headers(cache)]
    if all(finding.ok for finding in findings):
        findings += _probes(cache)
    else:
        findings.append(Finding("probes", False, "not tried: see what is missing above"))
    return [*findings, _ranks(), _nvml()]


def _root() -> Finding:
    return Finding("root", os.geteuid() == 0, "yes" if os.geteuid() == 0 else "no: run with sudo")


def _kernel() -> Finding:
    release = platform.release()
    if bpf.kernel_release() < OLDEST_KERNEL:
        return Finding("kernel", False, f"{release}; the agent needs Linux 5.8 or later")
    if bpf.kernel_release() < TELLS_STATE:
        return Finding("kernel", True, f"{release}; before 5.18 uninterruptible sleep is not told from sleep")
    return Finding("kernel", True, release)


def _tracing() -> list[Finding]:
    if os.geteuid() != 0:
        return [Finding("tracepoints", False, "only root can look")]
    try:
        bpf.require_tracefs()
    except BpfUnavailable as error:
        return [Finding("tracefs", False, str(error))]
    wanted = [
        ("sched", "sched_switch"),
        ("sched", "sched_waking"),
        ("sched", "sched_migrate_task"),
        ("irq", "irq_handler_entry"),
        ("irq", "softirq_entry"),
    ]
    missing = [f"{category}:{name}" for category, name in wanted if not bpf.has_tracepoint(category, name)]
    if missing:
        return [Finding("tracepoints", False, f"the kernel lacks {', '.join(missing)} (CONFIG_FTRACE)")]
    timer = bpf.has_tracepoint("irq_vectors", "local_timer_entry")
    words = (
        "scheduler, interrupts, timer" if timer else "scheduler, interrupts (timer interrupts are not seen)"
    )
    return [Finding("tracepoints", True, words)]


def _bcc() -> Finding:
    try:
        return Finding("BCC", True, f"version {bpf.bindings().__version__}")
    except BpfUnavailable as error:
        return Finding("BCC", False, str(error))


def _headers(cache: Path) -> Finding:
    try:
        found = bpf.kernel_headers(cache)
    except (BpfUnavailable, OSError) as error:
        return Finding("kernel headers", False, str(error))
    return Finding("kernel headers", True, found.name if found else "the running kernel's own")


def _probes(cache: Path) -> list[Finding]:
    try:
        threads = ThreadTimeProbe(Kernel(cache))
    except BpfUnavailable as error:
        return [Finding("probe thread_time", False, str(error))]
    try:
        gloo = GlooProbe(Kernel(cache))
    except BpfUnavailable as error:
        return [Finding("probe thread_time", True, "loads"), Finding("probe gloo", False, str(error))]
    finally:
        threads.close()
    gloo.close()
    return [Finding("probe thread_time", True, "loads"), Finding("probe gloo", True, "loads")]


def _ranks() -> Finding:
    ranks = sorted(Discovery(LIBRARY).scan().values(), key=lambda rank: (rank.job, rank.rank))
    if not ranks:
        return Finding("ranks", True, "none runs here now (RANK and WORLD_SIZE set, and PyTorch loaded)")
    listed = ", ".join(f"{rank.job} rank {rank.rank} (pid {rank.process.pid})" for rank in ranks[:16])
    return Finding("ranks", True, listed + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""))


def _nvml() -> Finding:
    """Whether GPUs could be read; no probe of this version reads them yet."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Finding("GPU", True, f"none is seen ({error}): GPU causes cannot be named here")
    try:
        count = pynvml.nvmlDeviceGetCount()
        return Finding(
            "GPU", True, f"{count} by NVML; this version has no GPU probe: GPU causes are not named"
        )
    finally:
        pynvml.nvmlShutdown()
