// What packed layers of floats and of integers share: blocks of 32 outputs, and how sums become outputs: a sum times
// the output's factor, plus its bias, in float32, and then rounded. Nothing is written behind the last output.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "operators.h"
#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 32;   // outputs
constexpr int64_t GROUP = 32;   // columns of one scale, as in quantized.py
constexpr int64_t CHUNK = 128;  // bytes
constexpr int VECTORS = BLOCK / LANES;

typedef int8_t Bytes __attribute__((vector_size(LANES)));

inline Floats floats(const int8_t* bytes) {  // GCC would convert them one by one
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(bytes)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)bytes)));
#else
  return __builtin_convertvector(load<Bytes>(bytes), Floats);
#endif
}

inline Floats floats(const at::Half* halves) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load<__m256i>(halves));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(load<__m128i>(halves));
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16(load<float16x4_t>(halves));
#else
  Floats wide;
  for (int lane = 0; lane < LANES; lane++) wide[lane] = halves[lane];
  return wide;
#endif
}

// Whether mins without steps are multiples of the scales.
inline bool are_multiples(const Maybe& mins) { return mins && mins->scalar_type() == at::kChar; }

// A vector of mins: float16, or int8 multiples of the scales.
inline Floats min_of(const void* mins, bool are_multiples, int64_t at, Floats scale) {
  if (are_multiples) return floats(static_cast<const int8_t*>(mins) + at) * scale;
  return floats(static_cast<const at::Half*>(mins) + at);
}

inline float largest_of(Floats numbers) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)numbers);
#else
  auto most = numbers[0];
  for (int lane = 1; lane < LANES; lane++) most = numbers[lane] > most ? numbers[lane] : most;
  return most;
#endif
}

// Puts a group of an output in 8 bits, and the low four bits of a group; `chunks`: the output's place in the group's
// first chunk.
inline void put_8(const void* bytes, uint8_t* chunks) {
  for (int four = 0; four < GROUP; four += 4)
    store(chunks + four / 4 * CHUNK, load<uint32_t>(static_cast<const char*>(bytes) + four));
}

inline void put_4(const uint8_t* values, uint8_t* chunks) {
  constexpr int LOW[]{0, 4, 1, 5}, HIGH[]{2, 6, 3, 7};
  for (int eight = 0; eight < GROUP; eight += 8)
    for (int byte = 0; byte < 4; byte++)
      chunks[eight / 8 * CHUNK + byte] = (values[eight + LOW[byte]] & 15) | values[eight + HIGH[byte]] << 4;
}

// Sums to outputs: one block's columns of `y` `[rows, outputs]`.
template <class Packed, class Out>
void finish(const Packed& packed, int64_t block, const float* sums, int64_t rows, Out* y) {
  auto first = block * BLOCK, count = std::min(BLOCK, packed.outputs - first);
  auto factors = packed.factors ? packed.factors + first : nullptr, bias = packed.bias ? packed.bias + first : nullptr;
  for (int64_t row = 0; row < rows; row++, sums += BLOCK, y += packed.outputs) {
    int64_t n = 0;
    for (; n + LANES <= count; n += LANES) {
      auto sum = factors ? floats(sums + n) * floats(factors + n) : floats(sums + n);
      put(y + first + n, bias ? sum + floats(bias + n) : sum);
    }
    for (; n < count; n++) {
      auto sum = factors ? sums[n] * factors[n] : sums[n];
      y[first + n] = static_cast<Out>(bias ? sum + bias[n] : sum);
    }
  }
}

template <class T>
const T* pointer(const Maybe& tensor) {
  return tensor ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

inline void check(const char* name, const Maybe& tensor, at::ScalarType type, at::IntArrayRef sizes) {
  if (tensor)
    TORCH_CHECK_VALUE(tensor->scalar_type() == type && tensor->sizes() == sizes && tensor->is_contiguous(), "`", name,
                      "` must be contiguous ", type, " ", sizes, ", got ", tensor->scalar_type(), " ", tensor->sizes());
}

}  // namespace
