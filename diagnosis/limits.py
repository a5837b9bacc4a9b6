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

FEWEST_PERMUTATIONS = 499
"""… and with so few, where ranks and metrics are very many, 0.002: with four levels tested still below ALPHA."""

PERMUTATION_WORK = 50_000_000
"""Values summed over all relabellings of one test: an eighth of a second on one core."""

MANY_RANKS = 256
MAX_BLOCKS_OF_MANY = 24
"""Among so many ranks, half the blocks tell as much: 24 coincidences of one in 256 do not happen."""

TAIL_STEP_SHARE = 0.5
TAIL_MADS = 6.0
"""A single step stands out when the rank takes half a mean step, and this many robust standard deviations
(1.4826 · MAD over all peers), longer than its peers."""

TAIL_COST_SHARE = 0.01
"""A rank that is slow only in some steps is told from this mean cost on: each 50th step, by half a step."""

SIDE_ALPHA = ALPHA / 4
"""For what costs little and is told all the same (slow in some steps only, drifting): it must be surer. Sets of
ranks have no part in this, so it is not divided among them."""

LEVEL_MEMBERS = 0.80
"""A node, stage or switch is the finding when this share of its ranks is slow: one that was not seen to be, among
eight, does not make seven findings of it."""

EVIDENCE_PEERS = 15
EVIDENCE_RANKS = 8
"""Other metrics of a culprit are compared with this many of its peers, for so many culprits (the slowest): medians
of more peers say the same, and nobody reads the metrics of a ninth."""

CHANGE_SHARE = 0.12
"""Two stretches of steps whose levels are closer than this are one stretch (sysTrace uses 10–15 %)."""

CHANGE_MADS = 3.0
"""… and so are two that are closer than this many robust standard errors (from 1.4826 · MAD)."""

CHANGE_ORDERED = 0.9
"""… and so are two of whose pairs of blocks fewer than this share are in the order of the levels: a burst within
a restless stretch is no change."""

DRIFT_NEWEST = 0.25
DRIFT_NEWEST_STEPS = 120
"""Of steps that drift, this share (and so many steps at least) is compared as what is now: long enough for the
tests of ranks, short enough to be near the newest level."""

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

LONG_WINDOW_NS = 18 * WINDOW_NS
"""Where that is not enough to say anything: sixty steps of three minutes."""

LONG_WINDOW_ROWS = 4_000_000
"""… but no further back than it takes to find so many collectives and cuts of threads at the present rate: they are
read in two seconds, into half a GB."""

TRACE_EFFECT_SHARE = 0.05
"""Operations that a trace timed: a rank must compute this share of the step longer than its stage. Half of
``MIN_EFFECT_SHARE``, because they hold no scheduling noise: healthy peers differ by 0.3 % (arXiv 2505.05713,
the trace of its §A.2)."""

ALWAYS_STEPS = 0.8
"""A rank is slow for good when it is in this share of the steps: uneven data makes every rank the slowest now
and then, a bad machine in all of them."""

LEVEL_STEPS = 4
"""Steps that a level must last at least to be told from its neighbours."""

OCCASIONAL_STEPS = 3
"""A rank that is slow now and then must have been so this often: once is an incident, twice a coincidence."""

OCCASIONAL_MADS = 6.0
"""… and each time by this many robust standard deviations of its stage: uneven data stays below."""

STRAGGLING = 1.1
"""Slowdown S from which a job counts as straggling (arXiv 2505.05713, §4)."""

UNEVEN_CORRELATION = 0.9
"""Forward and backward of a micro batch grow together at least like this where sequences are uneven (§5.3)."""

SLOW_LINK = 1.5
"""A transfer that takes this many times as long as that of its peers, both ends being there in time, is slow: links
of one kind differ by a few per cent, a port that lost half its lanes by two."""

SLOW_GROUP = 2.0
"""As :data:`SLOW_LINK` for collectives of one stage against those of the others, whose sizes differ somewhat:
embeddings and the loss lie on the first and last."""

OCCASIONAL_COST_SHARE = 0.01
"""What a rank that is slow now and then must cost the mean step: a step in fifty that takes half as long again."""

REPLAYED_OPERATIONS = 400_000
"""Most operations that are replayed (evenly spaced steps of the window beyond it): each replay then takes some
20 ms, whatever the size of the job."""

PAUSE_STEPS = 30
PAUSE_MS = 2_000.0
"""A step as long as this many usual ones, and this many ms, is a pause (a checkpoint, an evaluation) and no
step: it would outweigh all that the other steps tell. A fault on every 50th step stays below."""

MAX_PAUSES = 0.03
"""Share of steps that can be pauses; more are what the job does."""

UNEVEN_SHARE = 0.15
"""Share of the step by which the busiest of the peers exceeds their median, in the median step, from which work is
uneven though no rank is to blame. Ranks that vary by 5 % reach 0.11 when there are 1,024 of them."""

UNEVEN_SAME = 0.5
"""… while no rank is the busiest in more than this share of the steps."""

STOOD_MS = 1_000.0
STOOD_STEPS = 10
"""A rank that keeps the others waiting for so long at once, in ms and in usual steps, stood still: below, a crowded
machine does as much now and then."""

STOOD_OTHERS = 0.25
"""… if no other rank was busy for this share of it: else they paused as well, some longer than others."""

STOOD_WAITED = 0.5
"""… and so much of it the others waited for, and the job lost."""

STOOD_WARM_UP = 20
"""Steps at the beginning in which a rank may compile, load and measure: only who was stopped stood still there."""

STOOD_APART = 0.25
"""Other steps are longer than usual by this share of it at most: else steps are restless, or something comes back
at other lengths, and whoever stood still (but was not stopped) is not apart from that."""

STOOD_IN_A_ROW = 2
"""A stall is one step, or two that it fell into: more in a row are slow steps, unless the rank was stopped."""

STOOD_EVERY = 0.25
"""Three or more whose distances differ from their median by no more than this share come back regularly."""

RARE_COLLECTIVES = 0.05
"""A step with a number of collectives that fewer steps than this share have holds something else (a barrier)."""
