// A model's compiled passes (AOTInductor), and chains of them: a draft guesses token after token in one call.
//
// A pass calls functions, one of them for all layers that are alike. Its values have numbers: first its inputs, then
// the tensors that it holds, then what each call makes.
//
// Between two passes a token is chosen from the logits of each row, and the next pass reads it; positions and tables of
// all passes are computed beforehand. The rule that ends a row's chain is given as numbers:
//
//   edges, bases, rates
//                  a guess of probability p, in bin b of the bins between `edges`, is accepted with the chance
//                  min(bases[b] + p * rates[b], 1)
//   least          the chain goes on while the product of the chances of its guesses is more than that
//   pass_cost      by how much the chains that go on must exceed theirs together, or all end
//
// A head reads a token's embedding beside the hidden state that the previous pass returned.

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "filters.h"

namespace {

using Tensors = std::vector<at::Tensor>;

struct Guess {
  int64_t token;
  double probability;
};

// How guesses are chosen from logits: after filters the likeliest token, or the one that its noise favours.
struct Choice {
  std::vector<std::unique_ptr<Filter>> filters;
  std::vector<int64_t> noise;  // an address and the place of the first guess below it; of the likeliest token, nothing

  bool is_plain() const { return filters.empty() && noise.empty(); }
};

// The likeliest token, where `most` is the largest score, and its probability: 1 unless it must be known.
template <class In>
Guess likeliest(const In* scores, int64_t count, float most, bool confident) {
  int64_t token = 0;
  while (static_cast<float>(scores[token]) != most) token++;
  return {token, confident ? 1 / mass(scores, count, most) : 1};
}

// The rule of a row's chain: filters, noise of a choice, most guesses, number of tokens to choose from, tokens that end
// the chain, edges, bases, rates, least chance, cost of a pass, whether probabilities are needed, and whether scores
// are kept.
using Rule = std::tuple<std::vector<std::tuple<std::string, Numbers>>, std::vector<int64_t>, int64_t, int64_t,
                        std::vector<int64_t>, Numbers, Numbers, Numbers, double, double, bool, bool>;

// The chain of a row.
struct Chain {
  Choice choice;
  int64_t most, width;
  std::vector<int64_t> ends;
  std::vector<double> edges, bases, rates;
  double least, pass_cost;
  bool confident, keeps_scores;
  std::vector<int64_t> tokens;
  std::vector<double> probabilities;
  Tensors scores;  // of every guess, after filters, if they are kept
  double chance = 1;

  explicit Chain(Rule rule) {
    std::vector<std::tuple<std::string, Numbers>> filters;
    std::tie(filters, choice.noise, most, width, ends, edges, bases, rates, least, pass_cost, confident,
             keeps_scores) = std::move(rule);
    for (const auto& [name, numbers] : filters) choice.filters.push_back(filter(name, numbers));
  }

  // Adds a guess from logits `[vocab]`; returns whether the chain goes on, if a pass pays.
  bool grow(const at::Tensor& logits) {
    auto step = static_cast<int64_t>(tokens.size());
    auto [token, probability] = guess(logits, step);
    tokens.push_back(token);
    probabilities.push_back(probability);
    for (auto& filter : choice.filters) filter->follow(token);
    auto bin = std::upper_bound(edges.begin(), edges.end(), probability) - edges.begin();
    chance *= std::min(bases.at(bin) + probability * rates.at(bin), 1.0);
    return chance > least && step + 1 < most &&  // NaN is not large enough
           std::find(ends.begin(), ends.end(), token) == ends.end();
  }

 private:
  // Guess `step` from logits `[vocab]`; its probability is NaN if the largest score is not a number or infinite.
  Guess guess(const at::Tensor& logits, int64_t step) {
    Guess none{0, std::nan("")};
    auto count = std::min(logits.size(-1), width);
    auto last = logits.contiguous();
    if (choice.is_plain() && !keeps_scores && last.scalar_type() == at::kBFloat16) {
      auto scores = last.const_data_ptr<at::BFloat16>();
      auto most = largest(scores, count);
      return std::isfinite(most) ? likeliest(scores, count, most, confident) : none;
    }
    auto copies = keeps_scores || !choice.is_plain();
    auto exact = last.slice(0, 0, count).to(at::kFloat, /*non_blocking=*/false, copies);
    auto own = exact.mutable_data_ptr<float>();
    for (auto& filter : choice.filters) filter->apply(own, count, step);
    if (keeps_scores) scores.push_back(exact);
    auto most = largest(own, count);
    if (!std::isfinite(most)) return none;
    if (choice.noise.empty()) return likeliest(own, count, most, confident);
    auto address = folded(static_cast<uint64_t>(choice.noise[0]), static_cast<uint64_t>(choice.noise[1] + step));
    auto token = drawn(own, count, most, address);
    return {token, confident ? std::exp(own[token] - most) / mass(own, count, most) : 1};
  }
};

// A head's inputs for guesses, `wide` in all: embeddings beside the hidden states `written` before `[1, rows, width]`.
// A row of the table `[blocks, rows of a block, parts, numbers of a part]` begins with an embedding.
at::Tensor embedded(const std::vector<int64_t>& tokens, const at::Tensor& table, const at::Tensor& written,
                    int64_t wide) {
  Tensors rows;
  auto own = wide - written.size(-1), numbers = table.size(2) * table.size(3);
  TORCH_CHECK_VALUE(0 <= own && own <= numbers, "`embeddings` must have at least ", own, " numbers, got ", numbers);
  for (auto token : tokens) {
    auto row = table.select(0, token / table.size(1)).select(0, token % table.size(1));
    rows.push_back(row.flatten().slice(0, 0, own));
  }
  return at::cat({at::stack(rows).to(written.scalar_type()).unsqueeze(0), written}, -1);
}

// A function's number, and the numbers of the values that it reads and makes.
using Call = std::tuple<int64_t, std::vector<int64_t>, std::vector<int64_t>>;

struct Passes : torch::CustomClassHolder {
  // The package at `path` has functions named 0, 1 and so on; a pass returns the values `outputs`.
  Passes(const std::string& path, std::vector<Call> calls, std::vector<int64_t> outputs, int64_t inputs, Tensors held)
      : calls(std::move(calls)), outputs(std::move(outputs)), inputs(inputs), held(std::move(held)) {
    auto values = inputs + static_cast<int64_t>(this->held.size());
    for (const auto& [function, read, made] : this->calls) {
      if (function == static_cast<int64_t>(functions.size()))  // they are numbered in the order of their first calls
        functions.push_back(std::make_unique<Function>(path, std::to_string(function)));
      TORCH_CHECK_VALUE(function < static_cast<int64_t>(functions.size()), "there is no function ", function);
      for (auto value : read) TORCH_CHECK_VALUE(value < values, "there is no value ", value);
      values += static_cast<int64_t>(made.size());
    }
    last.assign(values, -1);
    for (size_t call = 0; call < this->calls.size(); call++)
      for (auto value : std::get<1>(this->calls[call])) last[value] = static_cast<int64_t>(call);
    for (auto value : this->outputs) last.at(value) = -1;
  }

  Tensors run(Tensors given) {
    TORCH_CHECK_VALUE(static_cast<int64_t>(given.size()) == inputs, "a pass has ", inputs, " inputs, got ", given.size());
    Tensors values = std::move(given);
    values.insert(values.end(), held.begin(), held.end());
    values.resize(last.size());
    for (size_t call = 0; call < calls.size(); call++) {
      const auto& [function, read, made] = calls[call];
      Tensors taken;
      taken.reserve(read.size());
      for (auto value : read) taken.push_back(values[value]);
      for (auto value : read)
        if (last[value] == static_cast<int64_t>(call)) values[value].reset();  // free as soon as nobody reads it
      auto results = functions[function]->boxed_run(std::move(taken));
      for (size_t place = 0; place < made.size(); place++) values[made[place]] = std::move(results.at(place));
    }
    Tensors returned;
    for (auto value : outputs) returned.push_back(values[value]);
    return returned;
  }

  // Drafts a chain per row: guesses, their probabilities (NaN: no guess), and their scores `[guesses, tokens]` if kept.
  // The first pass has inputs `first` and returns the logits after the rows' texts. Each later one reads a guess of
  // every row whose chain goes on, with these rows of `positions` `[passes, 1, rows]`, `tables` `[passes, 1, 1, rows,
  // …]` and `encoders` `[1, 1, rows, …]`, and `others`. A model with `embeddings` is a head.
  std::tuple<std::vector<std::vector<int64_t>>, std::vector<std::vector<double>>, Tensors> draft_chain(
      Tensors first, at::Tensor positions, Tensors tables, Tensors encoders, Tensors others, std::vector<Rule> rules,
      std::optional<at::Tensor> embeddings) {
    std::vector<Chain> chains(std::make_move_iterator(rules.begin()), std::make_move_iterator(rules.end()));
    std::vector<int64_t> live(chains.size());  // the rows of a pass
    std::iota(live.begin(), live.end(), 0);
    auto wide = first[0].size(-1);
    auto outputs = run(std::move(first));
    TORCH_CHECK_VALUE(outputs[0].size(1) == static_cast<int64_t>(chains.size()), "`rules` must be one for each of ",
                      outputs[0].size(1), " rows, got ", chains.size());
    auto states = outputs.size() - 1;
    for (int64_t pass = 0;; pass++) {
      std::vector<int64_t> on, places, tokens;  // the rows that go on, their places in the last pass, and guesses
      double gain = 0, cost = 0;
      for (int64_t place = 0; place < static_cast<int64_t>(live.size()); place++) {
        auto& chain = chains[live[place]];
        if (!chain.grow(outputs[0].select(0, 0).select(0, place))) continue;
        on.push_back(live[place]), places.push_back(place), tokens.push_back(chain.tokens.back());
        gain += chain.chance - chain.least, cost = std::max(cost, chain.pass_cost);
      }
      if (on.empty() || gain < cost) break;
      auto rows = at::tensor(on), all = at::arange(static_cast<int64_t>(on.size()));
      Tensors given{embeddings ? embedded(tokens, *embeddings, outputs.back().index_select(1, at::tensor(places)), wide)
                               : at::tensor(tokens).unsqueeze(0),
                    positions.select(0, pass).index_select(1, rows), all};
      for (auto& one : tables) given.push_back(one.select(0, pass).index_select(2, rows));
      for (auto& one : encoders) given.push_back(one.index_select(2, rows));
      given.insert(given.end(), others.begin(), others.end());
      given.insert(given.end(), states, embeddings ? all : at::empty({0}, at::kLong));
      outputs = run(std::move(given));
      live = std::move(on);
    }
    std::vector<std::vector<int64_t>> tokens;
    std::vector<std::vector<double>> probabilities;
    Tensors scores;
    for (auto& chain : chains) {
      tokens.push_back(std::move(chain.tokens));
      probabilities.push_back(std::move(chain.probabilities));
      if (chain.keeps_scores) scores.push_back(at::stack(chain.scores));
    }
    return {tokens, probabilities, scores};
  }

 private:
  using Function = torch::inductor::AOTIModelPackageLoader;

  std::vector<std::unique_ptr<Function>> functions;
  std::vector<Call> calls;
  std::vector<int64_t> outputs;
  int64_t inputs;
  Tensors held;
  std::vector<int64_t> last;  // by value: the last call that reads it, or -1 if the pass returns it
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.class_<Passes>("Passes")
      .def(torch::init<const std::string&, std::vector<Call>, std::vector<int64_t>, int64_t, Tensors>())
      .def("run", &Passes::run)
      .def("draft_chain", &Passes::draft_chain);
}
