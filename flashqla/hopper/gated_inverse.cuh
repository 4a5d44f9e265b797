// Device routines of the gated inverse (gated_inverse.py has the schedule and the shared-memory layout).
//
// One item is four tiles: CHUNKS = 4 / HEADS chunk slots of HEADS value heads that share a key head. Warp w inverts the
// tile of slot w / HEADS and head w % HEADS. The steps of an item:
//
// - gram, stage (warpgroup): K K^T by wgmma, scaled to unit keys, cut into 16x16 blocks, the diagonal ones in fp32 and
//   those below in fp16;
// - prepare (warp): gates and beta of its tile (eq. 2.1 to 2.5);
// - invert (warp): eq. 5.1 on the diagonal blocks, eq. 5.2 up to 64x64, gate and beta (eq. 4.1) on the way out.
//
// Unit keys: with n_i = |k_i| and c_ij the cosine of keys i and j, L_ij = beta_i n_i n_j c_ij is similar to
// L'_ij = beta'_i c_ij, beta'_i = beta_i n_i^2, so A_ij = A'_ij n_j / n_i. fp16 suits L' and A' for all key norms that
// leave the recurrence stable (beta' <= 2, then |A'_ij| <= beta'_i), and n_j / n_i joins the exponents of the gate.
// With l2norm n_i is n_i r_i, r_i = 1 / sqrt(n_i^2 + 1e-6), and the result carries r_i r_j, so that the chain takes raw K.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace gated_inverse {

typedef unsigned u32;

constexpr int CHUNK = 64;
constexpr int DIAGONAL_BLOCK = 260;  // floats of a 16x16 block; 4 more than 256 keep two blocks off each other's banks
constexpr int DIAGONAL = 4 * DIAGONAL_BLOCK;
constexpr int LOWER = 6 * 128;  // words of the six 16x16 fp16 blocks below the diagonal, as mma.sync B fragments
constexpr int TERMS = 224;      // words of a tile's terms: row exponent, column exponent, beta', beta' in fp16
constexpr float FRAME = 60.f;    // chunk_forward.FRAME
constexpr int RAW = 72;         // words of one tile's raw gates: 64 tokens, and 8 that spread four heads over the banks
constexpr float LOG2E = 1.4426950408889634f;
constexpr float RESET = -256.f;  // a token's log2 decay from here on is 0 in fp32; finite, so that differences stay numbers
constexpr float BOUND = 2.01f;   // of beta' in a step that contracts: 2, and the rounding of unit keys to 16 bits
constexpr float SMALLEST_BETA = 1.f / 4096;  // with BETA_FLOOR; well within the normal numbers of fp16
constexpr float TINY = 1e-30f;  // least |k|^2: a zero key has zero products, whatever its scale

// as in gated_inverse.py
enum Flags { USE_GATE = 1, HAS_DT_BIAS = 2, BETA_SIGMOID = 4, NEG_EIGVAL = 8, L2NORM = 16, GATED = 32, BETA_FLOOR = 64 };

// The items of a launch: `groups` of HEADS value heads (fastest), then CHUNKS consecutive slots.
struct Items {
  const int* cu_seqlens;
  int num_sequences, groups, groups_per_key;
};

// An item in shared memory: what the four warps have to know about it.
struct Item {
  int index;     // in the order of the grid; -1: there are no more
  int slot;      // the first of its chunk slots
  int head;      // the first of its value heads
  int key_head;  // of all of them
  int start[4];  // first token of each slot
  int valid[4];  // tokens of each slot, 0: no sequence owns it
  int sequence;  // owner of the first slot, where the look-up of a later item starts
  int unused[3];
};

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float log2_fast(float x) {
  float r;
  asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ u32 pack_half(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ u32 pack_bfloat(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <bool HALF>
__device__ __forceinline__ u32 pack(float lo, float hi) {
  return HALF ? pack_half(lo, hi) : pack_bfloat(lo, hi);
}

// ---- chunk slots

// 32 consecutive sequences, one a lane: where each begins, in tokens and in slots.
struct Window {
  int first, token, slot;
};

// The first slot of a sequence is m + (cu - m) / 64 with m = min(sequence, cu): it grows with the sequence, by at least
// its chunks.
__device__ __forceinline__ int first_slot(int sequence, int token) {
  const int m = min(sequence, token);
  return m + ((token - m) >> 6);
}

__device__ __forceinline__ Window open_window(Items items, int first) {
  const int sequence = min(first + lane_id(), items.num_sequences);
  Window w = {first, items.cu_seqlens[sequence], 0};
  w.slot = sequence < items.num_sequences ? first_slot(sequence, w.token) : 0x7fffffff;
  return w;
}

// Warp: moves the window to the last sequence that begins at or before `slot`, if it lies outside; 32-ary search.
__device__ __noinline__ Window move_window(Items items, int first, int slot) {
  int low = first, high = items.num_sequences;  // low begins at or before slot, high after it
  while (high - low > 31) {
    const int step = (high - low + 31) / 32;
    const int probe = low + lane_id() * step;
    const bool before = probe < high && first_slot(probe, items.cu_seqlens[probe]) <= slot;
    low += (__popc(__ballot_sync(~0u, before)) - 1) * step;
    high = min(high, low + step);
  }
  return open_window(items, low);
}

// Warp: writes to `item` the first item from `index` on, in steps of the grid, that holds at least one chunk.
template <int HEADS>
__device__ __forceinline__ void find_item(Items items, int num_items, Window w, int index, Item* item) {
  constexpr int CHUNKS = 4 / HEADS;
  for (; index < num_items; index += gridDim.x) {
    const int slot = index / items.groups * CHUNKS;
    int start[CHUNKS], valid[CHUNKS], any = 0, sequence = 0;
    Window v = w;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      int owner = __popc(__ballot_sync(~0u, v.slot <= slot + c)) - 1;
      if (owner == 31) {
        v = move_window(items, v.first + 31, slot + c);
        owner = __popc(__ballot_sync(~0u, v.slot <= slot + c)) - 1;
      }
      if (c == 0) {  // a later item begins here or after it
        w = v;
        sequence = v.first + owner;
      }
      const int chunk = slot + c - __shfl_sync(~0u, v.slot, owner);
      start[c] = __shfl_sync(~0u, v.token, owner) + chunk * CHUNK;
      valid[c] = max(0, min(CHUNK, __shfl_sync(~0u, v.token, owner + 1) - start[c]));
      any |= valid[c];
    }
    if (any) {
      if (lane_id() == 0) {
        item->index = index;
        item->slot = slot;
        item->head = index % items.groups * HEADS;
        item->key_head = index % items.groups / items.groups_per_key;
        item->sequence = sequence;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
          item->start[c] = start[c];
          item->valid[c] = valid[c];
        }
      }
      return;
    }
  }
  if (lane_id() == 0)
    item->index = -1;
}

// The items of all slots that the sequences span, the unowned ones between them included.
template <int HEADS>
__device__ __forceinline__ int count_items(Items items) {
  constexpr int CHUNKS = 4 / HEADS;
  const int slots = first_slot(items.num_sequences, items.cu_seqlens[items.num_sequences]);
  return (slots + CHUNKS - 1) / CHUNKS * items.groups;
}

// Warp 0, once: the first two items of this CTA.
template <int HEADS>
__device__ __forceinline__ void first_items(const int* cu_seqlens, int num_sequences, int groups, int groups_per_key,
                                            void* ring_) {
  Item* ring = (Item*)ring_;
  const Items items = {cu_seqlens, num_sequences, groups, groups_per_key};
  const int num_items = count_items<HEADS>(items);
  const Window w = open_window(items, 0);
  int index = blockIdx.x;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    find_item<HEADS>(items, num_items, w, index, ring + i);
    __syncwarp();
    index = ring[i].index < 0 ? num_items : ring[i].index + gridDim.x;
  }
}

// ---- raw gates

// The offset of a token's gate from the tensor's start, in elements.
__device__ __forceinline__ long long gate_offset(int token, int head, long long token_stride, long long head_stride) {
  return token * token_stride + head * head_stride;
}

// CTA: the raw gates of an item from any strides to shared memory, asynchronously: the aligned 32-bit word that holds
// each of them. Neighbouring lanes take neighbouring heads, then tokens. Tokens past the end are not read.
template <typename GATE, int HEADS>
__device__ __forceinline__ void fetch(const void* g, long long token_stride, long long head_stride, const void* item_,
                                      u32* raw) {
  const Item* item = (const Item*)item_;
  const int head = threadIdx.x % HEADS;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int place = threadIdx.x / HEADS + i * (128 / HEADS), chunk = place / CHUNK, token = place % CHUNK;
    const bool ok = token < item->valid[chunk];
    const long long offset =
        ok ? gate_offset(item->start[chunk] + token, item->head + head, token_stride, head_stride) : 0;
    const unsigned long long word = (unsigned long long)((const GATE*)g + offset) & ~3ull;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(
                     shared_address(raw + (chunk * HEADS + head) * RAW + token)),
                 "l"(word), "r"(ok ? 4 : 0)
                 : "memory");
  }
}
__device__ __forceinline__ void fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A gate from the word that holds it; `place` is its address in elements.
template <typename GATE>
__device__ __forceinline__ float gate_value(u32 word, u32 place);
template <>
__device__ __forceinline__ float gate_value<float>(u32 word, u32) {
  return __uint_as_float(word);
}
template <>
__device__ __forceinline__ float gate_value<__nv_bfloat16>(u32 word, u32 place) {
  return __uint_as_float(place & 1 ? word & 0xffff0000u : word << 16);
}
template <>
__device__ __forceinline__ float gate_value<__half>(u32 word, u32 place) {
  return __half2float(__ushort_as_half((unsigned short)(place & 1 ? word >> 16 : word)));
}

// The two gates of this lane, tokens 2 lane and 2 lane + 1; 0 past the end.
template <typename GATE>
__device__ __forceinline__ float2 gate_pair(const void* g, long long token_stride, long long head_stride, int start,
                                            int head, const u32* raw) {
  const uint2 words = *(const uint2*)(raw + 2 * lane_id());
  const u32 place = (u32)((unsigned long long)g / sizeof(GATE)) +
                    (u32)gate_offset(start + 2 * lane_id(), head, token_stride, head_stride);
  return make_float2(gate_value<GATE>(words.x, place), gate_value<GATE>(words.y, place + (u32)token_stride));
}

// log(1 + exp(x)) without overflow, exact to fp32 on both sides.
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(__expf(-fabsf(x))); }
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// Warp: raw gates of its tile -> prefix sums and key scales to global memory, exponents and beta' to shared memory.
template <typename GATE, typename BETA, int HEADS>
__device__ __forceinline__ void tile_terms(const void* g, long long g_token, long long g_head, const void* beta,
                                           long long beta_token, long long beta_head, const float* A_log,
                                           const float* dt_bias, int flags, int value_heads, const Item* item,
                                           const u32* raw, const float* inverse_norms, float* terms, float* gates_out) {
  const int lane = lane_id(), t = 2 * lane, chunk = warp_id() / HEADS;
  const int head = item->head + warp_id() % HEADS, start = item->start[chunk], valid = item->valid[chunk];
  float2 x = gate_pair<GATE>(g, g_token, g_head, start, head, raw + warp_id() * RAW);
  float2 b = gate_pair<BETA>(beta, beta_token, beta_head, start, head, raw + (4 + warp_id()) * RAW);
  if (flags & USE_GATE) {  // eq. 2.3
    const float rate = -__expf(A_log[head]), bias = flags & HAS_DT_BIAS ? dt_bias[head] : 0.f;
    x.x = rate * softplus(x.x + bias);
    x.y = rate * softplus(x.y + bias);
  }
  if (flags & BETA_SIGMOID) {  // eq. 2.5
    const float top = flags & NEG_EIGVAL ? 2.f : 1.f;
    b.x = top * sigmoid(b.x);
    b.y = top * sigmoid(b.y);
  }
  x.x = t < valid ? fmaxf(x.x * LOG2E, RESET) : 0.f;
  x.y = t + 1 < valid ? fmaxf(x.y * LOG2E, RESET) : 0.f;
  if (flags & BETA_FLOOR) {  // NaN stays
    b.x = b.x < SMALLEST_BETA ? SMALLEST_BETA : b.x;
    b.y = b.y < SMALLEST_BETA ? SMALLEST_BETA : b.y;
  }
  b.x = t < valid ? b.x : 0.f;
  b.y = t + 1 < valid ? b.y : 0.f;

  float sum = x.x + x.y;  // eq. 2.1, in powers of two
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float below = __shfl_up_sync(~0u, sum, d);
    if (lane >= d)
      sum += below;
  }
  const float before = __shfl_up_sync(~0u, sum, 1);
  const float2 G = make_float2((lane ? before : 0.f) + x.x, sum);

  // log2 of n and of r, and n^2 with l2norm applied (eq. 2.4); past the end n = r = 1
  const float2 inverse = *(const float2*)(inverse_norms + chunk * CHUNK + t);
  float2 log_n = make_float2(0.f, 0.f), log_r = log_n, square = make_float2(1.f, 1.f);
  if (t < valid) {
    log_n.x = -log2_fast(inverse.x);
    square.x = 1.f / (inverse.x * inverse.x);
  }
  if (t + 1 < valid) {
    log_n.y = -log2_fast(inverse.y);
    square.y = 1.f / (inverse.y * inverse.y);
  }
  if (flags & L2NORM) {
    if (t < valid) {
      log_r.x = -0.5f * log2_fast(square.x + 1e-6f);
      square.x = square.x / (square.x + 1e-6f);
    }
    if (t + 1 < valid) {
      log_r.y = -0.5f * log2_fast(square.y + 1e-6f);
      square.y = square.y / (square.y + 1e-6f);
    }
    log_n.x += log_r.x;
    log_n.y += log_r.y;
  }
  // eq. 8.2: no gate in the chunk's own frame; eq. 4.1 where its decay leaves that frame
  const bool gated = flags & GATED || __shfl_sync(~0u, sum, 31) < -FRAME;
  const float2 row = make_float2((gated ? G.x : 0.f) - log_n.x, (gated ? G.y : 0.f) - log_n.y);
  *(float2*)(terms + t) = make_float2(row.x + log_r.x, row.y + log_r.y);
  *(float2*)(terms + 64 + t) = make_float2(row.x - log_r.x - log2_fast(b.x), row.y - log_r.y - log2_fast(b.y));
  b.x *= square.x;
  b.y *= square.y;
  const bool contracts = b.x >= 0.f && b.x <= BOUND && b.y >= 0.f && b.y <= BOUND;
  if (!__all_sync(~0u, contracts) && !(flags & L2NORM)) log_r = make_float2(-0.f, -0.f);
  *(float2*)(terms + 128 + t) = b;
  ((u32*)terms)[192 + lane] = pack_half(b.x, b.y);
  if (valid > 0) {
    float* out = gates_out + ((long long)(item->slot + chunk) * value_heads + head) * (2 * CHUNK) + t;
    *(float2*)out = G;
    *(float2*)(out + CHUNK) = log_r;
  }
}

// Warpgroup, between the barriers of an item: the terms of its tiles. Warp 3, which staged least, also looks up the
// item after the next; the loads for that are in flight meanwhile.
template <typename GATE, typename BETA, int HEADS>
__device__ __forceinline__ void prepare(const void* g, long long g_token, long long g_head, const void* beta,
                                        long long beta_token, long long beta_head, const float* A_log,
                                        const float* dt_bias, int flags, int value_heads, const int* cu_seqlens,
                                        int num_sequences, int groups, int groups_per_key, void* ring_, int turn,
                                        const u32* raw, const float* inverse_norms, float* terms, float* gates_out) {
  Item* ring = (Item*)ring_;
  Item* found = ring + ((turn + 2) & 3);
  const Items items = {cu_seqlens, num_sequences, groups, groups_per_key};
  const Item* next = ring + ((turn + 1) & 3);
  const bool look_up = warp_id() == 3 && next->index >= 0;
  Window window;
  int num_items;
  if (look_up) {
    window = open_window(items, next->sequence);
    num_items = count_items<HEADS>(items);
  }
  tile_terms<GATE, BETA, HEADS>(g, g_token, g_head, beta, beta_token, beta_head, A_log, dt_bias, flags, value_heads,
                                ring + (turn & 3), raw, inverse_norms, terms + warp_id() * TERMS, gates_out);
  if (look_up)
    find_item<HEADS>(items, num_items, window, next->index + gridDim.x, found);
  else if (threadIdx.x == 96)
    found->index = -1;
}

// ---- K K^T, staged

// The wgmma descriptor of 64 rows of 128 bytes, 128-byte swizzle.
__device__ __forceinline__ unsigned long long descriptor(u32 address) {
  return (1ull << 62) | (64ull << 32) | (1ull << 16) | ((address & 0x3ffff) >> 4);
}

#define GATED_INVERSE_WGMMA(TYPE)                                                                                    \
  asm volatile(                                                                                                      \
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"                                                                      \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                                    \
      " "                                                                                                            \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                      \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;}\n" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),  \
        "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),       \
        "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),      \
        "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])                    \
      : "l"(k), "l"(k), "r"(accumulate))

// Warpgroup: c = K K^T of one slot, and 1 / |k| of its tokens (0 past the end) to shared memory.
// c[4 (j / 8) + 2 (i % 16 / 8) + j % 2] is element (i, j): row i % 16 = lane / 4 (+ 8) of warp i / 16, column j % 8 = 2
// (lane % 4) (+ 1).
template <bool HALF, int PANELS>
__device__ __forceinline__ void gram(const void* panels, float* c, float* inverse_norms, const void* item, int chunk) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int step = 0; step < 4 * PANELS; ++step) {
    const unsigned long long k = descriptor(shared_address(panels) + step / 4 * 8192 + step % 4 * 32);
    const int accumulate = step > 0;
    if (HALF)
      GATED_INVERSE_WGMMA("f16");
    else
      GATED_INVERSE_WGMMA("bf16");
  }
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 32; ++i)
    asm volatile("" : "+f"(c[i])::"memory");

  const int lane = lane_id(), w = warp_id(), valid = ((const Item*)item)->valid[chunk];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float square = 0.f;
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int block = 0; block < 4; ++block)
        if (w == block && (lane >> 2 & 1) == e)
          square = c[4 * (2 * block + r) + 2 * r + e];
    const int row = 16 * w + 8 * r + lane / 4;
    if (lane >> 3 == (lane & 3))
      inverse_norms[chunk * CHUNK + row] = row < valid ? rsqrtf(fmaxf(square, TINY)) : 0.f;
  }
}
#undef GATED_INVERSE_WGMMA

// A cosine. NaN, from rows past the end whose scale is 0, becomes a number: fminf returns the other one; beta' = 0
// removes it later.
__device__ __forceinline__ float cosine(float product, float scale) { return fminf(product * scale, 1.f); }

// K K^T is symmetric, so the accumulator of an upper block is the B fragment of the lower one: no transposition, one
// store a lane.
template <int W>
__device__ __forceinline__ void stage_rows(const float* acc, const float* inverse_norms, float* diagonal, u32* lower) {
  const int lane = lane_id(), column = 2 * (lane & 3);
  float row[2], c[8];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    row[r] = inverse_norms[16 * W + 8 * r + lane / 4];
#pragma unroll
  for (int I = W; I < 4; ++I) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 scale = *(const float2*)(inverse_norms + 16 * I + 8 * h + column);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        c[4 * h + 2 * r] = cosine(acc[4 * (2 * I + h) + 2 * r], row[r] * scale.x);
        c[4 * h + 2 * r + 1] = cosine(acc[4 * (2 * I + h) + 2 * r + 1], row[r] * scale.y);
      }
    }
    if (I == W) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          *(float2*)(diagonal + W * DIAGONAL_BLOCK + (8 * r + lane / 4) * 16 + 8 * h + column) =
              make_float2(c[4 * h + 2 * r], c[4 * h + 2 * r + 1]);
    } else {
      ((uint4*)lower)[(I * (I - 1) / 2 + W) * 32 + lane] =
          make_uint4(pack_half(c[0], c[1]), pack_half(c[4], c[5]), pack_half(c[2], c[3]), pack_half(c[6], c[7]));
    }
  }
}

// Warpgroup: the accumulator of one slot -> its diagonal and lower blocks, as products of unit keys.
__device__ __forceinline__ void stage(const float* acc, const float* inverse_norms, float* diagonal, u32* lower) {
  const int w = warp_id();
  if (w == 0)
    stage_rows<0>(acc, inverse_norms, diagonal, lower);
  else if (w == 1)
    stage_rows<1>(acc, inverse_norms, diagonal, lower);
  else if (w == 2)
    stage_rows<2>(acc, inverse_norms, diagonal, lower);
  else
    stage_rows<3>(acc, inverse_norms, diagonal, lower);
}

// ---- 16x16 blocks
// Fragments of a 16x16 block over a warp: accumulator float[8] (two n-tiles), left operand u32[4], right operand
// u32[4].

__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void clear(float* c) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    c[i] = 0.f;
}
__device__ __forceinline__ void add_product(float* c, const u32* a, const u32* b) {
  mma(c, a, b[0], b[1]);
  mma(c + 4, a, b[2], b[3]);
}
__device__ __forceinline__ void product(float* c, const u32* a, const u32* b) {
  clear(c);
  add_product(c, a, b);
}
// accumulator -> left operand
__device__ __forceinline__ void left(u32* a, const float* c) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = pack_half(c[2 * i], c[2 * i + 1]);
}
__device__ __forceinline__ void negated_left(u32* a, const float* c) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = pack_half(-c[2 * i], -c[2 * i + 1]);
}
__device__ __forceinline__ u32 times_half2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 transpose(u32 a) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}
__device__ __forceinline__ void load_matrices(u32* r, u32 p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(p)
               : "memory");
}
__device__ __forceinline__ void load_transposed(u32* r, u32 p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(p)
               : "memory");
}
__device__ __forceinline__ void lower_block(u32* b, const u32* lower, int I, int J) {
  const uint4 v = ((const uint4*)lower)[(I * (I - 1) / 2 + J) * 32 + lane_id()];
  b[0] = v.x;
  b[1] = v.y;
  b[2] = v.z;
  b[3] = v.w;
}
// Packed block (I, J) to the tile: 128-byte rows, their 16-byte pieces swizzled as the tensor map expects.
__device__ __forceinline__ void store_block(u32 tile, int I, int J, u32 a, u32 b, u32 c, u32 d) {
  const int matrix = lane_id() >> 3, row = lane_id() & 7;
  const u32 p = tile + I * 2048 + (8 * (matrix & 1) + row) * 128 + (((2 * J + (matrix >> 1)) ^ row) << 4);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(p), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
// Block (I, J) below the diagonal: gate, beta and key norms (eq. 4.1) in fp32, then rounded once.
template <bool HALF>
__device__ __forceinline__ void put_block(u32 tile, int I, int J, const float* c, const float* row,
                                          const float* columns) {
  u32 p[4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float2 column = *(const float2*)(columns + 16 * J + 8 * h + 2 * (lane_id() & 3));
#pragma unroll
    for (int r = 0; r < 2; ++r)
      p[2 * h + r] = pack<HALF>(c[4 * h + 2 * r] * exp2_fast(row[r] - column.x),
                                c[4 * h + 2 * r + 1] * exp2_fast(row[r] - column.y));
  }
  store_block(tile, I, J, p[0], p[1], p[2], p[3]);
}

// ---- the inverse

// Warp: the inverses of the four diagonal blocks by substitution (eq. 5.1) in fp32, to scratch in fp16: columns of 32
// bytes, their halves swapped every four columns. A lane owns column lane % 16 of blocks lane / 16 and lane / 16 + 2.
__device__ __forceinline__ void substitute(const float* diagonal, const float* beta, char* scratch) {
  const int column = lane_id() & 15, block = lane_id() >> 4;
  float x0[16], x1[16];
  const float4* k0 = (const float4*)(diagonal + block * DIAGONAL_BLOCK);
  const float4* k1 = (const float4*)(diagonal + (block + 2) * DIAGONAL_BLOCK);
  const float4* beta0 = (const float4*)(beta + 16 * block);
  const float4* beta1 = beta0 + 8;
  float4 b0, b1;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i % 4 == 0) {
      b0 = beta0[i / 4];
      b1 = beta1[i / 4];
    }
    float s0 = 0.f, s1 = 0.f;
#pragma unroll
    for (int q = 0; q < (i + 3) / 4; ++q) {
      const float4 u = k0[i * 4 + q], v = k1[i * 4 + q];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (4 * q + j < i) {
          s0 = fmaf((&u.x)[j], x0[4 * q + j], s0);
          s1 = fmaf((&v.x)[j], x1[4 * q + j], s1);
        }
    }
    const float one = column == i ? 1.f : 0.f;
    x0[i] = fmaf(-(&b0.x)[i % 4], s0, one);
    x1[i] = fmaf(-(&b1.x)[i % 4], s1, one);
  }
  const int swap = column >> 2 & 1;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float *y0 = x0 + 8 * h, *y1 = x1 + 8 * h;
    uint4* d = (uint4*)(scratch + block * 512 + column * 32) + (h ^ swap);
    d[0] =
        make_uint4(pack_half(y0[0], y0[1]), pack_half(y0[2], y0[3]), pack_half(y0[4], y0[5]), pack_half(y0[6], y0[7]));
    d[64] =
        make_uint4(pack_half(y1[0], y1[1]), pack_half(y1[2], y1[3]), pack_half(y1[4], y1[5]), pack_half(y1[6], y1[7]));
  }
}

// Warp: its gated inverse into `tile_`, 64x64 with 128-byte swizzle, whose first 2 KB are scratch before.
// Exponents above the diagonal may be large; 2^64 times the exact zeros there is still zero.
template <bool HALF, int HEADS>
__device__ __forceinline__ void invert(const float* diagonal, const u32* lower, const float* terms, void* tile_,
                                       const void* item) {
  if (((const Item*)item)->valid[warp_id() / HEADS] == 0)
    return;
  const int lane = lane_id();
  const u32 tile = shared_address(tile_);
  const float *columns = terms + 64, *beta = terms + 128;
  const u32* half_beta = (const u32*)terms + 192;

  substitute(diagonal, beta, (char*)tile_);
  __syncwarp();
  u32 L[4][4], R[3][4];  // the inverted diagonal blocks as left and as right operands
  {
    const int column = (lane & 7) + (lane >> 4 << 3), half = lane >> 3 & 1;
    const u32 p = tile + column * 32 + ((half ^ (column >> 2 & 1)) << 4);
#pragma unroll
    for (int I = 0; I < 4; ++I)
      load_transposed(L[I], p + I * 512);
#pragma unroll
    for (int I = 0; I < 3; ++I)
      load_matrices(R[I], p + I * 512);
  }
  __syncwarp();
  float row[4][2];
#pragma unroll
  for (int I = 0; I < 4; ++I) {
    row[I][0] = terms[16 * I + lane / 4];
    row[I][1] = terms[16 * I + 8 + lane / 4];
  }
  // the diagonal blocks, the zero blocks above them; then the left operands take the next product's diag(beta')
#pragma unroll
  for (int I = 0; I < 4; ++I) {
    const float2 h0 = *(const float2*)(columns + 16 * I + 2 * (lane & 3)),
                 h1 = *(const float2*)(columns + 16 * I + 8 + 2 * (lane & 3));
    const float2 a0 = __half22float2(*(__half2*)&L[I][0]), a1 = __half22float2(*(__half2*)&L[I][1]);
    const float2 a3 = __half22float2(*(__half2*)&L[I][3]);
    const float r0 = row[I][0], r1 = row[I][1];
    store_block(tile, I, I,
                pack<HALF>(a0.x * exp2_fast(fminf(r0 - h0.x, 64.f)), a0.y * exp2_fast(fminf(r0 - h0.y, 64.f))),
                pack<HALF>(a1.x * exp2_fast(r1 - h0.x), a1.y * exp2_fast(r1 - h0.y)), 0u,
                pack<HALF>(a3.x * exp2_fast(fminf(r1 - h1.x, 64.f)), a3.y * exp2_fast(fminf(r1 - h1.y, 64.f))));
#pragma unroll
    for (int J = I + 1; J < 4; ++J)
      store_block(tile, I, J, 0u, 0u, 0u, 0u);
    if (I > 0) {
      const u32 low = half_beta[8 * I + (lane & 3)], high = half_beta[8 * I + 4 + (lane & 3)];
      L[I][0] = times_half2(L[I][0], low);
      L[I][1] = times_half2(L[I][1], low);
      L[I][2] = times_half2(L[I][2], high);
      L[I][3] = times_half2(L[I][3], high);
    }
  }
  // eq. 5.2, 16 -> 32 in both halves: X_IJ = -(A_II diag(beta')) C_IJ A_JJ with C the cosines
  u32 C[4], X[4], R10[4], L32[4];
  float c[8], d[8];
  lower_block(C, lower, 1, 0);
  product(c, L[1], C);
  negated_left(X, c);
  product(c, X, R[0]);
  put_block<HALF>(tile, 1, 0, c, row[1], columns);
  left(X, c);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    R10[i] = transpose(X[i]);
  lower_block(C, lower, 3, 2);
  product(c, L[3], C);
  negated_left(X, c);
  product(c, X, R[2]);
  put_block<HALF>(tile, 3, 2, c, row[3], columns);
  {
    const float2 low = *(const float2*)(beta + 32 + 2 * (lane & 3)),
                 high = *(const float2*)(beta + 40 + 2 * (lane & 3));
    L32[0] = pack_half(c[0] * low.x, c[1] * low.y);
    L32[1] = pack_half(c[2] * low.x, c[3] * low.y);
    L32[2] = pack_half(c[4] * high.x, c[5] * high.y);
    L32[3] = pack_half(c[6] * high.x, c[7] * high.y);
  }
  // eq. 5.2, 32 -> 64: [L2 0; L32 L3] [C20 C21; C30 C31], times -[A0 0; A10 A1]
  u32 C20[4], C21[4], X0[4], X1[4];
  lower_block(C20, lower, 2, 0);
  lower_block(C21, lower, 2, 1);
  product(c, L[2], C20);
  negated_left(X0, c);
  product(d, L[2], C21);
  negated_left(X1, d);
  product(c, X0, R[0]);
  add_product(c, X1, R10);
  put_block<HALF>(tile, 2, 0, c, row[2], columns);
  product(d, X1, R[1]);
  put_block<HALF>(tile, 2, 1, d, row[2], columns);
  product(c, L32, C20);
  lower_block(C, lower, 3, 0);
  add_product(c, L[3], C);
  negated_left(X0, c);
  product(d, L32, C21);
  lower_block(C, lower, 3, 1);
  add_product(d, L[3], C);
  negated_left(X1, d);
  product(c, X0, R[0]);
  add_product(c, X1, R10);
  put_block<HALF>(tile, 3, 0, c, row[3], columns);
  product(d, X1, R[1]);
  put_block<HALF>(tile, 3, 1, d, row[3], columns);
}

// The tile's stores before the bulk copy that reads them (TileLang's fence has no memory clobber), and the raw gates of
// the next item: they are in before the bulk copy starts, because a wait for cp.async after it would wait for the bulk
// copy too.
__device__ __forceinline__ void publish() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  fetched();
  __syncwarp();
}

}  // namespace gated_inverse
