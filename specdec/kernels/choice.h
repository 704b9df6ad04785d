// Choosing a token from scores: top-k and top-p (as specdec/decoding/processors/warpers.py), the likeliest token, and
// Gumbel-max draws from noise that is a function of its address (as specdec/decoding/noise.py).
//
// Scores are `count` numbers side by side; what keeps some of them writes to them. Callers look whether the largest is
// NaN or infinite. Hashes are Python's, bit for bit; sums of probabilities may round differently.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "vectors.h"

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The largest of the numbers; a NaN is larger than all others.
template <class In>
float largest(const In* from, int64_t count) {
  auto whole = count / LANES * LANES;
  auto larger = [](float a, float b) { return a >= b || std::isnan(a) ? a : b; };
  auto most = NEVER;
  auto tops = all(most);
  for (int64_t i = 0; i < whole; i += LANES) {
    auto numbers = floats(from + i);
    tops = (tops >= numbers) | (tops != tops) ? tops : numbers;
  }
  for (int lane = 0; lane < LANES; lane++) most = larger(most, tops[lane]);
  for (auto i = whole; i < count; i++) most = larger(most, static_cast<float>(from[i]));
  return most;
}

// The sum of e to the power of each number less the largest.
template <class In>
double mass(const In* from, int64_t count, float most) {
  auto whole = count / LANES * LANES;
  Floats parts{};
  for (int64_t i = 0; i < whole; i += LANES) parts += exponential(floats(from + i) - most);
  double sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += parts[lane];
  for (auto i = whole; i < count; i++) sum += std::exp(static_cast<float>(from[i]) - most);
  return sum;
}

inline bool any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  int32_t bits = 0;
  for (int lane = 0; lane < LANES; lane++) bits |= mask[lane];
  return bits != 0;
#endif
}

// The k largest of the scores and their tokens, best first, of equals the first tokens.
template <class In>
std::vector<std::pair<float, int64_t>> best_of(const In* scores, int64_t count, int64_t k) {
  auto before = [](const auto& one, const auto& other) {
    return one.first > other.first || (one.first == other.first && one.second < other.second);
  };
  std::vector<std::pair<float, int64_t>> heap;  // the worst of them first
  int64_t i = 0;
  for (; i < std::min(k, count); i++) heap.emplace_back(static_cast<float>(scores[i]), i);
  std::make_heap(heap.begin(), heap.end(), before);
  auto offer = [&](int64_t token) {
    auto score = static_cast<float>(scores[token]);
    if (!(score > heap.front().first)) return;
    std::pop_heap(heap.begin(), heap.end(), before);
    heap.back() = {score, token};
    std::push_heap(heap.begin(), heap.end(), before);
  };
  for (; i + LANES <= count; i += LANES)
    if (any(floats(scores + i) > all(heap.front().first)))
      for (int lane = 0; lane < LANES; lane++) offer(i + lane);
  for (; i < count; i++) offer(i);
  std::sort_heap(heap.begin(), heap.end(), before);
  return heap;
}

// Scores below the k-th largest become -inf.
inline void keep_largest(float* scores, int64_t count, int64_t k) {
  if (k >= count) return;
  auto last = best_of(scores, count, k).back().first;
  for (int64_t i = 0; i < count; i++) scores[i] = scores[i] < last ? NEVER : scores[i];
}

// From the largest score on, the highest token first among equals, scores with less than the share p of the mass before
// them stay, and `least` scores in any case; the others become -inf. Scores are sorted only where the cut is, which a
// histogram of the mass says.
inline void keep_mass(float* scores, int64_t count, float most, double p, int64_t least) {
  constexpr int BINS = 1024;
  constexpr float SPAN = 24;  // e to the power of -24 is next to nothing
  std::vector<double> inside(BINS);
  std::vector<int64_t> members(BINS);
  auto bin = [&](float score) { return static_cast<int>(std::min((most - score) * (BINS / SPAN), BINS - 1.f)); };
  auto put = [&](float score, double part) {
    if (score == NEVER) return;
    auto at = bin(score);
    inside[at] += part;
    members[at]++;
  };
  auto whole = count / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) {
    auto numbers = floats(scores + i);
    if (!any(numbers != all(NEVER))) continue;
    auto parts = exponential(numbers - most);
    for (int lane = 0; lane < LANES; lane++) put(numbers[lane], parts[lane]);
  }
  for (auto i = whole; i < count; i++) put(scores[i], std::exp(scores[i] - most));
  auto share = p * std::accumulate(inside.begin(), inside.end(), 0.0);
  double before = 0;
  int64_t number_before = 0;
  int cut = 0;  // the first bin that does not stay as a whole
  while (cut < BINS - 1 && (before + inside[cut] < share || number_before + members[cut] <= least)) {
    before += inside[cut];
    number_before += members[cut++];
  }
  std::vector<std::pair<float, int64_t>> edge;
  for (int64_t i = 0; i < count; i++) {
    if (scores[i] == NEVER) continue;
    auto at = bin(scores[i]);
    if (at == cut) edge.emplace_back(scores[i], i);
    if (at > cut) scores[i] = NEVER;
  }
  std::sort(edge.begin(), edge.end(), std::greater<>());
  for (auto [score, token] : edge) {
    if (before >= share && number_before >= least) scores[token] = NEVER;
    before += std::exp(score - most);
    number_before++;
  }
}

// The k largest scores stay (0 keeps all), and among them the share p of the mass. NaN and infinity are left for the
// caller to detect.
inline void keep_most(float* scores, int64_t count, int64_t k, double p, int64_t least) {
  auto most = largest(scores, count);
  if (!std::isfinite(most)) return;
  if (k > 0) keep_largest(scores, count, k);
  if (p < 1) keep_mass(scores, count, most, p, least);
}

inline uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// The address of place `index` below an address.
inline uint64_t folded(uint64_t address, uint64_t index) {
  constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
  return mixed(mixed(address + GOLDEN) + (index + 1) * GOLDEN);
}

template <class Numbers>
Numbers mixed_words(Numbers x) {
  x ^= x >> 16;
  x *= 0x21F0AAADu;
  x ^= x >> 15;
  x *= 0xD35A2D97u;
  return x ^ (x >> 15);
}

struct Noise {
  uint32_t low, high;

  explicit Noise(uint64_t address) : low(static_cast<uint32_t>(address)), high(address >> 32) {}

  template <class Numbers>
  Numbers forerunner(Numbers ids) const { return mixed_words<Numbers>(ids * 0x9E3779B1u + low); }

  template <class Numbers>
  Numbers hash(Numbers forerunner) const { return mixed_words<Numbers>(forerunner ^ high); }

  // Standard Gumbel noise of one token.
  double of(uint32_t id) const {
    auto x = forerunner(id), h = hash(x);
    auto u = (h * 0x1p20 + (x & 0xFFFFF) + 0.5) * 0x1p-52;
    return -std::log(-std::log(u));
  }
};

// The token whose score and noise are the largest together, where `most` is the largest score. Logarithms are taken for
// those alone that can win: whose hash is large enough for the noise that beats the best so far.
inline int64_t drawn(const float* scores, int64_t count, float most, uint64_t address) {
  constexpr float HEAD = 4, REACH = 41;  // as in noise.py: two values of the noise differ by at most 36.8 + 3.7
  if (std::isinf(most)) return std::find(scores, scores + count, most) - scores;  // no noise matters beside it
  Noise noise(address);
  auto best = -std::numeric_limits<double>::infinity();
  int64_t token = -1;
  // The least hash that can win for a token with at most this score; the slack covers rounding.
  auto bar = [&](float score) {
    auto loud = std::exp(-std::exp(std::min(score - best + 1e-3, 700.0)));
    return static_cast<uint32_t>(std::clamp(loud * 0x1p32 - 1, 0.0, 4294967295.0));
  };
  auto offer = [&](int64_t id) {
    auto sum = noise.of(static_cast<uint32_t>(id)) + scores[id];
    if (token >= 0 && (sum < best || (sum == best && id > token))) return false;
    best = sum, token = id;
    return true;
  };
  auto whole = count / LANES * LANES;
  for (auto i = whole; i < count; i++)
    if (scores[i] >= most - REACH) offer(i);
  Words lanes;
  for (int lane = 0; lane < LANES; lane++) lanes[lane] = static_cast<uint32_t>(lane);
  // Tokens near the top come first, as one of them will be hard to beat.
  for (auto [from, to] : {std::pair{most - HEAD, most}, std::pair{most - REACH, std::nextafter(most - HEAD, NEVER)}}) {
    auto least = bar(to);
    for (int64_t i = 0; i < whole; i += LANES) {
      auto numbers = floats(scores + i);
      auto open = (numbers >= all(from)) & (numbers <= all(to));
      if (!any(open)) continue;
      auto ids = lanes + static_cast<uint32_t>(i);
      auto hashes = noise.hash(noise.forerunner(ids));
      open &= hashes >= least;
      if (!any(open)) continue;
      for (int lane = 0; lane < LANES; lane++)
        if (open[lane] && offer(i + lane)) least = bar(to);
    }
  }
  return token;
}

}  // namespace
