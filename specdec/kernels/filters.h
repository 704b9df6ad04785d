// Logits processors in numbers, as specdec/decoding/processors/numeric.py writes them: what each does to the scores of the next
// token, given what it knows of the text, which grows with every guess.

#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
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

// first, end, tokens: those do not come as guesses from number `first` to before `end`.
struct Suppress : Filter {
  double first, end;
  Tokens tokens;
  explicit Suppress(const Numbers& given) : first(given[0]), end(given[1]), tokens(tokens_of(given, 2)) {}
  void apply(float* scores, int64_t count, int64_t step) const override {
    if (step < first || step >= end) return;
    for (auto token : tokens)
      if (token < count) scores[token] = NEVER;
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

// k, p, least: as `keep_most` takes them
struct Top : Filter {
  int64_t k;
  double p;
  int64_t least;
  explicit Top(const Numbers& given) : k(whole(given[0], 0)), p(given[1]), least(whole(given[2], 1)) {}
  void apply(float* scores, int64_t count, int64_t) const override {
    auto most = largest(scores, count);
    if (!std::isnan(most) && most != NEVER) keep_most(scores, count, most, k, p, least);
  }
};

// The logarithm of the least share of the largest probability that stays.
struct MinP : Filter {
  float least;
  explicit MinP(const Numbers& given) : least(static_cast<float>(given[0])) {}
  void apply(float* scores, int64_t count, int64_t) const override {
    auto most = largest(scores, count), bar = most + least;
    if (!std::isfinite(most)) return;
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
  explicit NoRepeat(const Numbers& given) : n(whole(given[0], 1)), text(tokens_of(given, 1)) {}
  void apply(float* scores, int64_t count, int64_t) const override {
    auto length = static_cast<int64_t>(text.size());
    for (int64_t i = 0; i + n <= length; i++)
      if (text[i + n - 1] < count && std::equal(text.end() - (n - 1), text.end(), text.begin() + i))
        scores[text[i + n - 1]] = NEVER;
  }
  void follow(int64_t token) override { text.push_back(token); }
};

// first, end, most_initial (-1: any), by_probability, the newest timestamp (-1: none), the last two tokens that were
// said: Whisper's rules, as specdec/decoding/processors/whisper_timestamps.py has them.
struct Timestamps : Filter {
  int64_t first, end, most_initial;
  bool by_probability;
  int64_t newest;
  Tokens said;
  explicit Timestamps(const Numbers& given)
      : first(whole(given[0], 0)),
        end(whole(given[1], 0)),
        most_initial(whole(given[2], -1)),
        by_probability(given[3] != 0),
        newest(whole(given[4], -1)),
        said(tokens_of(given, 5)) {}
  void apply(float* scores, int64_t count, int64_t) const override {
    auto last = scores + count, stamps = scores + std::min(first, count), text = scores;
    auto until = [&](int64_t token) { return std::clamp(scores + std::min(token, count), stamps, last); };
    if (0 < first && first <= count) stamps[-1] = NEVER;
    if (newest >= 0 && !said.empty()) {
      auto open = said.back() >= first && said.size() > 1 && said[said.size() - 2] < first;
      if (said.back() < first) forbid(stamps, until(newest + 1));  // text takes some time
      else if (!open) forbid(stamps, last);                        // a first one stands for a pair
      else forbid(stamps, until(newest)), forbid(text, std::min(text + std::min(end, count), stamps));
    }
    if (said.empty()) {
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
    said.push_back(token);
  }
};

template <class Kind>
std::unique_ptr<Filter> made(const Numbers& given) {
  return std::make_unique<Kind>(given);
}

inline std::unique_ptr<Filter> filter(const std::string& name, const Numbers& given) {
  struct Known {
    std::unique_ptr<Filter> (*make)(const Numbers&);
    size_t least;  // how many numbers it must have
  };
  static const std::map<std::string, Known> kinds{
      {"suppress", {made<Suppress>, 2}},
      {"temperature", {made<Temperature>, 1}},
      {"top", {made<Top>, 3}},
      {"min_p", {made<MinP>, 1}},
      {"repetition_penalty", {made<RepetitionPenalty>, 1}},
      {"output_penalty", {made<OutputPenalty>, 2}},
      {"no_repeat_ngram", {made<NoRepeat>, 1}},
      {"timestamps", {made<Timestamps>, 5}},
  };
  auto found = kinds.find(name);
  TORCH_CHECK_VALUE(found != kinds.end(), "there is no filter ", name);
  TORCH_CHECK_VALUE(given.size() >= found->second.least, "filter ", name, " has at least ", found->second.least,
                    " numbers, got ", given.size());
  return found->second.make(given);
}

}  // namespace
