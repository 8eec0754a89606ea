"""Adapters that do something, over tiny models of transformers' making: what the tests of their layouts exchange."""

from collections.abc import Callable
from pathlib import Path

from forge_mlx.hub.pretrained import load_pretrained
from forge_mlx.models.adapters import add_adapters
from forge_mlx.nn.parameters import named_arrays
import mlx.core as mx
from mlx.utils import tree_unflatten
import numpy as np
from tiny_models import published, save


def bases(tmp_path_factory, finish: Callable[[Path], None] = lambda _: None) -> Callable[[str], Path]:
    """What gives a folder of the model of a name, made once; `finish` may change it then."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save(published(name), tmp_path_factory.mktemp("base"))
            finish(made[name])
        return made[name]

    return folder


def opened(folder):
    return load_pretrained(folder, log=lambda _: None).model


def taught(model, config, seed=3):
    """The model with adapters that do something; magnitudes stay near the norms."""
    add_adapters(model, config, seed=1)
    rng = np.random.default_rng(seed)
    arrays = []
    for name, array in named_arrays(model.trainable_parameters()):
        moved = rng.standard_normal(array.shape) * 0.2 + (np.array(array) if name.endswith(".m") else 0)
        arrays.append((name, mx.array(moved, mx.float32)))
    model.update(tree_unflatten(arrays))
    return model


def assert_alike(found, expected, tolerance=2e-5):
    """Compare logits, to a share of the largest."""
    found, expected = np.array(found), np.array(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
