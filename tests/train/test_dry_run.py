from dataclasses import asdict
import io
import re

from forge_mlx.data import Batch
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.models.adapters import AdapterConfig, add_adapters
from forge_mlx.models.gpt import GPTConfig
from forge_mlx.models.qat import QATConfig, convert_qat, prepare_qat
from forge_mlx.models.registry import ARCHITECTURES, build_model
from forge_mlx.nn.parameters import count_elements, named_arrays
from forge_mlx.optim import OptimConfig, build_optimizer
from forge_mlx.train.device import choose_placement
from forge_mlx.train.dry_run import describe_run
from forge_mlx.train.load import load_config
from forge_mlx.train.memory import decoded_bytes, estimate_memory
from forge_mlx.train.step import TrainStep, frozen_parameters
from forge_mlx.train.work import begin_work
import mlx.core as mx
import numpy as np
import pytest
from rich.console import Console
from shipped_configs import NEW, ROOT, SHIPPED, on_tiny_checkpoint
from tiny_checkpoint import finetune_config

SMALL = """\
run: {dir: x, device: cpu}
data: {source: stdlib, tokenizer: {vocab_size: 2048}}
model: {num_layers: 3, hidden_size: 192, num_heads: 2, intermediate_size: 768, mlp: relu2, qk_norm: true}
train: {steps: 450, batch_size: 8, seq_len: 256}
optim: {name: muon}
"""


def described(config, width=80):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    describe_run(config, console)
    return console.file.getvalue()


def small(tmp_path, *overrides):
    """A config of known sizes."""
    file = tmp_path / "c.yaml"
    file.write_text(SMALL)
    return load_config(file, [f"run.dir={tmp_path / 'run'}", *overrides])


def test_says_what_would_be_trained(tmp_path):
    lines = described(small(tmp_path, "train.accumulate=2")).splitlines()
    assert "parameters (3 layers; layers.0 stands for each)" in lines[0]
    rows = [line.strip("│ ").split("│") for line in lines if line.startswith("│")]
    shapes = {name.strip(): (shape.strip(), count.strip()) for name, shape, count in rows}
    assert shapes["embed_tokens.weight"] == ("2048 x 192", "393,216")
    assert shapes["layers.0.mlp.up_proj.weight"] == ("768 x 192", "147,456")
    assert not any(name.startswith("layers.1") for name in shapes)
    start = lines.index("device:        cpu")
    facts = lines[start:]
    assert facts[:6] == [
        "device:        cpu",
        "dtype:         float32 (chosen for the CPU, where 16-bit products are slow)",
        facts[2],
        facts[3],
        "packing:       concat (documents follow each other in a row, each with an end",
        "               token, and attention crosses their borders)",
    ]
    assert facts[2].startswith("attention:     causal: blocks of queries in plain MLX operations, engine")
    assert facts[3].startswith(" " * 15)
    facts = facts[6:]
    assert facts[:3] == [
        "parameters:    1,722,240 (1,329,024 without embeddings)",
        "tokens a step: 4,096 = 8 rows x 256 tokens x 2 passes",
        "tokens in all: 1,843,200 in 450 steps",
    ]
    # 6 (matrices with the head) + 6 x layers x heads x head size x (T + 1), for each token.
    flops = (6 * (3 * (4 * 192**2 + 2 * 192 * 768) + 2048 * 192) + 6 * 3 * 192 * 257) * 4096
    assert facts[3] == f"FLOPs:         {flops:.3g} a step, {flops * 450:.3g} in all"
    assert facts[4].startswith("memory:        about ")
    assert facts[5] == "               weights 13.8 MB, gradients 13.8 MB, optimizer 13.8 MB,"
    # Nine arrays of 512 rows, a quarter of the pass's, and the gradient of the head twice.
    logits = 4 * 2048 * (9 * 512 + 2 * 192) / 1e6
    assert facts[6].startswith(f"               activations 147.3 MB, logits {logits:.1f} MB")
    assert facts[7] == f"run folder:    {tmp_path / 'run'}"


def test_large_heads_are_left_to_mlx(tmp_path):
    text = " ".join(described(small(tmp_path, "model.head_dim=264")).split())
    assert "attention: causal: mx.fast.scaled_dot_product_attention, as no kernel takes heads of 264" in text


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_lines_fit_a_terminal_of_80_columns(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(path, ["run.device=cpu", *on_tiny_checkpoint(path, tmp_path)])
    assert max(len(line) for line in described(config).splitlines()) <= 80


@pytest.mark.parametrize("path", NEW, ids=[path.stem for path in NEW])
def test_shipped_config_is_described_without_allocating_its_weights(path):
    config = load_config(path, ["run.device=cpu"])
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    text = described(config)
    assert mx.get_peak_memory() - before < 2**20
    parameters = int(text.split("parameters:    ")[1].split(" ")[0].replace(",", ""))
    small = (1.5e6, 2e6)
    known = dict.fromkeys(("quickstart", "packed-quickstart", "qat_quickstart"), small)
    known |= {"moe_quickstart": (5e6, 6e6), "gpt2-124m": (124e6, 125e6)}
    bounds = known.get(path.stem, (25e6, 40e6))
    assert bounds[0] < parameters < bounds[1]


def test_says_that_the_run_folder_exists(tmp_path):
    (tmp_path / "run").mkdir()
    assert described(small(tmp_path)).endswith(f"run folder:    {tmp_path / 'run'} (exists)\n")


def test_the_vocabulary_is_that_of_a_given_tokenizer(tmp_path):
    text = "".join(f"def f_{i}(x):\n    return x + {i}\n" for i in range(200))
    Tokenizer.train([text], kind="bpe", vocab_size=300).save(tmp_path / "t.model")
    given = f"data.tokenizer.path={tmp_path / 't.model'}"
    assert "300 x 192" in described(small(tmp_path, given))
    with pytest.raises(ValueError, match=r"^model.vocab_size must be the tokenizer's 300 \(or null\) but got 301\.$"):
        described(small(tmp_path, given, "model.vocab_size=301"))


FAMILIES = {
    "gpt2": (
        {"norm": "layer_norm", "position": "learned", "mlp": "gelu_tanh", "bias": True, "dropout": 0.1},
        OptimConfig(),
        1,
    ),
    "llama": ({"num_kv_heads": 2, "mlp": "swiglu", "tie_embeddings": False}, OptimConfig(), 3),
    "modded": (
        {"mlp": "relu2", "qk_norm": True, "logit_softcap": 15.0, "norm_weight": False, "tie_embeddings": False},
        OptimConfig(name="muon"),
        1,
    ),
    # Long rows and many heads: with its probabilities the estimate would be too high, without its blocks too low.
    "packed": (
        {"num_layers": 1, "hidden_size": 64, "num_heads": 8, "mlp": "relu2", "max_seq_len": 512},
        OptimConfig(),
        1,
    ),
    # Many rows of one layer: what is left of heads and MLP decides.
    "rows": (
        {"num_layers": 1, "hidden_size": 64, "num_heads": 2, "mlp": "relu2", "max_seq_len": 512},
        OptimConfig(),
        1,
    ),
    "window": ({"sliding_window": 32, "mlp": "relu2", "num_heads": 2}, OptimConfig(), 1),
    # Many tokens and small experts: what the routing keeps of each counts.
    "moe": (
        {
            "arch": "moe",
            "mlp": "relu2",
            "num_experts": 8,
            "experts_per_token": 6,
            "expert_intermediate_size": 128,
            "shared_experts": 2,
        },
        OptimConfig(name="muon"),
        1,
    ),
    # One layer in which a token goes to all experts: their backward pass is the peak.
    "many experts": (
        {
            "arch": "moe",
            "num_layers": 1,
            "num_heads": 1,
            "head_dim": 16,
            "mlp": "swiglu",
            "num_experts": 16,
            "experts_per_token": 16,
            "expert_intermediate_size": 32,
        },
        OptimConfig(name="muon"),
        1,
    ),
    "latent": (
        {
            "arch": "moe",
            "num_experts": 4,
            "dense_layers": 2,
            "intermediate_size": 256,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "expert_intermediate_size": 64,
        },
        OptimConfig(),
        1,
    ),
    "qat": ({"mlp": "relu2", "hidden_size": 256, "num_heads": 4, "tie_embeddings": False}, OptimConfig(), 1),
    # Weights decide here, and the update is the peak.
    "wide": ({"hidden_size": 384, "num_heads": 6, "num_layers": 2}, OptimConfig(), 1),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_estimated_memory_is_that_of_real_steps(family):
    changes, optim, accumulate = FAMILIES[family]
    batch, length = {"wide": (1, 16), "packed": (1, 512), "rows": (8, 512), "many experts": (8, 256)}.get(
        family, (4, 128)
    )
    packing = "documents" if family in ("packed", "rows") else "concat"
    shape = {"vocab_size": 1024, "num_layers": 3, "hidden_size": 128, "num_heads": 4, **changes}
    config = ARCHITECTURES[str(shape.get("arch", "gpt"))].config.model_validate(shape)
    mx.clear_cache()
    before = mx.get_active_memory()
    with mx.stream(mx.cpu):
        model = build_model(config, seed=0)
        if family == "qat":
            prepare_qat(model, QATConfig(weights="affine", bits=4))
        step = TrainStep(model, build_optimizer(optim), mx.float32, 1.0)
        mx.reset_peak_memory()
        for seed in range(2):
            rows = np.random.default_rng(seed).integers(0, 1024, (accumulate, 2, batch, length), np.int32)
            batches = [Batch(*each) for each in rows]
            if packing == "documents":
                weights, places = np.ones((batch, length), np.float32), np.arange(length) + np.zeros((batch, 1), int)
                batches = [
                    each._replace(weights=weights, segment_ids=places // 50, positions=places % 50) for each in batches
                ]
            _, norm, grads, count = step.gradients(batches, seed)
            step.update(grads, norm, count, 1.0)
            del grads
    peak = mx.get_peak_memory() - before
    estimate = estimate_memory(
        config, optim, model.num_parameters(), batch, length, "float32", accumulate, mx.cpu, packing
    )
    assert 0.8 < estimate.total / peak < 1.3, (estimate, peak)


# What is the largest term, with the vocabulary, the residual stream, the MLP and the tokens of a row.
LARGEST = {"head": (8192, 256, 64, 32), "layers": (256, 256, 4096, 32), "logits": (16384, 64, 64, 256)}


@pytest.mark.parametrize("term", LARGEST)
def test_floats_made_of_codes_and_logits_of_many_chunks_are_counted(term):
    vocabulary, hidden, inner, length = LARGEST[term]
    shape = {"num_layers": 2, "num_heads": 2, "mlp": "swiglu", "vocab_size": vocabulary, "hidden_size": hidden}
    optim = OptimConfig()
    mx.clear_cache()
    before = mx.get_active_memory()
    with mx.stream(mx.cpu):
        model = build_model(GPTConfig(**shape, intermediate_size=inner), seed=0)
        if term != "logits":
            convert_qat(prepare_qat(model, QATConfig(bits=4, group_size=32)))
        add_adapters(model, AdapterConfig(rank=4, targets=["layers.*"]), seed=0)
        step = TrainStep(model, build_optimizer(optim), mx.float32, 1.0)
        for seed in range(2):
            mx.reset_peak_memory()
            rows = np.random.default_rng(seed).integers(0, 256, (2, 1, length), np.int32)
            _, norm, grads, count = step.gradients([Batch(*rows)], seed)
            step.update(grads, norm, count, 1.0)
            del grads
    peak = mx.get_peak_memory() - before
    frozen = sum(array.nbytes for _, array in named_arrays(frozen_parameters(model)))
    trained = count_elements(model.trainable_parameters())
    decoded = decoded_bytes(model, "float32", mx.cpu)
    # Float32 and 12 bits of unpacking, or four matrices.
    assert decoded == {"head": 5.5 * vocabulary * hidden, "layers": 4 * 4 * inner * hidden, "logits": 0}[term]
    estimate = estimate_memory(
        model.config, optim, trained, 1, length, "float32", frozen=frozen, trains_head=False, decoded=decoded
    )
    largest = estimate.logits if term == "logits" else estimate.decoded
    assert largest == max(asdict(estimate).values())
    assert 0.85 < estimate.total / peak < 1.15, (estimate, peak)


def test_a_gpu_makes_floats_of_the_head_and_of_codes_that_mlx_cannot_multiply():
    shape = {"vocab_size": 256, "num_layers": 1, "hidden_size": 64, "num_heads": 1, "intermediate_size": 512}
    made = {}
    for weights, bits in (("affine", 4), ("int8", None)):
        model = build_model(GPTConfig(**shape), seed=0)
        convert_qat(prepare_qat(model, QATConfig(weights=weights, bits=bits)))
        made[weights] = decoded_bytes(model, "bfloat16", mx.gpu)
    assert made == {"affine": 2 * 256 * 64, "int8": 4 * 2 * 512 * 64}


def test_half_precision_halves_the_activations_only():
    config = GPTConfig(vocab_size=100)
    # A CPU's attention takes blocks of float32 for bfloat16.
    full, half = (
        estimate_memory(config, OptimConfig(), 10**6, 2, 64, d, device=mx.gpu) for d in ("float32", "bfloat16")
    )
    assert half.activations * 2 == full.activations
    assert (half.weights, half.optimizer, half.logits) == (full.weights, full.optimizer, full.logits)


def test_routers_keep_float32_in_half_precision():
    config = ARCHITECTURES["moe"].config(vocab_size=100, num_layers=3, num_experts=16, experts_per_token=2)
    full, half = (
        estimate_memory(config, OptimConfig(), 10**6, 2, 64, d, device=mx.gpu) for d in ("float32", "bfloat16")
    )
    # Four arrays of all experts' scores, in three layers, of 128 tokens.
    assert 2 * half.activations - full.activations == 4 * 4 * 16 * 3 * 128


def test_missing_data_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.txt"):
        described(small(tmp_path, f"data.source={tmp_path / 'nowhere.txt'}"))


def test_missing_examples_are_an_error_too(tmp_path):
    config = finetune_config(tmp_path, data__source=str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match=r"nowhere\.jsonl"):
        described(config)


FITS = {"adapter": {"rank": 2}, "train__seq_len": 96}


def facts_of(text):
    """The lines of a description by name, those of one joined."""
    joined = re.sub(r"\n {15}", " ", text)
    return dict(re.findall(r"^([a-zA-Z ]+): +(.*)$", joined, re.MULTILINE))


def test_examples_are_counted_as_the_run_has_them(tmp_path):
    config = finetune_config(tmp_path, **FITS)
    facts = facts_of(described(config))
    # 25 characters and special tokens of ChatML, `is it ?` and a word of 38 letters in 10; four letters and an end are
    # learnt; 31 inputs and the word, two examples a row.
    counts = (
        "10 examples to train on (50 of their 358 tokens are learnt), 2 to validate; 36 tokens each on average, 37 the "
        "longest; 5 rows of 96, 72 % full"
    )
    assert facts["data"].startswith(f"{counts}; read in ")
    assert facts["epochs"] == "2.4 in 6 steps; one takes 2.5, as there are 5 rows, 2 a step"
    assert facts["tokens a step"] == "at most 192 = 2 rows x 96 tokens x 1 pass, about 20 learnt"
    assert facts["tokens in all"] == "at most 1,152 in 6 steps, about 120 learnt"
    said = []
    begin_work(config, choose_placement(config.run), said.append)
    assert any(line.startswith(f"data: {counts}; from the cache in ") for line in said)


def test_what_is_split_or_fills_no_batch_is_said(tmp_path):
    changes = {"train__seq_len": 32, "data__truncate": "split", "train__batch_size": 30, "train__accumulate": 2}
    facts = facts_of(described(finetune_config(tmp_path, adapter={"rank": 2}, **changes)))
    assert facts["data"].startswith("split as longer than a row of 32: 12 examples into ")
    assert "10 examples to train on" in facts["data"]
    assert "11 rows to train on, fewer than train.batch_size, 30" in facts["data"]
    assert facts["epochs"] == "32.7 in 6 steps; one takes 0.183, as there are 11 rows, 60 a step"


def test_rows_are_as_long_as_their_examples(tmp_path):
    padded = facts_of(described(finetune_config(tmp_path, "text", data__packing=False, **FITS)))
    assert padded["tokens a step"].startswith("at most 128 = 2 rows x 64 tokens x 1 pass")
    # No two examples fit into a row, which then needs no segments.
    alone = facts_of(described(finetune_config(tmp_path, "text", train__seq_len=20)))
    for facts in (padded, alone):
        assert facts["packing"] == "one example in a row, the rest padding"
        assert facts["attention"].startswith("causal: mx.fast")
    pairs = facts_of(described(finetune_config(tmp_path, "preference", **FITS)))
    assert pairs["tokens a step"] == "at most 256 = 4 rows x 64 tokens x 1 pass, about 22 learnt"
    assert pairs["epochs"] == "1.2 in 6 steps; one takes 5, as there are 10 pairs, 2 a step"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__seq_len": 512}, "train.seq_len must be at most the model's longest sequence, 256, but got 512."),
        ({"train__seq_len": 16}, "truncate: error all examples must fit into train.seq_len, 16, but 12 of 12 do not"),
        ({"train__seq_len": 16, "data__truncate": "drop"}, "drop must leave examples but all 12 of data.source"),
        ({"data__max_examples": 1}, "source must hold at least 2 examples"),
        ({"train__sample_prompt": "x" * 256}, "train.sample_prompt must be shorter than the model's longest sequence"),
    ],
)
def test_refuses_what_training_refuses_before_weights_are_read(changes, message, tmp_path, monkeypatch):
    config = finetune_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as of_run:
        begin_work(config, choose_placement(config.run), lambda _: None)
    monkeypatch.setattr("forge_mlx.train.work.load_pretrained", None)
    with pytest.raises(ValueError, match=f"^{re.escape(str(of_run.value))}$"):
        described(config)


def test_refuses_a_folder_of_something_else(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds other files, such as thesis\.txt"):
        described(small(tmp_path))
    with pytest.raises(ValueError, match=r"run\.dir must be a folder but \S+thesis\.txt is a file\."):
        described(small(tmp_path, f"run.dir={tmp_path / 'run' / 'thesis.txt'}"))
