"""GGUF files as they are written: header, tensors and tokenizer, without transformers' own loader.

    reader = GgufReader(path)               # maps the file: .keys, .tensors[name] (.data, .tensor_type)
    config = read_config(reader)            # transformers' config: rotary positions, windows, scales, end tokens
    model = empty_model(config, dtype)      # parameters on "meta", buffers as they are
    for name, parts in tensor_map(reader, config).items():
        for part in parts:                  # part.parameter, .rows, .place, .flipped, .plus
            ...                             # `converted(reader.tensors[name], part)`: its floats
    model.tie_weights()

`fill` is that loop for floats, and `read_model` all of it. What is not known is an error that names it.
"""

from specdec.models.gguf.config import model_class, read_config
from specdec.models.gguf.reader import GgufReader, StoredTensor, floats
from specdec.models.gguf.tensors import TensorPart, tensor_map
from specdec.models.gguf.weights import converted, empty_model, fill, read_model

__all__ = [
    "GgufReader",
    "StoredTensor",
    "TensorPart",
    "converted",
    "empty_model",
    "fill",
    "floats",
    "model_class",
    "read_config",
    "read_model",
    "tensor_map",
]
