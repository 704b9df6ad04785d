// Attention of frames that all see one another, as in an encoder: two products of matrices, and a softmax between them.
//
//   queries, keys, values   [rows, heads, frames, width], float32 or bfloat16
//   result                  [rows, frames, heads, width]
//
// A frame's result does not depend on other rows nor on threads. Where the processor multiplies pairs of bfloat16, both
// products of bfloat16 tensors take such pairs, so the softmax's results are rounded; all else is float32.
//
// Both products are sums over `inputs` (entries of a key; frames) for panels of 4 * LANES outputs (frames; entries of a
// value). Inputs lie in words of one float or two of bfloat16: [panels, words, 4 * LANES].

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <utility>
#include <vector>

#include "panels.h"

namespace {

constexpr int64_t QUERIES = 8 * SIDE;  // queries whose scores stay in the second cache

int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

struct Singles {
  static constexpr int NUMBERS = 1;  // numbers in a word

  static Floats power(Floats x) { return exponential(x * 0.693147181f); }
  static uint32_t word(float number, float) { return std::bit_cast<uint32_t>(number); }
  template <class In>
  static Words words(const In* from, int64_t) {
    return (Words)floats(from);
  }
  static Floats add(Floats sum, Words a, Words b) { return fused((Floats)a, (Floats)b, sum); }
  static void put(float* to, Floats first, Floats second) { store(to, first), store(to + LANES, second); }
};

#if defined(__AVX512BF16__)
struct Pairs {
  static constexpr int NUMBERS = 2;

  // 2 to the power of x, as exact as bfloat16.
  static Floats power(Floats x) {
    auto rest = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    auto sum = fused(rest, all(7.8024521e-2f), all(2.2606716e-1f));
    sum = fused(rest, sum, all(6.9583354e-1f));
    sum = fused(rest, sum, all(9.9992522e-1f));
    return (Floats)_mm512_scalef_ps((__m512)sum, (__m512)x);
  }
  static uint32_t word(at::BFloat16 first, at::BFloat16 second) { return first.x | uint32_t{second.x} << 16; }
  static Words words(const at::BFloat16* from, int64_t stride) {
    return (Words)floats(from) >> 16 | (Words)floats(from + stride);
  }
  static Floats add(Floats sum, Words a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  static void put(float* to, Floats first, Floats second) {
    store(to, _mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
  }
};
#else
using Pairs = Singles;
#endif

// sums[r * gap] = the sum over words of rows[r * stride] times the words of the panel, for R rows.
template <class Kind, int R>
void multiply(const float* rows, int64_t stride, const uint32_t* panel, int64_t words, float* sums, int64_t gap) {
  Floats sum[R][VECTORS] = {};
  for (int64_t word = 0; word < words; word++, panel += PANEL) {
    Words entries[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) entries[v] = load<Words>(panel + v * LANES);
    UNROLL for (int r = 0; r < R; r++) {
      auto of_row = Words{} + load<uint32_t>(rows + r * stride + word);
      UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = Kind::add(sum[r][v], of_row, entries[v]);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < VECTORS; v++) store(sums + r * gap + v * LANES, sum[r][v]);
}

template <class Kind, int... R>
constexpr auto by_rows(std::integer_sequence<int, R...>) {
  return std::array{&multiply<Kind, R + 1>...};
}

template <class Kind>
void multiply(const float* rows, int64_t count, int64_t stride, const uint32_t* panels, int64_t words, float* sums,
              int64_t width) {
  static constexpr auto multiply_rows = by_rows<Kind>(std::make_integer_sequence<int, SIDE>());
  for (int64_t at = 0; at < width; at += PANEL, panels += words * PANEL)
    for (int64_t row = 0; row < count; row += SIDE)
      multiply_rows[std::min<int64_t>(SIDE, count - row) - 1](rows + row * stride, stride, panels, words,
                                                              sums + row * width + at, width);
}

// A matrix as panels, with zeros around it; `block(word, output)` are words [LANES] of LANES outputs, where all exist.
template <class Kind, class Number, class Block>
void pack(int64_t inputs, int64_t outputs, uint32_t* to, Number number, Block block) {
  auto words = parts(inputs, Kind::NUMBERS);
  auto or_zero = [&](int64_t input, int64_t output) {
    return input < inputs && output < outputs ? number(input, output) : decltype(number(0, 0)){};
  };
  for (int64_t first = 0; first < outputs; first += PANEL, to += words * PANEL)
    for (int64_t word = 0; word < words; word += LANES)
      for (auto output = first; output < first + PANEL; output += LANES) {
        std::array<Words, LANES> square;
        if ((word + LANES) * Kind::NUMBERS <= inputs && output + LANES <= outputs)
          square = block(word, output);
        else
          for (int l = 0; l < LANES; l++)
            for (int o = 0; o < LANES; o++)
              square[l][o] = Kind::word(or_zero((word + l) * Kind::NUMBERS, output + o),
                                      or_zero((word + l) * Kind::NUMBERS + 1, output + o));
        for (int l = 0; l < std::min<int64_t>(LANES, words - word); l++)
          store(to + (word + l) * PANEL + output - first, square[l]);
      }
}

// Turns scores into weights, and puts these into words; returns their sum.
template <class Kind>
float soften(float* scores, int64_t count, float scale) {
  constexpr float NOTHING = -std::numeric_limits<float>::infinity();
  auto end = parts(count, 2 * LANES) * 2 * LANES;
  std::fill(scores + count, scores + end, NOTHING);
  auto most = all(NOTHING);
  for (int64_t i = 0; i < end; i += LANES) {
    auto next = floats(scores + i);
    most = next > most ? next : most;
  }
  for (int l = 1; l < LANES; l++) most[0] = std::max(most[0], most[l]);
  scale *= 1.44269504f;
  auto factor = all(scale), less = all(-most[0] * scale);
  Floats total{};
  for (int64_t i = 0; i < end; i += 2 * LANES) {
    auto first = Kind::power(fused(floats(scores + i), factor, less));
    auto second = Kind::power(fused(floats(scores + i + LANES), factor, less));
    total += first + second;
    Kind::put(scores + i / Kind::NUMBERS, first, second);
  }
  for (int l = 1; l < LANES; l++) total[0] += total[l];
  return total[0];
}

template <class In>
struct Heads {
  const In* data;
  int64_t row, head, frame, width;

  explicit Heads(const at::Tensor& of)
      : data(of.const_data_ptr<In>()), row(of.stride(0)), head(of.stride(1)), frame(of.stride(2)), width(of.size(3)) {}
  const In* of(int64_t number, int64_t heads) const { return data + number / heads * row + number % heads * head; }
};

template <class Kind, class In>
at::Tensor attend_in(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, double scale) {
  auto rows = queries.size(0), heads = queries.size(1), frames = queries.size(2);
  Heads<In> q(queries), k(keys), v(values);
  auto wide = parts(v.width, PANEL) * PANEL, columns = parts(frames, PANEL) * PANEL;
  auto of_keys = parts(k.width, Kind::NUMBERS), of_values = parts(frames, Kind::NUMBERS);
  auto size = of_keys * columns + of_values * wide;
  at::Tensor packed = at::empty({rows * heads * size}, at::kInt), out = at::empty({rows, frames, heads, v.width}, queries.options());
  auto panels = reinterpret_cast<uint32_t*>(packed.mutable_data_ptr<int32_t>());
  auto to = out.mutable_data_ptr<In>();
  at::parallel_for(0, rows * heads, 1, [&](int64_t begin, int64_t end) {
    for (auto one = begin; one < end; one++) {
      auto key = k.of(one, heads), value = v.of(one, heads);
      auto of_key = [&](int64_t i, int64_t f) { return key[f * k.frame + i]; };
      auto of_value = [&](int64_t f, int64_t i) { return value[f * v.frame + i]; };
      pack<Kind>(k.width, frames, panels + one * size, of_key, [&](int64_t word, int64_t f) {
        Words block[LANES];
        for (int l = 0; l < LANES; l++)
          if constexpr (Kind::NUMBERS * sizeof(In) == 4)
            block[l] = load<Words>(key + (f + l) * k.frame + word * Kind::NUMBERS);
          else
            block[l] = (Words)floats(key + (f + l) * k.frame + word);
        transpose(block);
        return std::to_array(block);
      });
      pack<Kind>(frames, v.width, panels + one * size + of_keys * columns, of_value, [&](int64_t word, int64_t i) {
        std::array<Words, LANES> block;
        for (int l = 0; l < LANES; l++)
          block[l] = Kind::words(value + (word + l) * Kind::NUMBERS * v.frame + i, v.frame);
        return block;
      });
    }
  });
  auto tiles = parts(frames, QUERIES);
  at::parallel_for(0, rows * heads * tiles, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> entries(QUERIES * of_keys), scores(QUERIES * columns), sums(QUERIES * wide);
    for (auto tile = begin; tile < end; tile++) {
      auto one = tile / tiles, first = tile % tiles * QUERIES, count = std::min(QUERIES, frames - first);
      auto from = q.of(one, heads) + first * q.frame;
      auto of_head = panels + one * size;
      for (int64_t r = 0; r < count; r++, from += q.frame)
        for (int64_t i = 0; i < q.width; i += Kind::NUMBERS)
          entries[r * of_keys + i / Kind::NUMBERS] =
              std::bit_cast<float>(Kind::word(from[i], i + 1 < q.width ? from[i + 1] : In(0)));
      multiply<Kind>(entries.data(), count, of_keys, of_head, of_keys, scores.data(), columns);
      std::array<float, QUERIES> totals;
      for (int64_t r = 0; r < count; r++) totals[r] = soften<Kind>(scores.data() + r * columns, frames, scale);
      multiply<Kind>(scores.data(), count, columns, of_head + of_keys * columns, of_values, sums.data(), wide);
      for (int64_t r = 0; r < count; r++) {
        auto target = to + ((one / heads * frames + first + r) * heads + one % heads) * v.width;
        int64_t i = 0;
        for (; i + LANES <= v.width; i += LANES) put(target + i, floats(sums.data() + r * wide + i) / totals[r]);
        for (; i < v.width; i++) target[i] = static_cast<In>(sums[r * wide + i] / totals[r]);
      }
    }
  });
  return out;
}

at::Tensor attend_frames(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, double scale) {
  auto type = queries.scalar_type();
  TORCH_CHECK_VALUE(queries.dim() == 4 && (type == at::kFloat || type == at::kBFloat16), "`queries` must be float32 or ",
                    "bfloat16 [rows, heads, frames, width], got ", type, " ", queries.sizes());
  for (auto [name, tensor] : {std::pair{"queries", &queries}, {"keys", &keys}, {"values", &values}}) {
    auto fits = tensor->dim() == 4 && tensor->sizes().slice(0, 3) == queries.sizes().slice(0, 3);
    fits = fits && (tensor == &values || tensor->size(3) == queries.size(3));
    TORCH_CHECK_VALUE(fits && tensor->scalar_type() == type && tensor->stride(3) == 1, "`", name, "` must be ", type,
                      " like `queries` ", queries.sizes(), ", its last dimension dense, got ", tensor->scalar_type(),
                      " ", tensor->sizes(), " with strides ", tensor->strides());
  }
  if (type == at::kFloat) return attend_in<Singles, float>(queries, keys, values, scale);
  return attend_in<Pairs, at::BFloat16>(queries, keys, values, scale);
}

// x times the normal distribution's mass below it; the mass beyond |x| by Hastings' formula (Abramowitz, 7.1.26).
Floats gelu(Floats x) {
  auto t = 1 / fused(x < 0 ? -x : x, all(0.3275911f * 0.707106781f), all(1.0f)), sum = all(1.061405429f);
  for (float next : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) sum = fused(sum, t, all(next));
  auto beyond = 0.5f * x * sum * t * Pairs::power(x * x * (-0.5f * 1.44269504f));
  return x > 0 ? x - beyond : beyond;
}

at::Tensor gelu(const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kBFloat16, "`x` must be bfloat16, got ", x.scalar_type());
  auto dense = x.contiguous();
  at::Tensor y = at::empty_like(dense);
  auto from = dense.const_data_ptr<at::BFloat16>();
  auto to = y.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, parts(x.numel(), LANES), 1 << 10, [&](int64_t begin, int64_t end) {
    auto last = std::min(end * LANES, x.numel()), i = begin * LANES;
    for (; i + LANES <= last; i += LANES) put(to + i, gelu(floats(from + i)));
    if (i == last) return;
    at::BFloat16 edge[LANES] = {};
    std::copy(from + i, from + last, edge);
    put(edge, gelu(floats(edge)));
    std::copy_n(edge, last - i, to + i);
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("attend_frames", attend_frames);
  m.impl("gelu", static_cast<at::Tensor (*)(const at::Tensor&)>(gelu));
}
