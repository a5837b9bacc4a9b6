"""Where chains of waiting end. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def chain_ends(edges: Mapping[int, Collection[int]]) -> list[tuple[int, ...]]:
    """Groups of ranks that wait for nobody outside the group; a rank that waits for nobody is one by itself.

    ``edges``: rank → those it waits for; a negative number is nobody that is known, so its waiter ends no chain.
    The groups are strongly connected components (R. Tarjan, "Depth-first search and linear graph algorithms",
    SIAM J. Comput. 1972), found without recursion: a chain may be as long as the job has ranks.
    """
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    group: dict[int, int] = {}
    groups: list[tuple[int, ...]] = []
    for root in sorted(edges):
        if root in order:
            continue
        work = [(root, iter(sorted(other for other in edges[root] if other >= 0)))]
        order[root] = low[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while work:
            rank, others = work[-1]
            for other in others:
                if other not in order:
                    order[other] = low[other] = len(order)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(sorted(o for o in edges.get(other, {}) if o >= 0))))
                    break
                if other in on_stack:
                    low[rank] = min(low[rank], order[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[rank])
                if low[rank] == order[rank]:
                    at = stack.index(rank)
                    members = tuple(sorted(stack[at:]))
                    del stack[at:]
                    on_stack.difference_update(members)
                    group.update(dict.fromkeys(members, len(groups)))
                    groups.append(members)
    return [
        members
        for number, members in enumerate(groups)
        if all(group.get(other, -1) == number for rank in members for other in edges.get(rank, {}))
    ]
