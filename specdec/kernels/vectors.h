// Vectors of GCC and Clang, as wide as the processor's, so that one source serves AVX-512, AVX2 and NEON; intrinsics
// where the compilers have no operator for an instruction. Loads and stores need no alignment. Processors of one kind
// give equal results; others may differ in the last bit, by the order of sums over lanes.

#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));

#define UNROLL _Pragma("GCC unroll 16")

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector>
inline void store(void* to, Vector vector) {
  std::memcpy(to, &vector, sizeof vector);
}

inline Floats all(float number) { return number - Floats{}; }  // nothing is left to subtract, unlike to add: -0 + 0

inline Floats floats(const float* from) { return load<Floats>(from); }

inline Floats floats(const c10::BFloat16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(from)), 16);
#else
  return (Floats)(__builtin_convertvector(load<Shorts>(from), Words) << 16);
#endif
}

inline void put(float* to, Floats numbers) { store(to, numbers); }

// Rounded as torch rounds them.
inline void put(c10::BFloat16* to, Floats numbers) {
  auto bits = (Words)numbers, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  store(to, __builtin_convertvector(numbers == numbers ? rounded : Words{} + 0x7fc0u, Shorts));
}

// a * b + c, rounded once where the processor can: explicit, so that the result does not depend on -ffp-contract.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// e to the power of x <= 0; 0 where it would not be a normal number, NaN for NaN.
inline Floats exponential(Floats x) {
  constexpr float ROUND = 3 << 22;  // numbers beside it are integers, which stand in their last bits
  auto rounded = fused(x, all(1.44269504f), all(ROUND)), power = rounded - ROUND;
  auto rest = fused(power, all(-0.693359375f), x);
  rest = fused(power, all(2.12194440e-4f), rest);
  auto sum = all(1.9875691500e-4f);
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.f, 1.f})
    sum = fused(sum, rest, all(next));
  auto scale = (Floats)(((Words)rounded << 23) + 0x3f800000u);
  return x < all(-87.3f) ? Floats{} : sum * scale;
}

// Entry i of the result is entry INDEX(i) of a and, behind it, b.
template <auto INDEX, int... I>
Words picked(Words a, Words b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, INDEX(I)...);
#else
  return __builtin_shuffle(a, b, Words{INDEX(I)...});
#endif
}

template <auto INDEX>
Words picked(Words a, Words b) {
  return picked<INDEX>(a, b, std::make_integer_sequence<int, LANES>());
}

// Rows become columns. Processors shuffle fastest within 128 bits, and these as a whole: so every four rows become
// columns within them first, and then the four columns of each group find each other.
inline void transpose(Words (&rows)[LANES]) {
  constexpr auto low = [](unsigned i) { return i / 4 * 4 + i % 4 / 2 + i % 2 * LANES; };
  constexpr auto high = [](unsigned i) { return i / 4 * 4 + i % 4 / 2 + i % 2 * LANES + 2; };
  constexpr auto low_pair = [](unsigned i) { return i / 4 * 4 + i % 2 + i % 4 / 2 * LANES; };
  constexpr auto high_pair = [](unsigned i) { return i / 4 * 4 + i % 2 + i % 4 / 2 * LANES + 2; };
  UNROLL for (int g = 0; g < LANES; g += 4) {
    auto a = picked<low>(rows[g], rows[g + 1]), b = picked<high>(rows[g], rows[g + 1]);
    auto c = picked<low>(rows[g + 2], rows[g + 3]), d = picked<high>(rows[g + 2], rows[g + 3]);
    rows[g] = picked<low_pair>(a, c), rows[g + 1] = picked<high_pair>(a, c);
    rows[g + 2] = picked<low_pair>(b, d), rows[g + 3] = picked<high_pair>(b, d);
  }
  constexpr auto even = [](unsigned i) { return i / 4 * 8 + i % 4; };
  constexpr auto odd = [](unsigned i) { return i / 4 * 8 + i % 4 + 4; };
  UNROLL for (int groups = LANES / 4; groups > 1; groups /= 2) {
    Words next[LANES];
    UNROLL for (int i = 0; i < LANES / 2; i++) {
      auto from = i / 4 * 8 + i % 4;
      next[i] = picked<even>(rows[from], rows[from + 4]);
      next[i + LANES / 2] = picked<odd>(rows[from], rows[from + 4]);
    }
    UNROLL for (int i = 0; i < LANES; i++) rows[i] = next[i];
  }
}

}  // namespace
