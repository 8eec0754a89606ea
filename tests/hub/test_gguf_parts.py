"""GGUF files in parts, as the package gguf and llama.cpp's converter split them, open as one model."""

import shutil
import struct

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.fingerprint import weights_fingerprint
from forge_mlx.hub.gguf import load_gguf
from forge_mlx.hub.pretrained import load_pretrained, read_shape, read_tokenizer
import gguf
from gguf_experts_oracle import published, write_gguf_of
from gguf_oracle import V
import mlx.core as mx
import numpy as np
import pytest
import torch

TOKENS = np.random.default_rng(5).integers(0, V, (2, 24))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """transformers' model, and a folder with its file in three parts."""
    folder = tmp_path_factory.mktemp("written")
    model = published("llama")
    write_gguf_of(folder / "m.gguf", model, "llama", split_max_tensors=9)
    return model, folder


@pytest.fixture
def folder(written, tmp_path):
    """A copy of the parts."""
    return shutil.copytree(written[1], tmp_path / "parts")


def part(folder, number):
    return folder / f"m-{number:05}-of-00003.gguf"


def set_number(file, key, value):
    """Overwrite a number of the metadata."""
    layouts = {gguf.GGUFValueType.UINT16: "<H", gguf.GGUFValueType.INT32: "<i"}
    content = bytearray(file.read_bytes())
    place = content.index(key.encode()) + len(key)
    (kind,) = struct.unpack_from("<I", content, place)
    struct.pack_into(layouts[gguf.GGUFValueType(kind)], content, place + 4, value)
    file.write_bytes(content)


def test_parts_are_one_model_with_transformers_logits(written):
    theirs, folder = written
    assert sorted(file.name for file in folder.iterdir()) == [part(folder, number).name for number in (1, 2, 3)]
    loaded = load_pretrained(part(folder, 1), log=pytest.fail)
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    found = np.array(loaded.model(mx.array(TOKENS)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * max(1, np.abs(expected).max()))
    shape = read_shape(part(folder, 1))
    assert shape == loaded.model.config
    assert read_tokenizer(part(folder, 1), shape).fingerprint == loaded.tokenizer.fingerprint


def test_what_was_merged_is_whole(tmp_path):
    """llama.cpp leaves a count of 0, and splits a small file into one."""
    file = write_gguf_of(tmp_path / "m.gguf", published("llama"), "llama", numbers={"split.count": 0})
    expected = weights_fingerprint(file)
    read_shape(file)
    set_number(file, "split.count", 1)
    read_shape(file)
    assert weights_fingerprint(file) != expected


def test_a_fingerprint_is_of_all_parts(folder):
    found = weights_fingerprint(part(folder, 1))
    content = bytearray(part(folder, 3).read_bytes())
    content[-1] ^= 1
    part(folder, 3).write_bytes(content)
    assert weights_fingerprint(part(folder, 1)) != found


def missing(folder):
    part(folder, 2).unlink()
    part(folder, 3).unlink()


def renamed(folder):
    part(folder, 1).rename(folder / "other.gguf")
    return folder / "other.gguf"


def twice(folder):
    shutil.copy(part(folder, 2), part(folder, 3))


def twice_with_another_number(folder):
    twice(folder)
    set_number(part(folder, 3), "split.no", 2)


def of_more_parts(folder):
    set_number(part(folder, 2), "split.count", 4)


def another_total(folder):
    set_number(part(folder, 1), "split.tensors.count", 30)


def no_part(folder):
    content = part(folder, 2).read_bytes()
    part(folder, 2).write_bytes(content.replace(b"split.no", b"split.on"))


def cut_short(folder):
    content = part(folder, 2).read_bytes()
    part(folder, 2).write_bytes(content[:-64])


FAULTS = {
    missing: r"all 3 parts \(split\.count\) .* but m-00002-of-00003\.gguf and 1 more is missing.*gguf-split --merge",
    renamed: r"other\.gguf: split\.count is 3, so that the name must end in -00001-of-00003\.gguf.* --merge",
    lambda folder: part(folder, 2): r"this is number 2\. Open m-00001-of-00003\.gguf\.",
    twice: r"m-00003-of-00003\.gguf: split\.no must be 2, as the name says, but got 1",
    twice_with_another_number: r"m-00003.*gguf: \S+ must be in one part but is in m-00002-of-00003\.gguf too",
    of_more_parts: r"m-00002-of-00003\.gguf: split\.count must be 3, as the name says, but got 4",
    another_total: r"m-00001-of-00003\.gguf: split\.tensors\.count must be that of the parts, \d+, but got 30",
    no_part: r"m-00002-of-00003\.gguf: split\.no must be a whole number, as in each part, but got None",
    cut_short: r"m-00002-of-00003\.gguf: is cut short",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_makes_no_whole_gives_one_clear_line(folder, fault):
    file = fault(folder) or part(folder, 1)
    for opened in (load_gguf, read_shape):
        with pytest.raises(HubError, match=FAULTS[fault]) as caught:
            opened(file)
        assert "\n" not in str(caught.value)
