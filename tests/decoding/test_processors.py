"""Every option's processor equals transformers' own, alone and together, padded or not."""

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers import LogitsProcessorList as StockList
from transformers.generation import logits_process as stock

from specdec.decoding.processors import Processors, build_processors
from specdec.errors import OptionError
from specdec.options.generate import Options
from tests.versions import wrong_before

VOCAB, EOS = 40, [2, 7]

FIELDS = {
    "sequence_bias": [[[5], 2.0], [[6, 9], -3.0]], "encoder_repetition_penalty": 1.3, "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "bad_words_ids": [[3], [4, 8], [2]], "min_length": 9,
    "min_new_tokens": 3, "forced_bos_token_id": 11, "forced_eos_token_id": 2, "remove_invalid_values": True,
    "exponential_decay_length_penalty": (1, 1.2), "suppress_tokens": [1, 12], "begin_suppress_tokens": [13, 14],
    "temperature": 0.6, "top_h": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.7, "epsilon_cutoff": 0.02,
    "eta_cutoff": 0.03, "renormalize_logits": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    return LlamaForCausalLM(config)


def options(**fields) -> GenerationConfig:
    config = GenerationConfig(**{"do_sample": True, "max_length": 14, "num_beams": 1, **fields})
    config._eos_token_tensor = torch.tensor(EOS)
    return config


def theirs(model, config, prompt, *, padding=0) -> StockList:
    mask = torch.ones_like(prompt)
    mask[:, :padding] = 0
    return model._get_logits_processor(
        config, input_ids_seq_length=prompt.shape[1], encoder_input_ids=prompt[:, padding:],
        prefix_allowed_tokens_fn=None, logits_processor=StockList(),
        model_kwargs={"attention_mask": mask},
    )  # fmt: skip


def ours(config, prompt, *, padding=0, **more) -> Processors:
    fields = {name: value for name in Options.model_fields if (value := getattr(config, name, None)) is not None}
    setup = {"prompt_length": prompt.shape[1], "padding": padding, "encoder_ids": prompt[:, padding:]}
    return build_processors(Options(**fields, eos_token_id=EOS), **setup, **more)


def texts(padding: int, seed: int = 0):
    """Prompts of 6 with `padding` zeros in front, and 0 to 7 tokens after them: the whole way to max_length."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (1, 14), generator=generator)
    ids[:, 8] = ids[:, 6]  # something to repeat
    ids[:, :padding] = 0
    for length in range(6, 14):
        yield ids[:, :length], torch.randn(1, VOCAB, generator=generator) * 3


def assert_equal(model, config, padding=0, **more) -> None:
    for seed in range(3):
        prompt = next(texts(padding, seed))[0]
        stock_list, mine = theirs(model, config, prompt, padding=padding), ours(config, prompt, padding=padding, **more)
        assert len(mine)
        for ids, logits in texts(padding, seed):
            before = logits.clone()
            expected = stock_list(ids, logits.clone())
            got = mine(ids[:, padding:] if mine.reads_ids else None, logits)
            first = 1 if padding else 0  # some versions penalise the padding token as well
            torch.testing.assert_close(got[:, first:], expected[:, first:], rtol=1e-6, atol=1e-6)
            assert torch.equal(logits, before)


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_makes_transformers_processor(model, field) -> None:
    """One option at a time gives the scores that transformers gives, and leaves its input alone."""
    assert_equal(model, options(**{field: FIELDS[field]}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_k", 1), ("top_p", 0.05), ("min_p", 0.99), ("typical_p", 0.05), ("epsilon_cutoff", 0.9), ("eta_cutoff", 0.9)],
)
def test_beams_keep_more_than_the_ends(model, field, value) -> None:
    """However narrow a warper, beams that sample are left one token more than can end a text."""
    config = options(num_beams=2, **{field: value})
    assert_equal(model, config)
    logits = torch.randn(1, VOCAB)
    assert (ours(config, torch.tensor([[1, 5]]))(None, logits) > -torch.inf).sum() >= len(EOS) + 1


@wrong_before("length penalties of impossible tokens")
def test_all_fields_keep_transformers_order(model) -> None:
    """All options together, whose result depends on their order."""
    assert_equal(model, options(**{k: v for k, v in FIELDS.items() if k != "remove_invalid_values"}))


@pytest.mark.parametrize(
    "fields",
    [
        *(["min_length"], ["min_new_tokens"], ["forced_eos_token_id"], ["begin_suppress_tokens"]),
        ["repetition_penalty", "exponential_decay_length_penalty"],  # this starts after the prompt
    ],
)
def test_padding_counts_as_in_transformers(model, fields) -> None:
    """Lengths mean what they mean for the padded row, although our ids hold no padding; penalties overlook it."""
    assert_equal(model, options(**{field: FIELDS[field] for field in fields}), padding=3)


def test_forced_bos_acts_on_a_single_known_token(model) -> None:
    """At length one the forced token alone is left, and suppression at the start moves one further."""
    config = options(forced_bos_token_id=11, begin_suppress_tokens=[13])
    prompt, logits = torch.tensor([[1]]), torch.randn(1, VOCAB)
    mine, stock_list = ours(config, prompt), theirs(model, config, prompt)
    for ids in (prompt, torch.tensor([[1, 11]])):
        assert torch.equal(mine(ids, logits), stock_list(ids, logits.clone()))


def test_no_options_leave_logits_untouched() -> None:
    """The fast path returns the very tensor."""
    made = build_processors(Options(), prompt_length=3)
    logits = torch.randn(1, 9)
    assert len(made) == 0
    assert made.pure
    assert not made.reads_ids
    assert made(None, logits) is logits


def test_users_processor_replaces_its_kind_or_follows() -> None:
    """A user's processor of a kind the options make takes its place; others come before the warpers."""
    own = stock.NoRepeatNGramLogitsProcessor(3)
    other = stock.LogitNormalization()
    config = options(no_repeat_ngram_size=2, suppress_tokens=[1], temperature=0.5)
    made = ours(config, torch.ones(1, 4, dtype=torch.long), extra=[other, own])
    names = [type(item).__name__ for item in made.items]
    assert made.items[0] is own
    assert made.items[2] is other
    assert names[1] == "Suppress"
    assert names[3] == "TemperatureLogitsWarper"


def test_drafts_see_only_known_functions() -> None:
    """A user's processor is neither pure nor shown to drafts, and what it writes in place stays its own."""

    def own(ids, logits):
        logits[:, 0] = 9.0
        return logits

    made = build_processors(Options(do_sample=True, top_k=4, temperature=0.5), prompt_length=1, extra=[own])
    logits = torch.zeros(1, VOCAB)
    assert made(torch.ones(1, 1, dtype=torch.long), logits).argmax() == 0
    assert not logits.any()
    assert (made.pure, made.reads_ids, len(made)) == (False, True, 3)
    assert (made.drafting.pure, made.drafting.reads_ids, len(made.drafting)) == (True, False, 2)


def test_prefix_function_hears_the_number_of_its_row(model) -> None:
    """A row alone keeps the batch number it has among its siblings."""
    heard = []

    def allowed(row, ids):
        heard.append((row, ids.tolist()))
        return [4, 5]

    made = build_processors(Options(), prompt_length=2, prefix_allowed_tokens_fn=allowed, row=3)
    out = made(torch.tensor([[8, 9]]), torch.randn(1, VOCAB))
    assert heard == [(3, [8, 9])]
    assert out.isfinite().nonzero()[:, 1].tolist() == [4, 5]
    assert not made.pure


@pytest.mark.parametrize("found", [[], None, 4, torch.tensor([], dtype=torch.long), [10**6], [-1], "ab", [1.5]])
def test_a_prefix_function_that_allows_no_token(found) -> None:
    """It was a bare ValueError, TypeError or IndexError, and -1 was the vocabulary's last token."""
    made = build_processors(Options(), prompt_length=2, prefix_allowed_tokens_fn=lambda row, ids: found, row=3)
    with pytest.raises(
        OptionError, match=r"`prefix_allowed_tokens_fn` must .*row 3, after 2 ids.*return \[eos_token_id\]"
    ):
        made(torch.tensor([[8, 9]]), torch.randn(1, VOCAB))


def test_integers_pass_for_floats() -> None:
    """`temperature=2` is clear enough, though transformers' warper insists on a float."""
    made = build_processors(Options(do_sample=True, temperature=2), prompt_length=1)
    assert torch.equal(made(None, torch.full((1, 4), 3.0)), torch.full((1, 4), 1.5))


@pytest.mark.parametrize(
    ("fields", "more", "word"),
    [
        ({"do_sample": True, "typical_p": 0.0}, {}, "typical_p"),
        ({"exponential_decay_length_penalty": (1, 1.1)}, {}, "eos_token_id"),
        ({}, {"extra": [lambda ids, logits, third: logits]}, "third"),
    ],
)
def test_bad_values_name_their_option(fields, more, word) -> None:
    """An option that a processor refuses raises an error with its name, before any forward pass."""
    with pytest.raises(OptionError, match=word):
        build_processors(Options(**fields), prompt_length=1, **more)


def test_two_guidances_contradict() -> None:
    """A guidance processor of the user and `guidance_scale` would guide twice."""
    own = stock.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model=None)
    with pytest.raises(OptionError, match="guidance_scale"):
        build_processors(Options(guidance_scale=1.5), prompt_length=1, extra=[own])
