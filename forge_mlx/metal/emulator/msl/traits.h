// Type traits.
#pragma once

namespace metal {

template <typename T, T value_>
struct integral_constant {
  static constexpr constant T value = value_;
  using value_type = T;
  using type = integral_constant;
  EMU_FUNC constexpr operator T() const { return value_; }
  EMU_FUNC constexpr T operator()() const { return value_; }
};

template <bool value>
using bool_constant = integral_constant<bool, value>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool condition, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool condition, typename T = void>
using enable_if_t = typename enable_if<condition, T>::type;

template <bool condition, typename T, typename U>
struct conditional {
  using type = T;
};
template <typename T, typename U>
struct conditional<false, T, U> {
  using type = U;
};
template <bool condition, typename T, typename U>
using conditional_t = typename conditional<condition, T, U>::type;

// Whether any of them is true. Metal's headers have it under this name, and MLX uses it.
template <typename... T>
struct _disjunction : bool_constant<(false || ... || T::value)> {};

// clang's decltype of a local variable says that it is in thread memory; Metal's does not.
template <typename T>
struct emu_anywhere {
  using type = T;
};
template <typename T>
struct emu_anywhere<thread T> {
  using type = T;
};
template <typename T>
struct emu_anywhere<const thread T> {
  using type = const T;
};
template <typename T>
struct emu_anywhere<volatile thread T> {
  using type = volatile T;
};
template <typename T>
using emu_anywhere_t = typename emu_anywhere<T>::type;

// Qualifiers are removed whatever the address space, which stays.
template <typename T>
struct remove_const {
  using type = T;
};
template <typename T>
struct remove_const<const T> {
  using type = T;
};
template <typename T>
struct remove_volatile {
  using type = T;
};
template <typename T>
struct remove_volatile<volatile T> {
  using type = T;
};
template <typename T>
struct remove_cv {
  using type = typename remove_volatile<typename remove_const<emu_anywhere_t<T>>::type>::type;
};
template <typename T>
struct remove_reference {
  using type = __remove_reference_t(T);
};
template <typename T>
struct remove_pointer {
  using type = __remove_pointer(T);
};
template <typename T>
struct add_const {
  using type = const T;
};
template <typename T>
using remove_const_t = typename remove_const<T>::type;
template <typename T>
using remove_volatile_t = typename remove_volatile<T>::type;
template <typename T>
using remove_cv_t = typename remove_cv<T>::type;
template <typename T>
using remove_reference_t = typename remove_reference<T>::type;
template <typename T>
using remove_pointer_t = typename remove_pointer<T>::type;
template <typename T>
using add_const_t = typename add_const<T>::type;
template <typename T>
struct decay {
  using type = __decay(T);
};
template <typename T>
using decay_t = typename decay<T>::type;

template <typename T>
struct remove_addrspace {
  using type = T;
};
#define EMU_REMOVE_SPACE(SPACE)           \
  template <typename T>                   \
  struct remove_addrspace<SPACE T> {      \
    using type = T;                       \
  };                                      \
  template <typename T>                   \
  struct remove_addrspace<const SPACE T> { \
    using type = const T;                 \
  };
EMU_REMOVE_SPACE(device)
EMU_REMOVE_SPACE(threadgroup)
EMU_REMOVE_SPACE(constant)
EMU_REMOVE_SPACE(thread)
#undef EMU_REMOVE_SPACE
template <typename T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

template <typename T, typename U>
struct is_same : bool_constant<__is_same(emu_anywhere_t<T>, emu_anywhere_t<U>)> {};
template <typename Base, typename Derived>
struct is_base_of : bool_constant<__is_base_of(Base, Derived)> {};
template <typename T, typename... A>
struct is_constructible : bool_constant<__is_constructible(T, A...)> {};

template <typename T, typename U>
constexpr constant bool is_same_v = __is_same(emu_anywhere_t<T>, emu_anywhere_t<U>);
// Metal converts neither float nor half to bfloat by itself; clang does.
template <typename From, typename To>
constexpr constant bool is_convertible_v =
    __is_convertible(From, To) &&
    (!is_same_v<remove_cv_t<To>, bfloat> ||
     !(is_same_v<remove_cv_t<From>, float> || is_same_v<remove_cv_t<From>, half>));
template <typename From, typename To>
struct is_convertible : bool_constant<is_convertible_v<From, To>> {};
template <typename Base, typename Derived>
constexpr constant bool is_base_of_v = __is_base_of(Base, Derived);
template <typename T, typename... A>
constexpr constant bool is_constructible_v = __is_constructible(T, A...);

#define EMU_TRAIT(name, ...)                         \
  template <typename T>                              \
  constexpr constant bool name##_v = __VA_ARGS__;    \
  template <typename T>                              \
  struct name : bool_constant<__VA_ARGS__> {};

EMU_TRAIT(is_integral, __is_integral(T))
EMU_TRAIT(is_floating_point, __is_floating_point(T))
EMU_TRAIT(is_arithmetic, __is_arithmetic(T))
EMU_TRAIT(is_signed, __is_signed(T))
EMU_TRAIT(is_unsigned, __is_unsigned(T))
EMU_TRAIT(is_void, __is_void(T))
EMU_TRAIT(is_pointer, __is_pointer(T))
EMU_TRAIT(is_reference, __is_reference(T))
EMU_TRAIT(is_array, __is_array(T))
EMU_TRAIT(is_class, __is_class(T))
EMU_TRAIT(is_union, __is_union(T))
EMU_TRAIT(is_enum, __is_enum(T))
EMU_TRAIT(is_const, __is_const(T))
EMU_TRAIT(is_volatile, __is_volatile(T))
EMU_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
EMU_TRAIT(is_scalar, __is_arithmetic(T) || __is_enum(T) || __is_pointer(T))

#undef EMU_TRAIT

template <typename T>
struct make_signed {
  using type = __make_signed(emu_anywhere_t<T>);
};
template <typename T>
struct make_unsigned {
  using type = __make_unsigned(emu_anywhere_t<T>);
};
template <typename T>
using make_signed_t = typename make_signed<T>::type;
template <typename T>
using make_unsigned_t = typename make_unsigned<T>::type;

} // namespace metal
