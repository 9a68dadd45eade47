"""Schedules for nodes of ranks: what crosses between nodes starts first and travels under the compute of a whole node.

Rank (g, l) is rank l of node g. It works through the nodes g, g - 1, g - 2, ..., and in each through the ranks l, l - 1, ...

    from its counterpart (g - j, l)   across, posted when the node before is begun: k computes hide it
    from its neighbour (g, l - i)     inside, posted one compute ahead: what that one got from its own counterpart

So each slice crosses to a node once, and the adapters of a node carry different slices.
"""

from __future__ import annotations

from .ir import Action, Compute, Post, Program, Recv, Send, Wait


def two_level_all_gather(ranks: int, m: int, ranks_per_node: int) -> tuple[Program, ...]:
    """The programs of all ranks. `ranks_per_node` divides `ranks`."""
    return tuple(_gather(rank, ranks, m, ranks_per_node) for rank in range(ranks))


def two_level_all_to_all(ranks: int, m: int, ranks_per_node: int) -> tuple[Program, ...]:
    """In the same order, but every slice goes straight to where it is needed: nobody else has a use for it."""
    return tuple(_exchange(rank, ranks, m, ranks_per_node) for rank in range(ranks))


def _gather(rank: int, ranks: int, m: int, k: int) -> Program:
    nodes = ranks // k
    node, local = divmod(rank, k)

    def at(g: int, l: int) -> int:  # noqa: E741
        return g % nodes * k + l % k

    program: list[Action] = []
    for j in range(nodes):
        for i in range(k):
            for part in range(m):

                def post(j_: int, i_: int, send_to: int, sent: int, source: int, part: int = part) -> Post:
                    step = (j_ * k + i_) * m + part
                    arriving = at(node - j_, local - i_)
                    return Post(step, Send(sent * m + part, send_to), Recv(arriving * m + part, source))

                if j or i:
                    program.append(Wait((j * k + i) * m + part))
                if i == 0 and j + 1 < nodes:
                    program.append(post(j + 1, 0, at(node + j + 1, local), rank, at(node - j - 1, local)))
                if i + 1 < k:
                    neighbour_gets, mine = at(node, local + i + 1), at(node - j, local)
                    program.append(post(j, i + 1, neighbour_gets, mine, at(node, local - i - 1)))
                program.append(Compute(at(node - j, local - i) * m + part))
    return tuple(program)


def _exchange(rank: int, ranks: int, m: int, k: int) -> Program:
    nodes = ranks // k
    node, local = divmod(rank, k)

    def post(j: int, i: int, part: int) -> Post:
        target = (node + j) % nodes * k + (local + i) % k
        source = (node - j) % nodes * k + (local - i) % k
        return Post(
            (j * k + i) * m + part,
            Send((rank * ranks + target) * m + part, target),
            Recv((source * ranks + rank) * m + part, source),
        )

    program: list[Action] = []
    for j in range(nodes):
        for i in range(k):
            source = (node - j) % nodes * k + (local - i) % k
            for part in range(m):
                if j or i:
                    program.append(Wait((j * k + i) * m + part))
                if j + 1 < nodes:
                    program.append(post(j + 1, i, part))
                if j == 0 and i + 1 < k:
                    program.append(post(j, i + 1, part))
                program.append(Compute((source * ranks + rank) * m + part))
    return tuple(program)
