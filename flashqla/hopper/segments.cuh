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

// Warp: how many of the last of `n` chunks a local state needs (eq. 7.4). `totals` is the log2 decay of the first of
// them, `stride` the distance to the next. Returns n + 1 where their decay never falls below `threshold`.
// `decay` becomes the log2 decay of the n chunks if it never does, of at least the chunks needed else.
__device__ __forceinline__ int warm_up(const float* totals, int stride, int n, float threshold, float* decay) {
  const int lane = threadIdx.x & 31;
  float sum = 0.f;
  for (int base = 0; base < n; base += 32) {
    const int back = base + lane;
    float x = back < n ? totals[(long)(n - 1 - back) * stride] : 0.f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float y = __shfl_up_sync(~0u, x, step);
      x += lane >= step ? y : 0.f;
    }
    const unsigned below = __ballot_sync(~0u, sum + x < threshold);
    sum += __shfl_sync(~0u, x, 31);
    if (below) {
      *decay = sum;
      return base + __ffs(below);
    }
  }
  *decay = sum;
  return n + 1;
}

}  // namespace segments
