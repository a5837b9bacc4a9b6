"""What this node offers to the agent, each point with what to do where it is missing; and what the agents that run
here say of themselves."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from probes import bpf, in_kernel, status
from probes.bpf import BpfUnavailable, Kernel
from probes.discovery import Discovery
from probes.host.thread_time import ThreadTimeProbe
from probes.host_probes import IN_CAPTURES, KINDS, Kind
from probes.in_kernel import CannotLook
from probes.loaded import NOT_YET, PROBES
from probes.nccl.gloo import LIBRARY, GlooProbe
from probes.procfs import HOST_PID_WORDS, in_initial_pid_namespace
from probes.status import AgentStatus

OLDEST_KERNEL = (5, 8)
TELLS_STATE = (5, 18)
LOADING_NS = 60_000_000_000
"""An agent that loads its probes may be silent for so long: it compiles at a low priority, beside a full job."""
OTHERS = "other agents"
"""Name of the finding that says of programs whose process does not report here."""
PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
"""Number of perf_event_open(2)."""
PERF_ATTR_BYTES = 72
"""PERF_ATTR_SIZE_VER1, include/uapi/linux/perf_event.h."""
SOFTWARE, CPU_CLOCK = 1, 0
"""PERF_TYPE_SOFTWARE and PERF_COUNT_SW_CPU_CLOCK, in the same file."""


@dataclass(frozen=True)
class Finding:
    """One point of what the node offers."""

    name: str
    ok: bool
    words: str
    """What was found; where it is missing, what that means and how to get it."""
    needed: bool = True
    """Without it the agent cannot watch; else ``ok`` false is worth knowing and no more."""


@dataclass(frozen=True)
class Examination:
    """What ``sysom doctor`` found."""

    node: str
    kernel: str
    cpus: int
    at: str
    """UTC, RFC 3339."""
    at_ns: int
    """CLOCK_MONOTONIC."""
    ok: bool
    """Watching works, or would work when an agent is started."""
    summary: str
    detached: str
    """Why nothing may be attached here; empty when agents may attach."""
    detached_since: str
    agents: list[AgentStatus]
    """Those that run now."""
    findings: list[Finding]


def examine(cache: Path, runtime: Path) -> Examination:
    """Look at everything the agent needs and at the agents that run. When there is none, load the probes and take
    them away again; with the kill switch on nothing is loaded."""
    agents = status.living(runtime)
    why = status.detached(runtime)
    findings = [_root(), _kernel(), _btf(), *_tracing(), _uprobes(), _perf_clock(), _bcc(), _headers(cache)]
    findings.append(_pid_namespace(Path("/proc")))
    elsewhere = _elsewhere(agents)
    if not agents and not elsewhere and not why:
        if all(finding.ok for finding in findings if finding.needed):
            findings += _probes(cache)
        else:
            findings.append(Finding("probes", False, "not tried: see what is missing above"))
    findings += [*elsewhere, _ranks(), _nvml()]
    ok, summary = _summary(findings, agents, why)
    return Examination(
        node=platform.node(),
        kernel=platform.release(),
        cpus=os.cpu_count() or 1,
        at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        at_ns=time.monotonic_ns(),
        ok=ok,
        summary=summary,
        detached=why,
        detached_since=_since(runtime / status.SWITCH) if why else "",
        agents=agents,
        findings=findings,
    )


def _summary(findings: list[Finding], agents: list[AgentStatus], why: str) -> tuple[bool, str]:
    """Whether all is well, and the one line to read first."""
    missing = [finding.name for finding in findings if finding.needed and not finding.ok]
    hanging = [agent.pid for agent in agents if _hangs(agent)]
    lacking = {p.name for agent in agents for p in agent.probes if p.state == "unavailable"}
    unavailable = sorted(lacking & set(PROBES))
    shed = [what for agent in agents for what in agent.shed]
    ranks = sum(len(agent.ranks) for agent in agents)
    if why:
        return False, "The kill switch is on: nothing is watched on this node. Off: sysom agent --attach"
    if hanging:
        return False, f"Agent {hanging[0]} has told nothing for over 10 s: it hangs, or is stopped."
    if missing:
        return False, f"This node cannot be watched: {', '.join(missing)} missing; see below."
    if unavailable:
        return False, f"An agent runs, but {' and '.join(unavailable)} cannot watch; see below."
    if not agents and any(finding.name == OTHERS for finding in findings):
        return True, "No agent reports here, but one runs: see other agents below."
    if not agents:
        return True, "No agent runs here; everything it needs is there. Start it: sysom agent"
    held = [agent.shipping for agent in agents if agent.shipping]
    if any(_loads(agent) for agent in agents):
        return True, "An agent loads its probes: look again in some seconds."
    words = (
        f"Watching {ranks} rank{'s' * (ranks != 1)}" if ranks else "An agent runs; no rank to watch runs here"
    )
    if lacking:
        words += f"; without {' and '.join(sorted(lacking))}, see below"
    if shed:
        words += f"; {len(shed)} thing{'s' * (len(shed) != 1)} given up to stay within the budgets"
    return True, words + ("; batches wait on this node, see below." if held else ".")


def _loads(agent: AgentStatus) -> bool:
    return any(probe.why == NOT_YET for probe in agent.probes)


def _hangs(agent: AgentStatus) -> bool:
    """Whether it has been silent for longer than what it does explains."""
    silent = time.monotonic_ns() - agent.at_ns
    return not status.is_fresh(agent) and not (_loads(agent) and silent < LOADING_NS)


def _since(path: Path) -> str:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%d %b %H:%M UTC")
    except OSError:
        return ""


def _root() -> Finding:
    if os.geteuid() != 0:
        return Finding("root", False, "no: run with sudo")
    try:
        bpf.require_root()
    except BpfUnavailable as error:
        return Finding("root", False, str(error))
    return Finding("root", True, "yes")


def _kernel() -> Finding:
    release = platform.release()
    if bpf.kernel_release() < OLDEST_KERNEL:
        return Finding("kernel", False, f"{release}; the agent needs Linux 5.8 or later")
    if bpf.kernel_release() < TELLS_STATE:
        return Finding("kernel", True, f"{release}; before 5.18 uninterruptible sleep is not told from sleep")
    return Finding("kernel", True, release)


def _btf() -> Finding:
    if Path("/sys/kernel/btf/vmlinux").exists():
        return Finding("BTF", True, "yes", needed=False)
    return Finding(
        "BTF", False, "none (CONFIG_DEBUG_INFO_BTF); no probe of this version needs it", needed=False
    )


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


def _uprobes() -> Finding:
    if Path("/sys/bus/event_source/devices/uprobe/type").exists():
        return Finding("uprobes", True, "yes, they end with the process that attached them")
    if (bpf.TRACEFS / "uprobe_events").exists():
        return Finding(
            "uprobes",
            True,
            "through tracefs only: those of a killed agent stay until `sysom agent --detach-all`",
        )
    return Finding("uprobes", False, "none: a kernel with CONFIG_UPROBE_EVENTS is needed")


def _perf_clock() -> Finding:
    """Whether CPUs can be sampled by the software clock, which virtual machines have too."""
    number = PERF_EVENT_OPEN.get(platform.machine())
    if number is None:
        return Finding("perf clock", False, f"not known on {platform.machine()}", needed=False)
    libc = ctypes.CDLL(None, use_errno=True)
    # struct perf_event_attr: type, size, config, sample_period, …
    attributes = struct.pack("<2I2Q", SOFTWARE, PERF_ATTR_BYTES, CPU_CLOCK, 10_000_000).ljust(
        PERF_ATTR_BYTES, b"\0"
    )
    handle = libc.syscall(number, attributes, -1, 0, -1, 0)
    if handle < 0:
        return Finding(
            "perf clock",
            False,
            f"cannot be opened ({os.strerror(ctypes.get_errno())}): in what code ranks run is not seen",
            needed=False,
        )
    os.close(handle)
    return Finding("perf clock", True, "yes", needed=False)


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
    words = f"{found.name.removeprefix('headers-')}, which serve too" if found else "the running kernel's own"
    return Finding("kernel headers", True, words)


def _pid_namespace(proc: Path) -> Finding:
    """BPF programs see the node's own pids: an agent must see the same."""
    try:
        ours = in_initial_pid_namespace(proc)
    except OSError as error:
        return Finding("pid namespace", False, f"cannot be read: {error}", needed=False)
    return Finding("pid namespace", ours, "the node's own" if ours else HOST_PID_WORDS)


def _probes(cache: Path) -> list[Finding]:
    try:
        threads = ThreadTimeProbe(Kernel(cache))
    except BpfUnavailable as error:
        return [Finding("probe thread_time", False, str(error))]
    try:
        gloo = GlooProbe(Kernel(cache), threads.load)
    except BpfUnavailable as error:
        return [Finding("probe thread_time", True, "loads"), Finding("probe gloo", False, str(error))]
    finally:
        threads.close()
    gloo.close()
    return [
        Finding("probe thread_time", True, "loads"),
        Finding("probe gloo", True, "loads"),
        *(_host_probe(kind, cache) for kind in KINDS),
    ]


def _host_probe(kind: Kind, cache: Path) -> Finding:
    """None of these is needed to watch ranks."""
    try:
        probe = kind.make(Kernel(cache))
    except (BpfUnavailable, OSError) as error:
        return Finding(f"probe {kind.name}", False, str(error), needed=False)
    words = "loads" if kind.always else f"loads; {IN_CAPTURES}"
    missing = "; ".join(probe.missing)
    probe.close()
    return Finding(
        f"probe {kind.name}", not missing, f"{words}; {missing}" if missing else words, needed=False
    )


def _ranks() -> Finding:
    discovery = Discovery(LIBRARY)
    jobs: dict[str, list[str]] = {}
    for rank in sorted(discovery.scan().values(), key=lambda rank: (rank.job, rank.rank)):
        jobs.setdefault(rank.job, []).append(f"{rank.rank} (pid {rank.process.pid})")
    for candidate in sorted(discovery.unnumbered().values(), key=lambda c: (c.job, c.process.pid)):
        jobs.setdefault(candidate.job, []).append(f"pid {candidate.process.pid}, its rank not yet known")
    if not jobs:
        return Finding(
            "ranks",
            True,
            "none runs here now (a process with PyTorch whose environment names a rank or a rendezvous)",
        )
    words = [
        f"{job}: " + ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        for job, ranks in jobs.items()
    ]
    return Finding("ranks", True, "; ".join(words))


def _elsewhere(agents: Collection[AgentStatus]) -> list[Finding]:
    """Programs of ours that a process holds which does not report here."""
    try:
        holders = {pid for program in in_kernel.programs() for pid in program.holders}
    except CannotLook:
        return []
    strangers = sorted(holders - {agent.pid for agent in agents} - {os.getpid()})
    if not strangers:
        return []
    pids = ", ".join(map(str, strangers))
    return [
        Finding(
            OTHERS,
            False,
            f"process {pids} holds programs of sysom and does not report here: it has another SYSOM_RUNTIME, or is "
            "another doctor",
            needed=False,
        )
    ]


def _nvml() -> Finding:
    """Whether GPUs could be read; no probe of this version reads them yet."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Finding("GPU", False, f"none is seen ({error}): no GPU cause is named", needed=False)
    try:
        count = pynvml.nvmlDeviceGetCount()
        return Finding("GPU", False, f"{count} by NVML; no probe of this version reads them", needed=False)
    finally:
        pynvml.nvmlShutdown()
