// The Metal standard library, as far as the emulator has it. Compiled once into a precompiled header.
#pragma once

#include "../runtime/abi.h"

#include "language.h"

#include "types.h"
#include "traits.h"
#include "vectors.h"
#include "bool_vectors.h"
#include "packed.h"
#include "constructors.h"
#include "limits.h"
#include "math.h"
#include "integer.h"
#include "relational.h"
#include "geometric.h"
#include "bfloat_math.h"
#include "array.h"

#include "simdgroup.h"
#include "quadgroup.h"
#include "matrix.h"
#include "atomic.h"
#include "sync.h"

#ifdef EMU_MLX_PREAMBLE
#include "mlx_preamble.h"
#endif
