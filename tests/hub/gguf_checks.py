"""What tests of GGUF files compare: logits with those of transformers, and what the package gguf finds in a file."""

import gguf
from gguf_oracle import V
import mlx.core as mx
import numpy as np
import torch

TOKENS = np.random.default_rng(5).integers(0, V, (2, 24))


def quiet(line):
    raise AssertionError(line)


def logits(model):
    return np.array(model(mx.array(TOKENS)))


def their_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def assert_close(found, expected, tolerance=1e-4):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1, np.abs(expected).max()))


def contents(file):
    """Metadata and tensors of a file, by the package gguf."""
    reader = gguf.GGUFReader(file)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    tensors = {each.name: (each.tensor_type.name, each.shape.tolist(), each.data.copy()) for each in reader.tensors}
    return values, tensors
