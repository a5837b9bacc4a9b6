"""What keeps a rank off its CPU, other than processes: a quota, interrupts, the hypervisor, a stop."""

from __future__ import annotations

from diagnosis.findings import Extra, Judgement, TakerGroup, group_of
from diagnosis.wording import ms, percent

KSOFTIRQD = "ksoftirqd"
"""The kernel's thread for softirqs when there are too many of them: interrupts, not a process."""


def throttled_over(extra: Extra) -> float:
    """How much longer than its peers the rank was runnable and not allowed to run, ms per step: what its groups
    were throttled, as far as it waited for a CPU at all."""
    waits = max(0.0, extra.over("runnable", "communication"))
    return min(waits, extra.metric_over("cpu_throttled_ns"))


def cpu_quota(extra: Extra) -> Judgement:
    """A control group's quota ran out while the rank wanted to run. The group's counter is summed over CPUs and all
    threads of the group, so it bounds what the rank waited, and does not measure it."""
    throttled = extra.host.rows("cpu_throttled_ns")
    waits = extra.parts["runnable"] + extra.parts["communication"]
    otherwise = (
        f"the control groups of rank {extra.rank} were throttled for "
        f"{ms(extra.host.total('cpu_throttled_ns'))} "
        f"per step, its peers' for {ms(extra.peers_host.total('cpu_throttled_ns'))}"
    )
    if not throttled:
        return Judgement(0.0, "node", "", (), otherwise)
    labels, took = throttled[0]
    quota, period = _ms_of(labels.get("quota_us", "")), _ms_of(labels.get("period_us", ""))
    group = labels.get("cgroup", "")
    periods = extra.host.total("cpu_periods")
    often = extra.host.total("cpu_throttled_periods") / periods if periods else 0.0
    detail = (
        f"the quota of cgroup {group} ({quota} per {period}) ran out in {percent(often)} of the periods "
        "and held "
        f"its threads up for {ms(took)} per step; rank {extra.rank} waited {ms(waits)} for a CPU, its peers "
        f"{ms(waits - extra.over('runnable', 'communication'))}"
    )
    actions = (
        f"Raise or remove the CPU quota of cgroup {group} on {extra.node} (cpu.max, or cpu.cfs_quota_us): "
        "a container's "
        "CPU limit.",
        f"Then diagnose again: nr_throttled in its cpu.stat should stand still, and rank {extra.rank} wait "
        "for a CPU as "
        "its peers do.",
    )
    return Judgement(throttled_over(extra), "node", detail, actions, otherwise)


def _ms_of(microseconds: str) -> str:
    return ms(int(microseconds) / 1000) if microseconds.isdigit() else "?"


def is_softirqs(group: TakerGroup) -> bool:
    """Whether what had the CPU is the kernel's thread for softirqs."""
    return group[0] == "kernel" and group[1].startswith(KSOFTIRQD)


def ksoftirqd_over(extra: Extra) -> float:
    """What ksoftirqd had the CPU of the rank longer than those of its peers."""
    return sum(over for group, over in extra.excess("kernel").items() if is_softirqs(group))


def interrupts(extra: Extra) -> Judgement:
    """Interrupts took the CPU that the rank ran on, or wanted: in its own time, and in ksoftirqd's."""
    inside = max(0.0, extra.over("interrupted"))
    outside = min(ksoftirqd_over(extra), max(0.0, extra.over("runnable", "communication")))
    mine = extra.parts["interrupted"]
    otherwise = (
        f"interrupts took {ms(mine)} per step from rank {extra.rank}, "
        f"{ms(mine - extra.over('interrupted'))} from its "
        "peers"
    )
    if inside + outside <= 0:
        return Judgement(0.0, "node", "", (), otherwise)
    whose, where = _largest_interrupt(extra)
    took = [f"{ms(inside)} per step in its midst"] if inside > 0 else []
    if outside > 0:
        pids = [str(pid) for taker in extra.takers if is_softirqs(group_of(taker)) for pid in taker.pids]
        took.append(f"{ms(outside)} in {KSOFTIRQD} (pid {', '.join(pids[:3])}) while it waited for the CPU")
    detail = f"{whose}{where} took {' and '.join(took)} more from rank {extra.rank} than from its peers"
    actions = (
        f"Move {whose} on {extra.node} to CPUs without a rank (/proc/irq/*/smp_affinity_list, the device's "
        "rps_cpus, "
        "irqbalance's ban list), or stop what causes it.",
        f"Then diagnose again: interrupts should take about {ms(extra.peers_parts['interrupted'])} per "
        "step from rank "
        f"{extra.rank}, as from its peers.",
    )
    return Judgement(inside + outside, "node", detail, actions, otherwise)


def _largest_interrupt(extra: Extra) -> tuple[str, str]:
    """The vector or device that took most beyond what it takes from peers, and on which CPU."""
    over: list[tuple[float, str, str]] = []
    for name in ("softirq_ns", "hardirq_ns"):
        for labels, mine in extra.host.rows(name):
            theirs = extra.peers_host.metrics.get((name, tuple(sorted(labels.items()))), 0.0)
            words = (
                labels.get("vector")
                or f"interrupt {labels.get('irq', '?')} of {labels.get('device') or 'a device'}"
            )
            over.append(
                (mine - theirs, words, "softirq_cpu_ns" if name == "softirq_ns" else "hardirq_cpu_ns")
            )
    if not over:
        # All of it in ksoftirqd: the node's own sums tell the vector.
        rows = [row for row in extra.node_metrics.rows("softirq_ns") if row[0].get("in") == KSOFTIRQD]
        if not rows:
            return "interrupts (which is not seen)", ""
        return _with_device(extra, rows[0][0].get("vector", "softirqs"), rows[0][0].get("cpu", ""))
    _, words, by_cpu = max(over)
    on = [labels for labels, _ in extra.host.rows(by_cpu) if words in (labels.get("vector"), words)]
    cpu = on[0].get("cpu", "") if on else ""
    return _with_device(extra, words, cpu)


def _with_device(extra: Extra, vector: str, cpu: str) -> tuple[str, str]:
    where = f" on CPU {cpu}" if cpu.isdigit() else ""
    if vector != "NET_RX":
        return vector, where
    shares = [
        (share, labels.get("device", ""))
        for labels, share in extra.node_metrics.rows("net_rx_share")
        if not cpu.isdigit() or labels.get("cpu") == cpu
    ]
    best = max(shares, default=(0.0, ""))
    return vector, f"{where} from {best[1]}" if best[1] else where


def hypervisor_steal(extra: Extra) -> Judgement:
    """The hypervisor gave the virtual CPU to others while the rank ran on it."""
    over = max(0.0, extra.over("stolen"))
    mine = extra.parts["stolen"]
    words = (
        f"the hypervisor took {ms(mine)} per step from rank {extra.rank}, "
        f"{ms(mine - extra.over('stolen'))} from its peers"
    )
    actions = (
        f"Ask whoever runs the host of {extra.node}: its virtual CPUs are oversubscribed (st in top), or "
        "move the node.",
    )
    return Judgement(over, "node", words if over > 0 else "", actions, words)


def stopped(extra: Extra) -> Judgement:
    """The process was stopped: by a signal, a debugger, a frozen control group."""
    over = extra.asleep_over("stopped")
    mine = extra.host.asleep.get("stopped", 0.0)
    otherwise = f"rank {extra.rank} was stopped for {ms(mine)} per step"
    if over <= 0:
        return Judgement(0.0, "node", "", (), otherwise)
    senders = [labels for labels, _ in extra.host.rows("stopped_ns") if labels.get("by")]
    tracers = [labels for labels, _ in extra.host.rows("traced") if labels.get("tracer")]
    frozen = [labels for labels, _ in extra.host.rows("cgroup_frozen") if labels.get("cgroup")]
    by, whom = "", "whatever stops it"
    if senders:
        whom = f"{senders[0]['by']} (pid {senders[0].get('by_pid', '?')})"
        by = f" by {whom}"
    elif tracers:
        whom = f"{tracers[0]['tracer']} (pid {tracers[0].get('tracer_pid', '?')})"
        by = f" by {whom}, which traces it"
    elif frozen:
        whom = f"what froze cgroup {frozen[0]['cgroup']}"
        by = f": cgroup {frozen[0]['cgroup']} was frozen"
    detail = f"process {extra.pid} of rank {extra.rank} was stopped{by}, {ms(mine)} per step in the mean"
    actions = (
        f"Find out why {whom} stops process {extra.pid} on {extra.node}; if it still stands still: kill "
        f"-CONT {extra.pid}.",
    )
    return Judgement(over, "node", detail, actions, otherwise)
