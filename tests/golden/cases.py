"""What is generated: one `case` per line of the JSON files, as (model, number of its prompt, options)."""

from __future__ import annotations

from typing import Any

Case = dict[str, Any]


def case(model: str, prompt: int, comment: str = "", decoder: list[list[int]] | None = None, **kwargs: Any) -> Case:
    """`decoder`: decoder_input_ids to start from, instead of the start token alone."""
    return {"model": model, "prompt": prompt, "comment": comment, "decoder": decoder, "kwargs": kwargs}


def group(model: str, prompt: int, beams: int, groups: int, penalty: float, **rest: Any) -> Case:
    options = {"num_beams": beams, "num_beam_groups": groups, "diversity_penalty": penalty, "max_new_tokens": 10}
    return case(model, prompt, **{**options, **rest})


def constrained(model: str, prompt: int, beams: int, words: Any = None, **rest: Any) -> Case:
    """`words`: force_words_ids; constraint objects come as constraints={"phrasal": [...], "disjunctive": [...]}."""
    options = {"num_beams": beams, "max_new_tokens": 10}
    return case(model, prompt, **{**options, **({"force_words_ids": words} if words else {}), **rest})


def contrastive(model: str, prompt: int, alpha: float, top_k: int, **rest: Any) -> Case:
    return case(model, prompt, **{"penalty_alpha": alpha, "top_k": top_k, "max_new_tokens": 14, **rest})


GROUP = [
    group("gpt2", 0, 4, 2, 0.2, eos_token_id=None),
    group("gpt2", 1, 4, 2, 1.0, eos_token_id=[7, 4], num_return_sequences=4),
    group("gpt2", 2, 6, 3, 5.0, eos_token_id=7, num_return_sequences=6, early_stopping=True),
    group("gpt2", 3, 6, 2, 1.0, eos_token_id=[7, 4, 33], num_return_sequences=3, early_stopping="never"),
    group("gpt2", 4, 4, 4, 1.0, eos_token_id=4, num_return_sequences=4, length_penalty=0.0),
    group("gpt2", 5, 6, 6, 0.2, eos_token_id=[35, 44], num_return_sequences=6, length_penalty=2.0),
    group("gpt2", 0, 6, 3, 1.0, eos_token_id=[4, 23], num_return_sequences=6, length_penalty=-1.0, early_stopping=True),
    group("gpt2", 6, 4, 2, 1.0, eos_token_id=[7, 12], num_return_sequences=4),
    group("gpt2", 7, 6, 3, 0.2, eos_token_id=7, num_return_sequences=2, length_penalty=2.0),
    group("gpt2", 8, 4, 2, 1.0, eos_token_id=[4, 7], num_return_sequences=3, pad_token_id=4,
          comment="pad is an EOS id: groups that are done count it, so it costs the penalty in later groups"),
    group("gpt2", 2, 4, 2, 1.0, repetition_penalty=1.5, num_return_sequences=4),
    group("gpt2", 4, 6, 2, 1.0, no_repeat_ngram_size=2, repetition_penalty=0.8, num_return_sequences=2),
    group("gpt2", 1, 4, 2, 1.0, min_new_tokens=6, eos_token_id=[7, 36, 12], num_return_sequences=4),
    group("gpt2", 3, 4, 2, 1.0, bad_words_ids=[[36], [28, 33]], num_return_sequences=4),
    group("gpt2", 1, 4, 2, 1.0, eos_token_id=[7, 4], num_return_sequences=4, length_penalty=2.0,
          early_stopping="never", max_new_tokens=20),
    group("gpt2", 5, 4, 2, 0.5, eos_token_id=[33, 44, 4], num_return_sequences=4, early_stopping="never",
          max_new_tokens=20),
    group("llama", 0, 4, 2, 1.0, num_return_sequences=4, early_stopping=True),
    group("llama", 0, 4, 2, 1.0, num_return_sequences=4, early_stopping="never", max_new_tokens=16),
    group("llama", 1, 6, 3, 0.2, eos_token_id=[2, 4, 44], num_return_sequences=6, length_penalty=0.0),
    group("llama", 6, 4, 2, 1.0, num_return_sequences=4, early_stopping=True,
          comment="pad is EOS: groups that are done count it, so EOS costs the penalty in later groups"),
    group("llama", 7, 6, 2, 5.0, eos_token_id=[20, 44, 9], pad_token_id=0, num_return_sequences=3),
    group("llama", 4, 4, 4, 5.0, eos_token_id=None, num_return_sequences=4),
    group("llama", 8, 6, 3, 1.0, eos_token_id=[1, 14], pad_token_id=0, length_penalty=-1.0, num_return_sequences=6),
    group("llama", 2, 4, 2, 0.5, min_new_tokens=4, eos_token_id=[15, 47, 45], early_stopping="never",
          length_penalty=-1.0, num_return_sequences=2),
    group("t5", 0, 4, 2, 1.0, eos_token_id=[31, 15], num_return_sequences=4),
    group("t5", 6, 6, 3, 1.0, eos_token_id=[31, 26], num_return_sequences=6, early_stopping=True),
    group("t5", 7, 4, 2, 0.2, eos_token_id=None, num_return_sequences=2),
    group("t5", 1, 6, 2, 1.0, no_repeat_ngram_size=2, eos_token_id=41, num_return_sequences=6, length_penalty=0.0),
    group("t5", 3, 4, 2, 1.0, decoder=[[0, 39, 8]], eos_token_id=38, num_return_sequences=4, length_penalty=2.0),
    group("bart", 0, 4, 2, 1.0, eos_token_id=[20, 43], num_return_sequences=4),
    group("bart", 1, 4, 4, 0.2, eos_token_id=43, num_return_sequences=2, early_stopping="never", length_penalty=2.0),
    group("bart", 6, 6, 2, 5.0, eos_token_id=[43, 10], num_return_sequences=6, early_stopping=True),
    group("bart", 7, 4, 2, 1.0, repetition_penalty=1.3, eos_token_id=24, num_return_sequences=4),
    group("bart", 8, 6, 3, 1.0, no_repeat_ngram_size=2, eos_token_id=[16, 42], min_new_tokens=3, length_penalty=0.0),
]  # fmt: skip

CONSTRAINED = [
    constrained("gpt2", 0, 4, [[47]]),
    constrained("gpt2", 1, 2, [[20, 21]], num_return_sequences=2),
    constrained("gpt2", 2, 4, [[40, 23], [12]], num_return_sequences=4),
    constrained("gpt2", 3, 8, [[5, 6, 7]], num_return_sequences=3, eos_token_id=[7, 4]),
    constrained("gpt2", 4, 4, [[7, 15], [7, 22]], num_return_sequences=4, comment="phrases share their first token"),
    constrained("gpt2", 5, 6, [[4, 7], [7, 9]], num_return_sequences=2, comment="the end of one phrase begins another"),
    constrained("gpt2", 2, 4, [[7, 7, 28]], num_return_sequences=2, max_new_tokens=14,
                comment="7 7 7 28 does not fulfil it: a token that breaks a phrase is not tried as its beginning"),
    constrained("gpt2", 2, 4, [[15, 28]], num_return_sequences=2,
                comment="the prompt ends with the phrase and so fulfils it: plain beam search follows"),
    constrained("gpt2", 3, 4, [[32, 36]], num_return_sequences=2, comment="the prompt ends within the phrase"),
    constrained("gpt2", 6, 4, [[0]], num_return_sequences=2, comment="padding counts: the second row has it fulfilled"),
    constrained("gpt2", 7, 4, [[31], [12]], num_return_sequences=2, eos_token_id=[7, 35]),
    constrained("gpt2", 1, 4, [[[20, 21, 22], [36, 4]]], num_return_sequences=2),
    constrained("gpt2", 4, 4, [[[20, 21], [20, 37], [20, 9, 3]], [44]], num_return_sequences=4,
                comment="alternatives share their first token: copies of the state share one list in 4.49"),
    constrained("gpt2", 4, 6, [[[36, 33, 3], [36, 36, 15], [36, 4, 20]], [7, 25]], num_return_sequences=6,
                comment="the same, with likely tokens"),
    constrained("gpt2", 5, 6, [[[5, 6, 7, 8], [5, 6, 9], [5, 10]]], num_return_sequences=6,
                comment="the same, two tokens deep"),
    constrained("gpt2", 0, 4, [[5, 6, 8, 9, 10, 13, 14, 16]], num_return_sequences=4, max_new_tokens=6,
                comment="too long to be fulfilled: the best open beams are returned, without beam_indices"),
    constrained("gpt2", 8, 4, [[29, 1], [16, 19]], num_return_sequences=4, max_new_tokens=5, eos_token_id=None,
                comment="fulfilled and unfulfilled beams compete by score"),
    constrained("gpt2", 1, 4, [[13]], eos_token_id=[4, 7, 36], num_return_sequences=4, early_stopping=True),
    constrained("gpt2", 2, 4, [[9, 7]], eos_token_id=[7], num_return_sequences=2,
                comment="EOS inside a phrase is forced as an ordinary token and does not end the beam"),
    constrained("gpt2", 3, 4, [[6]], eos_token_id=7, length_penalty=-1.0, early_stopping="never"),
    constrained("gpt2", 4, 6, [[19, 31]], eos_token_id=[4, 7], length_penalty=2.0, early_stopping="never",
                num_return_sequences=3, max_new_tokens=14),
    constrained("gpt2", 5, 4, constraints={"phrasal": [[8, 30]], "disjunctive": [[[1, 2], [3]]]},
                num_return_sequences=2),
    constrained("gpt2", 0, 4, [[20]], constraints={"phrasal": [[41, 17]]}, num_return_sequences=2,
                comment="constraint objects come before force_words_ids"),
    constrained("gpt2", 1, 4, [[7]], bad_words_ids=[[7]], num_return_sequences=2,
                comment="a banned word is forced all the same, at a score of -inf"),
    constrained("gpt2", 2, 4, [[33, 47]], repetition_penalty=1.5, min_new_tokens=5, eos_token_id=[7, 4]),
    constrained("gpt2", 1, 6, [[7]], eos_token_id=[4, 22], early_stopping=True, num_return_sequences=3),
    constrained("gpt2", 2, 4, [[15, 47]], eos_token_id=[7, 40], num_return_sequences=2),
    constrained("gpt2", 5, 5, [[23, 3], [47]], eos_token_id=7, num_return_sequences=5, max_new_tokens=14),
    constrained("gpt2", 8, 4, [[33]], eos_token_id=[7, 12, 35], early_stopping=True, num_return_sequences=4,
                max_new_tokens=14),
    constrained("gpt2", 6, 6, [[[33, 29], [12, 38], [23]]], eos_token_id=[4, 7], length_penalty=0.0),
    constrained("gpt2", 4, 4, [[36, 33], [36, 36, 15]], num_return_sequences=2,
                comment="shared first token: a broken phrase goes behind the other one"),
    constrained("gpt2", 2, 4, [[7, 25], [7, 28]], num_return_sequences=2, max_new_tokens=14),
    constrained("gpt2", 1, 4, [[7, 24], [7, 7, 4]], num_return_sequences=2, max_new_tokens=14),
    constrained("gpt2", 2, 2, [[28]], eos_token_id=[7, 4, 33], num_return_sequences=2, max_new_tokens=14),
    constrained("gpt2", 2, 2, [[28]], eos_token_id=[7, 4, 33], num_return_sequences=2, max_new_tokens=14,
                early_stopping=True),
    constrained("gpt2", 2, 2, [[28]], eos_token_id=[7, 4, 33], num_return_sequences=2, max_new_tokens=20,
                early_stopping="never", length_penalty=2.0),
    constrained("gpt2", 6, 3, [[[28], [22]]], eos_token_id=[7, 4, 12], num_return_sequences=3, max_new_tokens=16,
                early_stopping="never"),
    constrained("gpt2", 6, 3, [[[28], [22]]], eos_token_id=[7, 4, 12], num_return_sequences=3, max_new_tokens=16),
    constrained("llama", 0, 4, [[44]], num_return_sequences=4, early_stopping=True),
    constrained("llama", 1, 6, [[[36, 40], [44, 12]]], eos_token_id=[2, 14, 1], num_return_sequences=3),
    constrained("llama", 5, 4, [[14]], eos_token_id=[2, 1], num_return_sequences=4, early_stopping=True),
    constrained("llama", 0, 4, [[6, 8]], num_return_sequences=4),
    constrained("llama", 3, 5, [[44], [21, 9]], num_return_sequences=5, early_stopping=True),
    constrained("llama", 6, 4, [[[7, 13], [41]]], num_return_sequences=2),
    constrained("llama", 7, 3, [[12, 12]], pad_token_id=0, num_return_sequences=3, length_penalty=0.0),
    constrained("llama", 5, 8, [[[4, 22], [14, 2, 1]], [39]], num_return_sequences=8, eos_token_id=None),
    constrained("llama", 1, 4, [[2]], num_return_sequences=2, eos_token_id=2, comment="the forced word is EOS itself"),
    constrained("t5", 1, 4, [[31, 21]], eos_token_id=[15, 45, 4], num_return_sequences=4),
    constrained("t5", 6, 4, [[39]], eos_token_id=[31, 26], num_return_sequences=2, early_stopping=True),
    constrained("t5", 0, 4, [[4, 23]], num_return_sequences=2),
    constrained("t5", 6, 4, [[44], [8]], num_return_sequences=4, eos_token_id=[15, 26], early_stopping=True),
    constrained("t5", 2, 6, [[[8, 36], [8, 2], [29]]], num_return_sequences=3, length_penalty=2.0, eos_token_id=45),
    constrained("t5", 3, 4, [[8, 10]], decoder=[[0, 39, 8]], num_return_sequences=4, eos_token_id=38),
    constrained("bart", 0, 4, [[20, 43]], eos_token_id=[10, 42], num_return_sequences=3),
    constrained("bart", 7, 6, [[43], [20]], eos_token_id=[10, 24], num_return_sequences=2, early_stopping=True,
                max_new_tokens=12),
    constrained("bart", 6, 4, [[[14, 42], [16]]], eos_token_id=[20, 43], num_return_sequences=4),
    constrained("bart", 0, 4, [[6, 42]], num_return_sequences=2, eos_token_id=43),
    constrained("bart", 7, 4, [[14], [10, 30]], num_return_sequences=2, eos_token_id=[20, 42]),
    constrained("bart", 2, 2, [[[37, 40], [24]], [21]], num_return_sequences=2, no_repeat_ngram_size=2),
]  # fmt: skip

CONTRASTIVE = [
    contrastive("gpt2", 0, 0.6, 4, eos_token_id=None),
    contrastive("gpt2", 1, 0.2, 2),
    contrastive("gpt2", 2, 0.9, 8, eos_token_id=None),
    contrastive("gpt2", 3, 0.6, 8, eos_token_id=[7, 4]),
    contrastive("gpt2", 4, 0.9, 2, eos_token_id=[35, 22]),
    contrastive("gpt2", 5, 0.2, 8, repetition_penalty=1.5),
    contrastive("gpt2", 0, 0.6, 4, no_repeat_ngram_size=2, repetition_penalty=0.7),
    contrastive("gpt2", 6, 0.6, 4, eos_token_id=None),
    contrastive("gpt2", 7, 0.6, 4, eos_token_id=[7, 12, 47]),
    contrastive("gpt2", 8, 0.2, 2, eos_token_id=[4, 33], min_new_tokens=4),
    contrastive("gpt2", 7, 0.9, 8, bad_words_ids=[[36], [7, 7]], eos_token_id=40),
    contrastive("gpt2", 2, 1.0, 4, eos_token_id=None, comment="alpha 1: the cosine alone decides"),
    contrastive("gpt2", 3, 0.6, 3, suppress_tokens=list(range(2, 48)), max_new_tokens=4,
                comment="two ids are allowed, top_k is 3: a suppressed id of probability 0 is a candidate too"),
    contrastive("llama", 0, 0.6, 4),
    contrastive("llama", 1, 0.2, 2, eos_token_id=None),
    contrastive("llama", 2, 0.9, 8, eos_token_id=None),
    contrastive("llama", 6, 0.6, 4, eos_token_id=[2, 20], pad_token_id=0),
    contrastive("llama", 7, 0.6, 8, eos_token_id=[14, 47], repetition_penalty=1.3),
    contrastive("llama", 8, 0.9, 2, no_repeat_ngram_size=2),
    contrastive("t5", 0, 0.6, 4, eos_token_id=None),
    contrastive("t5", 1, 0.2, 2, eos_token_id=[41, 15]),
    contrastive("t5", 6, 0.6, 8, eos_token_id=[15, 26]),
    contrastive("t5", 7, 0.9, 4, repetition_penalty=1.5, eos_token_id=34),
    contrastive("t5", 3, 0.6, 4, decoder=[[0, 39, 8]], eos_token_id=None),
    contrastive("bart", 0, 0.6, 4, eos_token_id=None),
    contrastive("bart", 2, 0.9, 8, no_repeat_ngram_size=2),
    contrastive("bart", 6, 0.2, 8, eos_token_id=[20, 42]),
    contrastive("bart", 7, 0.6, 2, min_new_tokens=3, eos_token_id=[43, 38]),
    contrastive("bart", 8, 0.9, 4, eos_token_id=[10, 24], pad_token_id=0),
]  # fmt: skip
