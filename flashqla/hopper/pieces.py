"""What the kernels share: sizes, options of the compiler, layouts, and the few lines that each would write again."""

# ruff: noqa: F841 (what a macro takes as T.Ref it assigns to on behalf of its caller)

from pathlib import Path

import tilelang
import tilelang.language as T

from .workarounds import count_accumulators_per_warpgroup

CHUNK_SIZE = 64
ROWS = 64  # of S^T in one warpgroup: the M of a wgmma
FRAME = 60.0  # log2 range of a frame (eq. 8.1): two of them still multiply within fp32 and bf16
EPSILON = 1e-6  # of eq. 2.4
LANES = 1  # of a warp that arrive at a barrier for all; 32 for racecheck, which follows no arrival through __syncwarp
NO_SEGMENTS = 2**24  # chunks: longer than any sequence, and its tokens still fit int32
SEGMENTS = Path(__file__).with_name("segments.cuh").read_text()

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # the barriers in the kernels are the only ones needed
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,  # every index in the kernels is in range
}

count_accumulators_per_warpgroup()


def transposed(rows: int, columns: int):
    """[column, row] fragment that keeps each element in the register where the [row, column] accumulator has it."""
    return T.Fragment(
        [columns, rows],
        forward_thread_fn=lambda c, r: (r // 16) * 32 + (r % 8) * 4 + (c % 8) // 2,
        forward_index_fn=lambda c, r: (c // 8) * 4 + ((r % 16) // 8) * 2 + c % 2,
    )


def wgmma(A, B, accumulator, **options):
    """`T.wgmma_gemm` with the rows of the product dealt out to the warps. Asynchronous: see `T.wait_wgmma`."""
    return T.wgmma_gemm(A, B, accumulator, policy=T.GemmWarpPolicy.FullRow, **options)


@T.macro
def arrive(barrier, index, lane):
    """One arrival a warp: 32 would queue at the same word."""
    T.sync_warp()
    if lane < LANES:
        T.barrier_arrive(barrier[index])


@T.macro
def load_stage(i, tiles, fragment):
    """Tile of chunk i to registers.

    A buffer for each of three stages: TileLang 0.1.15 drops the offset of a slice when it copies by ldmatrix.
    """
    if i % 3 == 0:
        T.copy(tiles[0], fragment)
    elif i % 3 == 1:
        T.copy(tiles[1], fragment)
    else:
        T.copy(tiles[2], fragment)


@T.macro
def fetch_stage(st, source, tiles, barrier, land):
    """TMA load of a region into the buffer of stage `st`, of three; it arrives at `barrier[land]`."""
    if st == 0:
        T.tma_copy(source, tiles[0], barrier=barrier[land])
    elif st == 1:
        T.tma_copy(source, tiles[1], barrier=barrier[land])
    else:
        T.tma_copy(source, tiles[2], barrier=barrier[land])


@T.macro
def head_of_block(bx, H, HV, blocks, width, item: T.Ref, i_h: T.Ref, i_k: T.Ref, v_start: T.Ref):
    """Item, value head, key head and first value column of thread block `bx`: value blocks go fastest, then heads.

    Each of the `blocks` blocks of a head has `width` columns. An item is a sequence, or one of its segments.
    """
    item = T.truncdiv(bx, HV * blocks)
    i_h = T.truncdiv(bx - item * (HV * blocks), blocks)
    v_start = (bx - item * (HV * blocks) - i_h * blocks) * width
    i_k = T.truncdiv(i_h, T.truncdiv(HV, H))


@T.macro
def segment_of_item(item: T.Ref, N, cu_seqlens, segment_chunks, i_n: T.Ref, segment: T.Ref):
    """Sequence of an item, and which of its segments this is, by the numbers of segments.cuh."""
    i_n = item
    segment = 0
    if item >= N:
        i_n = T.call_extern(
            "int32", "segments::owner", T.address_of(cu_seqlens[0]), N, segment_chunks * CHUNK_SIZE, item - N
        )
        segment = item - N - T.truncdiv(cu_seqlens[i_n], segment_chunks * CHUNK_SIZE) + 1


@T.macro
def first_chunk(i_n: T.Ref, segment: T.Ref, cu_seqlens, segment_chunks, start: T.Ref, slot: T.Ref):
    """First token of a sequence, and the slot of a segment's first chunk: what `gated_inverse` has left for it."""
    start = cu_seqlens[i_n]
    slot = T.min(i_n, start)
    slot = slot + T.truncdiv(start - slot, CHUNK_SIZE) + segment * segment_chunks
