// erf and erfc of each element, one a thread.

#include <metal_stdlib>

#include "erf.h"

using namespace metal;

[[kernel]] void erf_of_each(
    const device float* x [[buffer(0)]],
    device float* error [[buffer(1)]],
    device float* complement [[buffer(2)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  const uint i = thread_position_in_grid.x;
  error[i] = forge::erf(x[i]);
  complement[i] = forge::erfc(x[i]);
}
