"""Schedules for nodes of ranks: what crosses between nodes starts first and travels under the compute of a whole node.

Rank (g, l) is rank l of node g. It works through the nodes g, g - 1, g - 2, ..., and in each through the ranks l, l - 1, ...

    from its counterpart (g - j, l)   across, posted when the node before is begun: k computes hide it
    from its neighbour (g, l - i)     inside, posted one compute ahead: what that one got from its own counterpart

So each slice crosses to a node once, and the adapters of a node carry different slices. Both functions give the program of
rank 0; the others follow by adding node and rank in the node (`Schedule.ranks_per_node`).
"""

from __future__ import annotations

from .ir import Action, Compute, Post, Program, Recv, Send, Wait


def two_level_all_gather(ranks: int, m: int, ranks_per_node: int) -> Program:
    """Slices of other nodes arrive at the counterpart of their owner, which hands them on inside the node."""
    k, nodes = ranks_per_node, ranks // ranks_per_node

    def at(node: int, local: int) -> int:
        return node % nodes * k + local % k

    program: list[Action] = []
    for j in range(nodes):
        for i in range(k):
            for part in range(m):

                def post(j_: int, i_: int, send_to: int, sent: int, source: int, part: int = part) -> Post:
                    step = (j_ * k + i_) * m + part
                    arriving = at(-j_, -i_)
                    return Post(step, Send(sent * m + part, send_to), Recv(arriving * m + part, source))

                if j or i:
                    program.append(Wait((j * k + i) * m + part))
                if i == 0 and j + 1 < nodes:
                    program.append(post(j + 1, 0, at(j + 1, 0), 0, at(-j - 1, 0)))
                if i + 1 < k:
                    program.append(post(j, i + 1, at(0, i + 1), at(-j, 0), at(0, -i - 1)))
                program.append(Compute(at(-j, -i) * m + part))
    return tuple(program)


def two_level_all_to_all(ranks: int, m: int, ranks_per_node: int) -> Program:
    """In the same order, but every slice goes straight to where it is needed: nobody else has a use for it."""
    k, nodes = ranks_per_node, ranks // ranks_per_node

    def post(j: int, i: int, part: int) -> Post:
        target, source = j * k + i, -j % nodes * k + -i % k
        return Post((j * k + i) * m + part, Send(target * m + part, target), Recv(source * ranks * m + part, source))

    program: list[Action] = []
    for j in range(nodes):
        for i in range(k):
            source = -j % nodes * k + -i % k
            for part in range(m):
                if j or i:
                    program.append(Wait((j * k + i) * m + part))
                if j + 1 < nodes:
                    program.append(post(j + 1, i, part))
                if j == 0 and i + 1 < k:
                    program.append(post(j, i + 1, part))
                program.append(Compute(source * ranks * m + part))
    return tuple(program)
