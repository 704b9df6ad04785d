"""Prompts of every shape: equal to transformers where it takes them, and a clear error where nobody can."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, LogitsProcessor
from transformers.modeling_outputs import BaseModelOutput

from specdec import LanguageModel, OptionError, SpecGenerator, UnsupportedError
from specdec.core.tree import Tree
from tests.folders import WIDTH, byte_tokenizer
from tests.generator.conftest import Letters, idle
from tests.matrix import pairwise, slow
from tests.oracle import oracle
from tests.proposers.fakes import OwnProposer
from tests.tiny import ENCODER_DECODERS, tiny, tiny_inputs

COMMON: dict[str, Any] = {"max_new_tokens": 10, "pad_token_id": 0}
IDS = torch.tensor([[5, 9, 12, 7, 30, 6], [8, 8, 4, 3, 11, 40]])


def theirs(model: Any, *args: Any, **options: Any) -> list[list[int]]:
    """transformers' greedy text."""
    with torch.no_grad():
        return model.generate(*args, **{**COMMON, "do_sample": False, "eos_token_id": None, **options}).tolist()


def ours(model: Any, *args: Any, draft: Any = "suffix", **options: Any) -> list[list[int]]:
    """The same call here."""
    return SpecGenerator(model, draft).generate(*args, **{**COMMON, "eos_token_id": [], **options}).sequences.tolist()


def test_an_empty_text_starts_as_no_prompt_does() -> None:
    """From the start id, alone and in a batch; without one it is an error."""
    generator = SpecGenerator(tiny("llama", vocab_size=WIDTH), "suffix", tokenizer=byte_tokenizer(), **COMMON)
    alone, others = generator.generate(), generator.generate(["", "ab"])
    assert generator.generate("").sequences.tolist() == alone.sequences.tolist()
    assert others.new_tokens()[0] == alone.new_tokens()[0]
    generator.target.model.generation_config.bos_token_id = None
    with pytest.raises(OptionError, match="row 0 of `prompt` is empty"):
        generator.generate("")


# --- decoder prompts of encoder-decoders


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        *(("t5", prompt) for prompt in ([[0, 7, 9], [0, 8, 8]], [[7, 9], [8, 8]], [[0, 7], [8, 8]])),
        ("bart", [[1, 0, 9, 0]]),
    ],
)
def test_padding_ids_in_a_decoder_prompt_stay(name: str, prompt: list[list[int]]) -> None:
    """Only a mask says what is padding there, and T5 starts with its padding id.

    (It was told by the id: a leading start token was stripped, and put back twice.)
    """
    model = tiny(name, **({"decoder_start_token_id": 0} if name == "t5" else {}))
    inputs = {**tiny_inputs(name, rows=len(prompt)), "decoder_input_ids": torch.tensor(prompt)}
    assert ours(model, **inputs) == theirs(model, **inputs)


def test_start_ids_of_each_row() -> None:
    """Every row is begun with its own start id. (All got the first row's.)"""
    model = tiny("t5")
    starts = [1, 3, 4]
    inputs = tiny_inputs("t5", rows=3)
    prompt = torch.tensor([[7, 9], [8, 8], [6, 7]])
    for more in ({}, {"decoder_input_ids": prompt}):
        expected = theirs(model, **inputs, **more, decoder_start_token_id=starts)
        assert [row[0] for row in expected] == starts
        assert ours(model, **inputs, **more, decoder_start_token_id=starts) == expected


def test_decoder_mask() -> None:
    """Padding that the mask of the decoder prompt names is not read: the row equals the row alone."""
    model = tiny("t5")
    inputs = tiny_inputs("t5", rows=2)
    padded = {"decoder_input_ids": [[1, 7, 9], [0, 1, 8]], "decoder_attention_mask": [[1, 1, 1], [0, 1, 1]]}
    both = ours(model, **inputs, **padded)
    one = {name: value[1:] for name, value in inputs.items()}
    assert both[1][3:] == ours(model, **one, decoder_input_ids=torch.tensor([[1, 8]]))[0][2:]


# --- what an encoder reads

PADDED = torch.tensor([[0, 0, 0, 9, 12, 7, 30, 6], [8, 8, 4, 3, 11, 40, 5, 6], [0, 21, 9, 33, 8, 0, 40, 0]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8, [0, 1, 1, 1, 1, 0, 1, 0]])


USUAL = ("t5", "bart", "m2m_100", "blenderbot")
OTHERS = [name for name in ENCODER_DECODERS if name not in (*USUAL, "whisper")]


@pytest.mark.parametrize("name", [*USUAL, *map(slow, OTHERS)])
def test_padding_anywhere_in_encoder_ids(name: str) -> None:
    """An encoder gets the ids and mask as they are. (Padding was moved to the right, where positions count columns.)

    What the mask leaves out is never looked up.
    """
    model = tiny(name)
    mask = {"attention_mask": MASK}
    free = {"encoder_no_repeat_ngram_size": 0}  # Blenderbot's; transformers counts padding, too, as text
    expected = theirs(model, PADDED, **mask, **free)
    for draft in (None, tiny(name), tiny(name, seed=1)):
        assert ours(model, PADDED, draft=draft, **mask, **free) == expected, draft
    assert ours(model, PADDED.tolist(), attention_mask=MASK.tolist(), **free) == expected
    assert ours(model, PADDED.masked_fill(MASK == 0, -100), **mask, **free) == expected


@pytest.mark.parametrize("name", ["bart", "mbart", "t5"])
def test_padding_that_no_mask_names(name: str) -> None:
    """An encoder reads all of a tensor that comes without a mask. (It was searched for padding.) Lists are padded."""
    model = tiny(name)
    assert ours(model, PADDED) == theirs(model, PADDED)
    rows = [[9, 12, 7], [8, 8, 4, 3, 11]]
    right = {"input_ids": torch.tensor([[9, 12, 7, 0, 0], rows[1]]), "attention_mask": [[1, 1, 1, 0, 0], [1] * 5]}
    assert ours(model, rows) == ours(model, **right) == [ours(model, [row])[0] for row in rows]


@pytest.mark.parametrize("draft", [None, "own", "shared"])
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_what_the_encoder_made_is_not_made_again(name: str, draft: str | None) -> None:
    """`encoder_outputs` in either spelling stand for the encoder's pass; a draft's own encoder reads the inputs."""
    model = tiny(name)
    inputs = tiny_inputs(name, rows=2)
    expected = ours(model, draft=None, **inputs)
    encoding = LanguageModel(model).encode(inputs)
    helper = {"own": tiny(name, seed=1), "shared": tiny(name)}.get(draft or "")
    model.get_encoder().forward = None
    beside = inputs if name == "t5" or draft == "own" else {}
    hidden = BaseModelOutput(last_hidden_state=encoding.hidden)
    for outputs in (encoding, hidden, (encoding.hidden,), encoding.hidden):
        assert ours(model, draft=helper, encoder_outputs=outputs, **beside) == expected


def test_a_draft_with_an_encoder_of_its_own_needs_inputs() -> None:
    """Without them the call is refused before any pass, and calls beside it go on."""
    model = tiny("t5")
    generator = SpecGenerator(model, tiny("t5", seed=1))
    hidden = LanguageModel(model).encode(tiny_inputs("t5")).hidden
    with pytest.raises(UnsupportedError, match="needs encoder inputs"):
        generator.generate(encoder_outputs=hidden, max_new_tokens=4)
    assert generator.engine.session.passes == 0


def test_drafts_read_the_encoder_s_text_without_padding() -> None:
    """(What a text draft copies from the source must not be padding.)"""
    seen: list[list[int] | None] = []

    class Copy(OwnProposer):
        instant = True

        def propose(self, rows: Any, plans: Any) -> list[Tree]:
            seen.extend(row.encoder_tokens for row in rows)
            return [Tree([], []) for _ in rows]

    ours(tiny("bart"), PADDED, draft=Copy(), attention_mask=MASK, max_new_tokens=3)
    assert seen[:3] == [row[mask.bool()].tolist() for row, mask in zip(PADDED, MASK, strict=True)]


# --- embeddings


class Seen(LogitsProcessor):
    """Remembers the ids it was shown."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.ids.append(input_ids.tolist()[0])
        return scores


def embedded(model: Any, ids: torch.Tensor = IDS[:1]) -> torch.Tensor:
    return model.get_input_embeddings()(ids).detach()


EMBEDDED_OPTIONS: list[dict[str, Any]] = [
    {}, {"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 1}, {"forced_bos_token_id": 7},
    {"forced_eos_token_id": 3}, {"max_new_tokens": None, "max_length": 14}, {"max_new_tokens": None},
    {"min_length": 12, "eos_token_id": 2}, {"min_new_tokens": 9, "eos_token_id": 2},
    {"guidance_scale": 1.6, "negative_prompt_ids": torch.tensor([[4, 9]])},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Passing", "ignore:Using the model-agnostic default")
@pytest.mark.parametrize("options", EMBEDDED_OPTIONS, ids=str)
def test_embeddings_equal_transformers(options: dict[str, Any]) -> None:
    """Without ids, only new tokens count for processors. (Placeholders of id 0 leaked into processors, limits, drafts
    and results.)"""
    model = tiny("llama")
    embeds = embedded(model)
    expected = theirs(model, inputs_embeds=embeds, **options)
    for draft in (None, "suffix", "early_exit:1", oracle("wrong", expected, 64)):
        assert ours(model, inputs_embeds=embeds, draft=draft, **{"eos_token_id": [], **options}) == expected, draft


def test_processors_see_the_new_ids_alone() -> None:
    """The first call sees ids of shape [1, 0]; a user's draft is asked once there is text.

    There is no prompt for an encoder's penalty to prefer. (The placeholder 0 was taken for it.)
    """
    model, seen, asked = tiny("llama"), Seen(), []

    def draft(tokens: list[int], k: int) -> list[int]:
        asked.append(list(tokens))
        return []

    new = ours(model, inputs_embeds=embedded(model), draft=draft, logits_processor=seen)[0]
    with pytest.warns(UserWarning, match="changes nothing: the input has no ids"):
        assert ours(model, inputs_embeds=embedded(model), encoder_repetition_penalty=5.0) == [new]
    assert seen.ids == [new[:n] for n in range(10)]
    assert asked[0] == new[:1]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba"])
def test_embeddings_with_their_ids(name: str) -> None:
    """Both together: the ids are the text, the embeddings what is read. (It was refused as a prompt given twice.)"""
    model = tiny(name)
    embeds = embedded(model, IDS + 1)
    expected = theirs(model, input_ids=IDS, inputs_embeds=embeds, repetition_penalty=1.5)
    assert ours(model, input_ids=IDS, inputs_embeds=embeds, repetition_penalty=1.5) == expected
    assert [row[:6] for row in expected] == IDS.tolist()


@pytest.mark.parametrize("name", ["llama", "mamba", "gpt_neo"])
@pytest.mark.parametrize("with_ids", [True, False])
def test_embeddings_are_read_in_chunks(name: str, with_ids: bool) -> None:
    """Each chunk gets its own part of the embeddings. (More than one chunk crashed.)"""
    model = tiny(name)
    embeds = embedded(model, IDS + 1)
    given = {"inputs_embeds": embeds, **({"input_ids": IDS} if with_ids else {})}
    assert ours(model, **given, prefill_chunk_size=2) == theirs(model, **given)


def test_ragged_embeddings() -> None:
    """A masked row equals the row alone."""
    model = tiny("llama")
    mask = [[0, 0, 1, 1, 1, 1], [1] * 6]
    both = ours(model, inputs_embeds=embedded(model, IDS), attention_mask=mask)
    assert both == [ours(model, inputs_embeds=embedded(model, ids))[0] for ids in (IDS[:1, 2:], IDS[1:])]


def test_embeddings_count_as_positions() -> None:
    """The prompt is part of the limit although its ids are not known."""
    model = tiny("gpt2", n_positions=12)
    assert len(ours(model, inputs_embeds=embedded(model), max_new_tokens=7)[0]) == 7
    with pytest.raises(OptionError, match="13 positions"):
        ours(model, inputs_embeds=embedded(model), max_new_tokens=8)
    with pytest.raises(OptionError, match="prompt of 6 tokens"):
        ours(model, inputs_embeds=embedded(model), max_new_tokens=None, max_length=6)


# --- negative prompts


@pytest.mark.parametrize("negative", [None, [[4, 9, 9]], [[4, 9, 9], [6, 8, 7]]])
def test_guidance_equals_transformers(negative: list[list[int]] | None) -> None:
    """A negative prompt for all or one for each, as a list or a tensor. (A list crashed.)"""
    model = tiny("llama")
    tensor = None if negative is None else torch.tensor(negative)
    everyone = None if tensor is None else tensor.expand(2, -1).contiguous()
    expected = theirs(model, IDS, guidance_scale=1.7, negative_prompt_ids=everyone)
    for draft, given in pairwise(draft=(None, "suffix", "early_exit:1"), given=(negative, tensor)):
        assert ours(model, IDS, draft=draft, guidance_scale=1.7, negative_prompt_ids=given) == expected


def test_negative_prompts_of_several_answers() -> None:
    """Each copy of a prompt keeps the prompt's own negative, without its padding. (Row 1 took the second prompt's.)"""
    model = tiny("llama")
    options = {"guidance_scale": 1.7, "do_sample": True, "top_k": 1, "seed": 0}
    negative = [[4, 9, 9], [6, 8]]
    padded = {"negative_prompt_ids": [[4, 9, 9], [0, 6, 8]], "negative_prompt_attention_mask": [[1, 1, 1], [0, 1, 1]]}
    twice = ours(model, IDS, **options, **padded, num_return_sequences=2)
    assert twice[:2] == [ours(model, IDS[:1], **options, negative_prompt_ids=negative[:1])[0]] * 2
    assert twice[2:] == [ours(model, IDS[1:], **options, negative_prompt_ids=negative[1:])[0]] * 2


# --- shapes that tokenizers and processors give


SPELLINGS = {
    "lists": IDS.tolist(), "array": IDS.numpy(), "list of tensors": list(IDS), "list of arrays": list(IDS.numpy()),
    "numpy ids": [[np.int64(i) for i in row] for row in IDS.tolist()],
    "encoding": BatchEncoding({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}),
    "encoding of lists": BatchEncoding({"input_ids": IDS.tolist(), "attention_mask": [[1] * 6] * 2}),
    "dict": {"input_ids": IDS},
}  # fmt: skip


@pytest.mark.parametrize("prompt", SPELLINGS.values(), ids=SPELLINGS)
def test_prompts_in_every_spelling(prompt: Any) -> None:
    """Lists, tensors, arrays and what a tokenizer returns are the same prompt. (A BatchEncoding was refused.)"""
    model = tiny("llama")
    assert ours(model, prompt) == ours(model, IDS)


def test_a_mask_may_be_a_list() -> None:
    """For tensors and for lists. (It had to be a tensor, and could not go with lists.)"""
    model = tiny("llama")
    padded, mask = [[0, 0, 5, 9], [8, 8, 4, 3]], [[0, 0, 1, 1], [1, 1, 1, 1]]
    expected = ours(model, torch.tensor(padded), attention_mask=torch.tensor(mask))
    assert ours(model, torch.tensor(padded), attention_mask=mask) == expected
    assert ours(model, padded, attention_mask=mask) == expected
    assert expected[0][4:] == ours(model, [[5, 9]])[0][2:]


def test_columns_of_padding_count() -> None:
    """`max_length` counts columns that are padding in every row, as transformers does. (It counted kept tokens.)"""
    model = tiny("llama")
    inputs = {"input_ids": torch.tensor([[0, 0, 5, 9]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    options = {"max_new_tokens": None, "max_length": 9}
    assert ours(model, **inputs, **options) == theirs(model, **inputs, **options)


def test_features_in_every_spelling() -> None:
    """Features as a list or as the first argument. (Lists crashed, and the first argument had to be ids.)"""
    model = tiny("whisper")
    features = tiny_inputs("whisper")["input_features"]
    expected = ours(model, input_features=features)
    assert ours(model, input_features=features.tolist()) == ours(model, features) == expected


# --- errors, before any forward


@pytest.fixture(scope="module")
def generators() -> dict[str, SpecGenerator]:
    return {name: idle(name, Letters()) for name in ("llama", "t5", "whisper")}


CHAT = [{"role": "user", "content": "hi"}]
EMBEDS = torch.zeros(1, 3, 32)
GUIDED = {"guidance_scale": 1.5}
CONVERSATIONS = [CHAT, [CHAT], CHAT[0]]
WRONG: list[tuple[str, Any, dict[str, Any], str]] = [
    *(("llama", prompt, {}, "empty") for prompt in ([], [[]], torch.empty(1, 0).long(), torch.empty(0, 4))),
    ("llama", torch.empty(0, 4, dtype=torch.long), {}, "empty"),
    *(("llama", [[5, token]], {}, f"token {token}") for token in (99, -1)),
    *(("llama", prompt, {}, "input_ids") for prompt in (torch.tensor([[0.5, 1.0]]), torch.zeros(1, 2, 3).long())),
    ("llama", 5, {}, "prompt"),
    *(("llama", prompt, {}, "the prompt is a conversation: pass it as `messages=`") for prompt in CONVERSATIONS),
    ("llama", IDS, {"attention_mask": torch.ones(2, 5)}, "attention_mask"),
    ("llama", IDS, {"attention_mask": torch.zeros(2, 6)}, "empty"),
    ("llama", IDS, {"messages": CHAT}, "given 2 times"),
    ("llama", None, {"input_features": torch.zeros(1, 8, 40)}, "encoder"),
    ("llama", {"a": 1}, {}, "prompt is a mapping with ['a']"),
    ("llama", {"input_ids": IDS}, {"input_ids": IDS}, "given 2 times"),
    *(("llama", [[5, token]], {}, "token ids") for token in ("x", True)),
    *(("llama", IDS, {"attention_mask": m}, "attention_mask") for m in (5, [[1, 1], [1]], torch.ones(2, 6, 6))),
    ("llama", None, {"attention_mask": torch.ones(1, 3)}, "attention_mask"),
    ("llama", "text", {"attention_mask": torch.ones(1, 4)}, "attention_mask"),
    ("llama", None, {"messages": CHAT}, "chat template"),
    *(("llama", IDS, {name: IDS}, name) for name in ("decoder_input_ids", "decoder_attention_mask")),
    *((name, None, {"encoder_outputs": 3}, "encoder_outputs") for name in ("llama", "t5")),
    ("t5", None, {"encoder_outputs": (torch.zeros(3, 32),)}, "[rows, frames, width]"),
    ("t5", IDS, {"encoder_outputs": torch.zeros(1, 6, 32)}, "2 rows"),
    ("t5", None, {"encoder_outputs": torch.zeros(1, 6, 31)}, "[rows, frames, 32]"),
    ("t5", None, {"encoder_outputs": torch.zeros(1, 0, 32)}, "at least one frame"),
    *(
        ("llama", None, {"inputs_embeds": torch.zeros(n)}, "[rows, length, 32]")
        for n in ((1, 3, 31), (3, 32), (0, 3, 32))
    ),
    ("llama", None, {"inputs_embeds": [[1.0]]}, "[rows, length, 32]"),
    ("llama", None, {"inputs_embeds": EMBEDS, "attention_mask": torch.ones(1, 4)}, "attention_mask"),
    ("llama", None, {"inputs_embeds": EMBEDS, "attention_mask": torch.zeros(1, 3)}, "empty"),
    ("llama", [[5, 6]], {"inputs_embeds": EMBEDS}, "equally long"),
    ("llama", None, {"inputs_embeds": EMBEDS, **GUIDED}, "negative_prompt_ids"),
    ("llama", IDS, {**GUIDED, "negative_prompt_ids": [[99]]}, "token 99"),
    ("llama", IDS, {**GUIDED, "negative_prompt_ids": [[]]}, "empty"),
    ("llama", IDS, {**GUIDED, "negative_prompt_ids": "text"}, "negative_prompt_ids"),
    ("llama", IDS, {**GUIDED, "negative_prompt_ids": [[5], [6], [7]]}, "one for each of 2"),
    ("llama", IDS, {**GUIDED, "negative_prompt_ids": [[5]], "negative_prompt_attention_mask": [[1, 1]]}, "_mask"),
    ("llama", IDS, {**GUIDED, "negative_prompt_attention_mask": [[1, 1]]}, "negative_prompt_ids"),
    ("llama", IDS, {"logits_processor": 3}, "logits_processor"),
    ("llama", IDS, {"stopping_criteria": [5]}, "stopping_criteria"),
    ("llama", IDS[:1], {"streamer": 3}, "streamer"),
    ("llama", IDS, {"prefix_allowed_tokens_fn": 5}, "prefix_allowed_tokens_fn"),
    ("llama", IDS, {"bad_words_ids": [[5], [6, 64]]}, "bad_words_ids"),
    *(("llama", IDS, {"sequence_bias": bias}, "sequence_bias") for bias in ({(64,): 1.0}, [[[5, 64], 1.0]])),
    *(("llama", IDS, {name: [64]}, name) for name in ("suppress_tokens", "begin_suppress_tokens")),
    ("llama", IDS, {"forced_bos_token_id": 64}, "forced_bos_token_id"),
    ("llama", IDS, {"forced_eos_token_id": [2, 64]}, "forced_eos_token_id"),
    ("whisper", None, {"inputs_embeds": EMBEDS}, "does not read `inputs_embeds`"),
    ("t5", IDS, GUIDED, "guidance_scale"),
    ("t5", IDS, {"decoder_input_ids": [[5]]}, "2 rows"),
    ("t5", IDS, {"decoder_attention_mask": [[1]]}, "decoder_input_ids"),
    ("t5", IDS, {"decoder_start_token_id": [1, 2, 3]}, "decoder_start_token_id"),
    ("t5", IDS, {"decoder_start_token_id": 64}, "token 64"),
    *(("whisper", None, {"input_features": torch.zeros(n)}, "3 dimensions") for n in ((8, 40), (0, 8, 40))),
    ("whisper", None, {"input_features": [[1.0], [1.0, 2.0]]}, "lists of equal lengths"),
    ("whisper", None, {"input_features": torch.zeros(1, 8, 40), "attention_mask": [1, 1]}, "attention_mask"),
    # (The error spoke of lists of equal lengths.)
    *(("whisper", text, {}, "`input_features`: for recordings there are specdec.Tr") for text in ("hi", ["hi", "ho"])),
]


@pytest.mark.parametrize(("name", "prompt", "options", "message"), WRONG, ids=lambda v: str(v)[:40])
def test_wrong_inputs(
    generators: dict[str, SpecGenerator], name: str, prompt: Any, options: dict[str, Any], message: str
) -> None:
    """Each raises OptionError and runs nothing, a stream before its first event is asked for.

    (Most were raw errors from torch, and some were ignored.)
    """
    for call in (generators[name].generate, generators[name].stream):
        with pytest.raises(OptionError) as caught:
            call(prompt, **{"max_new_tokens": 4, **options})
        assert message in str(caught.value)


def test_the_checkpoint_s_own_ids_never_raise() -> None:
    """A checkpoint that suppresses ids beyond its vocabulary can still be used."""
    model = tiny("llama")
    model.generation_config.suppress_tokens = [7, 64]
    model.generation_config.pad_token_id = 64
    out = SpecGenerator(model).generate(IDS, max_new_tokens=4, output_scores=True)
    assert out.scores is not None
    with pytest.raises(OptionError, match="suppress_tokens"):
        SpecGenerator(model).generate(IDS, max_new_tokens=4, suppress_tokens=[64])


def test_one_processor_or_criterion_alone() -> None:
    """A single callable stands for a list of one. (It raised that it cannot be iterated.)"""
    model, seen = tiny("llama"), Seen()
    out = ours(model, IDS[:1], logits_processor=seen, stopping_criteria=lambda ids, scores: ids.shape[1] >= 9)
    assert len(seen.ids) == 3
    assert len(out[0]) == 9


# --- positions


def test_a_prompt_beyond_the_trained_positions() -> None:
    """Rotary models read on, and the caller is warned. (Nothing said why the text made no sense.)"""
    model = tiny("llama", max_position_embeddings=6)
    assert len(ours(model, input_ids=IDS[:1], max_new_tokens=4)[0]) == 10
    with pytest.warns(UserWarning, match=r"has 7 tokens, and the target was trained on 6 \(`max_position"):
        assert len(ours(model, input_ids=torch.tensor([[*IDS[0], 3]]), max_new_tokens=4)[0]) == 11
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    model = tiny("llama", max_position_embeddings=6, rope_parameters=scaled)
    assert len(ours(model, input_ids=torch.tensor([[*IDS[0], 3]]), max_new_tokens=4)[0]) == 11


OTHER_NAMES = {"gpt2": "n_positions", "gptj": "n_positions", "mpt": "max_seq_len", "whisper": "max_target_positions"}


@pytest.mark.parametrize("name", [*OTHER_NAMES, "gpt_neo", "opt", "biogpt", "xglm", "bart", "marian", "m2m_100"])
def test_a_position_table_is_filled_to_its_end(name: str) -> None:
    """The last token is never fed, so one more than the positions fits. (The limit was one token short.)"""
    model = tiny(name, **{OTHER_NAMES.get(name, "max_position_embeddings"): 16})
    assert LanguageModel(model).max_positions == 16
    inputs = tiny_inputs(name) if model.config.is_encoder_decoder else {"input_ids": IDS[:1]}
    room = 16 if model.config.is_encoder_decoder else 11
    for draft in (model, "suffix"):
        assert len(ours(model, draft=draft, **inputs, max_new_tokens=room)[0]) == 17
    with pytest.raises(OptionError, match="17 positions"):
        ours(model, **inputs, max_new_tokens=room + 1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "falcon_alibi", "gpt_neox", "jamba"])
def test_rotary_models_go_beyond_their_training(name: str) -> None:
    """Without a table there is no end. (A trained length was taken for one, where transformers goes on.)"""
    model = tiny(name, max_position_embeddings=16)
    assert LanguageModel(model).max_positions is None
    assert ours(model, IDS[:1], max_new_tokens=20) == theirs(model, IDS[:1], max_new_tokens=20)


def test_unsupported_is_not_wrong() -> None:
    """What this target cannot do is told apart from what is a mistake."""
    with pytest.raises(UnsupportedError, match="guidance_scale"):
        SpecGenerator(tiny("t5")).generate(IDS, guidance_scale=2.0, max_new_tokens=3)
