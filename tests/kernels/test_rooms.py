"""What every room has: an export for each op, a profile, cases, a benchmark, an engine to choose, the same errors."""

from importlib import import_module
import inspect
from pathlib import Path

from forge_mlx import kernels
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.metal.check import rooms, sources
import pytest

FOLDER = Path(kernels.__file__).parent
OPS = {
    "attention": ["attention", "flash_attention", "flash_attention_backward"],
    "activations": ["geglu", "gelu", "relu2", "sigmoid", "silu", "softcap", "swiglu"],
    "cross_entropy": ["cross_entropy"],
    "dispatch": ["moe_combine", "moe_dispatch", "row_scale", "row_scale_accumulate"],
    "elementwise": ["accumulate", "add", "add_bias", "axpy", "mul", "scale"],
    "embedding": ["embedding"],
    "linear_cross_entropy": ["linear_cross_entropy"],
    "matmul": ["matmul"],
    "norms": ["add_rms_norm", "layer_norm", "rms_norm"],
    "optimizer": ["adamw_step"],
    "quantize": ["dequantize", "fake_quant", "quantize"],
    "reductions": ["sum", "sum_squares"],
    "rope": ["rope"],
    "routing": ["expert_counts", "topk_renorm"],
    "softmax": ["softmax"],
}
# Exports that compute nothing.
QUESTIONS = ["DispatchPlan", "flash_supported"]
# Plain MLX operations on every engine.
WITHOUT_KERNELS = ["attention", "dequantize"]
# Ops in the order of OPS.md with their arguments; `impl` is every op's last.
SIGNATURES = {
    "accumulate": "dst, src",
    "adamw_step": "w, g, m, v, *, lr, betas, eps, weight_decay, step, grad_scale=1.0, bias_correction=True, "
    "master=None",
    "add": "x, y",
    "add_bias": "x, b",
    "add_rms_norm": "x, residual, w=None, eps=1e-05",
    "attention": "q, k, v, *, scale=None, causal=True, window=None, softcap=None, segment_ids=None, sinks=None, "
    "return_lse=False, return_probs=False",
    "axpy": "dst, src, s",
    "cross_entropy": "logits, targets, *, ignore_index=-100, label_smoothing=0.0, softcap=None, z_loss=0.0, "
    "weights=None, reduction='mean'",
    "dequantize": "codes, scales, biases=None, *, mode, bits=None, group_size=None, granularity=None, dtype",
    "embedding": "weight, ids",
    "expert_counts": "indices, num_experts",
    "fake_quant": "w, mode, *, bits=None, group_size=None, granularity=None, ste='identity'",
    "flash_attention": "q, k, v, *, scale=None, causal=True, window=None, softcap=None, segment_ids=None, sinks=None, "
    "return_lse=False, variant='auto'",
    "flash_attention_backward": "q, k, v, out, dout, *, lse=None, row_max=None, row_sum=None, scale=None, causal=True, "
    "window=None, softcap=None, segment_ids=None, sinks=None, dlse=None, variant='auto'",
    "geglu": "gate, up, approximate='none'",
    "gelu": "x, approximate='none'",
    "layer_norm": "x, w=None, b=None, eps=1e-05",
    "linear_cross_entropy": "hidden, weight, targets, *, bias=None, ignore_index=-100, label_smoothing=0.0, "
    "softcap=None, z_loss=0.0, weights=None, reduction='mean', chunk=None",
    "matmul": "a, b, *, transpose_a=False, transpose_b=False, accumulate=None, variant='auto'",
    "moe_combine": "y, gates, plan",
    "moe_dispatch": "x, indices",
    "mul": "x, y",
    "quantize": "w, mode, *, bits=None, group_size=None, granularity=None",
    "relu2": "x",
    "rms_norm": "x, w=None, eps=1e-05",
    "rope": "x, freqs=None, *, dims=None, base=10000.0, scale=1.0, offset=0, positions=None, traditional=False",
    "row_scale": "x, gates, e",
    "row_scale_accumulate": "dst, x, gates, e",
    "scale": "x, s",
    "sigmoid": "x",
    "silu": "x",
    "softcap": "x, cap",
    "softmax": "x",
    "sum": "x, mul=1.0",
    "sum_squares": "x",
    "swiglu": "gate, up",
    "topk_renorm": "p, k, bias=None, normalize=True, eps=1e-20",
}


def cases_of(room):
    return import_module(f"forge_mlx.kernels.{room}.cases")


def test_every_room_is_listed_here():
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert folders == OPS.keys() == set(rooms())


def test_every_op_is_exported():
    assert sorted(kernels.__all__) == sorted([op for ops in OPS.values() for op in ops] + QUESTIONS)


@pytest.mark.parametrize("op", SIGNATURES)
def test_arguments_are_as_documented(op):
    *rest, impl = inspect.signature(getattr(kernels, op)).parameters.values()
    assert (impl.name, impl.kind, impl.default) == ("impl", inspect.Parameter.KEYWORD_ONLY, None)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in rest]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[op]})"


def test_every_op_has_its_arguments_checked():
    assert sorted([*SIGNATURES, *QUESTIONS]) == sorted(kernels.__all__)


@pytest.mark.parametrize("room", OPS)
def test_profile_names_every_op_and_every_file(room):
    text = (FOLDER / room / "README.md").read_text(encoding="utf-8")
    for op in OPS[room]:
        assert f"`{op}(" in text, op
    for source in sources(room):
        # A file's name is the kernel's, or what of it is not the op's.
        name = source.name
        assert name in text or any(name.removeprefix(f"{op}_") in text for op in OPS[room]), name


@pytest.mark.parametrize("room", OPS)
def test_every_op_is_proved_in_every_dtype_timed_and_counted(room):
    cases = cases_of(room)
    for op in OPS[room]:
        assert {case.dtype for case in cases.CASES if case.op == op} == set(FLOATS), op
        assert any(case.op == op for case in cases.TIMED), op
        assert any(case.op == op for case in cases.TRAFFIC) == (op not in WITHOUT_KERNELS), op
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
