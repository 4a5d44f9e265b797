// The scan over the segments of one sequence and head, for 16 columns of its state (segment_scan.py has the schedule).
//
// The state is kept transposed: 16 rows, K columns, of which warp w holds the w-th quarter in mma.sync accumulators. In a
// step every warp scales its quarter so that the largest element of a row is 1, rounds it to fp16 and shares it; then it
// takes the product of all four quarters with its columns of the matrix, each quarter's with a scale of its own.
#pragma once
#include <cuda_fp16.h>

namespace segment_scan {

constexpr int THREADS = 128;
constexpr int ROWS = 16;
constexpr int STAGES = 4;
constexpr int WINDOW = 1024;  // segments whose decays are in shared memory
constexpr float TINY = 1e-30f;

template <int K>
struct Shared {
  __half matrix[STAGES][K * K];  // 16-byte chunk c of row r lies at c ^ (r % 8)
  __half state[2][ROWS][K + 8];
  float scale[2][4][ROWS];
  float decay[WINDOW];
};

struct Segments {
  float* states;  // of one head: [number * heads, V, K], from the first of the CTA's rows on
  const __half* transitions;
  const float* decays;
  long state_stride, transition_stride, decay_stride;  // between segments
  int sequence, first;  // numbers of the segments of a sequence: `sequence`, first + 1, first + 2, ...

  __device__ __forceinline__ long number(int segment) const { return segment == 0 ? sequence : first + segment; }
};

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

__device__ __forceinline__ void load_transposed(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// All threads: the matrix of a segment by cp.async, one group; an empty group for no segment.
template <int K>
__device__ __forceinline__ void fetch(Segments s, int segment, __half* matrix) {
  if (segment > 0) {
    const __half* source = s.transitions + s.number(segment) * s.transition_stride;
#pragma unroll
    for (int i = 0; i < K * K / 8 / THREADS; ++i) {
      const int chunk = threadIdx.x + i * THREADS, row = chunk / (K / 8), column = chunk % (K / 8);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                       shared_address(matrix + row * K + ((column ^ (row & 7)) * 8))),
                   "l"(source + chunk * 8));
    }
  }
  asm volatile("cp.async.commit_group;");
}

// The accumulator layout: of tile j, columns 8 j + 2 (lane % 4) and the next, rows lane / 4 and 8 further.
template <int K>
__device__ __forceinline__ void read(float (&x)[K / 32][4], const float* rows) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const float* mine = rows + lane / 4 * K + warp * (K / 4) + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < K / 32; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair = *reinterpret_cast<const float2*>(mine + half * 8 * K + j * 8);
      x[j][2 * half] = pair.x;
      x[j][2 * half + 1] = pair.y;
    }
  }
}

template <int K>
__device__ __forceinline__ void write(float* rows, const float (&x)[K / 32][4]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float* mine = rows + lane / 4 * K + warp * (K / 4) + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < K / 32; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(mine + half * 8 * K + j * 8) = make_float2(x[j][2 * half], x[j][2 * half + 1]);
  }
}

// The warp's quarter of the state, scaled and rounded, for all warps.
template <int K>
__device__ __forceinline__ void share(const float (&state)[K / 32][4], __half (*rounded)[K + 8], float (*scale)[ROWS]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = TINY;
#pragma unroll
    for (int j = 0; j < K / 32; ++j)
      largest = fmaxf(largest, fmaxf(fabsf(state[j][2 * half]), fabsf(state[j][2 * half + 1])));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const int row = lane / 4 + half * 8;
    if (lane % 4 == 0) scale[warp][row] = largest;
    const float inverse = 1.f / largest;
#pragma unroll
    for (int j = 0; j < K / 32; ++j)
      *reinterpret_cast<__half2*>(&rounded[row][warp * (K / 4) + j * 8 + lane % 4 * 2]) =
          __floats2half2_rn(state[j][2 * half] * inverse, state[j][2 * half + 1] * inverse);
  }
}

// The warp's columns of the matrix as B fragments: [16 rows][2 tiles of 8 columns].
template <int K>
__device__ __forceinline__ void read_matrix(unsigned (&b)[K / 16][K / 64][4], const __half* matrix) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int k = 0; k < K / 16; ++k) {
#pragma unroll
    for (int j = 0; j < K / 64; ++j) {
      const int row = k * 16 + lane % 16, chunk = warp * (K / 32) + j * 2 + lane / 16;
      load_transposed(b[k][j], matrix + row * K + ((chunk ^ (row & 7)) * 8));
    }
  }
}

// state = local + gamma state + (the shared states) (the matrix)
template <int K>
__device__ __forceinline__ void step(float (&state)[K / 32][4], const float (&local)[K / 32][4], float gamma,
                                     const unsigned (&b)[K / 16][K / 64][4], const __half (*rounded)[K + 8],
                                     const float (*scale)[ROWS]) {
  const int lane = threadIdx.x & 31;
  float product[4][K / 32][4] = {};
#pragma unroll
  for (int k = 0; k < K / 16; ++k) {
    unsigned a[4];
    load_matrices(a, &rounded[lane % 16][k * 16 + lane / 16 * 8]);
#pragma unroll
    for (int j = 0; j < K / 32; ++j) multiply(product[k / (K / 64)][j], a, b[k][j / 2][j % 2 * 2], b[k][j / 2][j % 2 * 2 + 1]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float factor[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) factor[q] = scale[q][lane / 4 + half * 8];
#pragma unroll
    for (int j = 0; j < K / 32; ++j) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        float sum = fmaf(gamma, state[j][e], local[j][e]);
#pragma unroll
        for (int q = 0; q < 4; ++q) sum = fmaf(factor[q], product[q][j][e], sum);
        state[j][e] = sum;
      }
    }
  }
}

// The next segment whose transition counts, after `segment` and at most `last`; last + 1: there is none.
__device__ __forceinline__ int following(int segment, int last, const float* decay, int base) {
  do ++segment;
  while (segment <= last && !(decay[segment - base] > 0.f));
  return segment;
}

// CTA: segments first ... last (numbered from 1) of the sequence, at most WINDOW of them.
template <int K>
__device__ __forceinline__ void window(Segments s, int first, int last, Shared<K>& shared) {
  for (int i = threadIdx.x; i <= last - first; i += THREADS)
    shared.decay[i] = s.decays[s.number(first + i) * s.decay_stride];
  __syncthreads();
  int at[STAGES];  // the segments of the next steps
  at[0] = following(first - 1, last, shared.decay, first);
  if (at[0] > last) return;
#pragma unroll
  for (int i = 0; i + 1 < STAGES; ++i) {
    fetch<K>(s, at[i] <= last ? at[i] : 0, shared.matrix[i]);
    at[i + 1] = at[i] <= last ? following(at[i], last, shared.decay, first) : at[i];
  }
  float state[K / 32][4], local[K / 32][4], next[K / 32][4];
  unsigned b[K / 16][K / 64][4];
  read<K>(state, s.states + s.number(at[0] - 1) * s.state_stride);
  read<K>(next, s.states + s.number(at[0]) * s.state_stride);
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
  __syncthreads();
  read_matrix<K>(b, shared.matrix[0]);
  for (int i = 0; at[0] <= last; ++i) {
    // Here the matrix of this step is in b, that of the next one is on its way, N is in `next`.
    share<K>(state, shared.state[i & 1], shared.scale[i & 1]);
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 3));
#pragma unroll
    for (int j = 0; j < K / 32; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) local[j][e] = next[j][e];
    }
    if (at[1] <= last) read<K>(next, s.states + s.number(at[1]) * s.state_stride);
    // The states of all warps are shared; the next matrix has arrived; that of the step before has been read.
    __syncthreads();
    step<K>(state, local, shared.decay[at[0] - first], b, shared.state[i & 1], shared.scale[i & 1]);
    read_matrix<K>(b, shared.matrix[(i + 1) % STAGES]);
    // After what the next step waits for: they share a queue.
    fetch<K>(s, at[STAGES - 1] <= last ? at[STAGES - 1] : 0, shared.matrix[(i + STAGES - 1) % STAGES]);
    write<K>(s.states + s.number(at[0]) * s.state_stride, state);
    if (at[1] <= last && at[1] != at[0] + 1) read<K>(state, s.states + s.number(at[1] - 1) * s.state_stride);
#pragma unroll
    for (int j = 0; j + 1 < STAGES; ++j) at[j] = at[j + 1];
    if (at[STAGES - 1] <= last) at[STAGES - 1] = following(at[STAGES - 1], last, shared.decay, first);
  }
  asm volatile("cp.async.wait_group 0;");
}

// CTA: all segments of sequence `sequence` but its last, for head `head` and the state columns from `column` on.
template <int K>
__device__ __forceinline__ void run(float* states, const void* transitions, const float* decays, const int* cu_seqlens,
                                    int num_sequences, int heads, int head_dim_v, int segment_chunks, int sequence,
                                    int head, int column, void* memory) {
  const int span = segment_chunks * 64, start = cu_seqlens[sequence];
  const int last = (cu_seqlens[sequence + 1] - start + span - 1) / span - 2;
  const Segments s = {states + ((long)head * head_dim_v + column) * K,
                      static_cast<const __half*>(transitions) + (long)head * K * K,
                      decays + head,
                      (long)heads * head_dim_v * K,
                      (long)heads * K * K,
                      heads,
                      sequence,
                      num_sequences - 1 + start / span};
  for (int first = 1; first <= last; first += WINDOW) {
    window<K>(s, first, min(first + WINDOW - 1, last), *static_cast<Shared<K>*>(memory));
    __syncthreads();
  }
}

}  // namespace segment_scan
