// A model's compiled passes (AOTInductor), and chains of them: a draft guesses token after token in one call.
//
// Between two passes of a chain a token is chosen from the logits and written where the next pass reads it; positions
// and tables of all passes are there from the beginning. Nobody has to be asked, as the rule by which a chain ends is
// handed over as numbers:
//
//   edges, rates   a guess of probability p, in bin b of the bins between `edges`, is right with the chance
//                  min(p * rates[b], 1)
//   least          the chain goes on while the product of the chances of its guesses is at least so much

#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "vectors.h"

namespace {

using Tensors = std::vector<at::Tensor>;

struct Guess {
  int64_t token;
  double probability;
};

template <class In>
float number(In from) { return static_cast<float>(from); }

// The first of the likeliest tokens, and its probability: 1 unless it must be known, NaN if the largest of the logits
// is not a number or infinite. A NaN is larger than all others.
template <class In>
Guess likeliest(const In* logits, int64_t count, bool confident) {
  auto whole = count / LANES * LANES;
  auto larger = [](float a, float b) { return a >= b || std::isnan(a) ? a : b; };
  auto most = -std::numeric_limits<float>::infinity();
  auto tops = all(most);
  for (int64_t i = 0; i < whole; i += LANES) {
    auto own = floats(logits + i);
    tops = (tops >= own) | (tops != tops) ? tops : own;
  }
  for (int lane = 0; lane < LANES; lane++) most = larger(most, tops[lane]);
  for (auto i = whole; i < count; i++) most = larger(most, number(logits[i]));
  if (!std::isfinite(most)) return {0, std::nan("")};
  int64_t token = 0;
  while (number(logits[token]) != most) token++;
  if (!confident) return {token, 1.0};
  Floats parts{};
  for (int64_t i = 0; i < whole; i += LANES) parts += exponential(floats(logits + i) - most);
  double sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += parts[lane];
  for (auto i = whole; i < count; i++) sum += std::exp(number(logits[i]) - most);
  return {token, 1.0 / sum};
}

Guess guess(const at::Tensor& logits, int64_t width, bool confident) {
  auto count = std::min(logits.size(-1), width);
  auto last = logits.select(-2, -1).contiguous();
  if (last.scalar_type() == at::kBFloat16) return likeliest(last.const_data_ptr<at::BFloat16>(), count, confident);
  auto exact = last.to(at::kFloat);
  return likeliest(exact.const_data_ptr<float>(), count, confident);
}

struct Passes : torch::CustomClassHolder {
  explicit Passes(const std::string& path) : loader(path) {}

  std::vector<std::string> names() { return loader.get_constant_fqns(); }

  // The tensors stay the caller's.
  void load(const c10::Dict<std::string, at::Tensor>& constants) {
    std::unordered_map<std::string, at::Tensor> map;
    for (const auto& entry : constants) map.emplace(entry.key(), entry.value());
    loader.load_constants(map, false, true, true);
  }

  Tensors run(Tensors given) { return loader.boxed_run(std::move(given)); }

  // Guesses and their probabilities: one after the pass that is given `first`, and one after each of the passes that
  // read a guess. Of these, `then` are the tensors, the first of them the place of the token; `stacked` of them, by
  // number, have an entry for every pass. `width` are the tokens that can be guessed. The chain also ends with one of
  // `ends` and with tokens from `known` on. A probability of NaN says that there is no guess.
  std::tuple<std::vector<int64_t>, std::vector<double>> chain(
      Tensors first, Tensors then, std::vector<int64_t> stacked, int64_t most, int64_t width, int64_t known,
      std::vector<int64_t> ends, std::vector<double> edges, std::vector<double> rates, double least, bool confident) {
    std::vector<int64_t> tokens;
    std::vector<double> probabilities;
    auto logits = loader.boxed_run(std::move(first))[0];
    for (double chance = 1;;) {
      auto [token, probability] = guess(logits, width, confident);
      tokens.push_back(token);
      probabilities.push_back(probability);
      auto bin = std::upper_bound(edges.begin(), edges.end(), probability) - edges.begin();
      chance *= std::min(probability * rates.at(bin), 1.0);
      bool goes_on = chance >= least && token < known && std::find(ends.begin(), ends.end(), token) == ends.end();
      auto pass = static_cast<int64_t>(tokens.size()) - 1;
      if (!goes_on || pass + 1 >= most) break;  // NaN is not large enough either
      auto given = then;
      given[0].fill_(token);
      for (auto at : stacked) given[at] = then[at].select(0, pass);
      logits = loader.boxed_run(std::move(given))[0];
    }
    return {tokens, probabilities};
  }

  torch::inductor::AOTIModelPackageLoader loader;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.class_<Passes>("Passes")
      .def(torch::init<const std::string&>())
      .def("names", &Passes::names)
      .def("load", &Passes::load)
      .def("run", &Passes::run)
      .def("chain", &Passes::chain);
}
