"""What the matmul kernels share: where a tile lies, its product, and what is done to it before it is stored.

    out = epilogue(scale * (a @ b) + start + bias)

in float32, rounded once. A "row" of `a` or of the output counts through all leading dims: with `SPLIT`, row r is row r % inner
of block r // inner, which is how a slice of a flattened batch lies in a joined tensor [outer, slices * inner, n].
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from .language import jit

EPILOGUES = ("none", "relu", "gelu", "gelu_tanh", "silu")


@jit
def row_offset(
    row: tl.tensor, inner: tl.tensor, outer_stride: tl.tensor, row_stride: tl.tensor, SPLIT: tl.constexpr
) -> tl.tensor:
    """Elements from the first row of a slice to `row`."""
    if SPLIT:
        return (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * row_stride
    return row.to(tl.int64) * row_stride


@jit
def place(tile: tl.tensor, tiles_m: tl.tensor, tiles_n: tl.tensor, GROUP_M: tl.constexpr) -> tl.tensor:
    """Tile row and tile column of tile number `tile`: `GROUP_M` rows at a time, down before across."""
    in_group = GROUP_M * tiles_n
    first = tile // in_group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + tile % in_group % height, tile % in_group // height


@jit
def product(
    a: tl.tensor,
    b: tl.tensor,
    depth: tl.tensor,
    a_k_stride: tl.tensor,
    b_k_stride: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PLAIN: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_M, depth] @ [depth, BLOCK_N] in float32; `a` and `b` point at the first column and row."""
    k = tl.arange(0, BLOCK_K)
    # In 64 bits: columns of a long tensor may lie so far from each other that a block of them spans more than 2^31 elements.
    a_step, b_step = tl.cast(a_k_stride, tl.int64), tl.cast(b_k_stride, tl.int64)
    a_ptrs = a[:, None] + k[None, :] * a_step
    b_ptrs = b[None, :] + k[:, None] * b_step
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, depth, BLOCK_K):
        if EVEN_K:
            x = tl.load(a_ptrs)
            y = tl.load(b_ptrs)
        else:
            x = tl.load(a_ptrs, mask=k[None, :] < depth - begin, other=0.0)
            y = tl.load(b_ptrs, mask=k[:, None] < depth - begin, other=0.0)
        if PLAIN:  # the interpreter multiplies the bits of a bfloat16
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        if x.dtype == tl.float8e4nv:  # Hopper sums fp8 in 14 bits (arXiv 2412.19437, 3.3): go over to float32 in time
            acc = tl.dot(x, y, acc, max_num_imprecise_acc=BLOCK_K // 2)
        else:
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K * a_step
        b_ptrs += BLOCK_K * b_step
    return acc


@jit
def activate(x: tl.tensor, EPILOGUE: tl.constexpr) -> tl.tensor:
    """One of `EPILOGUES`, as torch.nn.functional defines it."""
    if EPILOGUE == "relu":
        x = tl.maximum(x, 0.0)
    elif EPILOGUE == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif EPILOGUE == "gelu_tanh":  # 0.5 (1 + tanh(z)) = sigmoid(2 z)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif EPILOGUE == "silu":
        x = x * tl.sigmoid(x)
    else:
        tl.static_assert(EPILOGUE == "none")
    return x
