"""Gated inverse: for every chunk and value head the 64x64 matrix that turns residuals into corrected values.

Inputs
    k            [T, H, K]     bf16 or fp16, K in {64, 128}; any token and head strides of 16-byte multiples, last 1
    g            [T, HV]       fp32, bf16 or fp16, any strides: log gate (<= 0), or the raw gate with `USE_GATE`
    beta         [T, HV]       fp32, bf16 or fp16, any strides: write strength in [0, 2], its logit with `BETA_SIGMOID`
    A_log        [HV]          fp32, read with `USE_GATE` only (else any fp32 tensor of at least one element)
    dt_bias      [HV]          fp32, read with `HAS_DT_BIAS` only (likewise)
    cu_seqlens   [N + 1]       int32, on the device; a dense batch is packed, of equal lengths; empty ones are legal
    flags                      int32, a sum of the flags below
    num_ctas                   int32, the grid: `grid_size(...)`, at least 1
Outputs
    a            [slots, HV, 64, 64]   dtype of k: r_i A_ij beta_j r_j, times exp(G_i - G_j) with `GATED` and where the
                                       chunk's decay leaves the frame of eq. 8.1; zero above the diagonal, past the end
    gates        [slots, HV, 2, 64]    fp32: G in powers of two (constant past the end); log2 r (without `L2NORM` 0;
                                       that is -0 in a chunk with a beta |k|^2 outside of [0, 2], where eq. 7.4 fails)
    Chunk c of sequence i has slot m + (cu_i - m) // 64 + c, m = min(i, cu_i). Slots that no chunk has are not written.
Definition
    G = log2(e) cumsum(g) within the chunk (eq. 2.1), g = -exp(A_log) softplus(raw + dt_bias) with `USE_GATE` (eq. 2.3),
    r_i = 1 / sqrt(|k_i|^2 + 1e-6) with `L2NORM`, else 1 (eq. 2.4),
    beta = sigmoid(raw) with `BETA_SIGMOID`, twice that with `NEG_EIGVAL` too (eq. 2.5),
    A = (I + StrictLower(diag(beta) K^ K^^T))^-1 with K^ = diag(r) K (eq. 3.2); the gate enters after it (eq. 4.1).
    Value head h uses key head h // (HV // H). Tokens past the end of a sequence are taken out by g = beta = 0, whatever
    K holds there: the next sequence, or NaN. Past cu_seqlens[-1] only K is read, by whole tiles, without effect.

Grid: `num_ctas` CTAs walk the items, head groups fastest, then chunk slots. An item is four tiles: HEADS value heads of
one key head times 4 / HEADS consecutive slots. HEADS = gcd(HV / H, 4), so every ratio HV / H has its variant.
Roles: four warps. Together they take K K^T (one 64x64xK product by wgmma a slot). Then each inverts one tile without a
barrier: fp32 substitution on the 16x16 diagonal blocks (eq. 5.1, a column a lane), merges 16 -> 32 -> 64 by fp16
mma.sync with fp32 sums (eq. 5.2); and stores it by TMA. Warp 0 loads K one item ahead, all warps the raw gates
likewise; warp 3 looks up the item after that in cu_seqlens.
Shared memory, K = 128 (64 halves the first line)           HEADS =    4        2        1
    K, the next item's while this one is inverted                     16 KB    32 KB    64 KB
    output tiles, which drain during the next item's K K^T            32 KB    32 KB    32 KB
    K K^T: diagonal blocks in fp32, lower ones in fp16                 7 KB    14 KB    28 KB
    terms of the tiles, raw gates, norms, items                        6 KB     7 KB     7 KB
    sum                                                               61 KB    85 KB   131 KB
    CTAs an SM (K = 64)                                                3 (3)    2 (3)    1 (2)
Registers: at most 168 a thread (three CTAs of 128 threads), no spills.
Numerics: the fp16 products see unit keys, whatever the norms (gated_inverse.cuh says how); the gate, beta and the norms
enter in fp32 just before the only rounding of the result.
"""

from math import gcd
from pathlib import Path

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from .pieces import CHUNK_SIZE

THREADS = 128
TILES = 4  # of an item, one a warp

# bits of `flags`
USE_GATE = 1
HAS_DT_BIAS = 2
BETA_SIGMOID = 4
NEG_EIGVAL = 8
L2NORM = 16
GATED = 32  # gate every chunk, also those of mild decay
BETA_FLOOR = 64  # take no beta as less than SMALLEST_BETA, so that the backward may divide by it

SMALLEST_BETA = 2.0**-12

PASS_CONFIGS = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,  # the barriers below are the only ones needed
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
}

SOURCE = Path(__file__).with_suffix(".cuh").read_text()
# sizes in the words of gated_inverse.cuh
DIAGONAL, LOWER, TERMS, RAW, ITEM = 4 * 260, 6 * 128, 224, 72, 16
INDEX, SLOT, HEAD, KEY_HEAD, START, VALID = 0, 1, 2, 3, 4, 8  # of an item
CUDA_TYPES = {"float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half"}


def heads_per_item(num_heads: int, num_value_heads: int) -> int:
    """Value heads of one item: they share a key head."""
    return gcd(num_value_heads // num_heads, TILES)


def ctas_per_sm(head_dim: int, heads: int) -> int:
    """How many CTAs the shared memory of an SM holds, at most three (for the registers)."""
    return {128: {4: 3, 2: 2, 1: 1}, 64: {4: 3, 2: 3, 1: 2}}[head_dim][heads]


def num_slots(num_tokens: int, num_sequences: int) -> int:
    """Chunk slots to allocate: a bound that needs no lengths."""
    return num_tokens // CHUNK_SIZE + num_sequences


def grid_size(num_slots: int, num_value_heads: int, head_dim: int, heads: int, sm_count: int) -> int:
    """CTAs to launch; 0 where there is nothing to do."""
    items = -(-num_slots // (TILES // heads)) * (num_value_heads // heads)
    return min(items, sm_count * ctas_per_sm(head_dim, heads))


def build(dtype: str, gate_dtype: str, head_dim: int, heads: int, beta_dtype: str | None = None):
    """The kernel as a TileLang PrimFunc.

    Args:
        dtype: of k and a, "bfloat16" or "float16".
        gate_dtype: of g, "float32", "bfloat16" or "float16".
        head_dim: K, 64 or 128.
        heads: value heads of an item, `heads_per_item(H, HV)`: 1, 2 or 4.
        beta_dtype: of beta, `gate_dtype` unless given.
    """
    beta_dtype = beta_dtype or gate_dtype
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    num_sequences_plus_1, slots, a_log_size, dt_bias_size = T.dynamic(
        "num_sequences_plus_1, slots, a_log_size, dt_bias_size"
    )
    k_token, k_head, g_token, g_head = T.dynamic(
        "k_token_stride, k_head_stride, g_token_stride, g_head_stride", "int64"
    )
    beta_token, beta_head = T.dynamic("beta_token_stride, beta_head_stride", "int64")
    C = CHUNK_SIZE
    CHUNKS = TILES // heads  # of an item
    PANELS = head_dim // 64  # of 64 channels, 128 bytes
    half = "true" if dtype == "float16" else "false"
    gate_type, beta_type = CUDA_TYPES[gate_dtype], CUDA_TYPES[beta_dtype]

    def device(name, *args):
        return T.evaluate(T.call_extern("handle", f"gated_inverse::{name}", *args))

    def whole(buffer, access, start=0):
        return T.access_ptr(buffer[start], access, buffer.shape[0] - start)

    @T.macro
    def load_k(k, k_shared, k_full, ring_shared, item):
        """Warp 0: the slots' K by TMA, 64 rows each from the flat token axis."""
        for c in T.unroll(CHUNKS):
            if ring_shared[item + VALID + c] > 0:
                for p in T.unroll(PANELS):
                    T.tma_copy(
                        k[
                            ring_shared[item + START + c] : ring_shared[item + START + c] + C,
                            ring_shared[item + KEY_HEAD],
                            p * 64 : p * 64 + 64,
                        ],
                        k_shared[(c * PANELS + p) * C : (c * PANELS + p) * C + C, :],
                        barrier=k_full[0],
                    )
        T.barrier_arrive(k_full[0])

    @T.macro
    def fetch_gates(g, beta, raw_shared, ring_shared, item):
        """All warps: the raw gates of an item by cp.async."""
        device(f"fetch<{gate_type}, {heads}>", T.address_of(g[0, 0]), g_token, g_head,
               whole(ring_shared, "r", item), whole(raw_shared, "w"))  # fmt: skip
        device(f"fetch<{beta_type}, {heads}>", T.address_of(beta[0, 0]), beta_token, beta_head,
               whole(ring_shared, "r", item), whole(raw_shared, "w", TILES * RAW))  # fmt: skip

    @T.prim_func
    def gated_inverse(
        k: T.StridedTensor((num_tokens, num_heads, head_dim), (k_token, k_head, 1), dtype),
        g: T.StridedTensor((num_tokens, num_value_heads), (g_token, g_head), gate_dtype),
        beta: T.StridedTensor((num_tokens, num_value_heads), (beta_token, beta_head), beta_dtype),
        A_log: T.Tensor((a_log_size,), "float32"),
        dt_bias: T.Tensor((dt_bias_size,), "float32"),
        cu_seqlens: T.Tensor((num_sequences_plus_1,), "int32"),
        a: T.Tensor((slots, num_value_heads, C, C), dtype),
        gates: T.Tensor((slots, num_value_heads, 2, C), "float32"),
        flags: T.int32,
        num_ctas: T.int32,
    ):
        with T.Kernel(num_ctas, threads=THREADS):
            T.import_source(SOURCE)
            T.pdl_trigger()  # the next kernel may take the SMs that this one leaves
            T.annotate_min_blocks_per_sm(ctas_per_sm(head_dim, heads))
            k_shared = T.alloc_shared((CHUNKS * PANELS * C, C), dtype)
            tile_shared = T.alloc_shared((TILES * C, C), dtype)
            diagonal_shared = T.alloc_shared((CHUNKS * DIAGONAL,), "float32", scope="shared")
            lower_shared = T.alloc_shared((CHUNKS * LOWER,), "uint32", scope="shared")
            terms_shared = T.alloc_shared((TILES * TERMS,), "float32", scope="shared")
            raw_shared = T.alloc_shared((2 * TILES * RAW,), "uint32", scope="shared")
            norms_shared = T.alloc_shared((CHUNKS * C,), "float32", scope="shared")
            # items: the present one, the next, the one being looked up, and the previous (still being stored)
            ring_shared = T.alloc_shared((4 * ITEM,), "int32", scope="shared")
            T.annotate_layout({buffer: make_swizzled_layout(buffer) for buffer in (k_shared, tile_shared)})
            product_local = T.alloc_local((32,), "float32")
            k_full = T.alloc_barrier(arrive_count=[32])
            turn = T.alloc_var("int32", init=0)
            thread = T.get_thread_binding()
            warp = thread // 32
            groups = T.truncdiv(num_value_heads, heads)
            walk = (T.address_of(cu_seqlens[0]), num_sequences_plus_1 - 1, groups, T.truncdiv(groups, num_heads))

            # the first two items, then K and the raw gates of the first
            if thread < 32:
                device(f"first_items<{heads}>", *walk, whole(ring_shared, "w"))
            T.sync_threads()
            if ring_shared[INDEX] >= 0:
                if thread < 32:
                    load_k(k, k_shared, k_full, ring_shared, 0)
                fetch_gates(g, beta, raw_shared, ring_shared, 0)
            device("fetched")

            while ring_shared[(turn & 3) * ITEM + INDEX] >= 0:
                item = (turn & 3) * ITEM
                following = ((turn + 1) & 3) * ITEM
                T.barrier_wait(k_full[0], turn & 1)
                for c in T.unroll(CHUNKS):
                    device(f"gram<{half}, {PANELS}>", T.access_ptr(k_shared[c * PANELS * C, 0], "r", PANELS * C * C),
                           T.access_ptr(product_local[0], "w", 32), whole(norms_shared, "w"),
                           whole(ring_shared, "r", item), c)  # fmt: skip
                    # The norms of slot c are in. At the first slot also: the raw gates are in, and all warps have left
                    # the previous item, so that its blocks are free. At the last: K has been read.
                    T.sync_threads()
                    if c == CHUNKS - 1 and thread < 32 and ring_shared[following + INDEX] >= 0:
                        load_k(k, k_shared, k_full, ring_shared, following)
                    device("stage", T.access_ptr(product_local[0], "r", 32), whole(norms_shared, "r", c * C),
                           whole(diagonal_shared, "w", c * DIAGONAL), whole(lower_shared, "w", c * LOWER))  # fmt: skip
                device(f"prepare<{gate_type}, {beta_type}, {heads}>", T.address_of(g[0, 0]), g_token, g_head,
                       T.address_of(beta[0, 0]), beta_token, beta_head, T.address_of(A_log[0]),
                       T.address_of(dt_bias[0]), flags, num_value_heads, *walk, whole(ring_shared, "rw"), turn,
                       whole(raw_shared, "r"), whole(norms_shared, "r"), whole(terms_shared, "w"),
                       T.address_of(gates[0, 0, 0, 0]))  # fmt: skip
                T.tma_store_wait(0)  # by the lane that stored: this warp's tile has been read
                # The blocks and the terms are in, every tile is free, the raw gates have been read.
                T.sync_threads()
                if ring_shared[following + INDEX] >= 0:
                    fetch_gates(g, beta, raw_shared, ring_shared, following)
                device(f"invert<{half}, {heads}>", whole(diagonal_shared, "r", warp // heads * DIAGONAL),
                       whole(lower_shared, "r", warp // heads * LOWER), whole(terms_shared, "r", warp * TERMS),
                       T.access_ptr(tile_shared[warp * C, 0], "w", C * C), whole(ring_shared, "r", item))  # fmt: skip
                device("publish")
                if ring_shared[item + VALID + warp // heads] > 0:
                    slot = ring_shared[item + SLOT] + warp // heads
                    head = ring_shared[item + HEAD] + warp % heads
                    T.tma_copy(
                        tile_shared[warp * C : warp * C + C, :], a[slot, head, 0:C, 0:C], leader_scope_threads=32
                    )
                turn += 1
            T.tma_store_wait(0)

    return gated_inverse
