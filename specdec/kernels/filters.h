// Logits processors in numbers, as specdec/logits/filters.py writes them: what each does to the scores of the next token,
// given what it knows of the text, which grows with every guess.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "choice.h"

namespace {

using Numbers = std::vector<double>;
using Tokens = std::vector<int64_t>;

// The tokens from place `first` of the numbers on.
inline Tokens tokens_of(const Numbers& numbers, size_t first) { return {numbers.begin() + first, numbers.end()}; }

inline void forbid(float* from, float* to) { std::fill(from, std::max(from, to), NEVER); }

struct Filter {
  virtual ~Filter() = default;
  // Changes the scores of guess `step`, of which the largest may be NaN or infinite.
  virtual void apply(float* scores, int64_t count, int64_t step) const = 0;
  // The text goes on with a guess.
  virtual void follow(int64_t token) {}
};

// first, end, tokens: those do not come as guesses from number `first` to before `end`.
struct Suppress : Filter {
  double first, end;
  Tokens tokens;
  explicit Suppress(const Numbers& given) : first(given[0]), end(given[1]), tokens(tokens_of(given, 2)) {}
  void apply(float* scores, int64_t count, int64_t step) const override {
    if (step < first || step >= end) return;
    for (auto token : tokens)
      if (0 <= token && token < count) scores[token] = NEVER;
  }
};

// temperature
struct Temperature : Filter {
  float temperature;
  explicit Temperature(const Numbers& given) : temperature(static_cast<float>(given[0])) {}
  void apply(float* scores, int64_t count, int64_t) const override {
    for (int64_t i = 0; i < count; i++) scores[i] /= temperature;
  }
};

// k
struct TopK : Filter {
  int64_t k;
  explicit TopK(const Numbers& given) : k(static_cast<int64_t>(given[0])) {}
  void apply(float* scores, int64_t count, int64_t) const override {
    if (std::isfinite(largest(scores, count))) keep_largest(scores, count, k);
  }
};

// p, and how many tokens stay at the least
struct TopP : Filter {
  double p;
  int64_t least;
  explicit TopP(const Numbers& given) : p(given[0]), least(static_cast<int64_t>(given[1])) {}
  void apply(float* scores, int64_t count, int64_t) const override {
    auto most = largest(scores, count);
    if (p < 1 && std::isfinite(most)) keep_mass(scores, count, most, p, least);
  }
};

// The logarithm of the least share of the largest probability that stays.
struct MinP : Filter {
  float least;
  explicit MinP(const Numbers& given) : least(static_cast<float>(given[0])) {}
  void apply(float* scores, int64_t count, int64_t) const override {
    auto bar = largest(scores, count) + least;
    for (int64_t i = 0; i < count; i++)
      if (scores[i] < bar) scores[i] = NEVER;
  }
};

// penalty, tokens of the text
struct RepetitionPenalty : Filter {
  float penalty;
  Tokens seen;
  explicit RepetitionPenalty(const Numbers& given)
      : penalty(static_cast<float>(given[0])), seen(tokens_of(given, 1)) {
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
  }
  void apply(float* scores, int64_t count, int64_t) const override {
    for (auto token : seen)
      if (token < count) scores[token] = scores[token] < 0 ? scores[token] * penalty : scores[token] / penalty;
  }
  void follow(int64_t token) override {
    auto place = std::lower_bound(seen.begin(), seen.end(), token);
    if (place == seen.end() || *place != token) seen.insert(place, token);
  }
};

// presence, frequency, tokens that were written
struct OutputPenalty : Filter {
  float presence, frequency;
  std::unordered_map<int64_t, int64_t> counts;
  explicit OutputPenalty(const Numbers& given)
      : presence(static_cast<float>(given[0])), frequency(static_cast<float>(given[1])) {
    for (auto token : tokens_of(given, 2)) counts[token]++;
  }
  void apply(float* scores, int64_t count, int64_t) const override {
    for (auto [token, times] : counts)
      if (token < count) scores[token] = scores[token] - frequency * static_cast<float>(times) - presence;
  }
  void follow(int64_t token) override { counts[token]++; }
};

// n, the text: no n tokens come twice in a row
struct NoRepeat : Filter {
  int64_t n;
  Tokens text;
  explicit NoRepeat(const Numbers& given) : n(static_cast<int64_t>(given[0])), text(tokens_of(given, 1)) {}
  void apply(float* scores, int64_t count, int64_t) const override {
    auto length = static_cast<int64_t>(text.size());
    for (int64_t i = 0; i + n <= length; i++)
      if (text[i + n - 1] < count && std::equal(text.end() - (n - 1), text.end(), text.begin() + i))
        scores[text[i + n - 1]] = NEVER;
  }
  void follow(int64_t token) override { text.push_back(token); }
};

// first, end, most_initial (-1: any), by_probability, the newest timestamp (-1: none), the last two tokens that were said:
// Whisper's rules, as specdec/logits/timestamps.py has them.
struct Timestamps : Filter {
  int64_t first, end, most_initial;
  bool by_probability;
  int64_t newest;
  Tokens said;
  explicit Timestamps(const Numbers& given) : by_probability(given[3] != 0), said(tokens_of(given, 5)) {
    auto whole = tokens_of(given, 0);
    first = whole[0], end = whole[1], most_initial = whole[2], newest = whole[4];
  }
  void apply(float* scores, int64_t count, int64_t) const override {
    if (count <= first) return;
    auto text = scores, stamps = scores + first, last = scores + count;
    auto until = [&](int64_t token) { return std::clamp(scores + token, stamps, last); };
    if (first) stamps[-1] = NEVER;
    if (newest >= 0) {
      auto open = said.back() >= first && said.size() > 1 && said[said.size() - 2] < first;
      if (said.back() < first) forbid(stamps, until(newest + 1));  // text takes some time
      else if (!open) forbid(stamps, last);                        // a first one stands for a pair
      else forbid(stamps, until(newest)), forbid(text, text + std::min(end, first));
    }
    if (said.empty()) {
      forbid(text, stamps);
      if (most_initial >= 0) forbid(until(first + most_initial + 1), last);
    }
    if (!by_probability || !first) return;
    auto most = largest(stamps, last - stamps);
    if (std::isfinite(most) && most + std::log(mass(stamps, last - stamps, most)) > largest(text, first))
      forbid(text, stamps);
  }
  void follow(int64_t token) override {
    if (token >= first) newest = token;
    said.push_back(token);
  }
};

template <class Kind>
std::unique_ptr<Filter> made(const Numbers& given) {
  return std::make_unique<Kind>(given);
}

inline std::unique_ptr<Filter> filter(const std::string& name, const Numbers& given) {
  static const std::map<std::string, std::unique_ptr<Filter> (*)(const Numbers&)> kinds{
      {"suppress", made<Suppress>},
      {"temperature", made<Temperature>},
      {"top_k", made<TopK>},
      {"top_p", made<TopP>},
      {"min_p", made<MinP>},
      {"repetition_penalty", made<RepetitionPenalty>},
      {"output_penalty", made<OutputPenalty>},
      {"no_repeat_ngram", made<NoRepeat>},
      {"timestamps", made<Timestamps>},
  };
  return kinds.at(name)(given);
}

}  // namespace
