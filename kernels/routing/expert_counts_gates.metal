// counts[e] += how many elements of column e are not 0. counts holds 0 before. A thread goes down a vector of columns;
// its threadgroup joins what it found for 1024 columns in threadgroup memory and adds that.

#include <metal_atomic>
#include <metal_stdlib>

#include "../_common/vector.h"

using namespace metal;

template <typename T>
[[kernel]] void expert_counts_gates(
    const device T* gates [[buffer(0)]],
    const constant int* gates_shape [[buffer(1)]],
    const constant int& rows_per_group [[buffer(2)]],
    device atomic<int>* counts [[buffer(3)]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup atomic_int found[1024];

  const int columns = gates_shape[1];
  const int thread_index = thread_position_in_threadgroup.x;
  const int threads = threads_per_threadgroup.x;
  const int first = threadgroup_position_in_grid.y * 1024;
  const int end = min(1024, columns - first);
  for (int i = thread_index; i < end; i += threads) {
    atomic_store_explicit(&found[i], 0, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int vectors = (end + N - 1) / N;
  const int rows_at_once = threads / vectors;
  const int own_row = thread_index / vectors;
  const int column = thread_index % vectors * N;
  const int limit = own_row < rows_at_once ? min(end - column, N) : 0;
  const long begin = long(threadgroup_position_in_grid.x) * rows_per_group;
  const long behind = min(begin + rows_per_group, long(gates_shape[0]));
  int own[N] = {};
  for (long row = begin + own_row; row < behind; row += rows_at_once) {
    float values[N];
    forge::load_floats(gates + row * columns + first + column, limit, values);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      // By its bits, because a comparison may take the smallest numbers for 0.
      own[i] += as_type<uint>(values[i]) << 1 != 0;
    }
  }
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    if (own[i] > 0) {
      atomic_fetch_add_explicit(&found[column + i], own[i], memory_order_relaxed);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int i = thread_index; i < end; i += threads) {
    const int count = atomic_load_explicit(&found[i], memory_order_relaxed);
    if (count > 0) {
      atomic_fetch_add_explicit(&counts[first + i], count, memory_order_relaxed);
    }
  }
}
