// Logits processors as numbers, encoded by specdec/decoding/processors/pipeline.py: each changes the scores
// [vocabulary] of the next token in place, and follows the guesses of one chain, so no two chains share a filter. The
// Python processors give equal scores, but for the rounding of sums.

#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "choice.h"

namespace {

using Numbers = std::vector<double>;
using Tokens = std::vector<int64_t>;

// The tokens from place `first` of the numbers on.
inline Tokens tokens_of(const Numbers& numbers, size_t first) {
  Tokens tokens{numbers.begin() + first, numbers.end()};
  for (auto token : tokens) TORCH_CHECK_VALUE(token >= 0, "a filter's tokens must be at least 0, got ", token);
  return tokens;
}

// A number that must be at least so much.
inline int64_t whole(double number, int64_t least) {
  TORCH_CHECK_VALUE(number >= least && number < 0x1p62, "a filter's number must be at least ", least, ", got ", number);
  return static_cast<int64_t>(number);
}

inline void forbid(float* from, float* to) { std::fill(from, std::max(from, to), NEVER); }

struct Filter {
  virtual ~Filter() = default;
  // Changes the scores of guess `step`, of which the largest may be NaN or infinite.
  virtual void apply(float* scores, int64_t count, int64_t step) const = 0;
  // The text goes on with a guess.
  virtual void follow(int64_t token) {}
};

// first, end, tokens: these are suppressed for guesses number `first` to before `end`.
struct Suppress : Filter {
  double first, end;
  Tokens tokens;
  explicit Suppress(const Numbers& numbers) : first(numbers[0]), end(numbers[1]), tokens(tokens_of(numbers, 2)) {}
  void apply(float* scores, int64_t count, int64_t step) const override {
    if (step < first || step >= end) return;
    for (auto token : tokens)
      if (token < count) scores[token] = NEVER;
  }
};

// penalty, tokens: the scores of the text's tokens are divided by the penalty, or multiplied if they are below 0.
struct Repetition : Filter {
  float penalty;
  std::set<int64_t> tokens;
  explicit Repetition(const Numbers& numbers) : penalty(static_cast<float>(numbers[0])) {
    for (auto token : tokens_of(numbers, 1)) tokens.insert(token);
  }
  void apply(float* scores, int64_t count, int64_t) const override {
    for (auto token : tokens)
      if (token < count) scores[token] = scores[token] < 0 ? scores[token] * penalty : scores[token] / penalty;
  }
  void follow(int64_t token) override { tokens.insert(token); }
};

// temperature
struct Temperature : Filter {
  float temperature;
  explicit Temperature(const Numbers& numbers) : temperature(static_cast<float>(numbers[0])) {}
  void apply(float* scores, int64_t count, int64_t) const override {
    for (int64_t i = 0; i < count; i++) scores[i] /= temperature;
  }
};

// k, p, least: as `keep_most` takes them
struct Top : Filter {
  int64_t k;
  double p;
  int64_t least;
  explicit Top(const Numbers& numbers) : k(whole(numbers[0], 0)), p(numbers[1]), least(whole(numbers[2], 1)) {}
  void apply(float* scores, int64_t count, int64_t) const override {
    keep_most(scores, count, k, p, least);
  }
};

// first, end, most_initial (-1: any), by_probability, the newest timestamp (-1: none), the last two tokens: Whisper's
// rules, as in specdec/decoding/processors/builtin.py.
struct Timestamps : Filter {
  int64_t first, end, most_initial;
  bool by_probability;
  int64_t newest;
  Tokens last_tokens;
  explicit Timestamps(const Numbers& numbers)
      : first(whole(numbers[0], 0)),
        end(whole(numbers[1], 0)),
        most_initial(whole(numbers[2], -1)),
        by_probability(numbers[3] != 0),
        newest(whole(numbers[4], -1)),
        last_tokens(tokens_of(numbers, 5)) {}
  void apply(float* scores, int64_t count, int64_t) const override {
    auto last = scores + count, stamps = scores + std::min(first, count), text = scores;
    auto until = [&](int64_t token) { return std::clamp(scores + std::min(token, count), stamps, last); };
    if (0 < first && first <= count) stamps[-1] = NEVER;
    if (newest >= 0 && !last_tokens.empty()) {
      auto open = last_tokens.back() >= first && last_tokens.size() > 1 && last_tokens[last_tokens.size() - 2] < first;
      if (last_tokens.back() < first) forbid(stamps, until(newest + 1));  // text takes some time
      else if (!open) forbid(stamps, last);                        // a first one stands for a pair
      else forbid(stamps, until(newest)), forbid(text, std::min(text + std::min(end, count), stamps));
    }
    if (last_tokens.empty()) {
      forbid(text, stamps);
      if (most_initial >= 0) forbid(until(first + most_initial + 1), last);
    }
    if (!by_probability || stamps == text || stamps == last) return;
    auto most = largest(stamps, last - stamps);
    if (std::isfinite(most) && most + std::log(mass(stamps, last - stamps, most)) > largest(text, stamps - text))
      forbid(text, stamps);
  }
  void follow(int64_t token) override {
    if (token >= first) newest = token;
    last_tokens.push_back(token);
  }
};

template <class Kind>
std::unique_ptr<Filter> make_filter(const Numbers& numbers) {
  return std::make_unique<Kind>(numbers);
}

inline std::unique_ptr<Filter> filter(const std::string& name, const Numbers& numbers) {
  struct Maker {
    std::unique_ptr<Filter> (*make)(const Numbers&);
    size_t least;  // how many numbers it must have
  };
  static const std::map<std::string, Maker> kinds{
      {"suppress", {make_filter<Suppress>, 2}},
      {"repetition", {make_filter<Repetition>, 1}},
      {"temperature", {make_filter<Temperature>, 1}},
      {"top", {make_filter<Top>, 3}},
      {"timestamps", {make_filter<Timestamps>, 5}},
  };
  auto entry = kinds.find(name);
  TORCH_CHECK_VALUE(entry != kinds.end(), "there is no filter ", name);
  TORCH_CHECK_VALUE(numbers.size() >= entry->second.least, "filter ", name, " has at least ", entry->second.least,
                    " numbers, got ", numbers.size());
  return entry->second.make(numbers);
}

}  // namespace
