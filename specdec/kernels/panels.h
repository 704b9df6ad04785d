// The tiles of sums that kinds of attention compute at once.

#pragma once

#include "vectors.h"

namespace {

// As many sums as the registers hold: SIDE queries times VECTORS vectors.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int SIDE = 6;
#else
constexpr int SIDE = 3;
#endif
constexpr int VECTORS = 4;
constexpr int64_t PANEL = VECTORS * LANES;  // columns at a time

}  // namespace
