// A row of a head shared out over the lanes of a simdgroup: lane l has the columns l, l + 32, l + 64 and so on.

#ifndef FORGE_ATTENTION_LANE_ROW_H
#define FORGE_ATTENTION_LANE_ROW_H

#include <metal_simdgroup>
#include <metal_stdlib>

namespace forge {

// What one lane has of a row of SIZE columns, in float32. Where a lane has no column its value is 0.
template <int SIZE>
struct LaneRow {
  enum { count = (SIZE + 31) / 32 };

  float values[count];

  METAL_FUNC static bool is_column(short i, ushort lane) {
    // All but the last 32 are known without the lane.
    return 32 * (i + 1) <= SIZE || lane + 32 * i < SIZE;
  }

  METAL_FUNC void fill(float value) thread {
#pragma clang loop unroll(full)
    for (short i = 0; i < count; i++) {
      values[i] = value;
    }
  }

  // Elements of a row lie `across` apart.
  template <typename T>
  METAL_FUNC void load(const device T* row, long across, ushort lane) thread {
    if (across == 1) {
#pragma clang loop unroll(full)
      for (short i = 0; i < count; i++) {
        values[i] = is_column(i, lane) ? static_cast<float>(row[lane + 32 * i]) : 0.0f;
      }
      return;
    }
#pragma clang loop unroll(full)
    for (short i = 0; i < count; i++) {
      values[i] = is_column(i, lane) ? static_cast<float>(row[(lane + 32 * i) * across]) : 0.0f;
    }
  }

  METAL_FUNC void multiply(float factor) thread {
#pragma clang loop unroll(full)
    for (short i = 0; i < count; i++) {
      values[i] *= factor;
    }
  }

  METAL_FUNC void add(float factor, const thread LaneRow& other) thread {
#pragma clang loop unroll(full)
    for (short i = 0; i < count; i++) {
      values[i] += factor * other.values[i];
    }
  }

  // The sum of the products of two whole rows, in every lane. The whole simdgroup takes part.
  METAL_FUNC float dot(const thread LaneRow& other) const thread {
    float sum = 0.0f;
#pragma clang loop unroll(full)
    for (short i = 0; i < count; i++) {
      sum += values[i] * other.values[i];
    }
    return metal::simd_sum(sum);
  }

  // To neighbouring elements, rounded to T.
  template <typename T>
  METAL_FUNC void store(device T* row, ushort lane) const thread {
#pragma clang loop unroll(full)
    for (short i = 0; i < count; i++) {
      if (is_column(i, lane)) {
        row[lane + 32 * i] = static_cast<T>(values[i]);
      }
    }
  }
};

}  // namespace forge

#endif
