"""Headers of GGUF files: what the package gguf writes is read, and every malformed file gives one clear line."""

import contextlib
import os
import struct

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf import load_gguf
from forge_mlx.hub.gguf_container import Outline, write_container
from forge_mlx.hub.gguf_file import read_gguf
from forge_mlx.hub.pretrained import read_shape
from forge_mlx.models.rope_scaling import RopeScaling
import gguf
from gguf_oracle import V, add_tokenizer, byte_level
import mlx.core as mx
import numpy as np
import pytest


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def header(entries=b"", *, num_entries=0, tensors=b"", num_tensors=0, magic=b"GGUF", version=3):
    return magic + struct.pack("<IQQ", version, num_tensors, num_entries) + entries + tensors


def tensor(name="x", shape=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_values_and_tensors_are_those_that_the_package_wrote(tmp_path):
    file = tmp_path / "some.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    values = {
        **{"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 4_000_000_000, "int32": -70000},
        **{"uint64": 2**40, "int64": -(2**40), "float32": 1e-5, "float64": 0.1, "bool": True, "string": "naïve 東京"},
    }
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("texts", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.25])
    arrays = {"first": np.arange(96, dtype=np.float32).reshape(3, 32), "second": np.arange(5, dtype=np.float16)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(file)
    assert {key: found.metadata[key] for key in values} == values
    assert found.metadata["texts"] == ["a", "", "ü"]
    assert found.metadata["numbers"].tolist() == [1, -2, 3]
    assert found.metadata["floats"].tolist() == [0.5, -1.25]
    for name, array in arrays.items():
        assert found.tensors[name].shape == array.shape
        assert found.read(found.tensors[name]).tobytes() == array.tobytes()


def test_the_package_reads_what_is_written(tmp_path):
    values = {"text": "é\n", "no": False, "count": 7, "share": 0.25, "texts": ["a", "ü"], "kinds": [1, 3], "s": [-0.5]}
    array = np.arange(64, dtype=np.float32).reshape(2, 32)
    outlines = [Outline("odd", "F16", (5,)), Outline("square", "F32", (2, 32))]
    odd = np.arange(5, dtype=np.float16)
    write_container(tmp_path / "x.gguf", values, outlines, (odd.view(np.uint8), array.view(np.uint8)))
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert {key: reader.fields[key].contents() for key in values} == values
    # llama.cpp reads kinds of tokens as signed numbers.
    assert reader.fields["kinds"].types[-1] == gguf.GGUFValueType.INT32
    found = {each.name: each.data for each in reader.tensors}
    assert np.array_equal(found["odd"], odd)
    assert np.array_equal(found["square"], array)
    assert [file.name for file in tmp_path.iterdir()] == ["x.gguf"]


MALFORMED = {
    "empty": (b"", r"its first 4 bytes cannot fit in a file of 0 bytes"),
    "not GGUF": (b"PK\x03\x04" + bytes(40), r"begins with GGUF, but begins with b'PK"),
    "old version": (header(version=1), r"version must be 2 or 3, little-endian, but got 1\."),
    "big-endian": (header(version=3 << 24), r"but got 3, big-endian"),
    "absurd counts": (header(num_tensors=2**62), rf"a table of {2**62} tensors cannot fit"),
    "absurd number of keys": (header(num_entries=2**63), rf"{2**63} entries of metadata cannot fit"),
    "absurd string": (header(struct.pack("<Q", 2**60) + bytes(9), num_entries=1), r"key 0 of the metadata cannot fit"),
    "absurd list": (
        header(text("a.list") + struct.pack("<IIQ", 9, 8, 2**60), num_entries=1),
        rf"a\.list, a list of {2**60} strings cannot fit",
    ),
    "absurd numbers": (
        header(text("a.list") + struct.pack("<IIQ", 9, 6, 2**60), num_entries=1),
        rf"a\.list, {2**60} numbers cannot fit",
    ),
    "nested lists": (
        header(text("deep") + struct.pack("<IIQ", 9, 9, 1), num_entries=1),
        r"deep: the type of a value must be one of GGUF's but got 9",
    ),
    "unknown type of a value": (header(text("key") + struct.pack("<II", 77, 0), num_entries=1), r"key: .* but got 77"),
    "not UTF-8": (header(struct.pack("<Q", 2) + b"\xff\xfe" + bytes(9), num_entries=1), r"must be UTF-8 but is not"),
    "key twice": (
        header((text("key") + struct.pack("<II", 4, 1)) * 2, num_entries=2),
        r"the key key must be there once but is there twice",
    ),
    "cut in the table": (header(tensors=tensor()[:-4], num_tensors=1), r"a table of 1 tensors cannot fit"),
    "cut in a tensor": (header(tensors=tensor(), num_tensors=1) + bytes(100), r"is cut short: x needs \d+ bytes"),
    "offset outside": (header(tensors=tensor(offset=2**62), num_tensors=1), r"is cut short: x needs"),
    "crooked offset": (header(tensors=tensor(offset=4), num_tensors=1) + bytes(400), r"x: must begin at a multiple"),
    "overlap": (
        header(tensors=tensor("x") + tensor("y", offset=64), num_tensors=2) + bytes(600),
        r"y: must lie apart from x but overlaps it",
    ),
    "tensor twice": (header(tensors=tensor() * 2, num_tensors=2) + bytes(600), r"the tensor x must be there once"),
    "no axes": (header(tensors=tensor(shape=()), num_tensors=1) + bytes(600), r"x: must have 1 to 4 axes but has 0"),
    "absurd axes": (
        header(tensors=text("x") + struct.pack("<I", 2**31) + bytes(60), num_tensors=1),
        rf"x: must have 1 to 4 axes but has {2**31}",
    ),
    "empty axis": (header(tensors=tensor(shape=(32, 0)), num_tensors=1) + bytes(600), r"x: a F32 must have rows"),
    "half a block": (header(tensors=tensor(shape=(16,), kind=8), num_tensors=1) + bytes(600), r"x: a Q8_0 must have"),
    "unknown type of a tensor": (header(tensors=tensor(kind=99), num_tensors=1), r"x: its type .* got number 99"),
    "alignment": (
        header(text("general.alignment") + struct.pack("<II", 4, 24), num_entries=1),
        r"general\.alignment must be a power of 2, at least 8, but got 24",
    ),
    "no architecture": (header(), r"the metadata must have general\.architecture but does not"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_headers_give_one_clear_line(tmp_path, name):
    content, said = MALFORMED[name]
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(HubError, match=said) as caught:
        load_gguf(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def shape_of(**changes):
    """Values of a small Llama's metadata; None leaves one out."""
    values = {
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    return values | {f"llama.{key}": value for key, value in changes.items()}


def write_model(file, *, architecture="llama", tensors=None, kind="F32", tokens=True, **changes):
    """A small Llama with whatever is wrong with it."""
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in shape_of(**changes).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        if value is not None:
            add[type(value)](key, value)
    if tokens:
        add_tokenizer(writer, byte_level())
    found = {
        **{"token_embd.weight": (V, 64), "output_norm.weight": (64,), "output.weight": (V, 64)},
        **{f"blk.0.attn_{name}.weight": (64, 64) for name in ("q", "k", "v", "output")},
        **{"blk.0.attn_norm.weight": (64,), "blk.0.ffn_norm.weight": (64,), "blk.0.ffn_down.weight": (64, 96)},
        **{"blk.0.ffn_gate.weight": (96, 64), "blk.0.ffn_up.weight": (96, 64)},
    }
    for name, shape in (found | (tensors or {})).items():
        if shape is not None:
            stored = gguf.GGMLQuantizationType[kind if len(shape) == 2 else "F32"]
            values = gguf.quantize(np.full(shape, 0.01, np.float32), stored)
            writer.add_tensor(name, values, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


WRONG_MODELS = {
    "architecture": ({"architecture": "mamba"}, r"general\.architecture must be one of llama, .* but got 'mamba'"),
    "experts": ({"expert_count": 8}, r"blk\.0\.ffn_gate_inp\.weight, which chooses among experts, must be there"),
    "missing key": ({"context_length": None}, r"the metadata must have llama\.context_length but does not"),
    "key of another type": ({"block_count": "one"}, r"llama\.block_count must be a whole number but got 'one'"),
    "layers that differ": ({"attention.head_count_kv": [2, 4]}, r"must be the same for all layers but got \[2, 4\]"),
    "absurd layers": ({"block_count": 2_000_000_000}, r"must fit the 12 tensors, .* 2000000000"),
    "no heads": ({"attention.head_count": 0}, r"must fit the 12 tensors"),
    "heads that do not divide": ({"attention.head_count_kv": 3}, r"num_heads must be a multiple of num_kv_heads"),
    "values of another size": (
        {"attention.value_length": 8},
        r"value_length must be the size of a head, 16, but got 8",
    ),
    "rotation of a part": ({"rope.dimension_count": 8}, r"rope\.dimension_count must be the size of a head, 16"),
    "unknown rotation": ({"rope.scaling.type": "longrope"}, r"must be none, linear or yarn but got 'longrope'"),
    "missing tensor": ({"tensors": {"blk.0.ffn_up.weight": None}}, r"blk\.0\.ffn_up\.weight is missing\."),
    "left over": ({"tensors": {"blk.0.attn_sinks.weight": (4,)}}, r"blk\.0\.attn_sinks\.weight has no place"),
    "wrong shape": (
        {"tensors": {"blk.0.attn_k.weight": (32, 64)}},
        r"attn_k\.weight has the shape \(32, 64\), which gives no layers\.0\.self_attn\.k_proj\.weight of \(64, 64\)",
    ),
    "no embedding": ({"tensors": {"token_embd.weight": None}}, r"token_embd\.weight must be there as a matrix"),
    "few rows": ({"tensors": {"token_embd.weight": (100, 64), "output.weight": (100, 64)}}, r"a row for each of 3\d\d"),
    "no tokenizer": ({"tokens": False}, r"the metadata must have tokenizer\.ggml\.model but does not"),
    "base": ({"rope.freq_base": 0.0}, r"rope\.freq_base must be greater than 1 but got 0\.0"),
    "factors of no Llama": (
        {"tensors": {"rope_freqs.weight": (8,)}},
        r"rope_freqs\.weight must be those of a scaling as Llama 3",
    ),
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_wrong_models_give_one_clear_line(tmp_path, name):
    changes, said = WRONG_MODELS[name]
    file = write_model(tmp_path / "wrong.gguf", **changes)
    with pytest.raises(HubError, match=said) as caught:
        load_gguf(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_types_that_cannot_be_read_are_named_with_the_first_tensor(tmp_path):
    file = write_model(tmp_path / "model.gguf", kind="Q8_0")
    content = bytearray(file.read_bytes())
    # The number of the type stands behind the name, the count of axes and the axes; a TQ2_0 has blocks of 256.
    for name, axes in (("blk.0.ffn_gate.weight", (64, 96)), ("blk.0.ffn_up.weight", (64, 96))):
        at = content.index(text(name) + struct.pack("<I", 2)) + len(text(name)) + 4
        content[at : at + 20] = struct.pack("<QQI", 256, axes[0] * axes[1] // 256, 35)
    file.write_bytes(content)
    with pytest.raises(
        HubError, match=r"blk\.0\.ffn_gate\.weight: the type must be one of .* but is TQ2_0 .* 2 of TQ2_0"
    ):
        load_gguf(file)


@pytest.mark.parametrize(("value", "dtype", "name"), [(np.nan, mx.float32, "float32"), (1e6, mx.float16, "float16")])
def test_values_that_are_not_finite_are_found(tmp_path, value, dtype, name):
    file = write_model(tmp_path / "model.gguf")
    found = read_gguf(file).tensors["blk.0.ffn_down.weight"]
    content = bytearray(file.read_bytes())
    content[found.start : found.start + 4] = struct.pack("<f", value)
    file.write_bytes(content)
    with pytest.raises(
        HubError, match=rf"blk\.0\.ffn_down\.weight: the values must be finite in {name} but the largest"
    ):
        load_gguf(file, dtype=dtype)


@pytest.mark.parametrize("scale", [np.nan, np.inf])
@pytest.mark.parametrize("keep_quantized", [True, False], ids=["codes", "floats"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_scales_that_are_not_finite_are_found(tmp_path, kind, keep_quantized, scale):
    file = write_model(tmp_path / "model.gguf", kind=kind)
    found = read_gguf(file).tensors["blk.0.ffn_down.weight"]
    content = bytearray(file.read_bytes())
    content[found.start : found.start + 2] = np.float16(scale).tobytes()
    file.write_bytes(content)
    with pytest.raises(HubError, match=r"blk\.0\.ffn_down\.weight: the values must be finite in float32 but the lar"):
        load_gguf(file, dtype=mx.float32, keep_quantized=keep_quantized)


def test_no_byte_that_is_cut_or_changed_ends_the_process(tmp_path):
    whole = write_model(tmp_path / "model.gguf").read_bytes()
    end = read_gguf(tmp_path / "model.gguf").tensors["token_embd.weight"].start
    random = np.random.default_rng(1)
    file = tmp_path / "broken.gguf"
    refused = []
    for place in random.integers(0, end, 60):
        file.write_bytes(whole[:place])
        with pytest.raises(HubError):
            load_gguf(file)
        content = bytearray(whole)
        content[place] ^= 1 << int(random.integers(8))
        file.write_bytes(content)
        with contextlib.suppress(HubError):
            load_gguf(file, log=[].append)
            continue
        refused.append(place)
    assert len(refused) > 5


def test_limits_of_yarn_are_read(tmp_path):
    keys = {"type": "yarn", "factor": 8.0, "original_context_length": 16, "yarn_beta_fast": 20.0, "yarn_beta_slow": 2.0}
    file = write_model(tmp_path / "model.gguf", **{f"rope.scaling.{key}": value for key, value in keys.items()})
    limits = {"beta_fast": 20.0, "beta_slow": 2.0}
    assert read_shape(file).rope_scaling == RopeScaling(kind="yarn", factor=8.0, original_max_seq_len=16, **limits)


def test_keys_that_are_not_known_are_named_once(tmp_path):
    said = []
    load_gguf(write_model(tmp_path / "model.gguf", surprise=1, **{"attention.clamp_kqv": 2.0}), log=said.append)
    assert len(said) == 1
    assert said[0].endswith("2 keys are not known and were left out: llama.attention.clamp_kqv, llama.surprise")


def test_a_file_that_is_not_there_gives_one_clear_line(tmp_path):
    with pytest.raises(HubError, match=r"none\.gguf: cannot be read: No such file"):
        load_gguf(tmp_path / "none.gguf")
    with pytest.raises(HubError, match="must be a regular file but is a folder, a pipe or a device"):
        load_gguf(tmp_path)
    assert os.listdir(tmp_path) == []
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(HubError, match=r"pipe\.gguf: must be a regular file but is a folder, a pipe or a device"):
        load_gguf(tmp_path / "pipe.gguf")
