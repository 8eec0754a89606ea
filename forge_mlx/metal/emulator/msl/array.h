// <metal_array>: array<T, N>, an array that is copied and returned.
#pragma once

namespace metal {

template <typename T, size_t N>
struct array {
  T elements[N];

  EMU_FUNC constexpr size_t size() const { return N; }
  EMU_FUNC constexpr size_t size() const constant { return N; }
  EMU_FUNC constexpr const thread T& operator[](size_t i) const thread { return elements[i]; }
  EMU_FUNC constexpr thread T& operator[](size_t i) thread { return elements[i]; }
  EMU_FUNC constexpr const device T& operator[](size_t i) const device { return elements[i]; }
  EMU_FUNC constexpr device T& operator[](size_t i) device { return elements[i]; }
  EMU_FUNC constexpr const threadgroup T& operator[](size_t i) const threadgroup { return elements[i]; }
  EMU_FUNC constexpr threadgroup T& operator[](size_t i) threadgroup { return elements[i]; }
  EMU_FUNC constexpr const constant T& operator[](size_t i) const constant { return elements[i]; }
};

} // namespace metal
