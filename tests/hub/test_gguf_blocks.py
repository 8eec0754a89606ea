"""Blocks of every type hold what the package gguf reads in them, and are written as it writes them."""

from forge_mlx.hub.gguf_blocks import DECODED, ENCODED, Codes, decode, encode, encode_q4_1
from forge_mlx.hub.gguf_file import BLOCK_TYPES
import gguf
from gguf import GGMLQuantizationType
import mlx.core as mx
import numpy as np
import pytest


def random_blocks(kind, rows=5, num_blocks=3):
    """Bytes of blocks with any codes, whose scales are float16 that are finite and of every sign."""
    size = next(each for each in BLOCK_TYPES.values() if each.name == kind).bytes
    random = np.random.default_rng(3)
    if kind in ("F32", "F16", "BF16"):
        values = random.normal(size=(rows, 64)).astype(np.float32)
        return np.ascontiguousarray(gguf.quantize(values, GGMLQuantizationType[kind])).view(np.uint8)
    blocks = random.integers(0, 256, (rows, num_blocks, size), dtype=np.uint8)
    scales = random.normal(size=(rows, num_blocks, 2)).astype("<f2").view(np.uint8)
    # Where a block has its one or two scales.
    if kind == "Q6_K":
        blocks[..., -2:] = scales[..., :2]
    else:
        places = 4 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2
        blocks[..., :places] = scales[..., :places]
    return blocks.reshape(rows, -1)


def test_sizes_of_types_are_those_of_the_package():
    for number, kind in BLOCK_TYPES.items():
        assert GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (kind.elements, kind.bytes), kind.name


@pytest.mark.parametrize("kind", DECODED)
def test_values_are_those_of_the_package(kind):
    rows = random_blocks(kind)
    decoded = decode(kind, rows)
    values = decoded.values() if isinstance(decoded, Codes) else decoded
    expected = gguf.dequantize(rows, GGMLQuantizationType[kind])
    assert np.abs(expected).max() > 0.5
    assert values.shape == expected.shape
    # A code times its scale, and the bias, are sums that round once.
    np.testing.assert_allclose(values, expected, rtol=0, atol=2e-7 * np.abs(expected).max())


@pytest.mark.parametrize("kind", [kind for kind in DECODED if kind.startswith("Q") and kind != "Q6_K"])
def test_codes_are_packed_as_mlx_unpacks_them(kind):
    codes = decode(kind, random_blocks(kind))
    scales, biases = mx.array(codes.scales), mx.array(codes.biases)
    unpacked = mx.dequantize(mx.array(codes.packed()), scales, biases, group_size=32, bits=codes.bits)
    np.testing.assert_allclose(np.array(unpacked), codes.values(), rtol=0, atol=1e-6 * np.abs(codes.values()).max())


@pytest.mark.parametrize("kind", ENCODED)
def test_values_are_rounded_as_the_package_rounds_them(kind):
    values = np.random.default_rng(4).normal(size=(6, 96)).astype(np.float32)
    values[1, :32] = 0
    values[2] *= 1e-6
    # Ties: of the largest magnitude, and halves between two codes.
    values[3, 4:6] = 3.5, -3.5
    values[4] = np.round(values[4] * 4) / 2
    values[5, :] = -np.abs(values[5])
    expected = gguf.quantize(values, GGMLQuantizationType[kind])
    assert np.array_equal(encode(kind, values), np.ascontiguousarray(expected).view(np.uint8))


def test_codes_of_four_bits_come_back_from_q4_1():
    rows = random_blocks("Q4_1")
    assert np.array_equal(encode_q4_1(decode("Q4_1", rows)), rows)
