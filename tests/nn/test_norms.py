"""RMSNorm is the room's rms_norm: MLX's own operation on a CPU, the kernels where they are asked for."""

from forge_mlx.kernels.rms_norm import op
from forge_mlx.metal.engine import use_engine
from forge_mlx.nn.norms import RMSNorm
import mlx.core as mx
import pytest


@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no-weight"])
def test_rms_norm_on_a_cpu_is_mlxs_own(weight):
    x = mx.random.normal((2, 3, 40), key=mx.random.key(0))
    norm = RMSNorm(40, eps=0.1, weight=weight)
    assert ("weight" in norm.parameters()) is weight
    assert mx.array_equal(norm(x), mx.fast.rms_norm(x, norm.get("weight"), 0.1))


@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no-weight"])
def test_rms_norm_runs_on_the_engine_that_is_asked_for(weight, monkeypatch):
    ran = []
    forward = op._forward
    monkeypatch.setattr(op, "_forward", lambda engine, *rest: ran.append(engine) or forward(engine, *rest))
    x = mx.random.normal((2, 3, 40), key=mx.random.key(0))
    norm = RMSNorm(40, eps=0.1, weight=weight)
    with use_engine("emulator"):
        got = norm(x)
    assert ran == ["emulator"]
    assert mx.allclose(got, norm(x), rtol=1e-5, atol=1e-6)
