"""What keeps a rank off its CPU, other than processes: a quota, interrupts, the hypervisor, a stop."""

from __future__ import annotations

from diagnosis.findings import Extra, HostTime, Judgement, TakerGroup, group_of
from diagnosis.wording import ms, percent

KSOFTIRQD = "ksoftirqd"
"""The kernel's thread for softirqs when there are too many of them: interrupts, not a process."""
_WORTH_SAYING = 0.5
"""A quota that is not the cause is said beside it where its group was throttled for this share of the waits."""
_USED_UP = 0.5
"""A group that used its quota up in this share of the periods had all the CPU time that the quota gives …"""
_OF_ITS_OWN = 2.0
"""… and one that was throttled for at most this many times what the rank waits was so mostly with this rank's own
threads (the counter is the sum over CPUs): then the quota held it, whoever else had the CPU meanwhile."""
_IDLE_SHARE = 0.5
"""A rank that its quota holds leaves its CPU idle, where nobody else wants it: from this share of what it waits
beyond its peers on, who else had the CPU does not matter. Below, the quota held it while the CPU was idle, whatever
its control groups count, and whoever had the CPU held it the rest of the time."""


def throttled_over(extra: Extra) -> float:
    """How much longer than its peers the rank was runnable and not allowed to run, ms per step.

    The counter of a control group is summed over CPUs and all threads of the group: it bounds what this rank
    waited, and does not measure it. So an idle CPU must speak for it.
    """
    waits = max(0.0, extra.over("runnable", "communication"))
    idle = max(0.0, extra.took("idle") - extra.peers_idle)
    others = sum(extra.excess("process", "kernel", "rank", "helper").values())
    throttled = extra.metric_over("cpu_throttled_ns", "cgroup")
    its_own = _used_up(extra) >= _USED_UP and throttled <= _OF_ITS_OWN * waits
    if not its_own and idle < _IDLE_SHARE * (idle + others):
        waits = min(waits, idle)
    return min(waits, throttled)


def _used_up(extra: Extra) -> float:
    """Share of the quota's periods in which it ran out."""
    periods = extra.host.total("cpu_periods")
    return extra.host.total("cpu_throttled_periods") / periods if periods else 0.0


def throttled_as_well(extra: Extra) -> str:
    """For whoever frees a busy CPU: a quota of the rank's group ran out, too, and may be next."""
    throttled = extra.metric_over("cpu_throttled_ns", "cgroup")
    rows = extra.host.rows("cpu_throttled_ns")
    if throttled < _WORTH_SAYING * extra.over("runnable", "communication") or not rows:
        return ""
    group = rows[0][0].get("cgroup", "?")
    return (
        f"; the quota of cgroup {group} held threads of its group up for {ms(throttled)}, which may add to it"
    )


def cpu_quota(extra: Extra) -> Judgement:
    """A control group's quota ran out while the rank wanted to run."""
    throttled = extra.host.rows("cpu_throttled_ns")
    waits, over = (
        extra.parts["runnable"] + extra.parts["communication"],
        extra.over("runnable", "communication"),
    )
    theirs = ms(extra.peers_host.total("cpu_throttled_ns")) if extra.comparable("cgroup") else "not known"
    otherwise = (
        f"the quotas of rank {extra.rank}'s cgroups held threads up for "
        f"{ms(extra.host.total('cpu_throttled_ns'))} per step, its peers' for {theirs}"
    )
    if not throttled:
        return Judgement(0.0, "node", "", (), otherwise)
    labels, took = throttled[0]
    group = labels.get("cgroup", "?")
    quota, period = _ms_of(labels.get("quota_us", "")), _ms_of(labels.get("period_us", ""))
    periods = _of_group(extra, "cpu_periods", group)
    often = (
        f" in {percent(_of_group(extra, 'cpu_throttled_periods', group) / periods)} of them"
        if periods
        else ""
    )
    detail = (
        f"cgroup {group}: quota {quota} per {period}, used up{often}, which held its threads up for {ms(took)} "
        f"per step (all CPUs together); rank {extra.rank} waited {ms(waits)} for a CPU, its peers "
        f"{ms(waits - over)}"
    )
    actions = (
        f"Raise or remove the CPU quota of cgroup {group} on {extra.node} (cpu.max, or cpu.cfs_quota_us; in "
        f"Kubernetes the container's CPU limit).",
        f"Then diagnose again: nr_throttled in its cpu.stat should stand still, and rank {extra.rank} wait for a "
        f"CPU as its peers do.",
    )
    return Judgement(throttled_over(extra), "node", detail, actions, otherwise)


def _of_group(extra: Extra, name: str, group: str) -> float:
    return sum(value for labels, value in extra.host.rows(name) if labels.get("cgroup", "?") == group)


def _ms_of(microseconds: str) -> str:
    """``50 ms``."""
    return f"{int(microseconds) / 1000:g} ms" if microseconds.isdecimal() else "?"


def is_softirqs(group: TakerGroup) -> bool:
    """Whether what had the CPU is the kernel's thread for softirqs."""
    return group[0] == "kernel" and group[1] == KSOFTIRQD


def ksoftirqd_over(extra: Extra) -> float:
    """What ksoftirqd had the CPU of the rank longer than those of its peers."""
    return sum(over for group, over in extra.excess("kernel").items() if is_softirqs(group))


def interrupts(extra: Extra) -> Judgement:
    """Interrupts took the CPU that the rank ran on, or wanted: in its own time, and in ksoftirqd's."""
    inside = max(0.0, extra.over("interrupted"))
    outside = min(ksoftirqd_over(extra), max(0.0, extra.over("runnable", "communication")))
    mine = extra.parts["interrupted"]
    otherwise = (
        f"interrupts took {ms(mine)} per step from rank {extra.rank}, {ms(mine - extra.over('interrupted'))} "
        f"from its peers"
    )
    if inside + outside <= 0:
        return Judgement(0.0, "node", "", (), otherwise)
    daemons = [taker for taker in extra.takers if is_softirqs(group_of(taker))]
    if outside > inside:
        cpu = daemons[0].name.partition("/")[2]
        what, where = _in_ksoftirqd(extra, cpu)
    else:
        what, where = _in_its_midst(extra, inside)
    both, split = ms(inside + outside), ""
    if outside > 0:
        pids = ", ".join(str(pid) for taker in daemons[:3] for pid in taker.pids[:3])
        split = f" ({ms(inside)} of its running time, {ms(outside)} in {KSOFTIRQD}, pid {pids})"
    detail = f"{what}{where} took {both} per step more from rank {extra.rank} than from peers{split}"
    actions = (
        f"On {extra.node}, move {what} to CPUs without a rank (/proc/irq/*/smp_affinity_list, the device's "
        f"rps_cpus, irqbalance's ban list), or stop what causes it.",
        f"Then diagnose again: interrupts should take about {ms(extra.peers_parts['interrupted'])} per step from "
        f"rank {extra.rank}, as from its peers.",
    )
    return Judgement(inside + outside, "node", detail, actions, otherwise)


def _in_its_midst(extra: Extra, inside: float) -> tuple[str, str]:
    """The vector or device that took most of the rank's running time beyond what it takes from peers, and where;
    no single one where none took half of it."""
    over: list[tuple[float, str, str, str, str]] = []
    for name, by_cpu, key in (
        ("softirq_ns", "softirq_cpu_ns", "vector"),
        ("hardirq_ns", "hardirq_cpu_ns", "irq"),
    ):
        for labels, mine in extra.host.rows(name):
            theirs = extra.peers_host.metrics.get((name, tuple(sorted(labels.items()))), 0.0)
            over.append((mine - theirs, _interrupt(labels), by_cpu, key, labels.get(key, "")))
    most, words, by_cpu, key, which = max(over, default=(0.0, "", "", "", ""))
    if not extra.comparable("interrupts") or 2 * most < inside:
        seen = f" (none of them most of it; {words} {ms(most)})" if most > 0 else " (which is not seen)"
        return f"interrupts{seen}", ""
    on = [labels.get("cpu", "") for labels, _ in extra.host.rows(by_cpu) if labels.get(key) == which]
    return words, _where(extra, words, on[0] if on else "")


def _interrupt(labels: dict[str, str]) -> str:
    if "vector" in labels:
        return labels["vector"]
    irq, device = labels.get("irq", "?"), labels.get("device", "")
    return f"interrupt {irq} ({device})" if device else f"interrupt {irq}"


def _in_ksoftirqd(extra: Extra, cpu: str) -> tuple[str, str]:
    """The vector that ksoftirqd of that CPU worked on most, as the node's own sums tell it."""
    rows = [
        labels["vector"]
        for labels, _ in extra.node_metrics.rows("softirq_ns")
        if labels.get("in") == KSOFTIRQD and labels.get("cpu") == cpu and labels.get("vector")
    ]
    what = rows[0] if rows else "softirqs (which is not seen)"
    return what, _where(extra, what, cpu)


def _where(extra: Extra, what: str, cpu: str) -> str:
    """CPU, and for received packets the interface that most of them came from."""
    if not cpu.isdecimal():
        return ""
    devices = [
        labels["device"]
        for labels, _ in extra.node_metrics.rows("net_rx_share")
        if labels.get("cpu") == cpu and labels.get("device")
    ]
    return f" on CPU {cpu}" + (f" from {devices[0]}" if what == "NET_RX" and devices else "")


def hypervisor_steal(extra: Extra) -> Judgement:
    """The hypervisor gave the virtual CPU to others while the rank ran on it."""
    over, mine = max(0.0, extra.over("stolen")), extra.parts["stolen"]
    words = (
        f"the hypervisor took {ms(mine)} per step from rank {extra.rank}, {ms(mine - extra.over('stolen'))} from "
        f"its peers"
    )
    actions = (
        f"Ask whoever runs the host of {extra.node}: its virtual CPUs are oversubscribed (st in top), or move the "
        f"rank to another node.",
        f"Then diagnose again: st in top on {extra.node} should be as on other nodes.",
    )
    return Judgement(over, "node", words if over > 0 else "", actions, words)


def stopped(extra: Extra) -> Judgement:
    """The process was stopped: by a signal, a debugger, a frozen control group. Signals are told of where the
    kernel hides what threads sleep for, too."""
    by_signals = _stopped_by_signals(extra.host)
    mine = max(extra.host.asleep.get("stopped", 0.0), by_signals)
    over = extra.asleep_over("stopped")
    if extra.comparable("signals"):
        signals_over = by_signals - _stopped_by_signals(extra.peers_host)
        over = max(over, min(signals_over, extra.over("blocked")))
    otherwise = f"rank {extra.rank} was stopped for {ms(mine)} per step"
    if over <= 0:
        return Judgement(0.0, "node", "", (), otherwise)
    whom, how = _who_stopped(extra)
    detail = f"process {extra.pid} of rank {extra.rank} was stopped{how}, {ms(mine)} per step in the mean"
    actions = (
        f"Find out why {whom} stops process {extra.pid} on {extra.node}; if it still stands still: "
        f"kill -CONT {extra.pid}, or thaw its cgroup.",
        f"Then diagnose again: rank {extra.rank} should not be stopped.",
    )
    return Judgement(over, "node", detail, actions, otherwise)


def _stopped_by_signals(of: HostTime) -> float:
    return sum(ms_ for labels, ms_ in of.rows("stopped_ns") if labels.get("process") != "helper")


def _who_stopped(extra: Extra) -> tuple[str, str]:
    """Whom to ask, and how it stands in a sentence."""
    for labels, _ in extra.host.rows("stopped_ns"):
        if labels.get("by") and labels.get("process") != "helper":
            whom = f"{labels['by']} (pid {labels.get('by_pid', '?')})"
            return whom, f" by {whom}"
    for labels, _ in extra.host.rows("traced"):
        if labels.get("tracer"):
            whom = f"{labels['tracer']} (pid {labels.get('tracer_pid', '?')})"
            return whom, f" by {whom}, which traces it"
    for labels, _ in extra.host.rows("cgroup_frozen"):
        if labels.get("cgroup"):
            return f"what froze cgroup {labels['cgroup']}", f": cgroup {labels['cgroup']} was frozen"
    return "whatever", ""
