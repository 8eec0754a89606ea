"""What a run says of its attention is what attention does, on a machine with a GPU that runs kernels too."""

from forge_mlx.kernels.attention import launch, reference
from forge_mlx.models.gpt import GPTConfig
from forge_mlx.nn.attention import Attention
from forge_mlx.train.attention_path import describe_attention
import mlx.core as mx
import pytest


@pytest.mark.parametrize(("head_dim", "path"), [(64, "mlx"), (60, "mlx"), (40, "kernels"), (264, "mlx")])
def test_path_is_the_one_that_attention_takes(head_dim, path, monkeypatch):
    taken = []
    fast = mx.fast.scaled_dot_product_attention

    def run(_engine, _variant, *rest):
        taken.append("kernels")
        return reference.forward(*rest)

    attention = Attention(16, num_heads=2, num_kv_heads=1, head_dim=head_dim, rope_base=None)
    monkeypatch.setattr("forge_mlx.nn.linear.Linear.__call__", lambda self, x: x @ self.weight.T)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", lambda *a, **b: taken.append("mlx") or fast(*a, **b))
    monkeypatch.setattr(launch, "forward", run)
    attention(mx.ones((1, 5, 16)))
    model = GPTConfig(hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=head_dim)
    text = describe_attention(model, "concat", 5, mx.float32, mx.gpu)
    assert taken == [path]
    assert ("mx.fast.scaled_dot_product_attention" in text) == (path == "mlx")
    assert ("the kernels of flash_attention" in text) == (path == "kernels")


def test_a_window_of_some_layers_is_told_from_one_of_all():
    texts = [
        describe_attention(GPTConfig(sliding_window=9, sliding_layers=layers), "concat", 5, mx.float32, mx.cpu)
        for layers in (None, [0, 2, 3])
    ]
    assert [text.split(":")[0] for text in texts] == ["causal, a window of 9", "causal, a window of 9 in 3 of 4 layers"]
