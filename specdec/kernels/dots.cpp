// A packed linear layer whose rows are rounded to 8 bits and multiplied as integers.
//
// Each group of 32 columns of a row has a scale, which makes its largest entry 127. The weights lie as packed_layout.py
// says; `part` columns (32 or 16) share a scale:
//
//   weight   int8 [blocks, columns / 4, 32, 4], or uint8 [blocks, columns / 8, 32, 4]: the low four bits of eight
//            columns, two columns in each byte
//   high     int32 [blocks, parts, 32]: the fifth bits of 32 columns, or the fifth and sixth of 16
//   scales, mins   [blocks, parts, 32] float16 or bfloat16; or int8, to be multiplied by `steps` float16 [blocks,
//            columns / 256, 2, 32], of scales and of mins; or mins int8 alone, to be multiplied by the scales
//
// weight = ((integer - zero) * scale + min) * factor; with `levels`, int8 [16], the integer is a level. The zero
// is the zero of signed integers, or 0 with mins.
//
// Sums of a part are exact, and parts are added in their order, so a row's result is the same, bit for bit, whatever
// rows stand beside it, on whatever thread.
//
// A head may compute its first `likely` outputs first: if one of them is sure, all later ones are -inf, uncomputed.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <limits>
#include <utility>
#include <vector>

#include "choice.h"
#include "dots.h"

namespace {

constexpr int64_t SUPER = 256;       // columns of one step
constexpr int64_t AHEAD = 6 << 10;   // bytes between reads and prefetches
constexpr int64_t BATCH = 64;        // rows that stay in the second cache
constexpr int ROWS = LANES == 16 ? 8 : 2;
constexpr double SURE = 0.9;         // a share of the mass of a head's likely outputs, as measured

struct Weight {
  const char* chunks;
  const uint32_t* high;
  const void *scales, *mins;
  const at::Half* steps;
  const int8_t* levels;
  const float *factors, *bias;
  at::ScalarType scale_type;
  bool are_multiples;  // the mins are multiples of the scales
  int64_t inputs, outputs, columns, parts, zero;

  // A vector of scales or mins of `part`; `which` is 0 for scales, 1 for mins.
  Floats scale(const void* from, int64_t block, int64_t part, int64_t part_size, int v, int which) const {
    auto at = (block * parts + part) * BLOCK + v * LANES;
    if (scale_type == at::kHalf) return floats(static_cast<const at::Half*>(from) + at);
    if (scale_type == at::kBFloat16) return floats(static_cast<const at::BFloat16*>(from) + at);
    auto super = (block * (columns / SUPER) + part * part_size / SUPER) * 2 + which;
    return floats(static_cast<const int8_t*>(from) + at) * floats(steps + super * BLOCK + v * LANES);
  }
};

// The `levels` of four-bit integers as bytes, with their zero at 128.
inline Words looked_up(Words indices, const int8_t* levels) {
#if defined(__AVX512BW__)
  auto table = _mm512_broadcast_i32x4(load<__m128i>(levels));
  return (Words)_mm512_shuffle_epi8(table, (__m512i)indices) ^ 0x80808080u;
#elif defined(__AVX2__)
  auto table = _mm256_broadcastsi128_si256(load<__m128i>(levels));
  return (Words)_mm256_shuffle_epi8(table, (__m256i)indices) ^ 0x80808080u;
#else
  Words numbers;
  auto from = reinterpret_cast<const uint8_t*>(&indices);
  auto to = reinterpret_cast<uint8_t*>(&numbers);
  for (int byte = 0; byte < 4 * LANES; byte++) to[byte] = static_cast<uint8_t>(levels[from[byte]] ^ 0x80);
  return numbers;
#endif
}

// How weights of BITS lie, with a scale for each PART columns.
template <int BITS, int PART, bool LEVELS = false>
struct Kind {
  static constexpr int COLUMNS = BITS == 8 ? 4 : 8, CHUNKS = PART / COLUMNS, FOURS = COLUMNS / 4;
  static constexpr bool IS_HIGH = BITS == 5 || BITS == 6;

  // Bytes of four columns each: columns `4 * i` to `4 * i + 3` of chunk `number` of the part.
  static Words bytes(Words chunk, Words high, int number, int i, const int8_t* levels) {
    if constexpr (BITS == 8) return chunk ^ 0x80808080u;
    auto low = (i ? chunk >> 4 : chunk) & 0x0f0f0f0fu;
    if constexpr (LEVELS) return looked_up(low, levels);
    constexpr auto EXTRA = BITS - 4;
    if constexpr (EXTRA > 0) {
      auto bit = (number * 2 + i) * EXTRA;  // its place in each byte of `high`
      auto moved = bit <= 4 ? high << (4 - bit) : high >> (bit - 4);
      low |= moved & (EXTRA == 1 ? 0x10101010u : 0x30303030u);
    }
    return low;
  }
};

// The sums `[R, 32]` of R rows and one block; `ahead` and `stride` as in linear.cpp. Entries of many rows are loaded
// once for all vectors of outputs; few rows take one vector after the other, which reads faster.
template <class K, int PART, int R>
void add(const Weight& weight, int64_t block, const Integers& rows, int64_t row, int64_t ahead, int64_t stride,
         float* sums) {
  constexpr int V = R <= 2 ? 1 : VECTORS;
  auto chunk = weight.chunks + block * (weight.columns / K::COLUMNS) * CHUNK;
  auto parts = weight.parts;
  auto q = rows.q + row * weight.columns;
  auto scales = rows.scales + row * (weight.columns / GROUP);
  auto offsets = rows.offsets + row * parts;
  auto in_part = rows.sums + row * parts;
  Floats totals[R][VECTORS] = {};
#pragma GCC unroll 1
  for (int64_t part = 0; part < parts; part++, chunk += K::CHUNKS * CHUNK) {
    UNROLL for (int c = 0; c < K::CHUNKS; c++, ahead += stride - CHUNK) {
      __builtin_prefetch(chunk + c * CHUNK + ahead);
      __builtin_prefetch(chunk + c * CHUNK + ahead + CHUNK / 2);
    }
    // A function, since GCC does not unroll this loop around the loops in it.
    auto add_vectors = [&](int first) __attribute__((always_inline)) {
      auto at = (block * parts + part) * BLOCK + first * LANES;
      Ints sum[R][V];
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) sum[r][v] = Ints{} + offsets[r];
      Words high[V] = {};
      if (K::IS_HIGH)
        UNROLL for (int v = 0; v < V; v++) high[v] = load<Words>(weight.high + at + v * LANES);
      UNROLL for (int c = 0; c < K::CHUNKS; c++)
        UNROLL for (int i = 0; i < K::FOURS; i++) {
          Words bytes[V];
          UNROLL for (int v = 0; v < V; v++)
            bytes[v] = K::bytes(load<Words>(chunk + c * CHUNK + (first + v) * sizeof(Words)), high[v], c, i,
                                weight.levels);
          UNROLL for (int r = 0; r < R; r++) {
            auto four = Ints{} + load<int32_t>(q + ((c * K::FOURS + i) * R + r) * 4);
            UNROLL for (int v = 0; v < V; v++) sum[r][v] = dot(sum[r][v], bytes[v], four);
          }
        }
      UNROLL for (int v = 0; v < V; v++) {
        Floats scale{}, min{};
        if (weight.scales) scale = weight.scale(weight.scales, block, part, PART, first + v, 0);
        if (weight.mins)
          min = weight.are_multiples ? min_of(weight.mins, true, at + v * LANES, scale)
                                     : weight.scale(weight.mins, block, part, PART, first + v, 1);
        UNROLL for (int r = 0; r < R; r++) {
          auto& total = totals[r][first + v];
          auto factor = weight.scales ? scale * scales[r] : all(scales[r]);
          total = fused(__builtin_convertvector(sum[r][v], Floats), factor, total);
          if (weight.mins) total = fused(min, all(in_part[r]), total);
        }
      }
    };
    if constexpr (V == VECTORS) add_vectors(0);
    else UNROLL for (int first = 0; first < VECTORS; first += V) add_vectors(first);
    q += PART * R, offsets += R, in_part += R;
    if (PART == GROUP || part % 2) scales += R;
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < VECTORS; v++) store(sums + r * BLOCK + v * LANES, totals[r][v]);
}

template <class K, int PART, int... R>
constexpr auto by_rows(std::integer_sequence<int, R...>) {
  return std::array{&add<K, PART, R + 1>...};
}

// Rows take turns on a block, which stays in the second cache; each turn prefetches its share of the next block.
template <class K, int PART, class Out>
void multiply(const Weight& weight, const Integers& rows, int64_t count, Out* y, int64_t start, int64_t stop) {
  static constexpr auto adds = by_rows<K, PART>(std::make_integer_sequence<int, ROWS>());
  at::parallel_for(start, stop, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[ROWS * BLOCK];
    auto bytes = weight.columns / K::COLUMNS * CHUNK, batch = std::max<int64_t>(BATCH / rows.turn, 1) * rows.turn;
    for (int64_t first = 0; first < count; first += batch) {
      auto last = std::min(first + batch, count);
      auto turns = (last - first + rows.turn - 1) / rows.turn;
      for (auto block = begin; block < end; block++) {
        auto ahead = turns == 1 ? AHEAD : bytes;
        for (auto row = first; row < last; row += rows.turn, ahead += bytes / turns) {
          auto now = std::min(rows.turn, last - row);
          adds[now - 1](weight, block, rows, row, ahead, CHUNK / turns, sums);
          finish(weight, block, sums, now, y + row * weight.outputs);
        }
      }
    }
  });
}

// Rows `[rows, inputs]` in 8 bits, in turns: [turns, columns / 4, rows of a turn, 4], scales and sums accordingly;
// columns in the order in which chunks of four bits hold them, if `is_paired`.
template <int PART, class In>
Integers integers(const at::Tensor& x, int64_t count, const Weight& weight, bool is_paired) {
  auto groups = weight.columns / GROUP, parts = weight.columns / PART, turns = (count + ROWS - 1) / ROWS;
  auto turn = turns ? (count + turns - 1) / turns : 1;
  auto line = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  auto of_q = line(count * weight.columns), of_scales = line(count * groups * 4), of_parts = line(count * parts * 4);
  static thread_local std::vector<char> scratch;  // a tensor for each call would take half a microsecond
  if (auto size = static_cast<size_t>(of_q + of_scales + 2 * of_parts); scratch.size() < size) scratch.resize(size);
  Integers rows{turn};
  auto room = scratch.data();
  auto q = reinterpret_cast<int8_t*>(room);
  auto scales = reinterpret_cast<float*>(room + of_q);
  auto offsets = reinterpret_cast<int32_t*>(room + of_q + of_scales);
  auto sums = reinterpret_cast<float*>(room + of_q + of_scales + of_parts);
  auto from = x.const_data_ptr<In>();
  // A thread rounds all rows of a turn, which share lines of the caches: two cores would wait for each other.
  at::parallel_for(0, turns * groups, std::max<int64_t>((1 << 10) / turn, 1), [&](int64_t begin, int64_t end) {
    for (auto at = begin; at < end; at++) {
      auto start = at / groups * turn, group = at % groups, column = group * GROUP, now = std::min(turn, count - start);
      for (int64_t lane = 0; lane < now; lane++) {
        auto source = from + (start + lane) * weight.inputs + column;
        alignas(64) In edge[GROUP] = {};
        if (column + GROUP > weight.inputs) {
          std::copy(source, source + (weight.inputs - column), edge);
          source = edge;
        }
        alignas(64) int8_t bytes[GROUP];
        int32_t in_part[GROUP / PART];
        auto scale = scales[start * groups + group * now + lane] = rounded(source, bytes, in_part);
        UNROLL for (int p = 0; p < GROUP / PART; p++) {
          auto place = start * parts + (group * (GROUP / PART) + p) * now + lane;
          offsets[place] = -static_cast<int32_t>(weight.zero) * in_part[p];
          sums[place] = scale * in_part[p];
        }
        if (is_paired) store(bytes, paired(load<Group>(bytes)));
        auto to = q + start * weight.columns + (column / 4 * now + lane) * 4;
        UNROLL for (int four = 0; four < GROUP; four += 4) store(to + four * now, load<int32_t>(bytes + four));
      }
    }
  });
  rows.q = q, rows.scales = scales, rows.offsets = offsets, rows.sums = sums;
  return rows;
}

// Whether one of the scores `[count]` has nearly all of their mass.
template <class Out>
bool is_sure(const Out* scores, int64_t count) {
  auto most = largest(scores, count);
  return std::isfinite(most) && SURE * mass(scores, count, most) <= 1;
}

template <class K, int PART, class In>
at::Tensor linear_of(const Weight& weight, const at::Tensor& x, int64_t likely) {
  auto sizes = x.sizes().vec();
  auto count = c10::multiply_integers(sizes.begin(), sizes.end() - 1);
  sizes.back() = weight.outputs;
  at::Tensor y = at::empty(sizes, x.options());
  auto rows = integers<PART, In>(x, count, weight, K::COLUMNS == 8);
  auto to = y.mutable_data_ptr<In>();
  auto blocks = (weight.outputs + BLOCK - 1) / BLOCK, first = likely ? likely / BLOCK : blocks;
  multiply<K, PART>(weight, rows, count, to, 0, first);
  if (!likely) return y;
  std::vector<In*> sure;
  for (int64_t row = 0; row < count; row++)
    if (auto scores = to + row * weight.outputs; is_sure(scores, likely)) sure.push_back(scores);
  if (static_cast<int64_t>(sure.size()) < count) multiply<K, PART>(weight, rows, count, to, first, blocks);
  for (auto scores : sure) std::fill(scores + likely, scores + weight.outputs, static_cast<In>(NEVER));
  return y;
}

void check(const at::Tensor& x, const at::Tensor& weight, const Maybe& high, const Maybe& factors, const Maybe& scales,
           const Maybe& mins, const Maybe& steps, const Maybe& levels, const Maybe& bias, int64_t outputs, int64_t part,
           int64_t likely) {
  auto type = weight.scalar_type(), of_rows = x.scalar_type();
  TORCH_CHECK_VALUE(of_rows == at::kFloat || of_rows == at::kBFloat16, "`x` must be float32 or bfloat16, got ", of_rows,
                    ": convert it");
  TORCH_CHECK_VALUE(x.dim() > 0, "`x` must be [..., inputs], got a single number");
  TORCH_CHECK_VALUE(type == at::kChar || type == at::kByte, "`weight` must be packed int8 or uint8, got ", type);
  TORCH_CHECK_VALUE(!scales || part == 16 || part == 32, "`scales` must be one for 16 or 32 columns, got ",
                    scales ? scales->size(1) : 0, " for ", x.size(-1), " columns");
  TORCH_CHECK_VALUE(!mins || scales, "`mins` must come with `scales`, got them alone: pass both");
  TORCH_CHECK_VALUE(type == at::kByte || part == 32, "`scales` must be one for 32 columns of int8, got one for ", part);
  TORCH_CHECK_VALUE(!levels || (type == at::kByte && part == 32 && !high), "`levels` must come with four bits in 32 ",
                    "columns, got them with other weights");
  int64_t columns = type == at::kChar ? 4 : 8, blocks = (outputs + BLOCK - 1) / BLOCK;
  auto groups = (x.size(-1) + GROUP - 1) / GROUP, parts = groups * GROUP / part, supers = groups * GROUP / SUPER;
  check("weight", weight, type, {blocks, groups * GROUP / columns, BLOCK, 4});
  check("high", high, at::kInt, {blocks, type == at::kByte ? parts : 0, BLOCK});
  check("factors", factors, at::kFloat, {outputs});
  check("bias", bias, at::kFloat, {outputs});
  check("levels", levels, at::kChar, {16});
  auto of_scales = steps ? at::kChar : scales && scales->scalar_type() == at::kBFloat16 ? at::kBFloat16 : at::kHalf;
  check("scales", scales, of_scales, {blocks, parts, BLOCK});
  check("mins", mins, are_multiples(mins) ? at::kChar : of_scales, {blocks, parts, BLOCK});
  check("steps", steps, at::kHalf, {blocks, supers, 2, BLOCK});
  TORCH_CHECK_VALUE(!steps || supers * SUPER == groups * GROUP, "`steps` must be for a multiple of 256 columns, got ",
                    x.size(-1));
  TORCH_CHECK_VALUE(0 <= likely && likely < outputs && likely % BLOCK == 0, "`likely` must be a multiple of ", BLOCK,
                    " below ", outputs, " outputs, got ", likely);
}

// From how many rows on products in floats are faster, as `set_floats` was told.
std::atomic<int64_t> floats_from = std::numeric_limits<int64_t>::max();

void set_floats(int64_t rows) { floats_from = rows; }

}  // namespace

at::Tensor dots(const at::Tensor& x, const at::Tensor& weight, const Maybe& high, const Maybe& factors,
                const Maybe& scales, const Maybe& mins, const Maybe& steps, const Maybe& levels, const Maybe& bias,
                int64_t outputs, int64_t way, int64_t likely) {
  auto columns = weight.size(1) * (weight.scalar_type() == at::kChar ? 4 : 8);
  auto part = scales && scales->size(1) ? columns / scales->size(1) : GROUP;
  check(x, weight, high, factors, scales, mins, steps, levels, bias, outputs, part, likely);
  auto count = c10::multiply_integers(x.sizes().begin(), x.sizes().end() - 1);
  if (way == 0 && count >= floats_from && !likely && !high && !steps && !levels && part == GROUP)
    return packed_linear(x, weight, factors, scales, mins, bias, outputs, way);
  auto rows = x.expect_contiguous();
  int64_t bits = weight.scalar_type() == at::kChar ? 8 : !high ? 4 : part == 32 ? 5 : 6;
  int64_t zero = bits == 8 || levels ? 128 : mins ? 0 : 1 << (bits - 1);
  Weight all{static_cast<const char*>(weight.const_data_ptr()), pointer<uint32_t>(high), pointer<void>(scales),
             pointer<void>(mins), pointer<at::Half>(steps), pointer<int8_t>(levels), pointer<float>(factors),
             pointer<float>(bias), scales ? scales->scalar_type() : at::kHalf, are_multiples(mins) && !steps,
             x.size(-1), outputs, columns, columns / part, zero};
  auto run = [&]<class K, int PART>(K, std::integral_constant<int, PART>) {
    return x.scalar_type() == at::kFloat ? linear_of<K, PART, float>(all, *rows, likely)
                                         : linear_of<K, PART, at::BFloat16>(all, *rows, likely);
  };
  std::integral_constant<int, 32> whole;
  std::integral_constant<int, 16> half;
  switch (bits) {
    case 8: return run(Kind<8, 32>(), whole);
    case 6: return run(Kind<6, 16>(), half);
    case 5: return run(Kind<5, 32>(), whole);
    default: break;
  }
  if (levels) return run(Kind<4, 32, true>(), whole);
  return part == 16 ? run(Kind<4, 16>(), half) : run(Kind<4, 32>(), whole);
}

TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("dots", dots); }

TORCH_LIBRARY_IMPL(specdec, CompositeExplicitAutograd, m) { m.impl("set_floats", set_floats); }
