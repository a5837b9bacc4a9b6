"""The records that agents send: the ground floor that every other part stands on.

One :class:`Batch` per node and second carries, for every rank on that node, one columnar
:class:`RankBatch`. On the wire a batch is msgpack (msgspec) inside one zstd frame.

Units: times are nanoseconds. ``*_ns`` instants are CLOCK_MONOTONIC of the node that took them;
``Batch.utc_offset_ns`` turns them into UTC (``utc = monotonic + offset``). Durations are nanoseconds.
Columns of one struct all have the same length; :func:`probes.codec.decode` refuses a batch in which they differ.
"""

from __future__ import annotations

import enum

import msgspec

SCHEMA = 1
"""Version of the wire format. A server takes its own version only, and says which one it speaks."""


class Op(enum.IntEnum):
    """What a collective does. Numbers are ``c10d::OpType``'s (torch/csrc/distributed/c10d/Work.hpp)."""

    BROADCAST = 0
    ALLREDUCE = 1
    ALLREDUCE_COALESCED = 2
    REDUCE = 3
    ALLGATHER = 4
    ALLGATHER_BASE = 5
    ALLGATHER_COALESCED = 6
    GATHER = 7
    SCATTER = 8
    REDUCE_SCATTER = 9
    ALLTOALL_BASE = 10
    ALLTOALL = 11
    SEND = 12
    RECV = 13
    RECV_ANY_SOURCE = 14
    BARRIER = 15
    REDUCE_SCATTER_BASE = 16
    COALESCED = 17
    ALLREDUCE_SPARSE = 18
    REDUCE_SCATTER_COALESCED = 19
    UNKNOWN = 100


class TimedBy(enum.IntEnum):
    """Which clock saw a collective end. Host-timed gloo calls end when the data is there; host-timed
    NCCL calls end at enqueue, and show late enqueues, not slow GPUs."""

    HOST = 0
    DEVICE = 1


class Role(enum.IntEnum):
    """What a watched thread does for its rank."""

    DRIVING = 0
    """Enqueues the step's work and waits for it."""
    COMMUNICATION = 1
    """Moves the data of collectives (a gloo run loop)."""
    HELPER = 2
    """The main thread of a process that works for the rank (a DataLoader worker)."""


class State(enum.IntEnum):
    """How far a collective came, where a flight recorder tells."""

    UNKNOWN = 0
    SCHEDULED = 1
    """Enqueued, not begun."""
    STARTED = 2
    COMPLETED = 3


class Lane(enum.IntEnum):
    """Where an operation runs; operations of one lane of one rank do not overlap, as a rule."""

    HOST = 0
    COMPUTE = 1
    COMMUNICATION = 2


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: immutable, fields by name."""


class Communicator(Struct, frozen=True, kw_only=True):
    """One communicator as one rank sees it. ``uid`` is equal on all its members where the library gives
    one (c10d's group name); ``uid == ""`` means unknown, then ranks are matched by size and order."""

    uid: str
    desc: str
    rank: int
    """This rank's place in the communicator, 0 … size−1."""
    size: int


class Collectives(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Columns, one row per collective, in the order in which the rank entered them."""

    communicator: list[int] = []
    """Index into ``RankBatch.communicators``."""
    seq: list[int] = []
    """The library's sequence number, counted per communicator."""
    op: list[int] = []
    """:class:`Op`; a number not listed there is kept as it came."""
    bytes: list[int] = []
    """Size of this rank's input; −1 when it could not be read."""
    dtype: list[str] = []
    enter_ns: list[int] = []
    """Arrival: the driving thread enters."""
    duration_ns: list[int] = []
    """From arrival to completion; −1 while it has not ended."""
    failed: list[bool] = []
    state: list[int] = []
    """:class:`State`; the column is empty where nothing tells (agents: an end is seen or it is not)."""


class Operations(Struct, frozen=True, kw_only=True):
    """Columns, one row per operation that a trace timed, in order of start: forward-compute, a kernel, a transfer.
    Agents send none; importers do."""

    names: list[str] = []
    """Kinds of operations; ``kind`` indexes them. Not a column."""
    kind: list[int] = []
    lane: list[int] = []
    """:class:`Lane`."""
    step: list[int] = []
    """Number of the training step; −1 when the trace does not tell."""
    start_ns: list[int] = []
    duration_ns: list[int] = []
    seq: list[int] = []
    """Place in the order that the trace gives, pairing operations of several ranks; −1 when it does not."""
    micro_batch: list[int] = []
    """−1 where there is none."""
    chunk: list[int] = []
    """Model chunk of an interleaved pipeline; −1 where there is none."""


class Place(Struct, frozen=True, kw_only=True):
    """Where a rank stands in the job's parallel layout and in the cluster; −1 and "" mean not known."""

    data: int = -1
    """Data-parallel rank."""
    stage: int = -1
    """Pipeline stage."""
    tensor: int = -1
    context: int = -1
    expert: int = -1
    switch: str = ""
    """The switch that its node hangs on."""


class Progress(Struct, frozen=True, kw_only=True):
    """How far a rank is on one communicator, by its library's own counters (sequence numbers; −1 not known)."""

    communicator: int
    """Index into ``RankBatch.communicators``."""
    enqueued: int
    started: int
    completed: int


NO_OPERATIONS, NO_PLACE = Operations(), Place()
"""The defaults, known again by identity."""


class ThreadTime(Struct, frozen=True, kw_only=True):
    """Where one watched thread's time went. Columns, one row per cut, cumulative from ``since_ns`` on, so a
    lost row costs resolution and never time: ``running + runnable + blocked == at_ns − since_ns``.

    A rank's communication threads come as one sum with ``tid`` 0, cut when the driving thread is; the sum of
    several threads does not add up to wall time, and ``since_ns`` is when the youngest began to be watched.
    """

    tid: int
    role: Role
    since_ns: int
    """When watching began; a changed value is a new thread under an old number."""
    at_ns: list[int] = []
    running_ns: list[int] = []
    """On a CPU, interrupts included (see ``interrupted_ns``)."""
    runnable_ns: list[int] = []
    """Wants a CPU and has none: preempted, or woken and not yet switched in."""
    blocked_ns: list[int] = []
    uninterruptible_ns: list[int] = []
    """The part of ``blocked_ns`` in state D, filled when the block ends; stays 0 where the kernel's
    sched_switch does not give the state (before 5.18)."""
    interrupted_ns: list[int] = []
    """The part of ``running_ns`` that hardware and software interrupts took."""
    stolen_ns: int = 0
    """The part of this batch's running time that the hypervisor took; estimated, never per cut."""
    blocked_by: dict[str, list[int]] = {}
    """Parts of ``blocked_ns`` by what was waited for (names of ``probes.host.reasons``), columns like the others, a
    block in progress included; what is missing in their sum is not known. Reasons that took nothing have no
    column, and none has where nothing tells."""


class Occupant(Struct, frozen=True, kw_only=True):
    """Who had the CPU while a rank's thread was runnable, summed over the batch's interval."""

    role: Role
    """Which of the rank's threads waited."""
    pid: int
    """Process id in the node's own numbering; 0 is the idle CPU (a throttled thread, or one just woken)."""
    name: str
    cgroup: str
    """Path in the cgroup hierarchy; empty when it could not be learned."""
    took_ns: int
    rank_job: str = ""
    """Job of which this process is a rank or a rank's helper, if it is one."""
    rank: int = -1
    kernel: bool = False
    """A kernel thread."""


class Metric(Struct, frozen=True, kw_only=True):
    """One value of the node, or of a rank, over the batch's interval."""

    name: str
    value: float
    unit: str
    labels: dict[str, str] = {}


class Waker(Struct, frozen=True, kw_only=True):
    """Who ended the sleeps of one of a rank's threads, summed over the batch's interval."""

    tid: int
    """The thread that slept."""
    reason: str
    """What it waited for, as in ``ThreadTime.blocked_by``; "" when that is not known."""
    pid: int
    """Process of the waker, in the node's own numbering; 0: an interrupt, or a timer."""
    waker_tid: int
    name: str
    slept_ns: int


class RankBatch(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One second of one rank. What only importers tell takes no room in an agent's batch."""

    job: str
    rank: int
    world_size: int
    local_rank: int
    pid: int
    start_ns: int
    """When the process started; with ``pid`` it names one life of this rank."""
    name: str
    env: dict[str, str]
    """Allow-listed keys only (``probes.launchers.ENV_ALLOWED``)."""
    communicators: list[Communicator] = []
    """All that this rank has used so far; a communicator keeps its index."""
    collectives: Collectives = Collectives()
    threads: list[ThreadTime] = []
    occupants: list[Occupant] = []
    wakers: list[Waker] = []
    metrics: list[Metric] = []
    """Of this rank's processes and of what it runs on (its cgroup, its CPUs)."""
    timed_by: TimedBy = TimedBy.HOST
    """Which clock timed ``collectives``."""
    operations: Operations = NO_OPERATIONS
    place: Place = NO_PLACE
    progress: list[Progress] = []
    source: str = "agent"
    """What saw this: ``agent``, or the importer's name (``kineto``, ``flight-recorder``, ``inspector``,
    ``operations``)."""
    ended: bool = False
    """The process is gone; this is its last batch."""


class Event(Struct, frozen=True, kw_only=True):
    """Something that happened once. ``kind`` is one of the words in docs/architecture.md."""

    kind: str
    at_ns: int
    detail: str
    job: str = ""
    rank: int = -1


class Probe(Struct, frozen=True, kw_only=True):
    """Whether a probe watches, and if not, why not and what to do."""

    name: str
    state: str
    """``on``, ``off`` (nothing to watch now, or switched off), ``unavailable``."""
    why: str = ""
    hits: int = 0
    """Events since the agent started."""
    lost: int = 0
    """Events the kernel could not hand over."""
    cost_ms_per_s: float = -1.0
    """What it takes of the node's CPUs now, traps included; −1 when it was not measured."""


class Batch(Struct, frozen=True, kw_only=True):
    """One second of one node. ``(node, boot_id, agent, seq)`` names it: the server stores it once."""

    schema: int
    node: str
    boot_id: str
    agent: str
    """Random id made with the agent's spool; tells two agents of one name, or a lost spool, apart."""
    seq: int
    start_ns: int
    end_ns: int
    utc_offset_ns: int
    ranks: list[RankBatch] = []
    metrics: list[Metric] = []
    events: list[Event] = []
    probes: list[Probe] = []


class CommandKind(enum.StrEnum):
    """All that a server can ask of an agent."""

    CAPTURE_START = "capture-start"
    """Watch the ranks of ``job`` at full detail for ``seconds``."""
    CAPTURE_END = "capture-end"
    """End the capture of ``job``."""
    PROBE_ON = "probe-on"
    PROBE_OFF = "probe-off"
    """Attach ``probe`` no more, until it is switched on again."""


MAX_CAPTURE_S = 600
"""Longest capture: at full detail a job pays more, so it must end by itself."""
MAX_COMMANDS = 16
"""Most commands in one reply."""


class Command(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing to do. Sent again with every reply until the agent has told the outcome (an event
    ``command-done`` or ``command-refused`` whose detail starts with the id), so agents do each id once."""

    id: str
    kind: CommandKind
    job: str = ""
    seconds: int = 0
    probe: str = ""


class Orders(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Commands, bound to the batch that they answer: orders for another node, or heard before, do not fit."""

    node: str
    boot_id: str
    agent: str
    seq: int
    commands: list[Command]


ORDERS_CONTEXT = b"sysom orders 1\0"
"""What is signed (Ed25519) is this and then ``Reply.orders`` as UTF-8: a signature made for anything else never
fits."""


class Reply(Struct, frozen=True, kw_only=True):
    """The server's answer to a batch, as JSON."""

    stored: bool
    """False: this batch was there already."""
    orders: str = ""
    """:class:`Orders` as JSON text; empty when there is nothing to do. Kept as text because that is signed."""
    signature: str = ""
    """Ed25519 over ``ORDERS_CONTEXT`` and ``orders``, in hexadecimal."""
