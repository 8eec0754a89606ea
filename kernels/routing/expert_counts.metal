// counts[e] += how many indices are e. counts holds 0 before. A threadgroup counts its part of the indices for 1024
// experts in threadgroup memory and adds what it found: integers, of which every order has the same sum.

#include <metal_atomic>
#include <metal_stdlib>

using namespace metal;

template <typename T>
[[kernel]] void expert_counts(
    const device T* indices [[buffer(0)]],
    const constant int* indices_shape [[buffer(1)]],
    const constant int& experts [[buffer(2)]],
    const constant int& indices_per_group [[buffer(3)]],
    device atomic<int>* counts [[buffer(4)]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  threadgroup atomic_int found[1024];

  const int thread_index = thread_position_in_threadgroup.x;
  const int threads = threads_per_threadgroup.x;
  const int first = threadgroup_position_in_grid.y * 1024;
  const int end = min(1024, experts - first);
  for (int i = thread_index; i < end; i += threads) {
    atomic_store_explicit(&found[i], 0, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const long begin = long(threadgroup_position_in_grid.x) * indices_per_group;
  const long behind = min(begin + indices_per_group, long(indices_shape[0]));
  for (long at = begin + thread_index; at < behind; at += threads) {
    // A uint64 past the largest long is negative here.
    const long expert = static_cast<long>(indices[at]);
    if (expert >= first && expert < first + end) {
      atomic_fetch_add_explicit(&found[int(expert - first)], 1, memory_order_relaxed);
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
