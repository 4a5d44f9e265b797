// How far outside of its segment a chain begins its walk.
#pragma once

namespace segments {

// Of `most` chunks from `slot` on, in steps of `step` = 1 or -1, how many decay below `threshold` (eq. 7.4); all of them
// where they never do, or where one on the way is marked as outside of the conditions (-0 for log2 r, as gated_inverse
// writes it). Every warp that asks gets the same answer. LANES: 32, or 1 to walk alone.
template <int LANES>
__device__ __forceinline__ int approach(const float* gates, int slot, int step, int most, int heads, int head,
                                        float threshold) {
  constexpr int CHUNK = 64;
  const int lane = threadIdx.x & (LANES - 1);
  float total = 0.f;
  for (int base = 0; base < most; base += LANES) {
    const bool inside = base + lane < most;
    float x = 0.f, mark = 0.f;
    if (inside) {
      const long i = slot + static_cast<long>(step) * (base + lane);
      const float* last = gates + (i * heads + head) * (2 * CHUNK) + CHUNK - 1;
      x = last[0];
      mark = last[CHUNK];
    }
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
      const float y = __shfl_up_sync(~0u, x, distance);
      if (lane >= distance) x += y;
    }
    const unsigned marks = __ballot_sync(~0u, __float_as_uint(mark) == 0x80000000u);
    const unsigned below = __ballot_sync(~0u, inside && total + x < threshold);
    if (below) {
      const int first = __ffs(below) - 1;
      return marks & ((2u << first) - 1) ? most : base + first + 1;
    }
    if (marks) return most;
    total += __shfl_sync(~0u, x, LANES - 1);
  }
  return most;
}

}  // namespace segments
