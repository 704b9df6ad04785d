// Attention over a cache of keys and values: a table says for each token its row and the columns that it sees.
//
//   queries   [1, heads, tokens, width]
//   keys      [rows, kv heads, capacity, width], and values too; groups of query heads share a head of keys. Keys may
//             lie turned, column beside column: [rows, kv heads, width, capacity]
//   nodes     int32 [tokens, 4 + words]: row, column, first, base, and bits. The token is stored in `column`, and sees
//             the columns from `first` to before `base`, and `base + j` wherever bit j is set
//   biases    optional [heads, distances]: added to a score, by the number of seen columns after the key; the last
//             entry is for all greater distances
//   result    [1, tokens, heads, width of a value]
//
// A token's result depends, bit for bit, only on its query and the keys and values that it sees, in their order: not on
// where these lie, on what lies between them, on other tokens, on capacity, rows or threads. For that
//   - a score is one chain of fused multiply-adds over the width of a key;
//   - a token's scores are brought together without gaps before anything is made of them;
//   - the sum of their exponentials has LANES parts, of every LANES-th score, that are added up in one order;
//   - the sum of the weighted values is one chain over the columns; its vectors run over the width of a value;
//   - the exponential is one polynomial for all lanes;
//   - every product that is added to something is fused by name, none by the compiler's choice.
// The softmax therefore waits until all scores of a token are there. How work is cut changes no result.
//
// Work is cut into tiles: some queries (tokens and heads) of one row that share a head of keys. A tile goes through the
// columns that any of its queries sees, 4 * LANES at a time: it turns their keys around, so that a vector holds one
// entry of many keys, and multiplies them by all its queries. Keys that lie turned, in a range that all queries see,
// are multiplied where they lie. Later it goes through the values: of columns that all queries see for all queries at once,
// of other columns token by token. Both are products of a small matrix of weights with rows of numbers:
// `add_products`.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "operators.h"
#include "panels.h"

namespace {

constexpr int64_t QUERIES = 48;             // queries of a tile, at most
constexpr int64_t SCORES = 128 << 10;       // scores of a tile of more than SIDE queries: the second cache holds them
constexpr int64_t ALONE = 1 << 19;          // multiply-adds that are done before other threads have started
constexpr int64_t AHEAD = 4 * LANES;        // columns between reads and prefetches
constexpr int64_t ENTRIES = 8;              // entries of turned keys that are read side by side
constexpr size_t LINE = 64;                 // bytes of a line of the caches
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

int64_t up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// ---- Sums of products

// sums[r] += the sum over j < count, in order, of weights[r][j] * rows[j], for R sums of V vectors; anew if `fresh`.
// Prefetches what lies `ahead` of each row.
template <class In, int R, int V>
void add_block(const float* const* weights, const In* const* rows, int64_t count, int64_t shift, int64_t ahead,
               float* sums, int64_t stride, bool fresh) {
  Floats sum[R][V];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) sum[r][v] = fresh ? Floats{} : floats(sums + r * stride + v * LANES);
  for (int64_t j = 0; j < count; j++) {
    Floats row[V];
    UNROLL for (int v = 0; v < V; v++) {
      row[v] = floats(rows[j] + shift + v * LANES);
      if (v * LANES * sizeof(In) % LINE == 0) __builtin_prefetch(rows[j] + shift + v * LANES + ahead, 0, 2);
    }
    UNROLL for (int r = 0; r < R; r++) {
      auto weight = all(weights[r][j]);
      UNROLL for (int v = 0; v < V; v++) sum[r][v] = fused(weight, row[v], sum[r][v]);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < V; v++) store(sums + r * stride + v * LANES, sum[r][v]);
}

template <class In, int V, int... R>
constexpr auto by_sides(std::integer_sequence<int, R...>) {
  return std::array{&add_block<In, R + 1, V>...};
}

// The same for any number of sums, `width` wide, a multiple of LANES; `stride` lies between them.
template <class In>
void add_products(const float* const* weights, int64_t sides, const In* const* rows, int64_t count, int64_t width,
                  int64_t ahead, float* sums, int64_t stride, bool fresh) {
  static constexpr auto wide = by_sides<In, VECTORS>(std::make_integer_sequence<int, SIDE>());
  static constexpr auto narrow = by_sides<In, 1>(std::make_integer_sequence<int, SIDE>());
  for (int64_t side = 0; side < sides; side += SIDE) {
    auto now = std::min<int64_t>(SIDE, sides - side) - 1;
    auto to = sums + side * stride;
    int64_t at = 0;
    for (; at + PANEL <= width; at += PANEL) wide[now](weights + side, rows, count, at, ahead, to + at, stride, fresh);
    for (; at < width; at += LANES) narrow[now](weights + side, rows, count, at, ahead, to + at, stride, fresh);
  }
}

// ---- Functions of vectors

Floats hyperbolic_tangent(Floats x) {
  auto size = x < 0 ? -x : x, square = x * x, sum = all(-5.70498872745e-3f);
  for (float next : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
    sum = fused(sum, square, all(next));
  auto small = fused(sum * square, x, x);
  auto e = exponential(size * -2), large = (1 - e) / (1 + e);
  return size < all(0.625f) ? small : x < 0 ? -large : large;
}

// Up to PANEL keys side by side: `[width, PANEL]`. Pointers to keys come in multiples of LANES, numbers in words of 32
// bits: two of bfloat16, the first one in the lower half.
template <class In>
void turn(const In* const* keys, int64_t count, int64_t width, int64_t ahead, float* panel) {
  constexpr int64_t PER_WORD = 4 / sizeof(In), STEP = LANES * PER_WORD;
  for (int64_t key = 0; key < count; key += LANES)
    for (int64_t i = 0; i < width; i += STEP) {
      Words block[LANES] = {};
      if (i + STEP <= width)
        UNROLL for (int l = 0; l < LANES; l++) {
          block[l] = load<Words>(keys[key + l] + i);
          __builtin_prefetch(keys[key + l] + i + ahead);
        }
      else
        for (int l = 0; l < LANES; l++) std::memcpy(&block[l], keys[key + l] + i, (width - i) * sizeof(In));
      transpose(block);
      auto to = panel + i * PANEL + key;
      UNROLL for (int l = 0; l < LANES; l++, to += PER_WORD * PANEL) {
        store(to, PER_WORD == 1 ? block[l] : block[l] << 16);
        if (PER_WORD == 2) store(to + PANEL, block[l] & 0xffff0000u);
      }
    }
}

// ---- What tokens see

struct Token {
  int64_t row, column, first, base;
  const int32_t* words;
  int64_t bits;

  // Calls `take` with every column that the token sees outside of `[begin, end)`, in order.
  template <class Take>
  void outside(int64_t begin, int64_t end, Take take) const {
    for (auto c = first; c < std::min(begin, base); c++) take(c);
    for (auto c = std::max(first, end); c < base; c++) take(c);
    for (int64_t word = 0; word < bits / 32; word++)
      for (auto left = static_cast<uint32_t>(words[word]); left; left &= left - 1) {
        auto c = base + word * 32 + __builtin_ctz(left);
        if (c < begin || c >= end) take(c);
      }
  }
  // One past the last column that the token sees; 0 if it sees none.
  int64_t end() const {
    for (auto word = bits / 32; word-- > 0;)
      if (words[word]) return base + word * 32 + 32 - __builtin_clz(static_cast<uint32_t>(words[word]));
    return first < base ? base : 0;
  }
};

struct Nodes {
  const int32_t* numbers;
  int64_t count, stride;

  explicit Nodes(const at::Tensor& nodes)
      : numbers(nodes.const_data_ptr<int32_t>()), count(nodes.size(-2)), stride(nodes.size(-1)) {}
  Token operator[](int64_t t) const {
    auto at = numbers + t * stride;
    return {at[0], at[1], std::min(at[2], at[3]), at[3], at + 4, (stride - 4) * 32};
  }
};

// Neighbouring tokens of one row, each of which sees a column.
struct Run {
  int64_t begin, end, columns;  // columns: no token sees more
};

std::vector<Run> runs_of(const Nodes& nodes) {
  std::vector<Run> runs;
  for (int64_t t = 0; t < nodes.count; t++) {
    auto token = nodes[t];
    auto end = token.end();
    if (!end) continue;
    auto columns = end - token.first;
    if (runs.empty() || runs.back().end < t || nodes[t - 1].row != token.row)
      runs.push_back({t, t + 1, columns});
    else
      runs.back() = {runs.back().begin, t + 1, std::max(runs.back().columns, columns)};
  }
  return runs;
}

// ---- Tiles

template <class In>
struct Heads {  // the heads of queries, keys or values
  const In *numbers, *end;  // the storage ends at `end`
  int64_t row, head, column, entry, heads, width;  // strides and sizes

  explicit Heads(const at::Tensor& tensor)
      : numbers(tensor.const_data_ptr<In>()),
        end(numbers + tensor.storage().nbytes() / sizeof(In) - tensor.storage_offset()), row(tensor.stride(0)),
        head(tensor.stride(1)), column(tensor.stride(2)), entry(tensor.stride(3)), heads(tensor.size(1)),
        width(tensor.size(3)) {}
  const In* of(int64_t r, int64_t h) const { return numbers + r * row + h * head; }
};

template <class In>
struct Call {
  Heads<In> queries, keys, values;
  Nodes nodes;
  float scale, softcap;
  const float *sinks, *biases;
  int64_t distances;
  In* out;
  int64_t group;
};

struct Tile {
  int64_t token, head, begin, end;  // the first token, the head of keys, and queries: token by token, head by head
};

// What a token sees of the columns of a tile.
struct Seen {
  int64_t places, left, right, count;  // where the token's places begin; places left and right of the shared ones, all
};

// Memory of a thread, kept from tile to tile.
struct Scratch {
  std::vector<int32_t> columns, marks, places, token_columns;
  std::vector<Seen> seen;
  std::vector<float> queries, scores, sums, panel;
  std::vector<const float*> weights, entries;
};

template <class T>
T* sized(std::vector<T>& memory, int64_t count) {
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
  return memory.data();
}

template <class In>
class Tiled {
 public:
  Tiled(const Call<In>& call, const Tile& tile, Scratch& scratch)
      : call(call), tile(tile), my(scratch), count(tile.end - tile.begin), first(tile.token + tile.begin / call.group),
        last(tile.token + (tile.end - 1) / call.group), row(call.nodes[first].row) {}

  void run() {
    gather_columns();
    take_queries();
    score();
    weights = sized(my.weights, count);
    for (int64_t q = 0; q < count; q++) soften(q);
    weigh();
    finish();
  }

 private:
  const Call<In>& call;
  const Tile& tile;
  Scratch& my;
  const int64_t count, first, last, row;    // queries, tokens, and where their keys are
  int64_t shared_from = 0, shared_to = 0;   // places of the columns that all see
  int64_t stride = 0, wide = 0;             // entries of a row of scores, and of sums
  const float** weights = nullptr;
  std::array<float, QUERIES> totals;

  int64_t token(int64_t q) const { return tile.token + (tile.begin + q) / call.group; }
  int64_t head(int64_t q) const { return tile.head * call.group + (tile.begin + q) % call.group; }
  const Seen& seen(int64_t q) const { return my.seen[token(q) - first]; }
  float* scores(int64_t q) { return my.scores.data() + q * stride; }

  // Lists the columns that any of the tokens sees, in order, and for each token the places of its columns in that list.
  void gather_columns() {
    auto begin = call.nodes[first].first, shared = begin, until = call.nodes[first].base, end = until;
    for (auto t = first; t <= last; t++) {
      auto one = call.nodes[t];
      begin = std::min(begin, one.first);
      shared = std::max(shared, one.first);
      until = std::min(until, one.base);
      end = std::max(end, one.end());
    }
    until = std::max(until, shared);
    end = std::max(end, until);

    auto left = shared - begin;
    my.marks.assign(left + end - until, 0);
    auto mark = [&](int64_t c) -> int32_t& { return my.marks[c < shared ? c - begin : c - until + left]; };
    for (auto t = first; t <= last; t++) call.nodes[t].outside(shared, until, [&](int64_t c) { mark(c) = 1; });

    my.columns.clear();
    auto keep = [&](int64_t c) {
      if (!mark(c)) return;
      mark(c) = my.columns.size();
      my.columns.push_back(c);
    };
    for (auto c = begin; c < shared; c++) keep(c);
    shared_from = my.columns.size();
    shared_to = shared_from + until - shared;
    my.columns.resize(shared_to);
    std::iota(my.columns.begin() + shared_from, my.columns.end(), shared);
    for (auto c = until; c < end; c++) keep(c);

    my.seen.clear();
    my.places.clear();
    for (auto t = first; t <= last; t++) {
      Seen one{static_cast<int64_t>(my.places.size()), 0, 0, 0};
      call.nodes[t].outside(shared, until, [&](int64_t c) {
        my.places.push_back(mark(c));
        (c < shared ? one.left : one.right)++;
      });
      one.count = one.left + shared_to - shared_from + one.right;
      my.seen.push_back(one);
    }
  }

  void take_queries() {
    auto width = call.keys.width;
    auto to = sized(my.queries, count * width);
    for (int64_t q = 0; q < count; q++, to += width) {
      auto from = call.queries.of(0, head(q)) + token(q) * call.queries.column;
      for (int64_t i = 0; i < width; i++) to[i] = static_cast<float>(from[i * call.queries.entry]) * call.scale;
    }
  }

  // Scores of all columns for all queries, seen or not.
  void score() {
    auto width = call.keys.width, columns = static_cast<int64_t>(my.columns.size());
    stride = up(columns, PANEL) + LANES;  // no power of two: rows would get into each other's way in the cache
    sized(my.scores, count * stride);
    auto panel = sized(my.panel, up(width, 2 * LANES) * PANEL);
    auto entries = sized(my.entries, width);
    for (int64_t i = 0; i < width; i++) entries[i] = panel + i * PANEL;
    auto queries = sized(my.weights, count);
    for (int64_t q = 0; q < count; q++) queries[q] = my.queries.data() + q * width;

    auto head = call.keys.of(row, tile.head);
    auto whole = up(columns, LANES), entry = call.keys.entry;
    auto end = head + (width - 1) * entry + my.columns[0] + whole;  // whole vectors are read
    if (call.keys.column == 1 && shared_to - shared_from == columns && end <= call.keys.end) {
      std::array<const In*, ENTRIES> rows;
      for (int64_t i = 0; i < width; i += ENTRIES) {
        auto now = std::min(ENTRIES, width - i);
        for (int64_t r = 0; r < now; r++) rows[r] = head + (i + r) * entry + my.columns[0];
        add_products(queries, count, rows.data(), now, whole, ENTRIES * entry, scores(0), stride, i == 0);
        for (int64_t q = 0; q < count; q++) queries[q] += now;
      }
      return;
    }
    std::array<const In*, PANEL> keys;
    for (int64_t at = 0; at < columns; at += PANEL) {
      auto now = std::min(PANEL, columns - at), padded = up(now, LANES);
      for (int64_t j = 0; j < padded; j++) keys[j] = head + my.columns[at + std::min(j, now - 1)] * call.keys.column;
      if (entry == 1)
        turn(keys.data(), padded, width, AHEAD * call.keys.column, panel);
      else
        for (int64_t i = 0; i < width; i++)
          for (int64_t j = 0; j < padded; j++) panel[i * PANEL + j] = static_cast<float>(keys[j][i * entry]);
      add_products(queries, count, entries, width, padded, 0, scores(0) + at, stride, true);
    }
  }

  // Scores of one query to weights, without gaps.
  void soften(int64_t q) {
    auto of_token = seen(q);
    auto to = scores(q);
    weights[q] = to;
    auto token_places = my.places.data() + of_token.places;
    for (int64_t i = 0; i < of_token.left; i++) to[i] = to[token_places[i]];
    if (of_token.left < shared_from)
      std::memmove(to + of_token.left, to + shared_from, (shared_to - shared_from) * sizeof(float));
    auto right = of_token.left + shared_to - shared_from;
    for (int64_t i = 0; i < of_token.right; i++) to[right + i] = to[token_places[of_token.left + i]];

    auto n = of_token.count, padded = up(n, LANES);
    if (call.biases) add_biases(to, n, call.biases + head(q) * call.distances);
    if (call.softcap > 0)
      for (int64_t i = 0; i < padded; i += LANES)
        store(to + i, hyperbolic_tangent(floats(to + i) / call.softcap) * call.softcap);
    std::fill(to + n, to + padded, NOTHING);

    auto most = all(call.sinks ? call.sinks[head(q)] : NOTHING);
    for (int64_t i = 0; i < padded; i += LANES) {
      auto next = floats(to + i);
      most = next > most ? next : most;
    }
    for (int l = 1; l < LANES; l++) most[0] = std::max(most[0], most[l]);
    most = all(most[0]);

    Floats total{};
    for (int64_t i = 0; i < padded; i += LANES) {
      auto weight = exponential(floats(to + i) - most);
      store(to + i, weight);
      total += weight;
    }
    for (int l = 1; l < LANES; l++) total[0] += total[l];
    if (call.sinks) total[0] += exponential(call.sinks[head(q)] - most)[0];
    totals[q] = total[0];
  }

  // The key that the token sees last is its nearest.
  void add_biases(float* to, int64_t n, const float* biases) {
    auto far = std::max<int64_t>(n - call.distances, 0);
    for (int64_t i = 0; i < far; i++) to[i] += biases[call.distances - 1];
    for (auto i = far; i < n; i++) to[i] += biases[n - 1 - i];
  }

  // Adds weighted values: of columns left of the shared ones, of shared columns, of columns right of them.
  void weigh() {
    wide = up(call.values.width, LANES);
    std::fill_n(sized(my.sums, count * wide), count * wide, 0.f);
    weigh_side(true);
    for (int64_t q = 0; q < count; q++) weights[q] = scores(q) + seen(q).left;
    add_values(0, count, my.columns.data() + shared_from, shared_to - shared_from);
    for (int64_t q = 0; q < count; q++) weights[q] += shared_to - shared_from;
    weigh_side(false);
  }

  // Adds weighted values of columns left or right of the shared ones, for the queries of one token at a time.
  void weigh_side(bool left) {
    for (int64_t q = 0, next; q < count; q = next) {
      for (next = q + 1; next < count && token(next) == token(q);) next++;
      auto of_token = seen(q);
      auto places = my.places.data() + of_token.places + (left ? 0 : of_token.left);
      auto columns = left ? of_token.left : of_token.right;
      auto token_columns = sized(my.token_columns, columns);
      for (int64_t i = 0; i < columns; i++) token_columns[i] = my.columns[places[i]];
      add_values(q, next, token_columns, columns);
    }
  }

  // Adds weighted values of some columns to the sums of queries `[begin, end)`.
  void add_values(int64_t begin, int64_t end, const int32_t* columns, int64_t number) {
    auto head = call.values.of(row, tile.head);
    std::array<const In*, PANEL> values;
    for (int64_t at = 0; at < number; at += PANEL) {
      auto now = std::min(PANEL, number - at);
      for (int64_t j = 0; j < now; j++) values[j] = head + columns[at + j] * call.values.column;
      auto sums = my.sums.data() + begin * wide;
      std::array<const float*, QUERIES> from;
      for (auto q = begin; q < end; q++) from[q - begin] = weights[q] + at;
      if (call.values.width == wide)
        add_products(from.data(), end - begin, values.data(), now, wide, AHEAD * call.values.column, sums, wide, false);
      else
        add_products(from.data(), end - begin, padded(values.data(), now).data(), now, wide, 0, sums, wide, false);
    }
  }

  // Values whose width is no multiple of LANES, with zeros behind them.
  std::array<const float*, PANEL> padded(const In* const* values, int64_t number) {
    auto to = sized(my.panel, PANEL * wide);
    std::array<const float*, PANEL> rows;
    for (int64_t j = 0; j < number; j++, to += wide) {
      for (int64_t i = 0; i < wide; i++) to[i] = i < call.values.width ? static_cast<float>(values[j][i]) : 0;
      rows[j] = to;
    }
    return rows;
  }

  void finish() {
    auto width = call.values.width, heads = call.queries.heads;
    for (int64_t q = 0; q < count; q++) {
      auto to = call.out + (token(q) * heads + head(q)) * width;
      auto sums = my.sums.data() + q * wide;
      for (int64_t i = 0; i < width; i++) to[i] = static_cast<In>(sums[i] / totals[q]);
    }
  }
};

// Cut so that a tile's scores fit into the second cache, and that every thread gets some tiles.
template <class In>
std::vector<Tile> tiles_of(const Call<In>& call, const std::vector<Run>& runs, int64_t heads, int64_t threads) {
  int64_t queries = 0;
  for (auto& run : runs) queries += (run.end - run.begin) * call.group * heads;
  auto share = std::max<int64_t>(queries / (4 * threads), SIDE);
  std::vector<Tile> tiles;
  for (auto& run : runs) {
    auto of_run = (run.end - run.begin) * call.group;
    auto most = std::min({QUERIES, share, std::max<int64_t>(SCORES / run.columns, SIDE)}) / SIDE * SIDE;
    for (int64_t begin = 0; begin < of_run; begin += most)
      for (int64_t head = 0; head < heads; head++)
        tiles.push_back({run.begin, head, begin, std::min(begin + most, of_run)});
  }
  return tiles;
}

// Threads take tile after tile, the last tile first: the last tokens of a prompt see the most columns.
template <class In>
void attend_all(const Call<In>& call, int64_t heads) {
  auto runs = runs_of(call.nodes);
  int64_t work = 0;
  for (auto& run : runs)
    work += (run.end - run.begin) * run.columns * heads * call.group * (call.keys.width + call.values.width);
  int64_t threads = work < ALONE || at::in_parallel_region() ? 1 : at::get_num_threads();
  auto tiles = tiles_of(call, runs, heads, threads);
  std::atomic<int64_t> left = tiles.size();
  auto take = [&](int64_t, int64_t) {
    static thread_local Scratch scratch;
    for (int64_t next; (next = --left) >= 0;) Tiled<In>(call, tiles[next], scratch).run();
  };
  if (threads == 1)
    take(0, 1);
  else
    at::parallel_for(0, threads, 1, take);
}

// ---- Operators

#define EXPECT(name, holds, expected, ...) TORCH_CHECK_VALUE(holds, "`" name "` must be " expected ", got ", __VA_ARGS__)

void check_nodes(const at::Tensor& nodes, int64_t tokens) {
  auto sizes = nodes.sizes();
  auto flat = sizes.size() == 2 || (sizes.size() == 4 && sizes[0] == 1 && sizes[1] == 1);
  EXPECT("nodes", nodes.scalar_type() == at::kInt && nodes.is_contiguous(), "contiguous int32", nodes.scalar_type(), " ",
        sizes, " with strides ", nodes.strides());
  EXPECT("nodes", flat && nodes.size(-2) == tokens && nodes.size(-1) >= 4,
        "[tokens, 4 + words], one line for each token", sizes, " for ", tokens, " tokens");
}

template <class Holds>
void check_each(const Nodes& nodes, const char* expected, Holds holds) {
  for (int64_t t = 0; t < nodes.count; t++) {
    auto one = nodes[t];
    TORCH_CHECK_VALUE(holds(one), "`nodes` must have ", expected, ", got row ", one.row, ", column ", one.column,
                      ", first ", one.first, ", base ", one.base, " for token ", t);
  }
}

void check_heads(const char* name, const at::Tensor& tensor, at::ScalarType type, at::IntArrayRef sizes,
                 bool or_turned = false) {
  auto dense = tensor.dim() == 4 && (tensor.stride(3) == 1 || tensor.size(3) <= 1);
  dense = dense || (or_turned && tensor.dim() == 4 && tensor.stride(2) == 1);
  TORCH_CHECK_VALUE(dense && tensor.scalar_type() == type && tensor.sizes() == sizes, "`", name, "` must be ", type, " ",
                    sizes, ", its last dimension dense", or_turned ? " or the one before" : "", ", got ",
                    tensor.scalar_type(), " ", tensor.sizes(), " with strides ", tensor.strides());
}

at::Tensor as_floats(const Maybe& tensor) {
  return tensor ? tensor->to(at::kFloat).contiguous() : at::Tensor();
}

const float* numbers(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr; }

template <class In>
at::Tensor attend_in(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const Nodes& nodes,
                     double scale, double softcap, const at::Tensor& sinks, const at::Tensor& biases) {
  auto heads = queries.size(1), kv_heads = keys.size(1);
  at::Tensor out = at::empty({1, nodes.count, heads, values.size(3)}, queries.options());
  auto to = out.mutable_data_ptr<In>();
  for (int64_t t = 0, size = heads * values.size(3); t < nodes.count; t++)
    if (!nodes[t].end()) std::fill_n(to + t * size, size, In(0));
  attend_all(Call<In>{Heads<In>(queries), Heads<In>(keys), Heads<In>(values), nodes, static_cast<float>(scale),
                      static_cast<float>(softcap), numbers(sinks), numbers(biases),
                      biases.defined() ? biases.size(1) : 0, to, heads / kv_heads},
             kv_heads);
  return out;
}

// Tokens `[1, kv heads, tokens, width]` into a buffer.
void store_in(const at::Tensor& from, const at::Tensor& buffer, const Nodes& nodes) {
  auto size = buffer.element_size();
  auto source = static_cast<const char*>(from.const_data_ptr());
  auto target = static_cast<char*>(buffer.mutable_data_ptr());
  for (int64_t t = 0; t < nodes.count; t++) {
    auto node = nodes[t];
    auto at = node.row * buffer.stride(0) + node.column * buffer.stride(2);
    for (int64_t head = 0; head < from.size(1); head++)
      std::memcpy(target + (at + head * buffer.stride(1)) * size,
                  source + (head * from.stride(1) + t * from.stride(2)) * size, from.size(3) * size);
  }
}

}  // namespace

at::Tensor attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& nodes,
                  double scale, double softcap, const Maybe& sinks, const Maybe& biases) {
  auto type = queries.scalar_type();
  EXPECT("queries", queries.dim() == 4 && queries.size(0) == 1 && (type == at::kFloat || type == at::kBFloat16),
        "float32 or bfloat16 [1, heads, tokens, width]", type, " ", queries.sizes());
  auto heads = queries.size(1);
  EXPECT("keys", keys.dim() == 4 && keys.size(1) > 0 && heads % keys.size(1) == 0,
        "[rows, kv heads, capacity, width], kv heads a divisor of the heads of `queries`", keys.sizes(), " for ", heads);
  auto rows = keys.size(0), capacity = keys.size(2);
  check_heads("keys", keys, type, {rows, keys.size(1), capacity, queries.size(3)}, /*or_turned=*/true);
  check_heads("values", values, type, {rows, keys.size(1), capacity, values.dim() ? values.size(-1) : 0});
  check_nodes(nodes, queries.size(2));
  EXPECT("softcap", softcap >= 0, "0 (none) or more", softcap);
  EXPECT("sinks", !sinks || (sinks->sizes() == at::IntArrayRef{heads} && sinks->is_floating_point()),
        "a float for each head", sinks->scalar_type(), " ", sinks->sizes(), " for ", heads, " heads");
  EXPECT("biases", !biases || (biases->dim() == 2 && biases->size(0) == heads && biases->size(1) > 0 &&
                               biases->is_floating_point()),
        "floats [heads, distances]", biases->scalar_type(), " ", biases->sizes(), " for ", heads, " heads");
  Nodes of_tokens(nodes);
  check_each(of_tokens, "rows and columns that `keys` has", [&](const Token& one) {
    return one.row >= 0 && one.row < rows && one.first >= 0 && one.base <= capacity && one.end() <= capacity;
  });
  auto run = type == at::kFloat ? attend_in<float> : attend_in<at::BFloat16>;
  return run(queries, keys, values, of_tokens, scale, softcap, as_floats(sinks), as_floats(biases));
}

void store_nodes(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& key_buffer,
                 const at::Tensor& value_buffer, const at::Tensor& nodes) {
  EXPECT("keys", keys.dim() == 4, "[1, kv heads, tokens, width]", keys.sizes());
  EXPECT("key_buffer", key_buffer.dim() == 4, "[rows, kv heads, capacity, width]", key_buffer.sizes());
  auto heads = keys.size(1), tokens = keys.size(2), rows = key_buffer.size(0), capacity = key_buffer.size(2);
  auto type = key_buffer.scalar_type(), of_values = value_buffer.scalar_type();
  auto width = value_buffer.dim() ? value_buffer.size(-1) : 0;
  check_heads("keys", keys, type, {1, heads, tokens, keys.size(3)});
  check_heads("values", values, of_values, {1, heads, tokens, width});
  check_heads("key_buffer", key_buffer, type, {rows, heads, capacity, keys.size(3)});
  check_heads("value_buffer", value_buffer, of_values, {rows, heads, capacity, width});
  check_nodes(nodes, tokens);
  Nodes of_tokens(nodes);
  check_each(of_tokens, "rows and columns that `key_buffer` has", [&](const Token& one) {
    return one.row >= 0 && one.row < rows && one.column >= 0 && one.column < capacity;
  });
  store_in(keys, key_buffer, of_tokens);
  store_in(values, value_buffer, of_tokens);
}

TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("attend", attend);
  m.impl("store_nodes", store_nodes);
}
