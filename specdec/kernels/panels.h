// The size of the tiles of sums that attention.cpp and frames.cpp compute at once; it changes no result.

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
