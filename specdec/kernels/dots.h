// Products of small integers: weights as bytes without a sign, rows as bytes with one, summed in 32 bits: exactly.
// dots.cpp has the layouts of weights, `Integers` the layout of rows.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "packed.h"

namespace {

// Adds to each lane the products of its four bytes of `weights` (0 to 255) and of `row` (-127 to 127).
inline Ints dot(Ints sums, Words weights, Ints row) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)row);
#elif defined(__AVXVNNI__) && defined(__AVX2__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)row);
#elif defined(__AVX512BW__)
  auto low = _mm512_set1_epi16(255);  // pairs of sums stay below 16 bits apart only
  auto even = _mm512_madd_epi16(_mm512_and_si512((__m512i)weights, low),
                                _mm512_srai_epi16(_mm512_slli_epi16((__m512i)row, 8), 8));
  auto odd = _mm512_madd_epi16(_mm512_srli_epi16((__m512i)weights, 8), _mm512_srai_epi16((__m512i)row, 8));
  return sums + (Ints)even + (Ints)odd;
#elif defined(__AVX2__)
  auto low = _mm256_set1_epi16(255);
  auto even = _mm256_madd_epi16(_mm256_and_si256((__m256i)weights, low),
                                _mm256_srai_epi16(_mm256_slli_epi16((__m256i)row, 8), 8));
  auto odd = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)weights, 8), _mm256_srai_epi16((__m256i)row, 8));
  return sums + (Ints)even + (Ints)odd;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (Ints)vusdotq_s32((int32x4_t)sums, (uint8x16_t)weights, (int8x16_t)row);
#else
  UNROLL for (int byte = 0; byte < 4; byte++)
    sums += (Ints)(weights >> 8 * byte & 255u) * ((Ints)((Words)row << (24 - 8 * byte)) >> 24);
  return sums;
#endif
}

// Rows in 8 bits: each group of 32 columns has its scale, which makes its largest entry 127. Rows lie in turns.
struct Integers {
  int64_t turn;            // rows that share a turn
  const int8_t* q;         // [turns, columns / 4, rows, 4]
  const float* scales;     // [turns, groups, rows]
  const int32_t* offsets;  // [turns, parts, rows]: minus the sum of a part times the weights' zero
  const float* sums;       // [turns, parts, rows]: the sum of a part, scaled
};

typedef int8_t Group __attribute__((vector_size(32)));  // as many bytes as a group has columns

inline Ints nearest(Floats numbers) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)numbers);
#else
  constexpr float ROUND = 3 << 22;  // numbers beside it are integers
  return __builtin_convertvector(numbers + ROUND - ROUND, Ints);
#endif
}

inline int32_t sum_of(Ints numbers) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)numbers);
#else
  int32_t sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += numbers[lane];
  return sum;
#endif
}

inline void store_bytes(int8_t* to, Ints numbers) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)numbers));
#else
  for (int lane = 0; lane < LANES; lane++) to[lane] = static_cast<int8_t>(numbers[lane]);
#endif
}

// Rounds the 32 entries of a group; `sums` are of each 32 / PARTS of them. Returns the scale.
template <int PARTS, class In>
inline float rounded(const In* x, int8_t* q, int32_t (&sums)[PARTS]) {
  constexpr int COUNT = 32 / LANES;
  Floats entries[COUNT], most{};
  UNROLL for (int i = 0; i < COUNT; i++) {
    entries[i] = floats(x + i * LANES);
    auto size = (Floats)((Words)entries[i] & 0x7fffffffu);
    most = size > most ? size : most;
  }
  auto largest = largest_of(most);
  auto inverse = largest > 0 ? 127 / largest : 0.0f;
  UNROLL for (int part = 0; part < PARTS; part++) {
    Ints total{};
    UNROLL for (int i = part * COUNT / PARTS; i < (part + 1) * COUNT / PARTS; i++) {
      auto integers = nearest(entries[i] * inverse);
      store_bytes(q + i * LANES, integers);
      total += integers;
    }
    sums[part] = sum_of(total);
  }
  return largest / 127;
}

// Each eight columns in the order in which chunks of four bits hold them: 0 4 1 5 2 6 3 7.
inline Group paired(Group q) {
#define EIGHT(n) n, n + 4, n + 1, n + 5, n + 2, n + 6, n + 3, n + 7
#if defined(__clang__)
  return __builtin_shufflevector(q, q, EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24));
#else
  return __builtin_shuffle(q, Group{EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)});
#endif
#undef EIGHT
}

}  // namespace
