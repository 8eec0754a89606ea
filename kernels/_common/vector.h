// Some neighbouring elements of a row between memory and float registers, in 16-byte accesses where the address allows.

#ifndef FORGE_VECTOR_H
#define FORGE_VECTOR_H

#include <metal_stdlib>

namespace forge {

// Elements of T in 16 bytes.
template <typename T>
METAL_FUNC constexpr int vector_size() {
  return 16 / sizeof(T);
}

// How N elements of T are accessed at once: in chunks of 16 bytes, or of 8 where there are no more.
template <typename T, int N>
struct Chunks {
  static_assert(N * sizeof(T) % 8 == 0, "8 bytes are the least that is read at once");
  enum {
    bytes = N * sizeof(T) % 16 == 0 ? 16 : 8,
    words = bytes / 4,
    elements = bytes / sizeof(T),
    count = N / elements
  };
  typedef metal::vec<uint, words> type;
};

// A row-contiguous MLX array starts at any element (x[1:] shares its buffer), so only the address itself tells.
template <typename P>
METAL_FUNC bool is_aligned(P address, uint bytes) {
  return (reinterpret_cast<ulong>(address) & (bytes - 1)) == 0;
}

// values[i] = source[i] for i < limit, and 0 from there on, where nothing is read.
template <typename P, int N>
METAL_FUNC void load_scalars(P source, int limit, thread float (&values)[N]) {
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    values[i] = i < limit ? static_cast<float>(source[i]) : 0.0f;
  }
}

// The same in chunks. An array of fewer than 8 elements comes as `constant`, and is read one by one.
template <typename T, int N>
METAL_FUNC void load_floats(const constant T* source, int limit, thread float (&values)[N]) {
  load_scalars(source, limit, values);
}

template <typename T, int N>
METAL_FUNC void load_floats(const device T* source, int limit, thread float (&values)[N]) {
  typedef Chunks<T, N> Chunk;
  if (limit < N || !is_aligned(source, Chunk::bytes)) {
    load_scalars(source, limit, values);
    return;
  }
  const device typename Chunk::type* chunks = reinterpret_cast<const device typename Chunk::type*>(source);
#pragma clang loop unroll(full)
  for (int c = 0; c < Chunk::count; c++) {
    const typename Chunk::type chunk = chunks[c];
#pragma clang loop unroll(full)
    for (int i = 0; i < Chunk::elements; i++) {
      if constexpr (sizeof(T) == 4) {
        values[c * Chunk::elements + i] = as_type<float>(chunk[i]);
      } else {
        values[c * Chunk::elements + i] = static_cast<float>(as_type<T>(ushort(chunk[i / 2] >> (i % 2 * 16))));
      }
    }
  }
}

// values as load_floats gives them, for threads of which several want the same elements: those that are owners read
// them and leave them at scratch[at], from where all take theirs. There is one barrier inside.
template <typename P, int N>
METAL_FUNC void load_shared(
    P source, int limit, bool is_owner, threadgroup float* scratch, int at, thread float (&values)[N]) {
  if (is_owner) {
    load_floats(source, limit, values);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      scratch[at + i] = values[i];
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    values[i] = scratch[at + i];
  }
}

// target[i] = values[i], rounded to T, for i < limit.
template <typename T, int N>
METAL_FUNC void store_floats(device T* target, int limit, const thread float (&values)[N]) {
  typedef Chunks<T, N> Chunk;
  if (limit < N || !is_aligned(target, Chunk::bytes)) {
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      if (i < limit) {
        target[i] = static_cast<T>(values[i]);
      }
    }
    return;
  }
  device typename Chunk::type* chunks = reinterpret_cast<device typename Chunk::type*>(target);
#pragma clang loop unroll(full)
  for (int c = 0; c < Chunk::count; c++) {
    typename Chunk::type chunk = 0;
#pragma clang loop unroll(full)
    for (int i = 0; i < Chunk::elements; i++) {
      if constexpr (sizeof(T) == 4) {
        chunk[i] = as_type<uint>(values[c * Chunk::elements + i]);
      } else {
        chunk[i / 2] |= uint(as_type<ushort>(static_cast<T>(values[c * Chunk::elements + i]))) << (i % 2 * 16);
      }
    }
    chunks[c] = chunk;
  }
}

}  // namespace forge

#endif
