// Weights rounded to 8 bits, with a factor for each output, or to 4 bits in groups of 32 inputs, and packed at once as
// dots.cpp reads them.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "dots.h"

namespace {

constexpr int COUNT = GROUP / LANES;  // vectors of a group
constexpr std::array SHRINKS{1.0f, 0.95f, 0.9f, 0.85f, 0.8f};  // shares of a group's range that are tried

inline Floats least(Floats a, Floats b) { return a < b ? a : b; }
inline Floats most(Floats a, Floats b) { return a > b ? a : b; }

// The nearest whole numbers; halves become even.
inline Floats whole(Floats numbers) {
#if defined(__AVX512F__)
  return (Floats)_mm512_roundscale_ps((__m512)numbers, 0);
#else
  constexpr float ROUND = 3 << 22;
  return numbers + ROUND - ROUND;
#endif
}

inline float sum_of(Floats numbers) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)numbers);
#else
  auto sum = numbers[0];
  for (int lane = 1; lane < LANES; lane++) sum += numbers[lane];
  return sum;
#endif
}

struct Range {
  float scale, min;
};

// The scale and least value of least squared error: of the group's range, or of a smaller one in its middle.
Range best_range(const Floats (&group)[COUNT]) {
  auto low = group[0], high = group[0];
  for (int i = 1; i < COUNT; i++) low = least(low, group[i]), high = most(high, group[i]);
  auto top = largest_of(high), bottom = -largest_of(-low), middle = (top + bottom) / 2, reach = (top - bottom) / 2;
  Range best{0, middle};
  auto smallest = std::numeric_limits<float>::infinity();
  for (auto shrink : SHRINKS) {
    auto scale = reach * shrink / 7.5f, begin = middle - reach * shrink, inverse = scale == 0 ? 0 : 1 / scale;
    Floats squares{};
    for (int i = 0; i < COUNT; i++) {
      auto level = least(most(whole((group[i] - begin) * inverse), Floats{}), all(15));
      auto error = fused(level, all(scale), begin - group[i]);
      squares = fused(error, error, squares);
    }
    auto sum = sum_of(squares);
    if (sum < smallest) smallest = sum, best = {scale, begin};
  }
  return best;
}

// A group of a row; the last input fills up the last group, which changes no range.
template <class In>
void read(const In* row, int64_t inputs, int64_t group, Floats (&to)[COUNT]) {
  auto first = group * GROUP, rest = inputs - first;
  if (rest >= GROUP) {
    for (int i = 0; i < COUNT; i++) to[i] = floats(row + first + i * LANES);
    return;
  }
  for (int i = 0; i < GROUP; i++) to[i / LANES][i % LANES] = row[first + std::min<int64_t>(i, rest - 1)];
}

struct Packed {
  uint8_t* chunks;
  at::Half *scales, *mins;
  float* factors;
  int64_t inputs, groups;
};

template <class In>
void round_to_8(const In* row, int64_t output, const Packed& to) {
  Floats values[COUNT], sizes{};
  for (int64_t group = 0; group < to.groups; group++) {
    read(row, to.inputs, group, values);
    for (auto value : values) sizes = most(sizes, (Floats)((Words)value & 0x7fffffffu));
  }
  auto factor = to.factors[output] = largest_of(sizes) / 127;
  auto chunks = to.chunks + output / BLOCK * to.groups * (GROUP / 4) * CHUNK + output % BLOCK * 4;
  for (int64_t group = 0; group < to.groups; group++) {
    read(row, to.inputs, group, values);
    int8_t bytes[GROUP];
    for (int i = 0; i < COUNT; i++) {
      auto levels = factor == 0 ? Floats{} : least(most(values[i] / factor, all(-127)), all(127));
      store_bytes(bytes + i * LANES, nearest(levels));
    }
    for (auto k = std::max(to.inputs - group * GROUP, int64_t{0}); k < GROUP; k++) bytes[k] = 0;
    put_8(bytes, chunks + group * (GROUP / 4) * CHUNK);
  }
}

template <class In>
void round_to_4(const In* row, int64_t output, const Packed& to, std::vector<Range>& ranges) {
  auto wide = 0.0f;
  for (int64_t group = 0; group < to.groups; group++) {
    Floats values[COUNT];
    read(row, to.inputs, group, values);
    auto range = ranges[group] = best_range(values);
    wide = std::max({wide, std::abs(range.scale), std::abs(range.min)});
  }
  int exponent = 0;
  std::frexp(wide, &exponent);
  auto factor = to.factors[output] = std::ldexp(1.0f, exponent);  // float16 is precise near 1
  auto block = output / BLOCK, lane = output % BLOCK;
  for (int64_t group = 0; group < to.groups; group++) {
    auto at = (block * to.groups + group) * BLOCK + lane;
    to.scales[at] = ranges[group].scale / factor, to.mins[at] = ranges[group].min / factor;
    float scale = to.scales[at], min = to.mins[at];
    Floats values[COUNT];
    read(row, to.inputs, group, values);
    int8_t bytes[GROUP];
    for (int i = 0; i < COUNT; i++) {
      auto levels = scale == 0 ? Floats{} : least(most((values[i] / factor - min) / scale, Floats{}), all(15));
      store_bytes(bytes + i * LANES, nearest(levels));
    }
    for (auto k = std::max(to.inputs - group * GROUP, int64_t{0}); k < GROUP; k++) bytes[k] = 0;
    put_4(reinterpret_cast<uint8_t*>(bytes), to.chunks + (block * to.groups + group) * (GROUP / 8) * CHUNK + lane * 4);
  }
}

template <class In>
void round_rows(const at::Tensor& weight, const Packed& to) {
  auto rows = weight.const_data_ptr<In>();
  auto outputs = weight.size(0);
  at::parallel_for(0, (outputs + BLOCK - 1) / BLOCK, 1, [&](int64_t begin, int64_t end) {
    std::vector<Range> ranges(to.groups);
    for (auto output = begin * BLOCK; output < std::min(end * BLOCK, outputs); output++)
      if (to.scales)
        round_to_4(rows + output * to.inputs, output, to, ranges);
      else
        round_to_8(rows + output * to.inputs, output, to);
  });
}

void round_weight(const at::Tensor& weight, const at::Tensor& packed, const at::Tensor& factors,
                  const std::optional<at::Tensor>& scales, const std::optional<at::Tensor>& mins) {
  auto wide = weight.scalar_type() == at::kFloat;
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) > 0 && weight.is_contiguous(),
                    "`weight` must be contiguous [outputs, inputs], got ", weight.sizes());
  TORCH_CHECK_VALUE(wide || weight.scalar_type() == at::kBFloat16, "`weight` must be float32 or bfloat16, got ",
                    weight.scalar_type());
  TORCH_CHECK_VALUE(scales.has_value() == mins.has_value(), "`mins` must come with `scales`, got one of them");
  auto outputs = weight.size(0), inputs = weight.size(1);
  auto blocks = (outputs + BLOCK - 1) / BLOCK, groups = (inputs + GROUP - 1) / GROUP;
  check("packed", packed, scales ? at::kByte : at::kChar, {blocks, groups * (scales ? 4 : 8), BLOCK, 4});
  check("factors", factors, at::kFloat, {outputs});
  check("scales", scales, at::kHalf, {blocks, groups, BLOCK});
  check("mins", mins, at::kHalf, {blocks, groups, BLOCK});
  auto halves = [](const auto& tensor) { return tensor ? static_cast<at::Half*>(tensor->mutable_data_ptr()) : nullptr; };
  Packed to{static_cast<uint8_t*>(packed.mutable_data_ptr()), halves(scales), halves(mins),
            factors.mutable_data_ptr<float>(), inputs, groups};
  wide ? round_rows<float>(weight, to) : round_rows<at::BFloat16>(weight, to);
}

}  // namespace

TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("round_weight", round_weight); }
