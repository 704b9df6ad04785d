"""GGUF files as they are written: header, tensors and tokenizer, without transformers' own loader.

    reader = GgufReader(path)               # maps the file: .keys, .tensors[name] (.data, .tensor_type)
    config = read_config(reader)            # transformers' config: rotary positions, windows, scales, end tokens
    model = empty_model(config, dtype)      # parameters on "meta", buffers as they are
    for name, parts in tensor_map(reader, config).items():
        for part in parts:                  # part.parameter, .rows, .place, .flipped, .plus
            ...                             # `converted(reader.tensors[name], part)`: its floats
    model.tie_weights()

`read_model` does all of it. A key or a tensor that is not known raises an error that names it.
"""

from specdec.models.gguf.config import read_config
from specdec.models.gguf.reader import GgufReader, floats
from specdec.models.gguf.tensors import tensor_map
from specdec.models.gguf.weights import converted, empty_model, read_model

__all__ = ["GgufReader", "converted", "empty_model", "floats", "read_config", "read_model", "tensor_map"]
