"""The host: what the operating system did with a late rank's time. Rules over tested differences."""

from __future__ import annotations

from collections.abc import Sequence

from diagnosis.accounting import ASLEEP, PARTS
from diagnosis.evidence import OccupantRow, RankEvidence
from diagnosis.findings import OTHERS, REASONS, Extra, Judgement, Taker, TakerKind, group_of
from diagnosis.layers.kept_off import is_softirqs, throttled_as_well, throttled_over
from diagnosis.layers.running import in_what_code, named_elsewhere, ran_longer
from diagnosis.verdict import Owner
from diagnosis.wording import more_ms, ms
from probes.records import Role

_NAMED = 3
_WORTH_NAMING = 0.1
"""Share of all that was taken; the rest is counted, not named."""
_WORTH_SPLITTING_MS = 0.05
"""Which threads waited is said from here on: less reads as 0.0 ms."""
_ROOT = "/"
"""The root cgroup: where whatever has none of its own is. It says nothing, and has no cpu.weight."""
_WORTH_SAYING_MS = 0.5
"""A reason for sleeping that took less beyond what it takes peers is not said."""
_GUILTY_SHARE = 0.1
"""A process that took less than this share of what others took beyond what they take from peers is not named."""


def takers(
    rank: RankEvidence,
    job: str,
    start_ns: int,
    end_ns: int,
    steps: float,
    runnable_ms: float,
    communication_ms: float,
) -> tuple[Taker, ...]:
    """Who had the CPU while this rank wanted one, between two of the rank's own instants, ms per step.

    Occupants come once per batch; one that straddles the bounds counts by its overlap. They never explain
    more than the account's ``runnable_ms`` (driving thread) and ``communication_ms`` (ms per step): what a
    communication thread waited while nobody waited for it is left out.
    """
    took: dict[Role, dict[tuple[TakerKind, str, str, str, int], float]] = {
        Role.DRIVING: {},
        Role.COMMUNICATION: {},
    }
    pids: dict[tuple[TakerKind, str, str, str, int], set[int]] = {}
    for row in rank.occupants:
        overlap = min(row.end_ns, end_ns) - max(row.start_ns, start_ns)
        if overlap <= 0 or row.took_ns <= 0:
            continue
        who = (_kind(row, rank, job), row.name, row.cgroup, row.rank_job, row.rank)
        share = overlap / (row.end_ns - row.start_ns)
        took[row.role][who] = took[row.role].get(who, 0.0) + row.took_ns * share / 1e6 / steps
        pids.setdefault(who, set()).add(row.pid)
    for role, limit in ((Role.DRIVING, runnable_ms), (Role.COMMUNICATION, communication_ms)):
        whole = sum(took[role].values())
        scale = min(1.0, limit / whole) if whole > 0 else 0.0
        took[role] = {who: ms * scale for who, ms in took[role].items()}
    found = [
        Taker(
            kind=who[0],
            name=who[1],
            pids=tuple(sorted(pids[who])),
            cgroup=who[2],
            ms=took[Role.DRIVING].get(who, 0.0) + took[Role.COMMUNICATION].get(who, 0.0),
            communication_ms=took[Role.COMMUNICATION].get(who, 0.0),
            job=who[3],
            rank=who[4],
        )
        for who in pids
    ]
    return tuple(sorted(found, key=lambda taker: (-taker.ms, taker.name, taker.pids)))


def _kind(row: OccupantRow, rank: RankEvidence, job: str) -> TakerKind:
    if row.pid == 0:
        return "idle"
    if row.pid == rank.pid:
        return "own"
    if row.rank_job == job and row.rank == rank.rank:
        return "helper"
    if row.rank_job:
        return "rank"
    return "kernel" if row.kernel else "process"


def cpu_contention(extra: Extra) -> Judgement:
    """Other processes had the CPU while the rank wanted it. An idle CPU (throttling) and the rank's own
    threads do not count, nor does what a process takes from the rank's peers as well."""
    longer = extra.over("runnable", "communication")
    # Softirqs are no process, and while a quota holds the rank, who has the CPU does not matter.
    excess = {group: over for group, over in extra.excess(*OTHERS).items() if not is_softirqs(group)}
    by_others = sum(excess.values())
    guilty = [
        taker
        for taker in extra.takers
        if taker.kind in OTHERS and excess.get(group_of(taker), 0.0) >= _GUILTY_SHARE * by_others
    ]
    named = [taker for taker in guilty[:_NAMED] if taker.ms >= _WORTH_NAMING * extra.took(*OTHERS)]
    waited = extra.parts["runnable"] + extra.parts["communication"]
    return Judgement(
        explained_ms=max(0.0, min(longer - throttled_over(extra), by_others)),
        owner=_owner(guilty),
        detail=_who_had_it(extra, named, guilty[len(named) :]) + throttled_as_well(extra) if named else "",
        actions=tuple(_contention_actions(extra, named)),
        otherwise=(
            f"rank {extra.rank} waits {ms(waited)} per step for a CPU, its peers {ms(waited - longer)}; other "
            f"processes had the CPU for {ms(extra.took(*OTHERS))} of it, {ms(by_others)} more than they take "
            f"from its peers"
        ),
    )


def _who_had_it(extra: Extra, named: Sequence[Taker], rest: Sequence[Taker]) -> str:
    """Who had the CPU, how long, and which of the rank's threads waited meanwhile."""
    first, *others = named
    took = [f"{describe(first, extra.job)} had the CPU for {ms(first.ms)} per step"]
    took += [f"{describe(taker, extra.job)} for {ms(taker.ms)}" for taker in others]
    if rest:
        took.append(f"{len(rest)} more for {ms(sum(taker.ms for taker in rest))}")
    inside = sum(taker.communication_ms for taker in (*named, *rest))
    outside = sum(taker.ms for taker in (*named, *rest)) - inside
    waited = f"while rank {extra.rank} waited for one"
    if min(inside, outside) >= _WORTH_SPLITTING_MS:
        waited += f" ({ms(outside)} in its driving thread, {ms(inside)} in its communication threads)"
    elif inside >= _WORTH_SPLITTING_MS:
        waited = f"while the communication threads of rank {extra.rank} waited for one"
    return f"{', '.join(took)}, {waited}" if len(took) > 1 else f"{took[0]} {waited}"


def describe(taker: Taker, job: str) -> str:
    """Name, pid, cgroup, and what it is to the job."""
    pids = ", ".join(str(pid) for pid in taker.pids[:_NAMED])
    if len(taker.pids) > _NAMED:
        pids += f" and {len(taker.pids) - _NAMED} more"
    facts = [f"pid {pids}" if len(taker.pids) == 1 else f"pids {pids}"]
    if taker.cgroup not in ("", _ROOT):
        facts.append(f"cgroup {taker.cgroup}")
    if taker.kind == "kernel":
        facts.append("kernel thread")
    if taker.kind == "helper":
        facts.append(f"a helper of rank {taker.rank} itself")
    if taker.kind == "rank":
        facts.append(f"rank {taker.rank} of {'this job' if taker.job == job else taker.job}")
    return f"{taker.name or 'a process without a name'} ({', '.join(facts)})"


def _owner(guilty: Sequence[Taker]) -> Owner:
    """The job owns what its own ranks and helpers take from each other, the node what strangers take."""
    ours = sum(taker.ms for taker in guilty if taker.kind in ("rank", "helper"))
    return "job" if ours * 2 > sum(taker.ms for taker in guilty) else "node"


def _contention_actions(extra: Extra, named: Sequence[Taker]) -> list[str]:
    actions = []
    for taker in named:
        what = describe(taker, extra.job)
        if taker.kind == "rank":
            actions.append(
                f"Give rank {extra.rank} and {what} CPUs of their own on {extra.node}: "
                f"compare their affinity (taskset -apc {extra.pid}) and the launcher's CPU binding."
            )
        elif taker.kind == "helper":
            actions.append(f"Give rank {extra.rank} fewer workers or more CPUs: {what} competes with it.")
        elif taker.kind == "kernel":
            actions.append(
                f"Find out what keeps {what} busy on {extra.node}, and move that off the rank's CPU."
            )
        else:
            pid = str(taker.pids[0]) if len(taker.pids) == 1 else "PID"
            lower = "give it a lower weight (its cgroup's cpu.weight)"
            if taker.cgroup in ("", _ROOT):
                lower = f"lower its priority (renice -n 10 -p {pid})"
            actions.append(
                f"Stop {what} on {extra.node}, move it to other CPUs (taskset -apc CPUS {pid}), or {lower}."
            )
    peers = extra.peers_parts["runnable"] + extra.peers_parts["communication"]
    actions.append(
        f"Then diagnose again: rank {extra.rank} should wait about {ms(peers)} per step for a CPU, as its "
        f"peers do (driving and communication threads together)."
    )
    return actions


def runs_longer(extra: Extra) -> Judgement:
    """The rank runs longer on its CPU, and not in Python: more work, or slower work. Only stacks and clocks could
    tell."""
    mine, theirs = extra.parts["running"], extra.peers_parts["running"]
    longer, along = ran_longer(extra)
    waits = f" (and so waits {ms(along)} longer for one)" if along >= 1.0 else ""
    runs = f"rank {extra.rank} runs {ms(mine)} per step on its CPU, its peers {ms(theirs)}{waits}"
    return Judgement(
        explained_ms=longer + along - named_elsewhere(extra),
        owner="unknown",
        detail=(
            f"{runs}{in_what_code(extra)}; whether its code does more or its CPU is slower is not seen (needs "
            f"stacks and the CPU's frequency)"
        ),
        actions=(
            f"See what rank {extra.rank} computes: py-spy dump --pid {extra.pid} on {extra.node}, a few "
            f"times; compare with a peer.",
            f"Compare its input (batch, sequence lengths, extra work such as logging) and {extra.node}'s CPU "
            f"frequency (cpupower frequency-info) with a peer's.",
        ),
        otherwise=runs,
    )


def unnamed(extra: Extra) -> Judgement:
    """What can be said when no cause explains enough: where the time is, and what to look at."""
    idle = extra.took("idle") - extra.peers_idle
    waits = extra.over("runnable", "communication")
    parts = {
        "runnable": waits,
        **{part: extra.over(part) for part in ("running", "interrupted", "stolen", "blocked")},
    }
    largest = max(parts, key=lambda part: parts[part])
    here, again = (
        f"rank {extra.rank} (pid {extra.pid}) on {extra.node}",
        f"{ms(parts[largest])} per step longer than its peers",
    )
    owner: Owner = "unknown"
    if largest == "runnable" and idle > 0.5 * waits:
        owner = "node"
        idled = f"waits for a CPU {again}, and for {ms(idle)} of it the CPU was idle"
        if "cgroup" in extra.host.told and not extra.host.total("cpu_throttled_ns"):
            detail = f"{idled}: no CPU quota held it up, nor did other processes; its CPU is slow to wake"
            action = (
                f"Compare idle states (cpupower idle-info) and, in a virtual machine, its host, for {here}."
            )
        else:
            detail = (
                f"{idled}: it was not allowed to run. A CPU quota (cgroup throttling) is suspected, other "
                f"processes are not"
            )
            action = f"Look at nr_throttled in the cpu.stat of the cgroup of {here}; raise its quota."
    elif largest == "runnable":
        seen = extra.took(*OTHERS, "own", "idle")
        others = extra.took(*OTHERS)
        detail = f"waits for a CPU {again}; who had it is seen for {ms(seen)}, other processes {ms(others)}"
        action = f"Look at what shares the CPUs of {here} (perf sched), its affinity and its cgroup's quota."
    elif largest == "blocked":
        detail = f"asleep outside collectives {again}, not for want of a CPU; {_slept_for(extra)}"
        action = (
            f"See where {here} sleeps: py-spy dump --native --pid {extra.pid}; a data loader, a file, a lock?"
        )
    elif largest == "interrupted":
        detail = f"interrupted by the kernel {again}, which explains only part of its extra time"
        action = f"Compare /proc/interrupts and /proc/softirqs over a few seconds on the CPU of {here}."
    elif largest == "stolen":
        owner = "node"
        detail = f"loses its CPU to the hypervisor {again}"
        action = (
            f"Ask whoever runs the host of {extra.node}: its virtual CPUs are oversubscribed (st in top)."
        )
    else:
        detail = f"runs on its CPU {again}, which explains only part of its extra time{in_what_code(extra)}"
        action = f"See what {here} computes and where it sleeps: py-spy dump --native --pid {extra.pid}."
    rest = [
        f"{PARTS[name].label} {more_ms(value)}"
        for name, value in parts.items()
        if name != largest and abs(value) >= 0.2 * extra.own
    ]
    if rest:
        detail += f" (also: {', '.join(rest)})"
    return Judgement(0.0, owner, f"rank {extra.rank} {_verb(detail)}", (action,), "")


def _slept_for(extra: Extra) -> str:
    """What is known of the sleeps of a rank none of which explains enough."""
    if REASONS not in extra.host.told:
        return "what it waits for is not seen (stacks, locks and disks are not watched)"
    mine, theirs = dict(extra.host.asleep), extra.peers_host.asleep
    mine["helpers"] = sum(extra.host.through_helpers.values())
    told = extra.comparable(REASONS)
    over = {what: ms_ - (theirs.get(what, 0.0) if told else 0.0) for what, ms_ in mine.items()}
    if told:
        over["helpers"] -= sum(extra.peers_host.through_helpers.values())
    largest = [what for what in sorted(over, key=lambda what: -over[what]) if over[what] >= _WORTH_SAYING_MS]
    known = max(0.0, sum(over.values()))
    words = ", ".join(f"{PARTS[ASLEEP + what].label} {more_ms(over[what])}" for what in largest[:_NAMED])
    if not told:
        most = f" (itself: {words.replace('+', '')})" if words else ""
        return f"what its peers sleep for is not seen, so nothing can be compared{most}"
    unseen = extra.over("blocked") - known
    if unseen >= _WORTH_SAYING_MS:
        words = f"{words}, " if words else ""
        words += f"for what is not seen {more_ms(unseen)}"
    return f"it is: {words}" if words else "no reason stands out"


def _verb(detail: str) -> str:
    return detail if detail.startswith(("waits", "runs", "loses")) else f"is {detail}"
