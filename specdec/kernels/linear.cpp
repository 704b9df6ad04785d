// A packed linear layer for few rows: y[m, n] = sum over k of x[m, k] * weight[n, k].
//
// A few rows cost what reading the weights from memory costs, so the weights lie in the order in which they are read:
// in blocks of 32 outputs, and in each of them chunk after chunk. A chunk is 128 bytes: 32 outputs times 1 column
// (float32), 2 (bfloat16), 4 (int8) or 8 (4 bits). `packed_layout.py` packs and unpacks them.
//
//   float32    [blocks, columns, 32, 1]
//   bfloat16   [blocks, columns / 2, 32, 2]       two neighbouring columns side by side, as the dot product wants them
//   int8       [blocks, columns / 4, 32, 4]
//   uint8      [blocks, columns / 8, 32, 4]       eight columns in 32 bits, the even ones in the lower half
//   scales, mins   float16 [blocks, groups, 32]   weight = integer * scale + min; 4 bits without mins are -8..7; a group
//                                                 is 32 columns; mins in int8 are multiples of the scales
//
// Every output is summed column by column in float32, in one order: a row's result is the same, bit for bit, whatever
// rows stand beside it, and whatever blocks and threads the work is cut into. A step takes two columns where the
// processor multiplies pairs of bfloat16, and 32 where it has tiles (AMX), which read chunks of bfloat16 as they lie: 16
// chunks are two tiles of 16 pairs times 16 outputs. Tiles, vectors, and torch's product over the unpacked weight round
// in three ways: `Way` says which of them is taken.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "packed.h"
#include "tiles.h"

namespace {

constexpr int64_t TILE = 128 << 10; // bytes of a block that several blocks of rows read again, from the second cache
constexpr int64_t AHEAD = 4 << 10;  // bytes between reads and prefetches; twice as many of one stream, as measured
constexpr int64_t BATCH = 64;       // rows whose sums wait in the first cache

// As many sums as the registers hold: rows times 32 outputs.
constexpr int ROWS = LANES == 16 ? 12 : 3;

inline Floats floats(Ints integers) { return __builtin_convertvector(integers, Floats); }

struct Packed {
  const char* chunks;
  const at::Half* scales;
  const void* mins;
  const float *factors, *bias;
  bool are_multiples;  // the mins are multiples of the scales
  // columns: inputs and padding; group: GROUP where there are scales, or all columns; width: from a row to the next
  int64_t inputs, outputs, columns, group, width;

  template <class Kind>
  int64_t offset(int64_t block, int64_t column) const {
    return (block * columns + column) / Kind::COLUMNS * CHUNK;
  }
  int64_t groups() const { return (columns + group - 1) / group; }
  Floats min(int64_t at, Floats scale) const { return min_of(mins, are_multiples, at, scale); }
};

// What a chunk is made of. `weights` are a vector of outputs, of column `i` of the chunk or, where one step takes pairs
// of columns, of `i` and `i + 1`; `add` multiplies them by the entries of one row.

struct Float32 {
  using Row = float;
  using Weights = Floats;
  static constexpr int COLUMNS = 1, STEP = 1;

  explicit Float32(const Packed&) {}
  Weights weights(const char* chunk, int, int v) const { return load<Floats>(chunk + v * sizeof(Floats)); }
  static Floats add(Floats sum, const Row* x, Weights weights) { return fused(all(*x), weights, sum); }
};

struct Int8 : Float32 {
  static constexpr int COLUMNS = 4;

  using Float32::Float32;
  Weights weights(const char* chunk, int i, int v) const {
    return floats((Ints)(load<Words>(chunk + v * sizeof(Words)) << (24 - 8 * i)) >> 24);
  }
};

// In a lane of 32 bits the even columns come first: 0 2 4 6 1 3 5 7.
struct Int4 : Float32 {
  static constexpr int COLUMNS = 8;
  float zero;

  explicit Int4(const Packed& packed) : Float32(packed), zero(packed.mins ? 0 : 8) {}
  Weights weights(const char* chunk, int i, int v) const {
    auto lanes = load<Words>(chunk + v * sizeof(Words)) >> (i / 2 + i % 2 * 4) * 4;
    return floats((Ints)(lanes & 15)) - zero;
  }
};

struct BFloat16Singles : Float32 {
  static constexpr int COLUMNS = 2;

  using Float32::Float32;
  Weights weights(const char* chunk, int i, int v) const {
    auto pairs = load<Words>(chunk + v * sizeof(Words));
    return (Floats)(i ? pairs & 0xffff0000u : pairs << 16);
  }
};

#if defined(__AVX512BF16__)
// Pairs of columns in bfloat16; small integers are exact in it.
struct Pairs {
  using Row = at::BFloat16;
  using Weights = Words;
  static constexpr int STEP = 2;

  explicit Pairs(const Packed&) {}
  static Floats add(Floats sum, const Row* x, Weights weights) {
    auto pair = _mm512_set1_epi32(load<int32_t>(x));
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)weights);
  }
};

struct BFloat16 : Pairs {
  static constexpr int COLUMNS = 2;

  using Pairs::Pairs;
  Weights weights(const char* chunk, int, int v) const { return load<Words>(chunk + v * sizeof(Words)); }
};

struct Int8Pairs : Pairs {
  static constexpr int COLUMNS = 4;
  Int8 single;

  explicit Int8Pairs(const Packed& packed) : Pairs(packed), single(packed) {}
  Weights weights(const char* chunk, int i, int v) const {
    return (Words)single.weights(chunk, i, v) >> 16 | (Words)single.weights(chunk, i + 1, v);
  }
};

struct Int4Pairs : Pairs {
  static constexpr int COLUMNS = 8;
  __m512i table;  // the bfloat16 of every nibble, twice: an index has five bits

  explicit Int4Pairs(const Packed& packed) : Pairs(packed) {
    at::BFloat16 values[32];
    for (int n = 0; n < 32; n++) values[n] = n % 16 - (packed.mins ? 0 : 8);
    table = load<__m512i>(values);
  }
  Weights weights(const char* chunk, int i, int v) const {
    auto lanes = load<Words>(chunk + v * sizeof(Words)) >> i / 2 * 4;
    return (Words)_mm512_permutexvar_epi16((__m512i)lanes, table);
  }
};
#else
using BFloat16 = BFloat16Singles;
using Int8Pairs = Int8;
using Int4Pairs = Int4;
#endif

template <class Row>
struct Rows {
  const Row* x;           // [rows, width]
  const float* in_group;  // [rows, groups]: the sum of a row over a group's columns, where there are mins

  Rows from(int64_t row, const Packed& packed) const {
    return {x + row * packed.width, in_group ? in_group + row * packed.groups() : nullptr};
  }
};

// Adds columns `[begin, end)` of B blocks, each `gap` blocks after the one before, to the sums `[R, 32]` of R rows; the
// sums of the second block lie BATCH rows behind the first block's. Prefetches `ahead` of each block; `ahead` grows by
// `stride` bytes a chunk. A group is summed up in integers' units, and then scaled.
template <class Kind, int R, int B>
void add_columns(const Packed& packed, int64_t block, int64_t gap, int64_t begin, int64_t end,
                 Rows<typename Kind::Row> rows, float* sums, int64_t ahead, int64_t stride) {
  const Kind kind(packed);
  // Only integers have scales: compilers that do not know this move the sums of 12 rows of floats out of registers.
  const auto scales = Kind::COLUMNS > 2 ? packed.scales : nullptr;
  const auto mins = Kind::COLUMNS > 2 ? packed.mins : nullptr;
  auto chunk = packed.chunks + packed.offset<Kind>(block, begin);
  auto next = packed.offset<Kind>(gap, 0);
  for (int64_t first = begin; first < end; first += packed.group) {
    auto last = std::min(first + packed.group, end);
    Floats sum[B][R][VECTORS];
    UNROLL for (int b = 0; b < B; b++)
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
          sum[b][r][v] = scales ? Floats{} : load<Floats>(sums + (b * BATCH + r) * BLOCK + v * LANES);

    for (int64_t column = first; column < last; column += Kind::COLUMNS, chunk += CHUNK, ahead += stride - CHUNK) {
      UNROLL for (int b = 0; b < B; b++) {
        __builtin_prefetch(chunk + b * next + ahead);
        __builtin_prefetch(chunk + b * next + ahead + CHUNK / 2);
      }
      UNROLL for (int i = 0; i < Kind::COLUMNS; i += Kind::STEP)
        UNROLL for (int b = 0; b < B; b++) {
          typename Kind::Weights weights[VECTORS];
          UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = kind.weights(chunk + b * next, i, v);
          UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < VECTORS; v++)
              sum[b][r][v] = Kind::add(sum[b][r][v], rows.x + r * packed.width + column + i, weights[v]);
        }
    }

    auto group = first / packed.group;
    UNROLL for (int b = 0; b < B; b++) {
      auto at = ((block + b * gap) * packed.groups() + group) * BLOCK;
      Floats scale[VECTORS], min[VECTORS];
      UNROLL for (int v = 0; v < VECTORS; v++) {
        if (scales) scale[v] = floats(scales + at + v * LANES);
        if (mins) min[v] = packed.min(at + v * LANES, scale[v]);
      }
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) {
          auto to = sums + (b * BATCH + r) * BLOCK + v * LANES;
          auto total = sum[b][r][v];
          if (scales) total = fused(total, scale[v], load<Floats>(to));
          if (mins) total = fused(all(rows.in_group[r * packed.groups() + group]), min[v], total);
          store(to, total);
        }
    }
  }
}

template <class Kind, int B, int... R>
constexpr auto by_rows(std::integer_sequence<int, R...>) {
  return std::array{&add_columns<Kind, R + 1, B>...};
}

// The sums `[rows, 32]` of one block. Where rows need several turns, they take them tile by tile, which stays in the
// second cache, and each turn prefetches its share of the next one.
template <class Kind>
void add_block(const Packed& packed, int64_t block, Rows<typename Kind::Row> rows, int64_t count, float* sums) {
  static constexpr auto add = by_rows<Kind, 1>(std::make_integer_sequence<int, ROWS>());
  std::fill_n(sums, count * BLOCK, 0.0f);
  auto turns = (count + ROWS - 1) / ROWS, most = (count + turns - 1) / turns;
  auto unit = packed.scales ? GROUP : int64_t{Kind::COLUMNS};
  auto tile = turns == 1 ? packed.columns : std::max<int64_t>(TILE / CHUNK * Kind::COLUMNS / unit, 1) * unit;
  for (int64_t begin = 0; begin < packed.columns; begin += tile) {
    auto end = std::min(begin + tile, packed.columns);
    auto bytes = packed.offset<Kind>(0, end - begin), ahead = turns == 1 ? 2 * AHEAD : bytes;
    for (int64_t row = 0; row < count; row += most, ahead += bytes / turns)
      add[std::min(most, count - row) - 1](packed, block, 0, begin, end, rows.from(row, packed), sums + row * BLOCK,
                                           ahead, CHUNK / turns);
  }
}

// The sums `[2, BATCH, 32]` of two blocks. Few rows take both at once: each step in one block waits for its last.
template <class Kind>
void add_blocks(const Packed& packed, int64_t block, int64_t gap, Rows<typename Kind::Row> rows, int64_t count,
                float* sums) {
  static constexpr auto add = by_rows<Kind, 2>(std::make_integer_sequence<int, ROWS / 3>());
  if (count <= ROWS / 3) {
    std::fill_n(sums, count * BLOCK, 0.0f);
    std::fill_n(sums + BATCH * BLOCK, count * BLOCK, 0.0f);
    add[count - 1](packed, block, gap, 0, packed.columns, rows, sums, AHEAD, CHUNK);
  } else {
    add_block<Kind>(packed, block, rows, count, sums);
    add_block<Kind>(packed, block + gap, rows, count, sums + BATCH * BLOCK);
  }
}

// A thread reads its blocks as two streams, one from their middle on; an odd one remains.
template <class Kind, class Out>
void multiply(const Packed& packed, Rows<typename Kind::Row> rows, int64_t count, Out* y) {
  at::parallel_for(0, (packed.outputs + BLOCK - 1) / BLOCK, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[2 * BATCH * BLOCK];
    for (int64_t row = 0; row < count; row += BATCH) {
      auto now = std::min(BATCH, count - row), half = (end - begin) / 2;
      auto from = rows.from(row, packed);
      auto to = y + row * packed.outputs;
      for (int64_t block = begin; block < begin + half; block++) {
        add_blocks<Kind>(packed, block, half, from, now, sums);
        finish(packed, block, sums, now, to);
        finish(packed, block + half, sums + BATCH * BLOCK, now, to);
      }
      if (begin + 2 * half < end) {
        add_block<Kind>(packed, end - 1, from, now, sums);
        finish(packed, end - 1, sums, now, to);
      }
    }
  });
}

#if defined(__AVX512BF16__)
constexpr int64_t STEP = 2 * TILE_ROWS;      // columns whose weights are two tiles, as many as a group has
constexpr int64_t PANEL = 512;               // columns whose weights stay in the first cache
constexpr int64_t TOGETHER = 2 * TILE_ROWS;  // rows that share a read of the weights
constexpr int64_t TILED = 256;               // rows whose sums wait in the second cache

// The weights of columns `[begin, end)` as chunks of bfloat16, with zeros up to whole steps: as they lie, or in `room`.
template <class Kind>
const char* as_pairs(const Packed& packed, int64_t block, int64_t begin, int64_t end, Words* room) {
  auto chunk = packed.chunks + packed.offset<Kind>(block, begin);
  if (std::is_same_v<Kind, BFloat16> && (end - begin) % STEP == 0) return chunk;
  const Kind kind(packed);
  auto to = room;
  for (auto column = begin; column < end; column += Kind::COLUMNS, chunk += CHUNK) {
    __builtin_prefetch(chunk + AHEAD);
    __builtin_prefetch(chunk + AHEAD + CHUNK / 2);
    UNROLL for (int i = 0; i < Kind::COLUMNS; i += 2)
      UNROLL for (int v = 0; v < VECTORS; v++) *to++ = kind.weights(chunk, i, v);
  }
  std::fill(to, room + (end - begin + STEP - 1) / STEP * STEP / 2 * VECTORS, Words{});
  return reinterpret_cast<const char*>(room);
}

// Adds the products of up to TOGETHER rows and the weights of `steps` steps to `sums` `[rows, 32]`; prefetches what
// lies `ahead`, if that is not 0. Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights.
template <bool BOTH>
void add_steps(const at::BFloat16* x, int64_t width, const char* weights, int64_t steps, int64_t ahead, float* sums) {
  constexpr int64_t LINE = BLOCK * sizeof(float), NEXT = TILE_ROWS * BLOCK;
  auto bytes = width * static_cast<int64_t>(sizeof *x);
  __asm__ volatile("" ::: "memory");  // GCC does not know that loads of tiles read memory
  TILE_LOAD(0, sums, LINE);
  TILE_LOAD(1, sums + TILE_ROWS, LINE);
  if (BOTH) {
    TILE_LOAD(2, sums + NEXT, LINE);
    TILE_LOAD(3, sums + NEXT + TILE_ROWS, LINE);
  }
  for (int64_t step = 0; step < steps; step++, x += STEP, weights += TILE_ROWS * CHUNK) {
    if (ahead)
      for (int64_t line = 0; line < TILE_ROWS * CHUNK; line += 64) __builtin_prefetch(weights + ahead + line);
    TILE_LOAD(4, x, bytes);
    TILE_LOAD(6, weights, CHUNK);
    TILE_LOAD(7, weights + TILE_BYTES, CHUNK);
    TILE_ADD_PAIRS(0, 4, 6);
    TILE_ADD_PAIRS(1, 4, 7);
    if (BOTH) {
      TILE_LOAD(5, x + TILE_ROWS * width, bytes);
      TILE_ADD_PAIRS(2, 5, 6);
      TILE_ADD_PAIRS(3, 5, 7);
    }
  }
  TILE_STORE(0, sums, LINE);
  TILE_STORE(1, sums + TILE_ROWS, LINE);
  if (BOTH) {
    TILE_STORE(2, sums + NEXT, LINE);
    TILE_STORE(3, sums + NEXT + TILE_ROWS, LINE);
  }
}

// Tiles for `rows` rows, up to TOGETHER.
inline void set_sizes(int64_t rows) {
  TileSizes sizes;
  std::fill_n(sizes.bytes, 8, TILE_BYTES);
  std::fill_n(sizes.rows, 8, TILE_ROWS);
  for (int tile : {0, 1, 4}) sizes.rows[tile] = std::min(rows, TILE_ROWS);
  for (int tile : {2, 3, 5}) sizes.rows[tile] = std::max<int64_t>(rows - TILE_ROWS, 1);
  TILE_SIZES(sizes);
}

// Scales the `group_sums` of one group, and adds them to the `sums` `[rows, 32]` of one block.
inline void add_group(const Packed& packed, int64_t block, int64_t group, Rows<at::BFloat16> rows, int64_t count,
                      const float* group_sums, float* sums) {
  auto at = (block * packed.groups() + group) * BLOCK;
  for (int v = 0; v < VECTORS; v++) {
    auto scale = floats(packed.scales + at + v * LANES);
    auto min = packed.mins ? packed.min(at + v * LANES, scale) : Floats{};
    for (int64_t r = 0; r < count; r++) {
      auto place = r * BLOCK + v * LANES;
      auto total = fused(load<Floats>(group_sums + place), scale, load<Floats>(sums + place));
      if (packed.mins) total = fused(all(rows.in_group[r * packed.groups() + group]), min, total);
      store(sums + place, total);
    }
  }
}

// The sums `[rows, 32]` of one block, by tiles.
template <class Kind>
void add_tiles(const Packed& packed, int64_t block, Rows<at::BFloat16> rows, int64_t count, float* sums) {
  alignas(64) Words room[PANEL / 2 * VECTORS];
  alignas(64) float group_sums[TOGETHER * BLOCK];  // in integers' units
  int64_t sized = 0;  // rows for which tiles are set
  std::fill_n(sums, count * BLOCK, 0.0f);
  for (int64_t begin = 0; begin < packed.columns; begin += PANEL) {
    auto end = std::min(begin + PANEL, packed.columns), unit = packed.scales ? GROUP : PANEL;
    auto weights = as_pairs<Kind>(packed, block, begin, end, room);
    for (int64_t row = 0; row < count; row += TOGETHER) {
      auto now = std::min(TOGETHER, count - row);
      auto add = now > TILE_ROWS ? add_steps<true> : add_steps<false>;
      auto from = rows.from(row, packed);
      auto ahead = row || weights == reinterpret_cast<const char*>(room) ? 0 : AHEAD;
      if (now != sized) set_sizes(sized = now);
      for (auto first = begin; first < end; first += unit) {
        auto to = packed.scales ? group_sums : sums + row * BLOCK;
        if (packed.scales) std::fill_n(group_sums, now * BLOCK, 0.0f);
        add(from.x + first, packed.width, weights + (first - begin) / 2 * CHUNK,
            (std::min(first + unit, end) - first + STEP - 1) / STEP, ahead, to);
        if (packed.scales) add_group(packed, block, first / GROUP, from, now, group_sums, sums + row * BLOCK);
      }
    }
  }
}

template <class Kind, class Out>
void multiply_by_tiles(const Packed& packed, Rows<at::BFloat16> rows, int64_t count, Out* y) {
  at::parallel_for(0, (packed.outputs + BLOCK - 1) / BLOCK, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[TILED * BLOCK];
    for (auto block = begin; block < end; block++)
      for (int64_t row = 0; row < count; row += TILED) {
        auto now = std::min(TILED, count - row);
        add_tiles<Kind>(packed, block, rows.from(row, packed), now, sums);
        finish(packed, block, sums, now, y + row * packed.outputs);
      }
    TILE_RELEASE();
  });
}
#endif

// The weight `[outputs, inputs]`, row by row; `Kind` takes columns one by one.
template <class Kind, class Out>
at::Tensor unpacked(const Packed& packed, at::TensorOptions options) {
  at::Tensor weight = at::empty({packed.outputs, packed.inputs}, options);
  auto all_rows = weight.mutable_data_ptr<Out>();
  at::parallel_for(0, (packed.outputs + BLOCK - 1) / BLOCK, 1, [&](int64_t begin, int64_t end) {
    const Kind kind(packed);
    for (auto block = begin; block < end; block++)
      for (int64_t column = 0; column < packed.inputs; column += LANES) {
        auto count = std::min<int64_t>(LANES, packed.inputs - column);
        for (int v = 0; v < VECTORS; v++) {
          Words columns[LANES] = {};
          for (int j = 0; j < count; j++) {
            auto chunk = packed.chunks + packed.offset<Kind>(block, (column + j) / Kind::COLUMNS * Kind::COLUMNS);
            auto values = kind.weights(chunk, (column + j) % Kind::COLUMNS, v);
            auto at = (block * packed.groups() + (column + j) / packed.group) * BLOCK + v * LANES;
            if (packed.scales) values *= floats(packed.scales + at);
            if (packed.mins) values += packed.min(at, floats(packed.scales + at));
            columns[j] = (Words)values;
          }
          transpose(columns);
          auto first = block * BLOCK + v * LANES;
          for (int64_t output = first; output < std::min(first + LANES, packed.outputs); output++) {
            auto row = (Floats)columns[output - first] * (packed.factors ? packed.factors[output] : 1.0f);
            for (int j = 0; j < count; j++) all_rows[output * packed.inputs + column + j] = static_cast<Out>(row[j]);
          }
        }
      }
  });
  return weight;
}

// `[rows, inputs]` as `[rows, width]` of the type that the kind reads, zeros in the padding.
template <class Row, class In>
at::Tensor padded(const at::Tensor& x, int64_t rows, const Packed& packed) {
  at::Tensor wide = at::empty({rows, packed.width}, x.options().dtype(c10::CppTypeToScalarType<Row>::value));
  auto from = x.const_data_ptr<In>();
  auto to = wide.mutable_data_ptr<Row>();
  for (int64_t row = 0; row < rows; row++, from += packed.inputs, to += packed.width) {
    for (int64_t k = 0; k < packed.inputs; k++) to[k] = static_cast<Row>(from[k]);
    std::fill(to + packed.inputs, to + packed.width, Row(0));
  }
  return wide;
}

template <class Row>
at::Tensor group_sums(const Row* x, int64_t rows, const Packed& packed) {
  constexpr int PARTS = 8;
  at::Tensor sums = at::empty({rows * packed.groups()}, at::kFloat);
  auto to = sums.mutable_data_ptr<float>();
  for (int64_t group = 0; group < sums.numel(); group++, x += GROUP) {
    float parts[PARTS] = {};
    for (int64_t k = 0; k < GROUP; k += PARTS)
      for (int part = 0; part < PARTS; part++) parts[part] += static_cast<float>(x[k + part]);
    to[group] = std::accumulate(parts, parts + PARTS, 0.0f);
  }
  return sums;
}

int64_t columns_of_chunk(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return 1;
    case at::kBFloat16: return 2;
    case at::kChar: return 4;
    case at::kByte: return 8;
    default: TORCH_CHECK_VALUE(false, "`weight` must be packed float32, bfloat16, int8 or uint8, got ", type);
  }
}

// How rows are multiplied: the fastest way for their number, one way for all numbers, or a way that is measured.
enum Way : int64_t { FASTEST, ALIKE, VECTORS_ALONE, TILES_ALONE, UNPACKED };

// From how many rows on tiles, and the unpacked weight, are faster than vectors, by types of weight and rows;
// `set_ways` sets them.
constexpr int64_t NEVER = std::numeric_limits<int64_t>::max();
struct Fastest {
  std::atomic<int64_t> tiles = NEVER, unpacked = NEVER;
};
std::array<Fastest, 16> measured;

Fastest& measured_of(at::ScalarType weight, bool grouped, bool wide) {
  return measured[std::countr_zero(static_cast<uint64_t>(columns_of_chunk(weight))) * 4 + grouped * 2 + wide];
}

template <class Kind>
int64_t way_of(int64_t way, int64_t count, const Fastest& fastest) {
  auto tiles = std::is_same_v<typename Kind::Row, at::BFloat16> && runs_tiles();
  TORCH_CHECK_VALUE(way != TILES_ALONE || tiles, "`way` must be possible here, got tiles: take another one");
  if (way == ALIKE) return tiles && has_tiles() ? TILES_ALONE : VECTORS_ALONE;
  if (way != FASTEST) return way;
  if (count >= fastest.unpacked) return UNPACKED;
  return tiles && count >= fastest.tiles ? TILES_ALONE : VECTORS_ALONE;
}

// `Single` takes columns one by one.
template <class Kind, class Single, class In>
at::Tensor linear_of(Packed packed, const at::Tensor& x, int64_t way, const Fastest& fastest) {
  using Row = typename Kind::Row;
  packed.width = packed.columns *= Kind::COLUMNS;
  packed.group = packed.scales ? GROUP : std::max<int64_t>(packed.columns, 1);
  auto count = c10::multiply_integers(x.sizes().begin(), x.sizes().end() - 1);
  way = way_of<Kind>(way, count, fastest);
  if (way == UNPACKED) {
    Maybe bias;
    auto numbers = const_cast<float*>(packed.bias);
    if (numbers) bias = at::from_blob(numbers, {packed.outputs}, at::kFloat).to(x.options());
    return at::linear(x, unpacked<Single, In>(packed, x.options()), bias);
  }
  auto sizes = x.sizes().vec();
  sizes.back() = packed.outputs;
  at::Tensor y = at::empty(sizes, x.options());
#if defined(__AVX512BF16__)
  if (way == TILES_ALONE) packed.width = (packed.columns + STEP - 1) / STEP * STEP;
#endif
  auto as_it_is = std::is_same_v<Row, In> && packed.width == packed.inputs;
  at::Tensor wide = as_it_is ? x : padded<Row, In>(x, count, packed);
  Rows<Row> rows{wide.const_data_ptr<Row>(), nullptr};
  at::Tensor in_group = packed.mins ? group_sums(rows.x, count, packed) : at::Tensor();
  if (packed.mins) rows.in_group = in_group.const_data_ptr<float>();
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Row, at::BFloat16>)
    if (way == TILES_ALONE) return multiply_by_tiles<Kind>(packed, rows, count, y.mutable_data_ptr<In>()), y;
#endif
  multiply<Kind>(packed, rows, count, y.mutable_data_ptr<In>());
  return y;
}

void check(const at::Tensor& x, const at::Tensor& weight, const Maybe& factors, const Maybe& scales, const Maybe& mins,
           const Maybe& bias, int64_t outputs) {
  auto type = weight.scalar_type();
  auto columns = columns_of_chunk(type), blocks = (outputs + BLOCK - 1) / BLOCK;
  auto of_rows = x.scalar_type();
  auto fits = weight.is_floating_point() ? of_rows == type : of_rows == at::kFloat || of_rows == at::kBFloat16;
  TORCH_CHECK_VALUE(fits, "`x` must have the dtype of a float `weight`, or float32 or bfloat16 for integers, got ",
                    of_rows, " for ", type, ": convert it");
  TORCH_CHECK_VALUE(x.dim() > 0, "`x` must be [..., inputs], got a single number");
  TORCH_CHECK_VALUE(!mins || scales, "`mins` must come with `scales`, got them alone: pass both");
  auto unit = weight.is_floating_point() ? columns : GROUP, units = (x.size(-1) + unit - 1) / unit;
  auto chunks = units * unit / columns;
  std::array sizes{blocks, chunks, BLOCK, 4 / weight.element_size()};
  check("weight", weight, type, sizes);
  check("factors", factors, at::kFloat, {outputs});
  check("bias", bias, at::kFloat, {outputs});
  check("scales", scales, at::kHalf, {blocks, units, BLOCK});
  check("mins", mins, are_multiples(mins) ? at::kChar : at::kHalf, {blocks, units, BLOCK});
}

// From how many rows on a weight of this type is multiplied by tiles, and unpacked, with rows in bfloat16 or `wide`.
void set_ways(at::ScalarType weight, bool grouped, bool wide, int64_t tiles, int64_t unpacked) {
  auto& fastest = measured_of(weight, grouped, wide);
  fastest.tiles = tiles, fastest.unpacked = unpacked;
}

}  // namespace

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& weight, const Maybe& factors, const Maybe& scales,
                         const Maybe& mins, const Maybe& bias, int64_t outputs, int64_t way) {
  check(x, weight, factors, scales, mins, bias, outputs);
  Packed packed{static_cast<const char*>(weight.const_data_ptr()), pointer<at::Half>(scales), pointer<void>(mins),
                pointer<float>(factors), pointer<float>(bias), are_multiples(mins), x.size(-1), outputs,
                weight.size(1), 0, 0};
  auto rows = x.expect_contiguous();
  auto wide = x.scalar_type() == at::kFloat;
  auto& fastest = measured_of(weight.scalar_type(), scales.has_value(), wide);
  auto run = [&](auto linear) { return linear(packed, *rows, way, fastest); };
  switch (weight.scalar_type()) {
    case at::kFloat: return run(linear_of<Float32, Float32, float>);
    case at::kBFloat16: return run(linear_of<BFloat16, BFloat16Singles, at::BFloat16>);
    case at::kChar: return run(wide ? linear_of<Int8, Int8, float> : linear_of<Int8Pairs, Int8, at::BFloat16>);
    default: return run(wide ? linear_of<Int4, Int4, float> : linear_of<Int4Pairs, Int4, at::BFloat16>);
  }
}

TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("packed_linear", packed_linear); }

TORCH_LIBRARY_IMPL(specdec, CompositeExplicitAutograd, m) {
  m.impl("set_ways", set_ways);
  m.impl("has_tiles", has_tiles);
}
