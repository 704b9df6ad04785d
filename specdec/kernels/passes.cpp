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
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "choice.h"

namespace {

using Tensors = std::vector<at::Tensor>;

struct Guess {
  int64_t token;
  double probability;
};

// How a guess is chosen from logits.
struct Choice {
  std::vector<int64_t> suppressed;
  double temperature;
  int64_t k;  // 0 keeps all
  double p;
  std::vector<int64_t> noise;  // an address and the place of the first guess below it; of the likeliest token, nothing

  bool is_plain() const { return suppressed.empty() && temperature == 1 && k == 0 && p >= 1 && noise.empty(); }
};

// The likeliest token, where `most` is the largest score, and its probability: 1 unless it must be known.
template <class In>
Guess likeliest(const In* scores, int64_t count, float most, bool confident) {
  int64_t token = 0;
  while (static_cast<float>(scores[token]) != most) token++;
  return {token, confident ? 1 / mass(scores, count, most) : 1};
}

// Guess `step` of a chain; its probability is NaN if the largest of the logits is not a number or infinite.
Guess guess(const at::Tensor& logits, int64_t width, const Choice& choice, int64_t step, bool confident) {
  Guess none{0, std::nan("")};
  auto count = std::min(logits.size(-1), width);
  auto last = logits.select(-2, -1).contiguous();
  if (choice.is_plain() && last.scalar_type() == at::kBFloat16) {
    auto scores = last.const_data_ptr<at::BFloat16>();
    auto most = largest(scores, count);
    return std::isfinite(most) ? likeliest(scores, count, most, confident) : none;
  }
  auto exact = last.to(at::kFloat, /*non_blocking=*/false, /*copy=*/!choice.is_plain());
  auto scores = exact.mutable_data_ptr<float>();
  for (auto token : choice.suppressed)
    if (0 <= token && token < count) scores[token] = NEVER;
  if (choice.temperature != 1)
    for (int64_t i = 0; i < count; i++) scores[i] /= static_cast<float>(choice.temperature);
  auto most = largest(scores, count);
  if (!std::isfinite(most)) return none;
  keep_most(scores, count, most, choice.k, choice.p, 1);
  if (choice.noise.empty()) return likeliest(scores, count, most, confident);
  auto address = folded(static_cast<uint64_t>(choice.noise[0]), static_cast<uint64_t>(choice.noise[1] + step));
  auto token = drawn(scores, count, most, address);
  return {token, confident ? std::exp(scores[token] - most) / mass(scores, count, most) : 1};
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
  // number, have an entry for every pass. The next five arguments are those of a choice, among `width` tokens. The chain
  // also ends with one of `ends`. A probability of NaN says that there is no guess.
  std::tuple<std::vector<int64_t>, std::vector<double>> chain(
      Tensors first, Tensors then, std::vector<int64_t> stacked, std::vector<int64_t> suppressed, double temperature,
      int64_t k, double p, std::vector<int64_t> noise, int64_t most, int64_t width, std::vector<int64_t> ends,
      std::vector<double> edges, std::vector<double> rates, double least, bool confident) {
    Choice choice{std::move(suppressed), temperature, k, p, std::move(noise)};
    std::vector<int64_t> tokens;
    std::vector<double> probabilities;
    auto logits = loader.boxed_run(std::move(first))[0];
    for (double chance = 1;;) {
      auto pass = static_cast<int64_t>(tokens.size());
      auto [token, probability] = guess(logits, width, choice, pass, confident);
      tokens.push_back(token);
      probabilities.push_back(probability);
      auto bin = std::upper_bound(edges.begin(), edges.end(), probability) - edges.begin();
      chance *= std::min(probability * rates.at(bin), 1.0);
      bool goes_on = chance >= least && std::find(ends.begin(), ends.end(), token) == ends.end();
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
