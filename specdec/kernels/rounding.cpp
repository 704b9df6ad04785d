// Weights rounded to 8 bits, with a factor for each output, or to 4 bits in groups of 32 inputs, with `scales` and
// `mins`, and packed at once as dots.cpp reads them. They are read as linear.cpp reads floats: a lane of each vector
// belongs to one output. Callers set what lies behind the last output. An output's numbers depend on its weights alone;
// a thread rounds whole blocks of 32 outputs.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "dots.h"

namespace {

constexpr std::array SHRINKS{1.0f, 0.95f, 0.9f, 0.85f, 0.8f};  // shares of a group's range that are tried

inline Floats least(Floats a, Floats b) { return a < b ? a : b; }
inline Floats most(Floats a, Floats b) { return a > b ? a : b; }
inline Floats size_of(Floats numbers) { return (Floats)((Words)numbers & 0x7fffffffu); }

inline void put(at::Half* to, Floats numbers) {
#if defined(__AVX512F__)
  store(to, _mm512_cvtps_ph((__m512)numbers, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int lane = 0; lane < LANES; lane++) to[lane] = numbers[lane];
#endif
}

// A column of as many outputs as a vector has lanes.
inline Floats column(const float* block, int64_t number) { return floats(block + number * BLOCK); }

inline Floats column(const c10::BFloat16* block, int64_t number) {
  auto pairs = load<Words>(block + number / 2 * BLOCK * 2);
  return (Floats)(number % 2 ? pairs & 0xffff0000u : pairs << 16);
}

// 0 for 0.
inline Floats inverse_of(Floats numbers) { return numbers == 0 ? Floats{} : 1 / numbers; }

struct Range {
  Floats scale, min;
};

// The scales and least values of least squared error: of the groups' ranges, or of smaller ones in their middle.
Range best_range(const Floats* group, int64_t count) {
  auto low = group[0], high = group[0];
  for (int64_t k = 1; k < count; k++) low = least(low, group[k]), high = most(high, group[k]);
  auto middle = (high + low) / 2, reach = (high - low) / 2, smallest = all(std::numeric_limits<float>::infinity());
  Range best{{}, middle};
  for (auto shrink : SHRINKS) {
    auto scale = reach * shrink / 7.5f, begin = middle - reach * shrink, inverse = inverse_of(scale);
    Floats squares{};
    for (int64_t k = 0; k < count; k++) {
      auto place = (group[k] - begin) * inverse, whole = __builtin_convertvector(nearest(place), Floats);
      auto error = place - least(most(whole, Floats{}), all(15));
      squares = fused(error, error, squares);
    }
    squares *= scale * scale;
    best.scale = squares < smallest ? scale : best.scale;
    best.min = squares < smallest ? begin : best.min;
    smallest = least(squares, smallest);
  }
  return best;
}

// Where the integers of a block's lanes go: its chunks, scales and mins.
struct Packed {
  uint8_t* chunks;
  at::Half *scales, *mins;
  int64_t inputs, groups;
};

// Columns of a group: `values` beyond `inputs` are unset.
template <class In>
int64_t read(const In* block, int64_t group, int64_t inputs, Floats (&values)[GROUP]) {
  auto count = std::min(GROUP, inputs - group * GROUP);
  for (int64_t k = 0; k < count; k++) values[k] = column(block, group * GROUP + k);
  return count;
}

// Returns the factors.
template <class In>
Floats round_to_8(const In* block, const Packed& to) {
  Floats largest{};
  for (int64_t k = 0; k < to.inputs; k++) largest = most(largest, size_of(column(block, k)));
  auto factor = largest / 127;
  for (int64_t first = 0; first < to.groups * GROUP; first += 4) {
    Words chunk{};
    for (auto k = first; k < std::min(first + 4, to.inputs); k++) {
      auto levels = factor == 0 ? Floats{} : least(most(column(block, k) / factor, all(-127)), all(127));
      chunk |= ((Words)nearest(levels) & 255u) << 8 * (k - first);
    }
    store(to.chunks + first / 4 * CHUNK, chunk);
  }
  return factor;
}

template <class In>
Floats round_to_4(const In* block, const Packed& to, std::vector<Range>& ranges) {
  Floats values[GROUP], wide{};
  for (int64_t group = 0; group < to.groups; group++) {
    auto range = ranges[group] = best_range(values, read(block, group, to.inputs, values));
    wide = most(wide, most(size_of(range.scale), size_of(range.min)));
  }
  Floats factor;
  for (int lane = 0; lane < LANES; lane++) {
    int exponent = 0;
    std::frexp(wide[lane], &exponent);
    factor[lane] = std::ldexp(1.0f, exponent);  // float16 is precise near 1
  }
  constexpr int PLACES[]{0, 16, 4, 20, 8, 24, 12, 28};  // where eight columns lie in a chunk's numbers, as in `put_4`
  for (int64_t group = 0; group < to.groups; group++) {
    auto scales = to.scales + group * BLOCK, mins = to.mins + group * BLOCK;
    put(scales, ranges[group].scale / factor), put(mins, ranges[group].min / factor);
    auto min = floats(mins), inverse = inverse_of(floats(scales));
    auto count = read(block, group, to.inputs, values);
    Words chunks[GROUP / 8]{};
    for (int64_t k = 0; k < count; k++) {
      auto levels = least(most((values[k] / factor - min) * inverse, Floats{}), all(15));
      chunks[k / 8] |= (Words)nearest(levels) << PLACES[k % 8];
    }
    for (int64_t i = 0; i < GROUP / 8; i++) store(to.chunks + (group * (GROUP / 8) + i) * CHUNK, chunks[i]);
  }
  return factor;
}

template <class In>
void round_blocks(const at::Tensor& weight, const Packed& packed, float* factors, int64_t outputs) {
  auto floats = weight.const_data_ptr<In>();
  auto size = weight.size(1) * weight.size(2) * weight.size(3), chunks = packed.groups * (packed.scales ? 4 : 8);
  at::parallel_for(0, weight.size(0), 1, [&](int64_t begin, int64_t end) {
    std::vector<Range> ranges(packed.groups);
    for (auto block = begin; block < end; block++)
      for (int64_t lane = 0; lane < BLOCK; lane += LANES) {
        auto to = packed;
        to.chunks += block * chunks * CHUNK + lane * 4;
        if (to.scales) to.scales += block * to.groups * BLOCK + lane, to.mins += block * to.groups * BLOCK + lane;
        auto from = floats + block * size + lane * weight.size(3);
        auto factor = to.scales ? round_to_4(from, to, ranges) : round_to_8(from, to);
        for (auto i = block * BLOCK + lane; i < std::min(block * BLOCK + lane + LANES, outputs); i++)
          factors[i] = factor[i - block * BLOCK - lane];
      }
  });
}

void round_weight(const at::Tensor& weight, int64_t inputs, const at::Tensor& packed, const at::Tensor& factors,
                  const Maybe& scales, const Maybe& mins) {
  auto wide = weight.scalar_type() == at::kFloat;
  TORCH_CHECK_VALUE(wide || weight.scalar_type() == at::kBFloat16, "`weight` must be float32 or bfloat16, got ",
                    weight.scalar_type());
  TORCH_CHECK_VALUE(scales.has_value() == mins.has_value(), "`mins` must come with `scales`, got one of them");
  TORCH_CHECK_VALUE(inputs > 0 && factors.dim() == 1, "`inputs` must be positive, and `factors` [outputs]");
  auto outputs = factors.size(0), columns = wide ? int64_t{1} : 2;
  auto blocks = (outputs + BLOCK - 1) / BLOCK, groups = (inputs + GROUP - 1) / GROUP;
  check("weight", weight, weight.scalar_type(), {blocks, (inputs + columns - 1) / columns, BLOCK, columns});
  check("packed", packed, scales ? at::kByte : at::kChar, {blocks, groups * (scales ? 4 : 8), BLOCK, 4});
  check("factors", factors, at::kFloat, {outputs});
  check("scales", scales, at::kHalf, {blocks, groups, BLOCK});
  check("mins", mins, at::kHalf, {blocks, groups, BLOCK});
  auto halves = [](const auto& tensor) { return tensor ? static_cast<at::Half*>(tensor->mutable_data_ptr()) : nullptr; };
  Packed to{static_cast<uint8_t*>(packed.mutable_data_ptr()), halves(scales), halves(mins), inputs, groups};
  auto values = factors.mutable_data_ptr<float>();
  wide ? round_blocks<float>(weight, to, values, outputs) : round_blocks<at::BFloat16>(weight, to, values, outputs);
}

}  // namespace

TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("round_weight", round_weight); }
