#!/usr/bin/env bash
# One JSON schema, two grammars: xgrammar 0.2.9 forbids texts that the schema allows and allows texts that it forbids.
#
# Engines offer xgrammar and llguidance 1.9.1 for the same option, a JSON schema. `pattern` is a search in JSON Schema:
# xgrammar takes it for the whole string and so forbids "abc" for "b". It counts the characters of an escaped string as
# written, so that two line feeds do not fit `maxLength` 2. And it leaves out whole keywords without an error: `anyOf`
# beside `properties`, `minimum` beside `$ref` or without `type`, `not`, `if`, `dependentRequired`, `uniqueItems`.
# llguidance follows the schema, or refuses a keyword that it does not know. jsonschema 4.26.0 is the judge.
#
# Seen: xgrammar decides against the schema in all of nine cases, llguidance in none (right in 5, a refusal in 4).
# Fails if one of these decisions changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 xgrammar==0.2.9 llguidance==1.9.1 jsonschema==4.26.0
"$folder/venv/bin/python" - <<'PYTHON'
import json

import jsonschema
import xgrammar
from llguidance import LLMatcher, LLTokenizer

BYTES = LLTokenizer("byte")
END = 256
NAMES = xgrammar.TokenizerInfo([bytes([n]) for n in range(END)] + ["</s>"], stop_token_ids=[END])
A_NUMBER = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
CASES = [
    ({"type": "string", "pattern": "b"}, '"abc"'),
    ({"type": "string", "maxLength": 2}, r'"\n\n"'),
    ({"type": "object", **A_NUMBER, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, '{"a": 1}'),
    ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 3}, "1"),
    ({"minimum": 3}, "1"),
    ({"not": {"type": "string"}}, '"a"'),
    ({"type": "object", **A_NUMBER, "if": A_NUMBER, "then": {"required": ["b"]}}, '{"a": 1}'),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
]


def by_xgrammar(schema: dict, text: str) -> str:
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema))
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(NAMES).compile_grammar(grammar))
    return "allowed" if matcher.accept_string(text) and matcher.accept_token(END) else "forbidden"


def by_llguidance(schema: dict, text: str) -> str:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(schema))
    if matcher.is_error():
        return "refused"
    tokens = BYTES.tokenize_bytes(text.encode())
    return "allowed" if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting() else "forbidden"


decisions = []
for schema, text in CASES:
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    right = "allowed" if valid else "forbidden"
    decisions.append((right, by_xgrammar(schema, text), by_llguidance(schema, text)))
    print("{} for {}: {}; xgrammar: {}, llguidance: {}".format(text, json.dumps(schema), *decisions[-1]))
assert all(first != right for right, first, _ in decisions), "xgrammar follows one of the schemas now"
assert [second == right for right, _, second in decisions] == [True] * 5 + [False] * 4, "llguidance changed"
assert all(second == "refused" for _, _, second in decisions[5:]), "llguidance knows one of the keywords now"
PYTHON
