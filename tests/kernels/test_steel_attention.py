"""MLX's own attention kernel, read from its headers, is attention on the emulator, and its work that of its tiles."""

import json

from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest

from scripts.bench import steel_attention

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_mlx_kernel_agrees_with_float64_with_every_check(causal):
    generator = np.random.default_rng(1)
    # No block of 32 queries or keys divides these, there are more keys than queries, and two heads share a key head.
    shapes = ((2, 4, 45, 64), (2, 2, 77, 64), (2, 2, 77, 64))
    q, k, v = (mx.array(generator.standard_normal(shape), mx.float32).astype(mx.bfloat16) for shape in shapes)
    with emulator.settings(schedules=3):
        out, lse = steel_attention.steel(q, k, v, causal=causal)
    steel_attention.errors("MLX", (q, k, v), (out, lse), causal)
    for wrong in ((out * 1.02, lse), (out, lse + 1e-4), (out + mx.nan, lse)):
        with pytest.raises(ValueError, match="MLX: out is off by"):
            steel_attention.errors("MLX", (q, k, v), wrong, causal)


def test_command_counts_both_kernels(call_main, tmp_path):
    file = tmp_path / "counts.json"
    options = ("--length", 96, "--head-dim", 64, "--dtype", "float32", "--json", file)
    status, out, err = call_main(steel_attention.main, *options)
    assert (status, err) == (0, "")
    rows = json.loads(file.read_text())["rows"]
    assert [(row["kernel"], row["causal"]) for row in rows] == [
        ("MLX", True),
        ("forge", True),
        ("MLX", False),
        ("forge", False),
    ]
    assert out.count("| float32 | 64 |") == len(rows)
    for row in rows:
        assert row["ideal_flops"] == 2 * 4 * 64 * (96 * 97 // 2 if row["causal"] else 96 * 96)
    # Two heads, blocks of 32 x 32 of which causal order leaves 6 of 9, two products of 4 x 4 tiles and 8 of the head.
    assert [row["products"] for row in rows if row["kernel"] == "MLX"] == [2 * blocks * 2 * 16 * 8 for blocks in (6, 9)]
    assert rows[2]["device_bytes"] == 2 * (96 * 64 * 4 * (2 + 2 * 3) + 96 * 4)
    assert all(row["products"] * 1024 >= row["ideal_flops"] for row in rows)
