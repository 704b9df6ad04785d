"""Encoders and decoders with vocabularies, widths and classes of their own, as one model and apart."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    FSMTConfig,
    FSMTForConditionalGeneration,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from specdec import OptionError, SpecGenerator, UnsupportedError, VocabularyError
from specdec.models import LanguageModel
from specdec.models.capability import attention_kinds, kv_width
from specdec.models.hf.tiny_models import SIZES, shake
from tests.matrix import endless
from tests.oracle import KINDS, oracle
from tests.tiny import ROPE, tiny

pytestmark = pytest.mark.filterwarnings("ignore")
SOURCE, PLAIN = [5, 70, 7, 90, 70], [5, 16, 7, 9, 16]  # ids of a wide and of a narrow vocabulary
SIDES = {"marian": (100, 50), "marian back": (50, 100), "bert": (100, 50), "bert back": (50, 100), "fsmt": (100, 50)}


def shaken(kind: type[PreTrainedModel], config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = kind(config)
    shake(model)
    return model.eval()


def sided(name: str, seed: int = 0, **options: Any) -> Any:
    """A model of two vocabularies."""
    family, (source, text) = name.split()[0], SIDES[name]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    if family == "marian":
        return tiny("marian", source, seed, decoder_vocab_size=text, share_encoder_decoder_embeddings=False, **options)
    if family == "fsmt":
        sizes = {"src_vocab_size": source, "tgt_vocab_size": text, "langs": ["a", "b"], "num_beams": 1}
        model = shaken(FSMTForConditionalGeneration, FSMTConfig(**{**SIZES["bart"], **ids, **sizes, **options}), seed)
        model.generation_config = GenerationConfig(**ids)
        return model
    sizes = {**ROPE, "max_position_embeddings": 64}
    reads = BertConfig(vocab_size=source, **{**sizes, **options})
    writes = BertConfig(vocab_size=text, is_decoder=True, add_cross_attention=True, **sizes)
    model = shaken(EncoderDecoderModel, EncoderDecoderConfig.from_encoder_decoder_configs(reads, writes), seed)
    model.generation_config = GenerationConfig(**ids)
    return model


def theirs(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """The row that transformers writes, which no token ends."""
    given = {"max_new_tokens": 8, "eos_token_id": None, **options}
    return model.generate(torch.tensor([prompt]), **given)[0].tolist()


@pytest.mark.parametrize("name", SIDES)
def test_ids_belong_to_the_side_that_reads_them(name: str) -> None:
    """Sources were checked against the decoder's vocabulary: wider ones were refused, others ended in IndexError."""
    model, (source, text) = sided(name), SIDES[name]
    prompt = SOURCE if source > text else PLAIN
    answer = theirs(model, prompt)
    for kind in KINDS:
        out = SpecGenerator(model, oracle(kind, [answer], text)).generate([prompt], **endless(8))
        assert out.sequences.tolist() == [answer], kind
    generator = SpecGenerator(model)
    beams = generator.generate([prompt], **endless(8, num_beams=3)).sequences.tolist()
    assert beams == [theirs(model, prompt, num_beams=3)]
    if name != "fsmt":  # whose pass over several tokens in a cache lets them see later ones
        begun = generator.generate([prompt], decoder_input_ids=[[1, text - 1]], **endless(8)).sequences.tolist()
        assert begun == [theirs(model, prompt, decoder_input_ids=torch.tensor([[1, text - 1]]))]
    for wrong, given in (
        ("prompt", {"prompt": [[5, source]]}),
        ("decoder_input_ids", {"prompt": [prompt], "decoder_input_ids": [[1, text]]}),
        ("decoder_start_token_id", {"prompt": [prompt], "decoder_start_token_id": text}),
    ):
        with pytest.raises(OptionError, match=f"row 0 of `{wrong}` holds token"):
            generator.generate(given.pop("prompt"), **given, **endless(8))
    outside = {"forced_bos_token_id": text, "bad_words_ids": [[text]], "sequence_bias": {(text,): 1.0}}
    for option, value in outside.items():
        with pytest.raises(OptionError, match=f"`{option}` must be ids from 0 to {text - 1}"):
            generator.generate([prompt], **{option: value}, **endless(8))
    with pytest.raises(OptionError, match="row 0 of `prediction` holds token"):
        SpecGenerator(model, "suffix").generate([prompt], prediction=[text], **endless(8))


@pytest.mark.parametrize("name", ["marian back", "bert back"])
def test_padding_of_sources_is_an_id_of_the_encoder(name: str) -> None:
    """The decoder's padding id, here beyond the encoder's ids, ended ragged batches in IndexError."""
    model = sided(name)
    prompts = [PLAIN, [9, 10]]
    out = SpecGenerator(model, "suffix").generate(prompts, **endless(8, pad_token_id=70))
    assert out.sequences.tolist() == [theirs(model, prompt) for prompt in prompts]


@pytest.mark.parametrize("name", ["marian", "bert"])
def test_penalties_of_a_source_are_for_ids_that_can_be_written(name: str) -> None:
    """Ids of the source beyond the logits ended `encoder_repetition_penalty` and `…no_repeat_ngram_size` in torch's
    words.
    """
    model = sided(name)
    generator = SpecGenerator(model, "suffix")
    for option in ({"encoder_repetition_penalty": 3.0}, {"encoder_no_repeat_ngram_size": 1}):
        both = [[4, 70, 15, 90, 17], [4, 71, 15, 91, 17]]
        mixed = generator.generate(both, **option, **endless(8)).sequences.tolist()
        plain = [[4, 15, 17]]  # the ids of both that the decoder has
        processors = {"logits_processor": [_of(option, plain)]}
        assert mixed == generator.generate(both, **processors, **endless(8)).sequences.tolist()


def _of(option: dict[str, Any], ids: list[list[int]]) -> Any:
    stock = {
        "encoder_repetition_penalty": transformers.EncoderRepetitionPenaltyLogitsProcessor,
        "encoder_no_repeat_ngram_size": transformers.EncoderNoRepeatNGramLogitsProcessor,
    }
    [(name, value)] = option.items()
    return stock[name](value, torch.tensor(ids))


def test_sources_longer_than_the_encoder_are_named() -> None:
    """They ended in torch's words about an index or the size of a tensor."""
    for model in (tiny("marian", max_position_embeddings=16), tiny("bart", max_position_embeddings=16), sided("bert")):
        with pytest.raises(OptionError, match=r"the encoder of \w+ cannot read `input_ids` \[1, 70\], .*: shorten it"):
            SpecGenerator(model, "suffix").generate([[5] * 70], **endless(8))


def test_drafts_read_the_sources_of_their_targets() -> None:
    """A draft whose encoder has fewer ids, or reads sound, ended in IndexError or TypeError in its first round."""
    target = sided("marian")
    answer = theirs(target, SOURCE)
    for draft in (sided("marian", 1), sided("bert")):
        out = SpecGenerator(target, draft).generate([SOURCE], **endless(8))
        assert out.sequences.tolist() == [answer]
    with pytest.raises(VocabularyError, match="the draft's encoder reads 50 ids, the target's 100"):
        SpecGenerator(target, tiny("marian", 50, share_encoder_decoder_embeddings=False))
    with pytest.raises(OptionError, match="`draft` has an encoder that reads `input_features`, and the target's reads"):
        SpecGenerator(target, tiny("whisper", 50))


@pytest.mark.parametrize("name", SIDES)
def test_two_sided_models_are_packed(name: str, built: None) -> None:
    """Trials of packing took the encoder's vocabulary for the decoder's, and `main_input_name` of any encoder."""
    model, (source, text) = sided(name), SIDES[name]
    packed = LanguageModel(model, backend="packed")
    assert packed.backend == "packed"
    prompt = SOURCE if source > text else PLAIN
    out = SpecGenerator(packed, "suffix").generate([prompt], **endless(8))
    assert out.sequences.tolist() == [theirs(model, prompt)]


@pytest.mark.parametrize("name", ["fsmt", "bert", "marian"])
def test_two_sided_models_load_by_name(name: str, tmp_path: Path) -> None:
    """FSMT's encoder, a plain module, ended loading in an AttributeError about `main_input_name`."""
    model = sided(name)
    model.save_pretrained(tmp_path)
    generator = SpecGenerator.from_pretrained(str(tmp_path), "suffix")
    assert generator.generate([SOURCE], **endless(8)).sequences.tolist() == [theirs(model, SOURCE)]


def test_fsmt_inside_generate() -> None:
    """`custom_generate` asked the encoder for `main_input_name`, which a plain module lacks."""
    from specdec import custom_generate

    model = sided("fsmt")
    given = {"max_new_tokens": 8, "eos_token_id": None, "custom_generate": custom_generate("suffix")}
    assert model.generate(torch.tensor([SOURCE]), **given).tolist() == [theirs(model, SOURCE)]


ALONE = {
    **{name: SIZES[name] for name in ("bart", "mbart", "marian", "pegasus", "blenderbot", "whisper")},
    **dict.fromkeys(("plbart", "bigbird_pegasus", "mvp"), SIZES["bart"]),
    "trocr": {name: value for name, value in SIZES["bart"].items() if "encoder" not in name},
}


@pytest.mark.parametrize("name", ALONE)
def test_decoders_alone_are_targets_and_drafts(name: str) -> None:
    """`WhisperForCausalLM` was joined with itself as if it had an encoder, which ended in a TypeError, and its beams
    and batches were wrong, as positions were passed by the name that the whole model has.
    """
    sizes = {**ALONE[name], "vocab_size": 64, "decoder_vocab_size": 64, "max_position_embeddings": 64}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True, "is_encoder_decoder": False}
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name, "MvpForCausalLM"))
    target, draft = (shaken(kind, AutoConfig.for_model(name, **{**sizes, **ids}), seed) for seed in (0, 1))
    generator, prompts = SpecGenerator(target, draft), [[5, 6, 7, 8], [9, 10]]
    new = [theirs(target, prompt)[len(prompt) :] for prompt in prompts]
    assert generator.generate(prompts, **endless(8)).sequences[:, 4:].tolist() == new
    beams = generator.generate(prompts[:1], **endless(8, num_beams=3)).sequences.tolist()
    assert beams == [theirs(target, prompts[0], num_beams=3)]


GENERATIVE = sorted(
    CONFIG_MAPPING_NAMES.keys()
    & (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
        | MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys()
        | MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys()
    )
)


def test_the_width_of_keys_and_values_is_estimated_for_every_config() -> None:
    """DeepSeek V4, which has one of the fields of multi-head latent attention, could not be loaded."""
    for model_type in GENERATIVE:
        try:
            config = AutoConfig.for_model(model_type)
        except Exception:  # configs without defaults
            continue
        for part in (config, config.get_text_config(decoder=True)):
            assert kv_width(part) >= 1, model_type
            attention_kinds(part)


@pytest.mark.parametrize("name", ["Roberta", "Camembert", "XLMRoberta", "Data2VecText"])
def test_positions_of_roberta_are_its_forwards(name: str) -> None:
    """The page for users of transformers says so: `generate` counts from 0, which no forward does."""
    config = getattr(transformers, f"{name}Config")(vocab_size=64, is_decoder=True, **ROPE)
    model = shaken(getattr(transformers, f"{name}ForCausalLM"), config)
    answer, padding = [5, 6, 7, 8], config.pad_token_id
    with torch.no_grad():
        for _ in range(8):
            logits = model(input_ids=torch.tensor([answer])).logits[0, -1]
            logits[padding] = -torch.inf  # which has no position
            answer.append(int(logits.argmax()))
    for kind in KINDS:
        generator = SpecGenerator(model, oracle(kind, [answer], 64))
        out = generator.generate([[5, 6, 7, 8]], suppress_tokens=[padding], **endless(8))
        assert out.sequences.tolist() == [answer], kind


@pytest.mark.parametrize("name", ["XLMWithLMHeadModel", "XLNetLMHeadModel", "FlaubertWithLMHeadModel"])
def test_models_that_continue_at_a_mask_are_refused(name: str) -> None:
    """Their texts were quite other ones than those of `generate`."""
    kind = getattr(transformers, name)
    small = {"emb_dim": 32, "d_model": 32, "n_layers": 2, "n_layer": 2, "n_heads": 4, "n_head": 4, "d_inner": 48}
    fields = kind.config_class().to_dict()
    config = kind.config_class(vocab_size=64, **{name: value for name, value in small.items() if name in fields})
    with pytest.raises(UnsupportedError, match=f"{name} continues text at a mask token"):
        SpecGenerator(shaken(kind, config))


def test_deepseek_v4() -> None:
    """It ended in an AttributeError about `qk_nope_head_dim` when it was loaded, and then in torch's words, as a trial
    of its layers gave one row to a linear layer that takes groups of rows.
    """
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("this release has no DeepSeek V4")
    sizes: dict[str, Any] = {
        **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16},
        **{"q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "moe_intermediate_size": 24, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 8, "sliding_window": 16},
    }
    model = shaken(transformers.DeepseekV4ForCausalLM, transformers.DeepseekV4Config(**sizes))
    model.generation_config = GenerationConfig(pad_token_id=0)
    answer = theirs(model, [5, 6, 7, 8])
    for kind in KINDS:
        generator = SpecGenerator(model, oracle(kind, [answer], 64))
        assert generator.generate([[5, 6, 7, 8]], **endless(8)).sequences.tolist() == [answer], kind


def test_layers_of_different_attention_are_no_kind() -> None:
    """A config whose layers have windows of their own ended loading in an error of the config's."""
    if "neomme" not in CONFIG_MAPPING_NAMES:
        pytest.skip("this release has no config whose layers have configs of their own")
    config = AutoConfig.for_model("neomme")
    assert attention_kinds(config) is None
    assert kv_width(config) == 2 * config.num_key_value_heads * config.head_dim
