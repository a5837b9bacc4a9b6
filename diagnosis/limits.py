"""The engine's thresholds, each with its reason. Nothing else in ``diagnosis`` decides by a bare number."""

ALPHA = 0.01
"""Largest corrected p-value of a finding: one false finding in a hundred diagnoses of a healthy job."""

MIN_EFFECT_SHARE = 0.10
"""A rank must take this share of the step longer than its peers: machines and batches differ by a few per
cent for good, and nobody is woken for that."""

MIN_EFFECT_MS = 1.0
"""… and this many ms: below, scheduling and timer slack of a shared machine look like a fault."""

MIN_COST_SHARE = 0.05
"""What the culprits together cost the job, as a share of its step. A rank can differ and cost little, when
its extra time hides behind another's."""

EXPLAINS = 0.80
"""Share of a culprit's extra time that a cause must explain to be named (the evidence gate)."""

EXPLAINS_PART = 0.20
"""Share from which a cause that is not enough alone is said with another, and not ruled out: what the gate
leaves unexplained at most."""

BLOCK_STEPS = 10
BLOCK_MS = 1_000.0
"""Shortest block of steps that is permuted, or compared, as one: schedulers balance over some 100 ms, so
neighbouring steps resemble each other. Longer when the autocorrelation says so."""

MIN_BLOCKS = 6
"""Fewer blocks cannot reach ALPHA with four ranks (4 · 4⁻⁶ = 0.001), nor show a level."""

MAX_BLOCKS = 48
"""More blocks add cost and no power: with 48, one rank of 1,024 is found at any effect that matters."""

PERMUTATIONS = 1_999
"""Smallest possible p-value 0.0005, a twentieth of ALPHA."""

CHANGE_SHARE = 0.12
"""Two stretches of steps whose levels are closer than this are one stretch (sysTrace uses 10–15 %)."""

CHANGE_MADS = 3.0
"""… and so are two that are closer than this many robust standard errors (from 1.4826 · MAD)."""

CHANGE_ORDERED = 0.9
"""… and so are two of whose pairs of blocks fewer than this share are in the order of the levels: a burst within
a restless stretch is no change."""

ALIKE_SHARE = 0.20
"""A job whose ranks all slowed alike is called slow beyond this; below, neighbours on a shared machine do as much,
and the change is said without raising anybody."""

ONSET_STEPS = 6
"""Steps in a row that must be slow where a slow stretch begins (sysTrace v3)."""

MAX_CUT_GAP_NS = 2_500_000_000
"""Threads are cut at least once a second. Across a longer gap batches are missing, and how the time was
spent within it is not known per step."""

STALL_MS = 10_000.0
STALL_STEPS = 20
"""No step for this long, in ms and in steps: what came before says nothing about the job's state now."""

WAITING_SHARE = 0.30
"""When ranks are missing and those seen wait for this share of the step, nobody of them being late, the
culprit may be among the unseen. Transfers of a healthy small job stay below it."""

STALE_NS = 60_000_000_000
"""Newest data older than this is said in ``not_seen``."""

WINDOW_NS = 600_000_000_000
"""Default window: long enough to hold a baseline and an onset that somebody has just noticed."""
