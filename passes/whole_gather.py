"""A rewritten all-gather region as the arguments of `gather_matmul` (`runtime/whole_gather.py`).

exchange, mm, wait, exchange, mm, wait, mm, cat    ->    gather_matmul(own, b, order, posts, ...)
"""

from __future__ import annotations

from torch.fx import Node

from ..runtime import whole_gather
from .whole_nodes import OTHER_BODY, NotWhole, RegionNodes, WholeRegion, arguments, aten, rows_of, source_of


def read_gather(region: RegionNodes) -> WholeRegion:
    """Raises NotWhole where the region is something else."""
    joins = [
        node
        for node in region.all
        if node.target is aten.cat.default and set(arguments(node)[0]) == set(region.matmuls)
    ]
    if len(joins) != 1 or not region.exchanges:
        raise NotWhole(f"{OTHER_BODY} of what is gathered")
    (joined,) = joins
    b, pieces, *dim = region.factor(), *arguments(joined)
    if dim and dim[0] % 2 != 0:
        raise NotWhole("the matmul is not cut along its rows")
    region.check_sizes(b)
    sources = {source_of(rows_of(piece)): index for index, piece in enumerate(pieces)}
    if len(sources) != len(pieces):
        raise NotWhole("a slice is not what was sent or received, in another shape")
    own = [source for source in sources if source not in region.waits.values()]
    computed = {source_of(rows_of(matmul)): rows_of(matmul) for matmul in region.matmuls}  # in order

    def received(exchange: Node) -> int | None:
        return sources.get(region.waits[exchange]) if exchange in region.waits else None

    return region.region(
        b,
        [joined],
        op=whole_gather.gather_matmul,
        inputs=lambda _: ([computed[source] for source in own], b),
        order=[n for source in computed for n in (sources[source], own.index(source) if source in own else -1)],
        posts=region.posts(lambda exchange: sources.get(source_of(arguments(exchange)[0])), received),
    )
