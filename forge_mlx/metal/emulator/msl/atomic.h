// <metal_atomic>: atomic types and functions as of MSL 3.1.
//
// int and uint have every operation, bool has load, store, exchange and compare-exchange, float these, add and sub in
// device memory only, ulong a minimum and a maximum in device memory that return nothing. atomic_thread_fence needs
// MSL 3.2, and orders on barriers MSL 4.1.
#pragma once

#include "../runtime/abi.h"

// C++ for OpenCL has types of these names in the global namespace.
#define atomic_int emu_atomic_int
#define atomic_uint emu_atomic_uint
#define atomic_float emu_atomic_float
#define atomic_ulong emu_atomic_ulong

namespace metal {

enum memory_order { memory_order_relaxed };

// How the runtime knows a type, and what it moves of it: of a bool a whole word, as wide as every atomic object.
template <typename T> struct emu_atomic_type {
  static constexpr __constant bool in_device = false, in_threadgroup = false, arithmetic = false;
  static constexpr __constant bool valid = false;
  typedef T word;
};
// Of ulong there is a minimum and a maximum alone.
template <> struct emu_atomic_type<ulong> {
  static constexpr __constant bool in_device = false, in_threadgroup = false, arithmetic = false;
  static constexpr __constant bool valid = true;
  typedef ulong word;
};
#define EMU_ATOMIC_TYPE(T, WORD, IN_THREADGROUP, ARITHMETIC, KIND) \
  template <> struct emu_atomic_type<T> { \
    static constexpr __constant bool valid = true, arithmetic = ARITHMETIC; \
    static constexpr __constant bool in_device = true, in_threadgroup = IN_THREADGROUP; \
    static constexpr __constant uint kind = KIND; \
    typedef WORD word; \
  }
EMU_ATOMIC_TYPE(int, int, true, true, EMU_I32);
EMU_ATOMIC_TYPE(uint, uint, true, true, EMU_U32);
EMU_ATOMIC_TYPE(bool, uint, true, false, EMU_BOOL);
EMU_ATOMIC_TYPE(float, float, false, false, EMU_F32);
#undef EMU_ATOMIC_TYPE

// Only the functions below reach the value: an atomic is neither read nor copied as it is.
template <typename T> struct atomic {
  static_assert(emu_atomic_type<T>::valid, "an atomic holds int, uint, bool, float or ulong");
  atomic(const atomic&) = delete;
  void operator=(const atomic&) = delete;

  typename emu_atomic_type<T>::word emu_value;
};

typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;

// Takes a value without letting it choose the type: a literal 1 goes with atomic_uint.
template <typename T> struct emu_plain { typedef T type; };

template <bool condition> struct emu_require {};
template <> struct emu_require<true> { typedef int type; };
#define EMU_ATOMIC(T, where) typename emu_require<emu_atomic_type<T>::where>::type = 0

template <typename W> EMU_FUNC W emu_update(volatile void* address, uint kind, uint operation, W operand) {
  W old;
  emu_atomic((void*)address, kind, operation, &operand, nullptr, &old);
  return old;
}
template <typename T> EMU_FUNC T emu_update_as(volatile void* address, uint operation, T operand) {
  typedef emu_atomic_type<T> type;
  return T(emu_update(address, type::kind, operation, typename type::word(operand)));
}
template <typename T> EMU_FUNC bool emu_exchange_if(volatile void* address, __private T* expected, T desired) {
  typedef emu_atomic_type<T> type;
  typename type::word wanted = *expected, wish = desired, old;
  bool stored = emu_atomic((void*)address, type::kind, EMU_COMPARE_EXCHANGE, &wish, &wanted, &old);
  if (!stored) *expected = T(old);
  return stored;
}

#define EMU_ATOMIC_FETCH(name, space, operation) \
  template <typename T, EMU_ATOMIC(T, arithmetic)> \
  EMU_FUNC T name(volatile space atomic<T>* object, typename emu_plain<T>::type operand, memory_order) { \
    return emu_update_as<T>(object, operation, operand); \
  }

#define EMU_ATOMIC_FUNCTIONS(space, where) \
  template <typename T, EMU_ATOMIC(T, where)> \
  EMU_FUNC T atomic_load_explicit(const volatile space atomic<T>* object, memory_order) { \
    return emu_update_as((volatile space atomic<T>*)object, EMU_LOAD, T()); \
  } \
  template <typename T, EMU_ATOMIC(T, where)> \
  EMU_FUNC void atomic_store_explicit( \
      volatile space atomic<T>* object, typename emu_plain<T>::type desired, memory_order) { \
    emu_update_as<T>(object, EMU_STORE, desired); \
  } \
  template <typename T, EMU_ATOMIC(T, where)> \
  EMU_FUNC T atomic_exchange_explicit( \
      volatile space atomic<T>* object, typename emu_plain<T>::type desired, memory_order) { \
    return emu_update_as<T>(object, EMU_EXCHANGE, desired); \
  } \
  template <typename T, EMU_ATOMIC(T, where)> \
  EMU_FUNC bool atomic_compare_exchange_weak_explicit( \
      volatile space atomic<T>* object, __private T* expected, typename emu_plain<T>::type desired, memory_order, \
      memory_order) { \
    return emu_exchange_if(object, expected, desired); \
  } \
  EMU_ATOMIC_FETCH(atomic_fetch_add_explicit, space, EMU_ADD) \
  EMU_ATOMIC_FETCH(atomic_fetch_sub_explicit, space, EMU_SUB) \
  EMU_ATOMIC_FETCH(atomic_fetch_min_explicit, space, EMU_MIN) \
  EMU_ATOMIC_FETCH(atomic_fetch_max_explicit, space, EMU_MAX) \
  EMU_ATOMIC_FETCH(atomic_fetch_and_explicit, space, EMU_AND) \
  EMU_ATOMIC_FETCH(atomic_fetch_or_explicit, space, EMU_OR) \
  EMU_ATOMIC_FETCH(atomic_fetch_xor_explicit, space, EMU_XOR)
EMU_ATOMIC_FUNCTIONS(__global, in_device)
EMU_ATOMIC_FUNCTIONS(__local, in_threadgroup)
#undef EMU_ATOMIC_FUNCTIONS
#undef EMU_ATOMIC_FETCH

EMU_FUNC float atomic_fetch_add_explicit(volatile __global atomic_float* object, float operand, memory_order) {
  return emu_update(object, EMU_F32, EMU_ADD, operand);
}
EMU_FUNC float atomic_fetch_sub_explicit(volatile __global atomic_float* object, float operand, memory_order) {
  return emu_update(object, EMU_F32, EMU_SUB, operand);
}

EMU_FUNC void atomic_min_explicit(volatile __global atomic_ulong* object, ulong operand, memory_order) {
  emu_update(object, EMU_U64, EMU_MIN, operand);
}
EMU_FUNC void atomic_max_explicit(volatile __global atomic_ulong* object, ulong operand, memory_order) {
  emu_update(object, EMU_U64, EMU_MAX, operand);
}

} // namespace metal
