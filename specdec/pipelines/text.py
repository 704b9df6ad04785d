"""`Text`: continues prompts and conversations, with the call and results of transformers' text generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdec.errors import OptionError, UnsupportedError
from specdec.generator.generator import SpecGenerator
from specdec.generator.inputs.pictures import chat_ids
from specdec.generator.tokenizers import before_stop, ids_of
from specdec.options.generate import listed
from specdec.pipelines.batching import BATCH, check_call, decode, make_generator, row_seeds

TASK = "text-generation"
Message = Mapping[str, Any]


class Text:
    """Continues texts and conversations with a target and a draft, as `transformers.pipeline("text-generation")` does.

    `target`, `draft` and `options` are those of `SpecGenerator`; `target` may also be a `SpecGenerator`. Unlike
    transformers it samples, and limits the length, only where the checkpoint or the caller does.
    """

    def __init__(self, target: Any, draft: Any = None, **options: Any) -> None:
        self.generator = make_generator(target, draft, TASK, options, kind="Text")
        self._tokenizer = self.generator.tokenizer
        if self.generator.target.is_encoder_decoder:
            raise UnsupportedError("the target has an encoder, and `Text` continues prompts: use Summarizer")

    @classmethod
    def from_pretrained(cls, target: str, draft: Any = None, **options: Any) -> Text:
        """A pipeline of models by id or path; `options` are those of `SpecGenerator.from_pretrained`."""
        return cls(SpecGenerator.from_pretrained(target, draft, task=TASK, **options))

    def __call__(
        self,
        inputs: str | Iterable[Any],
        *,
        batch_size: int = BATCH,
        return_full_text: bool | None = None,
        return_text: bool | None = None,
        return_tensors: bool | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        skip_special_tokens: bool = True,
        continue_final_message: bool | None = None,
        stop_sequence: str | Sequence[str] | None = None,
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> list[Any]:
        """`[{"generated_text": …}]` for a text or a list of messages, and a list of such lists for several.

        The text includes the prompt, or is the conversation with its answer, unless `return_full_text` is False.
        `return_tensors` returns `generated_token_ids` instead, prompt included. An assistant's message at the end of a
        conversation is continued, unless `continue_final_message` is False. `options` are those of
        `SpecGenerator.generate`. Raises OptionError.
        """
        check_call(batch_size, options)
        forms = {"return_full_text": return_full_text, "return_text": return_text, "return_tensors": return_tensors}
        if len(named := [name for name, value in forms.items() if value is not None]) > 1:  # as in transformers
            raise OptionError(f"`{named[0]}` and `{named[1]}` each say what is returned: pass one of them")
        if return_text is False:
            raise OptionError("`return_text`=False leaves nothing to return: pass `return_tensors=True`")
        if stop_sequence is not None:
            options["stop_strings"] = stop_sequence if isinstance(stop_sequence, str) else list(stop_sequence)
        items, alone = _items(inputs)
        resolved = self.generator.options(**options)
        if resolved.max_new_tokens is None and resolved.max_length is None:
            raise OptionError("a text prompt needs a length limit: pass `max_new_tokens=`")
        if resolved.max_new_tokens is None or resolved.min_length:
            batch_size = 1  # these lengths count the prompt, and in a batch its padding
        prompts = [self._ids(item, continue_final_message, tools) or listed(resolved.bos_token_id) for item in items]
        given = {name: value for name, value in options.items() if name != "seed"}
        out = decode(self.generator, prompts, given, batch_size=batch_size, seeds=row_seeds(resolved, len(prompts)))

        def record(item: Any, prompt: list[int], new: list[int]) -> dict[str, Any]:
            if return_tensors:
                return {"generated_token_ids": [*prompt, *new]}
            text = self._tokenizer.decode(
                new,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            )
            text = before_stop(text, resolved.cut_before)
            return {"generated_text": text if return_full_text is False else _whole(item, text, continue_final_message)}

        rows = zip(items, prompts, out.new, strict=True)
        records = [[record(item, prompt, new) for new in copies] for item, prompt, copies in rows]
        return records[0] if alone else records

    def _ids(self, item: Any, go_on: bool | None, tools: Sequence[Any] | None) -> list[int]:
        """A prompt's ids; messages go through the chat template."""
        if isinstance(item, str):
            return ids_of(self._tokenizer, item, verbose=False)
        go_on = _goes_on(item, go_on)
        how: dict[str, Any] = {"add_generation_prompt": not go_on, "continue_final_message": go_on}
        how |= {"tools": tools} if tools else {}
        try:
            return chat_ids(list(item), self._tokenizer, self.generator.processor, **how)
        except Exception as error:  # of any class: templates are code of the checkpoint
            raise OptionError(f"the model's chat template refused the messages: {error}") from error


def _items(inputs: Any) -> tuple[list[Any], bool]:
    """Texts and conversations as a list, and whether `inputs` is a single one."""
    if isinstance(inputs, str):
        return [inputs], True
    items = list(inputs) if isinstance(inputs, Iterable) and not isinstance(inputs, bytes | Mapping) else [None]
    alone = bool(items) and all(isinstance(item, Mapping) for item in items)
    items = [items] if alone else items
    if not all(isinstance(item, str | list | tuple) for item in items):
        raise OptionError.of("inputs", "text, messages, or a list of either", type(inputs).__name__)
    for messages in (item for item in items if not isinstance(item, str)):
        if not messages or not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
            raise OptionError.of("inputs", 'messages like {"role": "user", "content": "…"}', messages)
    return items, alone


def _goes_on(messages: Sequence[Message], asked: bool | None) -> bool:
    """Whether the last message is continued instead of answered."""
    return messages[-1]["role"] == "assistant" if asked is None else asked


def _whole(item: Any, text: str, go_on: bool | None) -> Any:
    """The prompt with its continuation, or the conversation with its answer."""
    if isinstance(item, str):
        return item + text
    if not _goes_on(item, go_on):
        return [*item, {"role": "assistant", "content": text}]
    return [*item[:-1], {**item[-1], "content": item[-1]["content"] + text}]
