// What the simdgroup and quadgroup functions share: how lanes exchange values, and the folds over what they handed in.
//
// Where MSL leaves freedom:
// - A reduction is a tree in lane order, ((0+1)+(2+3))+((4+5)+(6+7)) and so on; a lane that does not take part counts
//   as the operation's neutral value. A prefix sum or product goes from the lowest lane upwards.
// - float is computed in float; half in float, rounded once at the end. Integers wrap.
// - Maxima and minima pass over NaN, as metal::fmax and metal::fmin do; of NaN alone they are NaN.
#pragma once

#include "../runtime/abi.h"

// Reads copies on the thread's own stack, which no check needs to see.
#define EMU_HELPER inline __attribute__((noinline, nodebug, disable_sanitizer_instrumentation))

namespace metal {

// The types that lanes exchange: integers and floating-point numbers of up to 32 bits, and vectors of them. Not bool,
// nor bfloat, which Metal lacks here. `wide` is what sums and products are computed in.
template <typename T> struct emu_scalar {
  static constexpr __constant bool valid = false, integer = false;
  typedef int type;
  typedef int wide;
};
#define EMU_SCALAR(T, W, INTEGER) \
  template <> struct emu_scalar<T> { \
    static constexpr __constant bool valid = true, integer = INTEGER; \
    typedef T type; \
    typedef W wide; \
  }
EMU_SCALAR(char, char, true);
EMU_SCALAR(uchar, uchar, true);
EMU_SCALAR(short, short, true);
EMU_SCALAR(ushort, ushort, true);
EMU_SCALAR(int, int, true);
EMU_SCALAR(uint, uint, true);
EMU_SCALAR(half, float, false);
EMU_SCALAR(float, float, false);
#undef EMU_SCALAR

template <typename T> struct emu_lane_type : emu_scalar<T> { static constexpr __constant uint components = 1; };
template <typename T, int N> struct emu_lane_type<T __attribute__((ext_vector_type(N)))> : emu_scalar<T> {
  static constexpr __constant uint components = N;
};

// An error in words, rather than a function that is missing: with MLX's header an argument of any other type would find
// its overload for bfloat, and be rounded to that.
#define EMU_LANES(T) \
  static_assert( \
      emu_lane_type<T>::valid, \
      "simdgroup and quadgroup functions take integers and floating-point numbers of up to 32 bits, and vectors of " \
      "them; not bool, bfloat or 64 bits")

struct emu_sum {
  template <typename W> static constexpr W first() { return W(0); }
  // Adding -0 changes no number: not even -0.
  template <typename W> static constexpr W neutral() { return emu_scalar<W>::integer ? W(0) : W(-0.0f); }
  template <typename W> static constexpr W combine(W a, W b) {
    if constexpr (emu_scalar<W>::integer) return W(ulong(a) + ulong(b));
    else return a + b;
  }
};
struct emu_product {
  template <typename W> static constexpr W first() { return W(1); }
  template <typename W> static constexpr W neutral() { return W(1); }
  template <typename W> static constexpr W combine(W a, W b) {
    if constexpr (emu_scalar<W>::integer) return W(ulong(a) * ulong(b));
    else return a * b;
  }
};
struct emu_xor {
  template <typename W> static constexpr W neutral() { return W(0); }
  template <typename W> static constexpr W combine(W a, W b) { return W(a ^ b); }
};
// The value of a lane that takes part is neutral for the four below.
struct emu_repeats {};
struct emu_max : emu_repeats {
  template <typename W> static constexpr W combine(W a, W b) { return a < b || a != a ? b : a; }
};
struct emu_min : emu_repeats {
  template <typename W> static constexpr W combine(W a, W b) { return b < a || a != a ? b : a; }
};
struct emu_and : emu_repeats {
  template <typename W> static constexpr W combine(W a, W b) { return W(a & b); }
};
struct emu_or : emu_repeats {
  template <typename W> static constexpr W combine(W a, W b) { return W(a | b); }
};
template <typename Op> inline constexpr __constant bool emu_has_neutral = !__is_base_of(emu_repeats, Op);

// One component of every lane: lane i's is values[i * stride].
template <typename Op, uint Lanes, typename S>
EMU_HELPER S emu_fold(const __private S* values, uint stride, uint active) {
  typedef typename emu_scalar<S>::wide W;
  W tree[Lanes];
  W neutral = W(values[__builtin_ctz(active) * stride]);
  if constexpr (emu_has_neutral<Op>) neutral = Op::template neutral<W>();
  for (uint i = 0; i < Lanes; i++) tree[i] = active >> i & 1 ? W(values[i * stride]) : neutral;
  for (uint n = Lanes / 2; n; n /= 2)
    for (uint i = 0; i < n; i++) tree[i] = Op::combine(tree[2 * i], tree[2 * i + 1]);
  return S(tree[0]);
}

template <typename Op, typename S>
EMU_HELPER S emu_scan(const __private S* values, uint stride, uint active, uint lane, bool inclusive) {
  typedef typename emu_scalar<S>::wide W;
  uint before = active & ((1u << lane) - 1);
  if (!before && !inclusive) return S(Op::template first<W>());
  W total = Op::template neutral<W>();
  for (uint i = 0; i < lane; i++)
    if (active >> i & 1) total = Op::combine(total, W(values[i * stride]));
  return S(inclusive ? Op::combine(total, W(values[lane * stride])) : total);
}

template <typename T> EMU_HELPER T emu_pick(const __private T* all, uint lane) { return all[lane & 31]; }

EMU_HELPER uint emu_votes(const __private uchar* all, uint active) {
  uint votes = 0;
  for (uint i = 0; i < 32; i++) votes |= (active >> i & all[i] & 1u) << i;
  return votes;
}

// A group of lanes: how many, the kinds of its exchanges, and the lane in the simdgroup of its first.
struct emu_simdgroup {
  static constexpr __constant uint lanes = 32, reduce = EMU_REDUCE, move = EMU_SHUFFLE;
  static EMU_FUNC uint base() { return 0; }
};
struct emu_quadgroup {
  static constexpr __constant uint lanes = 4, reduce = EMU_QUAD, move = EMU_QUAD;
  static EMU_FUNC uint base() { return emu_lane() & ~3u; }
};
template <typename Group> EMU_FUNC uint emu_index() { return emu_lane() & (Group::lanes - 1); }
// Of a simdgroup's mask of active lanes, those of the caller's group, from bit 0.
template <typename Group> EMU_FUNC uint emu_members(uint active) {
  return active >> Group::base() & (0xffffffffu >> (32 - Group::lanes));
}

// `all` points at what the group's first lane handed in.
template <typename Op, typename Group, typename T> EMU_HELPER T emu_fold_all(const __private T* all, uint active) {
  typedef typename emu_lane_type<T>::type S;
  const __private S* values = (const __private S*)all;
  T result;
  for (uint c = 0; c < emu_lane_type<T>::components; c++)
    ((__private S*)&result)[c] = emu_fold<Op, Group::lanes>(values + c, sizeof(T) / sizeof(S), active);
  return result;
}
template <typename Op, typename T>
EMU_HELPER T emu_scan_all(const __private T* all, uint active, uint lane, bool inclusive) {
  typedef typename emu_lane_type<T>::type S;
  const __private S* values = (const __private S*)all;
  T result;
  for (uint c = 0; c < emu_lane_type<T>::components; c++)
    ((__private S*)&result)[c] = emu_scan<Op>(values + c, sizeof(T) / sizeof(S), active, lane, inclusive);
  return result;
}

template <typename Op, typename Group, typename T> EMU_FUNC T emu_reduce(T data) {
  EMU_LANES(T);
  T all[32];
  uint active = emu_exchange(Group::reduce, &data, sizeof(T), all);
  return emu_fold_all<Op, Group>(all + Group::base(), emu_members<Group>(active));
}

template <typename Op, typename Group, typename T> EMU_FUNC T emu_bitwise(T data) {
  static_assert(emu_lane_type<T>::integer, "_and, _or and _xor take integers of up to 32 bits, and vectors of them");
  if constexpr (emu_lane_type<T>::integer) return emu_reduce<Op, Group>(data);
  else return data;
}

template <typename Op, typename Group, typename T> EMU_FUNC T emu_prefix(T data, bool inclusive) {
  EMU_LANES(T);
  T all[32];
  uint active = emu_exchange(Group::reduce, &data, sizeof(T), all);
  return emu_scan_all<Op>(all + Group::base(), emu_members<Group>(active), emu_index<Group>(), inclusive);
}

// The value of lane `source` of the group; an index past its end is a lane that does not take part.
template <typename Group, typename T> EMU_FUNC T emu_read(T data, uint source) {
  EMU_LANES(T);
  T all[32];
  uint active = emu_exchange(Group::move, &data, sizeof(T), all);
  uint lane = source < Group::lanes ? Group::base() + source : 32u;
  emu_require_lane(active, lane);
  return emu_pick(all, lane);
}

template <typename Group, typename T> EMU_FUNC T emu_read_first(T data) {
  EMU_LANES(T);
  T all[32];
  uint active = emu_exchange(Group::move, &data, sizeof(T), all);
  return emu_pick(all, Group::base() + __builtin_ctz(emu_members<Group>(active)));
}

template <typename T> struct emu_filled { T data, filling; };

// Lane `source`'s data, or its filling: the lanes' vectors of `modulo` are followed (or led) by those of the fillings.
template <typename Group, typename T, typename F>
EMU_FUNC T emu_read_filled(T data, F filling, uint source, bool filled) {
  EMU_LANES(T);
  static_assert(__is_same(T, F), "data and filling_data must be of one type");
  emu_filled<T> mine = {data, filling};
  emu_filled<T> all[32];
  uint active = emu_exchange(Group::move, &mine, sizeof(mine), all);
  uint lane = source < Group::lanes ? Group::base() + source : 32u;
  emu_require_lane(active, lane);
  emu_filled<T> read = emu_pick(all, lane);
  return filled ? read.filling : read.data;
}

template <typename Group, typename T, typename F> EMU_FUNC T emu_fill_up(T data, F filling, uint delta, uint modulo) {
  uint index = emu_index<Group>(), place = index & (modulo - 1);
  uint source = index - place + ((place - delta) & (modulo - 1));
  return emu_read_filled<Group>(data, filling, source, place < delta);
}

template <typename Group, typename T, typename F> EMU_FUNC T emu_fill_down(T data, F filling, uint delta, uint modulo) {
  uint index = emu_index<Group>(), place = index & (modulo - 1);
  uint source = index - place + ((place + delta) & (modulo - 1));
  return emu_read_filled<Group>(data, filling, source, place + delta >= modulo);
}

// Which active lanes of the group hold true; `active` receives which lanes take part.
template <typename Group> EMU_FUNC uint emu_vote(uint kind, bool expr, __private uint* active) {
  uchar mine = expr;
  uchar all[32];
  uint lanes = emu_exchange(kind, &mine, 1, all);
  *active = emu_members<Group>(lanes);
  return emu_members<Group>(emu_votes(all, lanes));
}

// The functions of both kinds of group.
#define EMU_GROUP_FUNCTIONS(prefix, Group) \
  template <typename T> EMU_FUNC T prefix##_sum(T data) { return emu_reduce<emu_sum, Group>(data); } \
  template <typename T> EMU_FUNC T prefix##_product(T data) { return emu_reduce<emu_product, Group>(data); } \
  template <typename T> EMU_FUNC T prefix##_max(T data) { return emu_reduce<emu_max, Group>(data); } \
  template <typename T> EMU_FUNC T prefix##_min(T data) { return emu_reduce<emu_min, Group>(data); } \
  template <typename T> EMU_FUNC T prefix##_and(T data) { return emu_bitwise<emu_and, Group>(data); } \
  template <typename T> EMU_FUNC T prefix##_or(T data) { return emu_bitwise<emu_or, Group>(data); } \
  template <typename T> EMU_FUNC T prefix##_xor(T data) { return emu_bitwise<emu_xor, Group>(data); } \
  template <typename T> EMU_FUNC T prefix##_prefix_inclusive_sum(T data) { \
    return emu_prefix<emu_sum, Group>(data, true); \
  } \
  template <typename T> EMU_FUNC T prefix##_prefix_exclusive_sum(T data) { \
    return emu_prefix<emu_sum, Group>(data, false); \
  } \
  template <typename T> EMU_FUNC T prefix##_prefix_inclusive_product(T data) { \
    return emu_prefix<emu_product, Group>(data, true); \
  } \
  template <typename T> EMU_FUNC T prefix##_prefix_exclusive_product(T data) { \
    return emu_prefix<emu_product, Group>(data, false); \
  } \
  template <typename T> EMU_FUNC T prefix##_broadcast(T data, ushort lane) { \
    return emu_read<Group>(data, lane); \
  } \
  template <typename T> EMU_FUNC T prefix##_broadcast_first(T data) { return emu_read_first<Group>(data); } \
  template <typename T> EMU_FUNC T prefix##_shuffle(T data, ushort lane) { \
    return emu_read<Group>(data, lane); \
  } \
  template <typename T> EMU_FUNC T prefix##_shuffle_xor(T data, ushort mask) { \
    return emu_read<Group>(data, emu_index<Group>() ^ mask); \
  } \
  /* The lower (upper) delta lanes keep their own value: nothing wraps. */ \
  template <typename T> EMU_FUNC T prefix##_shuffle_up(T data, ushort delta) { \
    uint index = emu_index<Group>(); \
    return emu_read<Group>(data, index < delta ? index : index - delta); \
  } \
  template <typename T> EMU_FUNC T prefix##_shuffle_down(T data, ushort delta) { \
    uint index = emu_index<Group>(); \
    return emu_read<Group>(data, index + delta < Group::lanes ? index + delta : index); \
  } \
  template <typename T> EMU_FUNC T prefix##_shuffle_rotate_up(T data, ushort delta) { \
    return emu_read<Group>(data, (emu_index<Group>() - delta) & (Group::lanes - 1)); \
  } \
  template <typename T> EMU_FUNC T prefix##_shuffle_rotate_down(T data, ushort delta) { \
    return emu_read<Group>(data, (emu_index<Group>() + delta) & (Group::lanes - 1)); \
  } \
  template <typename T, typename F> \
  EMU_FUNC T prefix##_shuffle_and_fill_up(T data, F filling_data, ushort delta, ushort modulo) { \
    return emu_fill_up<Group>(data, filling_data, delta, modulo); \
  } \
  template <typename T, typename F> EMU_FUNC T prefix##_shuffle_and_fill_up(T data, F filling_data, ushort delta) { \
    return emu_fill_up<Group>(data, filling_data, delta, Group::lanes); \
  } \
  template <typename T, typename F> \
  EMU_FUNC T prefix##_shuffle_and_fill_down(T data, F filling_data, ushort delta, ushort modulo) { \
    return emu_fill_down<Group>(data, filling_data, delta, modulo); \
  } \
  template <typename T, typename F> EMU_FUNC T prefix##_shuffle_and_fill_down(T data, F filling_data, ushort delta) { \
    return emu_fill_down<Group>(data, filling_data, delta, Group::lanes); \
  } \
  EMU_FUNC prefix##_vote prefix##_ballot(bool expr) { \
    uint active; \
    return prefix##_vote(emu_vote<Group>(Group::reduce, expr, &active)); \
  } \
  EMU_FUNC bool prefix##_all(bool expr) { \
    uint active; \
    return emu_vote<Group>(Group::reduce, expr, &active) == active; \
  } \
  EMU_FUNC bool prefix##_any(bool expr) { \
    uint active; \
    return emu_vote<Group>(Group::reduce, expr, &active) != 0; \
  } \
  /* The two below are asked where part of a group is expected, so they do not warn of it. */ \
  EMU_FUNC prefix##_vote prefix##_active_threads_mask() { \
    uint active; \
    return prefix##_vote(emu_vote<Group>(Group::move, true, &active)); \
  } \
  EMU_FUNC bool prefix##_is_first() { \
    uint active; \
    emu_vote<Group>(Group::move, true, &active); \
    return uint(__builtin_ctz(active)) == emu_index<Group>(); \
  } \
  EMU_FUNC bool prefix##_is_helper_thread() { return false; }

} // namespace metal
