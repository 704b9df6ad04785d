// Blocks of GGUF files, repacked as dots.cpp reads them: every number stays as it is. ggml-common.h and ggml-quants.c
// of llama.cpp have their layouts.
//
//   raw, rows   uint8 [rows, bytes of a row]; optional int64 [outputs]: the row of each output, by default in order
//   the rest    overwritten, in the layouts of dots.cpp; None for what the kind lacks
//
// Callers set what lies behind the last output. A thread packs whole blocks of 32 outputs.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <unordered_map>

#include "packed.h"

namespace {

// 32 columns of an output. Of two halves with one scale each, `scales` and `mins` have two entries.
struct Columns {
  uint8_t values[GROUP];
  int16_t scales[2], mins[2];  // small integers, or the bits of a half or bfloat16
};

using Byte = uint8_t;
using Decode = void (*)(const Byte* block, int group, Columns& to);

// How a kind of blocks lies in the file, and how it is packed.
struct Kind {
  int64_t columns, bytes;  // in a block
  Decode decode;
  int bits, part;
  bool mins, steps;
  int step = -1, min_step = -1;  // where a block has the halves that integer scales and mins are multiplied by
};

inline int16_t half_at(const Byte* from) { return load<int16_t>(from); }

inline void nibbles(const Byte* from, Byte* to) {
  for (int i = 0; i < 16; i++) to[i] = from[i] & 15, to[i + 16] = from[i] >> 4;
}

inline void fifth_bits(uint32_t bits, Byte* to) {
  for (int i = 0; i < 32; i++) to[i] |= (bits >> i & 1) << 4;
}

template <bool MINS, bool FIVE>
void legacy(const Byte* block, int, Columns& to) {
  to.scales[0] = half_at(block);
  if (MINS) to.mins[0] = half_at(block + 2);
  auto at = block + (MINS ? 4 : 2);
  nibbles(at + (FIVE ? 4 : 0), to.values);
  if (FIVE) fifth_bits(load<uint32_t>(at), to.values);
}

void eight_bits(const Byte* block, int, Columns& to) {
  to.scales[0] = half_at(block);
  std::copy(block + 2, block + 34, to.values);
}

void mxfp4(const Byte* block, int, Columns& to) {
  // 2 to the power of exponent - 128, as a bfloat16
  to.scales[0] = block[0] > 1 ? (block[0] - 1) << 7 : 0x40 >> (1 - block[0]);
  nibbles(block + 1, to.values);
}

// Scale and min of a group: six bits of each, packed in twelve bytes.
inline void six_bits(const Byte* scales, int group, Columns& to) {
  auto low = scales[group % 4], high = scales[group % 4 + 4], rest = scales[group % 4 + 8];
  to.scales[0] = group < 4 ? low & 63 : (rest & 15) | low >> 6 << 4;
  to.mins[0] = group < 4 ? high & 63 : rest >> 4 | high >> 6 << 4;
}

inline void half_bytes(const Byte* from, int high, Byte* to) {
  for (int i = 0; i < 32; i++) to[i] = high ? from[i] >> 4 : from[i] & 15;
}

inline void two_bits(const Byte* from, int shift, Byte* to) {
  for (int i = 0; i < 32; i++) to[i] = from[i] >> shift & 3;
}

void q2_k(const Byte* block, int group, Columns& to) {
  two_bits(block + 16 + group / 4 * 32, group % 4 * 2, to.values);
  for (int half = 0; half < 2; half++) {
    auto both = block[2 * group + half];
    to.scales[half] = both & 15, to.mins[half] = both >> 4;
  }
}

void q3_k(const Byte* block, int group, Columns& to) {
  two_bits(block + 32 + group / 4 * 32, group % 4 * 2, to.values);
  for (int i = 0; i < 32; i++) to.values[i] += (block[i] >> group & 1 ? 4 : 0) + 4;  // their zero is 4, and ours 8
  auto scales = block + 96;
  for (int half = 0; half < 2; half++) {
    auto n = 2 * group + half;
    auto low = n < 8 ? scales[n] & 15 : scales[n - 8] >> 4;
    to.scales[half] = static_cast<int16_t>((low | (scales[8 + n % 4] >> n / 4 * 2 & 3) << 4) - 32);
  }
}

void q4_k(const Byte* block, int group, Columns& to) {
  six_bits(block + 4, group, to);
  half_bytes(block + 16 + group / 2 * 32, group % 2, to.values);
}

void q5_k(const Byte* block, int group, Columns& to) {
  six_bits(block + 4, group, to);
  half_bytes(block + 48 + group / 2 * 32, group % 2, to.values);
  for (int i = 0; i < 32; i++) to.values[i] |= (block[16 + i] >> group & 1) << 4;
}

void q6_k(const Byte* block, int group, Columns& to) {
  half_bytes(block + group / 4 * 64 + group % 2 * 32, group % 4 / 2, to.values);
  auto high = block + 128 + group / 4 * 32;
  for (int i = 0; i < 32; i++) to.values[i] |= (high[i] >> group % 4 * 2 & 3) << 4;
  for (int half = 0; half < 2; half++) to.scales[half] = static_cast<int8_t>(block[192 + 2 * group + half]);
}

void iq4_xs(const Byte* block, int group, Columns& to) {
  auto low = block[4 + group / 2] >> group % 2 * 4 & 15, high = load<uint16_t>(block + 2) >> 2 * group & 3;
  to.scales[0] = static_cast<int16_t>((low | high << 4) - 32);
  nibbles(block + 8 + group * 16, to.values);
}

const std::unordered_map<std::string, Kind> KINDS = {
    {"Q4_0", {32, 18, legacy<false, false>, 4, 32, false, false}},
    {"Q4_1", {32, 20, legacy<true, false>, 4, 32, true, false}},
    {"Q5_0", {32, 22, legacy<false, true>, 5, 32, false, false}},
    {"Q5_1", {32, 24, legacy<true, true>, 5, 32, true, false}},
    {"Q8_0", {32, 34, eight_bits, 8, 32, false, false}},
    {"IQ4_NL", {32, 18, legacy<false, false>, 4, 32, false, false}},
    {"MXFP4", {32, 17, mxfp4, 4, 32, false, false}},
    {"Q2_K", {256, 84, q2_k, 4, 16, true, true, 80, 82}},
    {"Q3_K", {256, 110, q3_k, 4, 16, false, true, 108}},
    {"Q4_K", {256, 144, q4_k, 4, 32, true, true, 0, 2}},
    {"Q5_K", {256, 176, q5_k, 5, 32, true, true, 0, 2}},
    {"Q6_K", {256, 210, q6_k, 6, 16, false, true, 208}},
    {"IQ4_XS", {256, 136, iq4_xs, 4, 32, false, true, 0}},
};

// Where an output's columns go.
struct Packed {
  Byte* chunks;
  uint32_t* high;
  void *scales, *mins;
  int16_t* steps;
  int64_t groups;  // each has 32 columns
};

// The upper bits of 32 columns, in the order of dots.cpp: one number of five bits, two of six.
inline void put_high(const Kind& kind, const Byte* values, uint32_t* to) {
  constexpr std::array ORDER{0, 4, 1, 5, 2, 6, 3, 7};
  auto extra = kind.bits - 4, fours = kind.part / 4;
  for (int part = 0; part < GROUP / kind.part; part++) {
    uint32_t bits = 0;
    for (int four = 0; four < fours; four++)
      for (int byte = 0; byte < 4; byte++) {
        auto column = part * kind.part + four / 2 * 8 + ORDER[four % 2 * 4 + byte];
        bits |= uint32_t(values[column] >> 4) << (byte * 8 + four * extra);
      }
    to[part * BLOCK] = bits;
  }
}

// Output `lane` of a block, group by group.
void put(const Kind& kind, const Byte* row, int64_t block, int64_t lane, const Packed& to) {
  auto per_block = kind.columns / GROUP, parts = GROUP / kind.part;
  for (int64_t group = 0; group < to.groups; group++) {
    auto from = row + group / per_block * kind.bytes;
    Columns columns;
    kind.decode(from, static_cast<int>(group % per_block), columns);
    auto v = columns.values;
    auto first = block * to.groups + group;
    if (kind.bits == 8) {
      put_8(v, to.chunks + first * (GROUP / 4) * CHUNK + lane * 4);
    } else {
      put_4(v, to.chunks + first * (GROUP / 8) * CHUNK + lane * 4);
      if (to.high) put_high(kind, v, to.high + first * parts * BLOCK + lane);
    }
    for (int part = 0; part < parts; part++) {
      auto at = (first * parts + part) * BLOCK + lane;
      if (kind.steps) {
        static_cast<int8_t*>(to.scales)[at] = static_cast<int8_t>(columns.scales[part]);
        if (kind.mins) static_cast<int8_t*>(to.mins)[at] = static_cast<int8_t>(columns.mins[part]);
      } else {
        static_cast<int16_t*>(to.scales)[at] = columns.scales[part];
        if (kind.mins) static_cast<int16_t*>(to.mins)[at] = columns.mins[part];
      }
    }
    if (kind.steps && group % per_block == 0) {
      auto steps = to.steps + first / per_block * 2 * BLOCK + lane;
      steps[0] = half_at(from + kind.step);
      steps[BLOCK] = kind.min_step < 0 ? 0 : half_at(from + kind.min_step) ^ -0x8000;  // mins are subtracted
    }
  }
}

void pack_blocks(const at::Tensor& raw, const Maybe& rows, const std::string& name, const at::Tensor& packed,
                 const Maybe& high, const at::Tensor& scales, const Maybe& mins, const Maybe& steps) {
  auto entry = KINDS.find(name);
  TORCH_CHECK_VALUE(entry != KINDS.end(), "`name` must be a kind of blocks that is known, got ", name);
  auto& kind = entry->second;
  auto per_block = kind.columns / GROUP;
  auto outputs = rows ? rows->numel() : raw.size(0), groups = raw.size(1) / kind.bytes * per_block;
  auto blocks = (outputs + BLOCK - 1) / BLOCK, parts = groups * GROUP / kind.part;
  check("raw", raw, at::kByte, {raw.size(0), groups / per_block * kind.bytes});
  auto width = kind.bits == 8 ? 4 : 8;
  check("packed", packed, kind.bits == 8 ? at::kChar : at::kByte, {blocks, groups * GROUP / width, BLOCK, 4});
  auto of_scales = kind.steps ? at::kChar : name == "MXFP4" ? at::kBFloat16 : at::kHalf;
  check("scales", scales, of_scales, {blocks, parts, BLOCK});
  auto needs = [&](const char* what, const Maybe& tensor, bool is_needed) {
    TORCH_CHECK_VALUE(tensor.has_value() == is_needed, "`", what, "` must ", is_needed ? "" : "not ", "be given for ",
                      name);
  };
  needs("high", high, kind.bits == 5 || kind.bits == 6), needs("mins", mins, kind.mins), needs("steps", steps, kind.steps);
  check("high", high, at::kInt, {blocks, parts, BLOCK});
  check("mins", mins, of_scales, {blocks, parts, BLOCK});
  check("steps", steps, at::kHalf, {blocks, groups / per_block, 2, BLOCK});
  auto order = pointer<int64_t>(rows);
  for (int64_t row = 0; order && row < outputs; row++)
    TORCH_CHECK_VALUE(0 <= order[row] && order[row] < raw.size(0), "`rows` must be below ", raw.size(0), ", got ",
                      order[row]);
  auto to = [](const auto& tensor) { return tensor ? const_cast<void*>(tensor->const_data_ptr()) : nullptr; };
  Packed whole{static_cast<Byte*>(packed.mutable_data_ptr()), static_cast<uint32_t*>(to(high)),
               scales.mutable_data_ptr(), to(mins), static_cast<int16_t*>(to(steps)), groups};
  auto from = raw.const_data_ptr<Byte>();
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (auto row = begin * BLOCK; row < std::min(end * BLOCK, outputs); row++)
      put(kind, from + (order ? order[row] : row) * raw.size(1), row / BLOCK, row % BLOCK, whole);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("pack_blocks", pack_blocks); }
