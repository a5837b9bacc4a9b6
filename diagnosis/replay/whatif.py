"""What if nobody had been slow? Recorded operations, replayed with other durations.

The method of "Understanding Stragglers in Large Model Training Using What-if Analysis" (arXiv 2505.05713): the
operations of a step form a graph; replaying it with ideal durations gives the step without stragglers, and
replaying it with one worker's, one stage's or one kind's durations made ideal gives what that one costs.

Where several readings of the paper are possible, these are taken:

- *Graph* (§3.2). Compute runs in recorded order; each of forward-send, forward-recv, backward-send and
  backward-recv is a stream of its own; a receive precedes its compute and follows the compute of the same direction
  before that one, a send follows its compute (as the published analyser has it). Other collectives run in recorded
  order after the last compute that had ended when they began; parameter gathers precede the first forward of
  their chunk and wait for no compute.
- *Groups*. A send ends with its receive. Collectives meet the data-parallel group of the stage; those named
  ``embedding`` the first and last stage of one pipeline, ``clip`` all ranks (the gradient norm), ``layernorm`` the
  tensor-parallel group. A group starts when its last member is ready.
- *Transfer time*. The paper subtracts the latest start from the end. Members leave together, so that is the
  duration of the member that waited least: the shortest in the group, which needs no common clock.
- *Ideal* (§3.3). Compute (optimizer and gc too): mean over all ranks, stages and steps of the kind.
  Communication: median of its transfer times. So the ideal has equal stages: an uneven split of layers costs.
- *Slowdown* S: mean replayed step over mean ideal step. The replay leaves out delays before a launch
  (the paper does, too); :attr:`Replayed.error` says how far it is from the recorded steps.

Pure: arrays in, arrays out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.replay.opgraph import Graph, build
from diagnosis.replay.trace import BACKWARD, FORWARD, OTHER, Trace
from diagnosis.steps import Bools, Floats


@dataclass(frozen=True)
class Replayed:
    """A trace's graph with its recorded and ideal durations, all in ms."""

    trace: Trace
    graph: Graph
    duration: Floats
    """Per row: compute as recorded, communication without waiting."""
    ideal: Floats
    wait: Floats
    """Per row: what communication waited for others of its group."""
    recorded_ms: float
    """Mean recorded step."""
    steps_ms: Floats
    """Per step, replayed as it was."""
    ideal_ms: float

    @property
    def replayed_ms(self) -> float:
        return float(self.steps_ms.mean())

    @property
    def slowdown(self) -> float:
        """S of the paper; 1 where the ideal step takes no time."""
        return self.replayed_ms / self.ideal_ms if self.ideal_ms > 0 else 1.0

    @property
    def error(self) -> float:
        """Replayed over recorded mean step, less one: what the graph does not know of, delays above all."""
        return self.replayed_ms / self.recorded_ms - 1 if self.recorded_ms > 0 else 0.0

    def run(self, duration: Floats) -> Floats:
        """Step times (ms) with these durations (per row of the trace)."""
        return replay(self.graph, duration, len(self.trace.steps))

    def fixed(self, chosen: Bools, other: Floats | None = None) -> Floats:
        """Step times if the chosen operations had taken their ideal (or ``other``) durations."""
        return self.run(np.where(chosen, self.ideal if other is None else other, self.duration))

    def explained(self, chosen: Bools) -> float:
        """Share of the slowdown that goes when the chosen operations become ideal: Mw for the slowest
        workers, Ms for the last stage. 0 where there is no slowdown."""
        lost = self.replayed_ms - self.ideal_ms
        return (self.replayed_ms - float(self.fixed(chosen).mean())) / lost if lost > 0 else 0.0

    def added(self, chosen: Bools) -> float:
        """Slowdown if only the chosen operations were as recorded (S_t, S_w of the paper)."""
        steps = self.run(np.where(chosen, self.duration, self.ideal))
        return float(steps.mean()) / self.ideal_ms if self.ideal_ms > 0 else 1.0


def what_if(trace: Trace) -> Replayed:
    """Build the graph and replay it as it was and as it would ideally be."""
    graph = build(trace)
    duration, wait = transfers(trace, graph)
    ideal = ideals(trace, duration, graph.members == graph.expected)
    count = len(trace.steps)
    longest = np.nanmax(trace.wall, axis=0)
    return Replayed(
        trace=trace,
        graph=graph,
        duration=duration,
        ideal=ideal,
        wait=wait,
        recorded_ms=float(longest.mean()),
        steps_ms=replay(graph, duration, count),
        ideal_ms=float(replay(graph, ideal, count).mean()),
    )


def transfers(trace: Trace, graph: Graph) -> tuple[Floats, Floats]:
    """Durations without waiting, and the waiting, per row. Computation does not wait."""
    groups = int(graph.of_row.max()) + 1
    least = np.full(groups, np.inf)
    np.minimum.at(least, graph.of_row, trace.duration)
    moved = least[graph.of_row]
    return moved, trace.duration - moved


def ideals(trace: Trace, duration: Floats, whole: Bools) -> Floats:
    """Ideal duration per row: mean of the kind for compute, median for communication.

    ``whole``: rows whose group is complete; where some are not, their durations may contain waiting for
    somebody who was not recorded, and count for the ideal only if there are no others.
    """
    ideal = duration.copy()
    for kind, role in enumerate(trace.role):
        of_kind = trace.kind == kind
        if not of_kind.any():
            continue
        known = of_kind & whole if (of_kind & whole).any() else of_kind
        typical = np.mean if role in (FORWARD, BACKWARD, OTHER) else np.median
        ideal[of_kind] = typical(duration[known])
    return ideal


def replay(graph: Graph, duration: Floats, steps: int) -> Floats:
    """Length of each step (ms): every group starts when all that its members wait for has ended."""
    takes = duration[graph.order]
    ends = np.zeros(len(takes))
    begin = np.zeros(len(graph.bounds))
    for op_a, op_b, group_a, group_b, edge_a, edge_b in graph.levels:
        if edge_b > edge_a:
            bounds = graph.bounds[group_a:group_b] - edge_a
            begin[group_a:group_b] = np.maximum.reduceat(ends[graph.source[edge_a:edge_b]], bounds)
        ends[op_a:op_b] = begin[graph.group[op_a:op_b]] + takes[op_a:op_b]
    longest = np.zeros(steps)
    np.maximum.at(longest, graph.step, ends)
    return longest
