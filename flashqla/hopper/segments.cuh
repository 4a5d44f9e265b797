// Device routines that the kernels of context parallelism share: which segment a CTA has, and which chunks it needs.
//
// A sequence is cut every `span` tokens. Its first segment has the number of the sequence; segment s >= 1 of sequence i
// has the number N + cu_i / span + s - 1. Numbers grow with i, no two segments share one, and none exceeds
// N + total / span: sizes and grids need no lengths.
#pragma once

namespace segments {

// The last sequence that begins at or before the `extra`-th span: the owner of segment N + extra, if anyone is.
__device__ __forceinline__ int owner(const int* cu_seqlens, int num_sequences, int span, int extra) {
  int low = 0, high = num_sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) >> 1;
    if (cu_seqlens[middle] / span <= extra)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// What the order kernel needs to know of a call.
struct Call {
  const int* cu_seqlens;
  int num_sequences, num_items, heads, segment_chunks;
};

constexpr int CHUNK = 64;
constexpr int BATCH = 32;  // totals that a thread asks for at a time

// Chunks that the local state of a segment needs (eq. 7.4); n + 1 where its n chunks never decay below `threshold`, or
// where one of those walked is marked as outside of its conditions (-0 for log2 r, as gated_inverse writes it); 0 for the
// last segment of a sequence, and where there is none. `total` becomes the log2 decay that was summed.
__device__ __forceinline__ int warm_up(Call call, const float* gates, float threshold, int item, int head, float* total) {
  const int n = call.segment_chunks, span = n * CHUNK;
  int sequence = item, segment = 0;
  if (item >= call.num_sequences) {
    sequence = owner(call.cu_seqlens, call.num_sequences, span, item - call.num_sequences);
    segment = item - call.num_sequences - call.cu_seqlens[sequence] / span + 1;
  }
  const int start = call.cu_seqlens[sequence];
  *total = 0.f;
  if (call.cu_seqlens[sequence + 1] - start <= (segment + 1) * span) return 0;
  const int before = min(sequence, start);
  const long first = before + (start - before) / CHUNK + segment * n;  // chunk slot, as gated_inverse has it
  for (int back = 0; back < n; back += BATCH) {
    float x[BATCH], mark[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const long slot = first + max(n - 1 - back - j, 0);
      const float* last = gates + (slot * call.heads + head) * (2 * CHUNK) + CHUNK - 1;
      x[j] = last[0];
      mark[j] = last[CHUNK];
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      if (back + j < n) {
        *total += x[j];
        if (__float_as_uint(mark[j]) == 0x80000000u) threshold = -INFINITY;
        if (*total < threshold) return back + j + 1;
      }
    }
  }
  return n + 1;
}

// One CTA of THREADS: `needed` and `decays` of every segment and head, and their `order`: first those that never decay
// below the threshold, which take long, then the others that have anything to do; -1 for the rest.
template <int THREADS>
__device__ __forceinline__ void sort(const int* cu_seqlens, int num_sequences, int num_items, int heads,
                                     int segment_chunks, const float* gates, float threshold, int* needed,
                                     float* decays, int* order) {
  const Call call = {cu_seqlens, num_sequences, num_items, heads, segment_chunks};
  constexpr int WARPS = (THREADS + 31) / 32;
  __shared__ int sums[2][WARPS];
  const int pairs = call.num_items * call.heads, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int steady = 0;
  for (int base = 0; base < pairs; base += THREADS) {
    const int pair = base + threadIdx.x;
    bool long_one = false;
    if (pair < pairs) {
      float total;
      const int item = pair / call.heads;
      const int w = warm_up(call, gates, threshold, item, pair - item * call.heads, &total);
      long_one = w > call.segment_chunks;
      needed[pair] = w;
      decays[pair] = long_one && item >= call.num_sequences ? exp2f(total) : 0.f;
    }
    steady += __syncthreads_count(long_one);
  }
  int next[2] = {0, steady};
  for (int base = 0; base < pairs; base += THREADS) {
    const int pair = base + threadIdx.x;
    const int w = pair < pairs ? needed[pair] : 0;
    const int kind = w > call.segment_chunks ? 0 : w > 0 ? 1 : 2;
    int rank = 0;
    for (int k = 0; k < 2; ++k) {
      const unsigned same = __ballot_sync(~0u, kind == k);
      if (kind == k) rank = __popc(same & ((1u << lane) - 1));
      if (lane == 0) sums[k][warp] = __popc(same);
    }
    __syncthreads();
    for (int k = 0; k < 2; ++k) {
      for (int i = 0; i < WARPS; ++i) {
        if (kind == k && i < warp) rank += sums[k][i];
      }
      if (kind == k) order[next[k] + rank] = pair;
      for (int i = 0; i < WARPS; ++i) next[k] += sums[k][i];
    }
    __syncthreads();
  }
  for (int i = next[1] + threadIdx.x; i < pairs; i += THREADS) order[i] = -1;
}

}  // namespace segments
