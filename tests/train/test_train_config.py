import json
from pathlib import Path

from forge_mlx.models.gpt import GPTConfig
from forge_mlx.models.moe import MoEConfig
from forge_mlx.models.qat import QATConfig
from forge_mlx.models.registry import ARCHITECTURES
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.load import ConfigError, dump_config, load_config
import pytest
from shipped_configs import FINETUNING, NEW, SHIPPED

SECTIONS = "run, model, data, train, optim, adapter, qat, preference"
BASE = """\
run:
  dir: runs/x
data:
  source: stdlib
model:
  num_layers: 2
train:
  steps: 10
  batch_size: 2
  seq_len: 64
optim:
  lr: 1.0e-3
"""


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(*overrides, text=BASE, **replaced):
    """The config of BASE with lines replaced (`steps="steps: 5"` replaces the line that begins with steps)."""
    lines = text.splitlines()
    for name, new in replaced.items():
        (index,) = [i for i, line in enumerate(lines) if line.split(":")[0].strip() == name]
        indent = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
        lines[index] = "\n".join(indent + part for part in new.split("\n"))
    Path("c.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return load_config(Path("c.yaml"), overrides)


def error(*overrides, text=BASE, **replaced):
    with pytest.raises(ConfigError) as caught:
        load(*overrides, text=text, **replaced)
    return str(caught.value)


def test_reads_values_and_fills_in_defaults():
    config = load()
    assert config.run.dir == Path("runs/x")
    assert (config.train.steps, config.optim.lr, config.model.num_layers) == (10, 1e-3, 2)
    assert (config.optim.name, config.optim.betas, config.train.accumulate) == ("adamw", (0.9, 0.95), 1)
    assert config.positions_per_step == 128


def test_what_looks_like_a_date_is_text():
    assert load(dir="dir: 2024-01-31").run.dir == Path("2024-01-31")


def test_home_is_expanded_in_the_run_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert load(dir="dir: ~/runs/x").run.dir == Path("/home/someone/runs/x")


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (
            {"steps": "steps: 1.5"},
            "c.yaml:8: train.steps: must be a whole number, greater than 0, or null, but got 1.5. (optimizer updates; "
            "null: as many as train.epochs takes)",
        ),
        (
            {"steps": 'steps: "10"'},
            'c.yaml:8: train.steps: must be a whole number, greater than 0, or null, but got "10". (optimizer updates; '
            "null: as many as train.epochs takes)",
        ),
        (
            {"steps": "steps: 0"},
            "c.yaml:8: train.steps: must be a whole number, greater than 0, or null, but got 0. (optimizer updates; "
            "null: as many as train.epochs takes)",
        ),
        (
            {"steps": "steps: true"},
            "c.yaml:8: train.steps: must be a whole number, greater than 0, or null, but got true. (optimizer updates; "
            "null: as many as train.epochs takes)",
        ),
        (
            {"lr": "lr: yes"},
            'c.yaml:12: optim.lr: must be a number, greater than 0, but got "yes". (peak learning rate of AdamW)',
        ),
        (
            {"lr": "lr:"},
            "c.yaml:12: optim.lr: must be a number, greater than 0, but got null. (peak learning rate of AdamW)",
        ),
        (
            {"lr": "lr: .inf"},
            "c.yaml:12: optim.lr: must be a finite number, greater than 0, but got Infinity. "
            "(peak learning rate of AdamW)",
        ),
        (
            {"lr": "clip_norm: off"},
            'c.yaml:12: optim.clip_norm: must be a number, greater than 0, or null, but got "off". '
            "(clip the gradient's global norm to this; null: never)",
        ),
        (
            {"lr": "name: adam"},
            'c.yaml:12: optim.name: must be adamw or muon but got "adam". Did you mean adamw? '
            "(adamw for all parameters, or muon for the hidden matrices and adamw for the rest)",
        ),
        (
            {"lr": "betas: [0.9]"},
            "c.yaml:12: optim.betas: must be a list of 2, each a number, at least 0 and less than 1, but got [0.9]. "
            "(AdamW's decay rates of the two moments)",
        ),
        (
            {"lr": "betas: [0.9, 1.0]"},
            "c.yaml:12: optim.betas: must be a list of 2, each a number, at least 0 and less than 1, but got "
            "[0.9, 1.0] (item 2 is 1.0). (AdamW's decay rates of the two moments)",
        ),
        (
            {"dir": "dir: x\nseed: -1"},
            "c.yaml:3: run.seed: must be a whole number, at least 0 and less than 2147483648, but got -1. "
            "(seeds the weights, dropout and the order of the data)",
        ),
        (
            {"dir": "dir: 3"},
            "c.yaml:2: run.dir: must be a path but got 3. "
            "(the run's folder: config, metrics, checkpoints, final model, report)",
        ),
        ({"dir": "dir: ''"}, "c.yaml:2: run.dir: must name a folder but is empty."),
        (
            {"num_layers": "bias: 1"},
            "c.yaml:6: model.bias: must be true or false but got 1. "
            "(Whether projections and LayerNorms have a bias; the head never has)",
        ),
        (
            {"num_layers": "vocab_size: []"},
            "c.yaml:6: model.vocab_size: must be a whole number, at least 1, or null, but got []. "
            "(Number of tokens V; null: the tokenizer's)",
        ),
        (
            {"source": "source: stdlib\ntokenizer: bpe"},
            "c.yaml:5: data.tokenizer: must be a section with the keys kind, vocab_size, sample_bytes, path, but got "
            '"bpe". (The tokenizer to train or to load)',
        ),
        (
            {"source": "source: stdlib\ntokenizer: {vocab_size: 3}"},
            "c.yaml:5: data.tokenizer.vocab_size: must be a whole number, at least 258 and at most 1048576, but got 3. "
            "(Pieces of the vocabulary, of which 256 are single bytes and 2 are `unknown` and `end`)",
        ),
        (
            {"steps": ""},
            "c.yaml:7: train.steps: is required but missing, and train.epochs too: one of the two says how long a run "
            "is.",
        ),
    ],
)
def test_a_bad_value_is_one_line_with_place_key_rule_value_and_help(replaced, message):
    assert error(**replaced) == message


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("3", "3"),
        ("[]", "[]"),
        ("[1, a]", '[1, "a"] (item 1 is 1)'),
        ("[a, '']", '["a", ""] (item 2 is "")'),
        ("{a: b}", '{"a": "b"}'),
        ("", "null"),
    ],
)
def test_a_key_that_takes_several_kinds_has_one_message(value, shown):
    message = error(source=f"source: {value}")
    assert message.startswith(
        f"c.yaml:4: data.source: must be stdlib or a list of at least 1, each non-empty text, but got {shown}. "
    )
    assert "\n" not in message


def test_a_long_value_is_cut():
    message = error(lr=f"lr: {list(range(200))}")
    assert "but got [0, 1, 2, " in message
    assert len(message) < 250


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"lr": "lrr: 1"}, "c.yaml:12: optim.lrr: there is no such key. Did you mean optim.lr?"),
        ({"lr": "steps: 1"}, "c.yaml:12: optim.steps: there is no such key. Did you mean train.steps?"),
        ({"lr": "method: muon"}, "c.yaml:12: optim.method: there is no such key. Did you mean optim.name?"),
        ({"lr": "method: lora"}, "c.yaml:12: optim.method: there is no such key. Did you mean adapter.method?"),
        (
            {"lr": "dropuot: 1"},
            "c.yaml:12: optim.dropuot: there is no such key. Did you mean model.dropout or adapter.dropout?",
        ),
        ({"optim": "optimizer:"}, "c.yaml:11: optimizer: there is no such key. Did you mean optim?"),
        ({"run": "seed: 1\nrun:"}, "c.yaml:1: seed: there is no such key. Did you mean run.seed?"),
        (
            {"dir": "dir: x\nzzz: 1"},
            "c.yaml:3: run.zzz: there is no such key. Allowed: dir, seed, resume, device, dtype.",
        ),
        (
            {"dir": "dir: x\n1: 1"},
            "c.yaml:3: run.1: there is no such key. Allowed: dir, seed, resume, device, dtype.",
        ),
        (
            {"source": "source: stdlib\ntokenizer: {vocabsize: 300}"},
            "c.yaml:5: data.tokenizer.vocabsize: there is no such key. Did you mean data.tokenizer.vocab_size?",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest(replaced, message):
    assert error(**replaced) == message


def test_several_problems_are_all_listed():
    lines = error(num_layers="num_layer: 2", seq_len="seq_len: -4", lr="lr: x").splitlines()
    assert lines[0] == "c.yaml: 3 problems"
    assert [line.split(" must")[0].split(" there")[0] for line in lines[1:]] == [
        "  c.yaml:6: model.num_layer:",
        "  c.yaml:10: train.seq_len:",
        "  c.yaml:12: optim.lr:",
    ]


def test_impossible_combinations_are_all_listed_at_their_lines():
    message = error(
        num_layers="vocab_size: 300",
        seq_len="seq_len: 512",
        lr="warmup_steps: 10",
    )
    assert message.splitlines() == [
        "c.yaml: 3 problems",
        "  c.yaml:10: train.seq_len must be at most model.max_seq_len, 256, but got 512. Lower one or raise the other.",
        "  c.yaml:12: optim.warmup_steps must be less than train.steps, 10, but got 10.",
        "  c.yaml:6: model.vocab_size must be data.tokenizer.vocab_size, 2048, or null, but got 300.",
    ]
    assert load(num_layers="vocab_size: 2048").model.vocab_size == 2048
    assert load("data.tokenizer.path=t.model", num_layers="vocab_size: 300").model.vocab_size == 300


def test_large_heads_and_packed_documents_are_refused_together():
    assert error("data.packing=documents", num_layers="head_dim: 264") == (
        "c.yaml:6: model.head_dim must be at most 256 with data.packing: documents but the head size is 264. "
        "Set it or raise model.num_heads."
    )
    assert load(num_layers="head_dim: 264").model.head_size == 264


def test_a_combination_inside_a_section_names_the_section_and_the_line():
    assert error(num_layers="hidden_size: 64\nnum_heads: 3") == (
        "c.yaml:6: model.hidden_size must be a multiple of num_heads, 3, but got 64. "
        "Change one of them or set head_dim."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"c.yaml: must hold the sections {SECTIONS} but is empty."),
        ("# nothing\n", f"c.yaml: must hold the sections {SECTIONS} but is empty."),
        ("- a\n", f'c.yaml: must hold the sections {SECTIONS} but holds ["a"].'),
        ("a\n", f'c.yaml: must hold the sections {SECTIONS} but holds "a".'),
        (
            "run:\n\tdir: x\n",
            "c.yaml:2: not valid YAML: found character '\\t' that cannot start any token. "
            "Indent with spaces, not tabs.",
        ),
        ("run:\n  dir: a\nrun:\n  dir: b\n", "c.yaml:3: run: is there twice; keep one."),
        ("run:\n  dir: a\n  dir: b\n", "c.yaml:3: dir: is there twice; keep one."),
        (
            "run:\n  dir: a: b\n",
            "c.yaml:2: not valid YAML: mapping values are not allowed here. "
            "Check the colons and the indentation here and just above.",
        ),
        ("run: *x\n", "c.yaml:1: not valid YAML: found undefined alias 'x'."),
        (
            "run: &a {dir: *a}\n",
            "c.yaml: must hold only texts, numbers, lists and sections: Circular reference detected.",
        ),
        (
            "run: {dir: !!binary aGk=}\n",
            "c.yaml: must hold only texts, numbers, lists and sections: Object of type bytes is not JSON serializable.",
        ),
    ],
)
def test_a_file_that_is_no_config(text, message):
    assert error(text=text) == message


def test_a_file_that_cannot_be_read(tmp_path):
    for path, content, message in [
        ("missing.yaml", None, "missing.yaml: there is no such file."),
        ("latin.yaml", "run: größe".encode("latin-1"), "latin.yaml: must be UTF-8 text but byte 7 is not."),
    ]:
        if content:
            Path(path).write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_config(Path(path))
        assert str(caught.value) == message
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory\.$"):
        load_config(tmp_path)


def test_an_empty_section_has_its_defaults():
    config = load(lr="", source="source: stdlib\ntokenizer:")
    assert config.optim == TrainConfig.model_fields["optim"].get_default(call_default_factory=True)
    assert config.data.tokenizer.vocab_size == 2048
    assert error(text="run:\n  dir: x\ndata:\n  source: stdlib\nmodel:\ntrain:\n").splitlines()[1:] == [
        "  c.yaml:6: train.steps: is required but missing, and train.epochs too: one of the two says how long a run "
        "is.",
        "  c.yaml:6: train.batch_size: is required but missing. (rows in one forward and backward pass; of preference "
        "pairs)",
        "  c.yaml:6: train.seq_len: is required but missing. (tokens in a row)",
    ]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optim.lr=1e-3", 1e-3),
        ("optim.lr=1", 1.0),
        ("optim.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("optim.clip_norm=null", None),
        ("model.bias=true", True),
        ("data.source=[a, b]", ["a", "b"]),
        ("data.source=a", ["a"]),
        ("data.tokenizer.vocab_size=300", 300),
        ("data.tokenizer.path=null", None),
        ("data.tokenizer.path=2024", "2024"),
        ("run.dir=2024-01-31", Path("2024-01-31")),
        ("train.sample_prompt=a=b", "a=b"),
        ("train.sample_prompt=def f(): ", "def f(): "),
        ("train.sample_prompt=# no comment", "# no comment"),
        ("train.sample_prompt=", ""),
        ("train.sample_prompt=null", "null"),
        ('train.sample_prompt="a\\nb"', "a\nb"),
    ],
)
def test_overrides(override, value):
    got = load(override)
    for name in override.split("=")[0].split("."):
        got = getattr(got, name)
    assert got == value
    assert type(got) is type(value) or isinstance(value, Path)


def test_an_override_may_name_a_section_that_the_file_lacks_and_the_last_one_wins():
    text = BASE.split("optim:")[0]
    config = load("optim.lr=2.0", "optim.lr=3.0", "optim.schedule=wsd", text=text)
    assert (config.optim.lr, config.optim.schedule) == (3.0, "wsd")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optim.lr",
            "command line: optim.lr: an override is written section.key=value, such as optim.lr=1e-3.",
        ),
        (
            "lr=3",
            "command line: lr=3: an override is written section.key=value, such as optim.lr=1e-3. "
            "Did you mean optim.lr?",
        ),
        (
            "optim=3",
            "command line: optim=3: an override is written section.key=value, such as optim.lr=1e-3.",
        ),
        (
            "optim.=3",
            "command line: optim.=3: an override is written section.key=value, such as optim.lr=1e-3.",
        ),
        (
            "optim.lr =3",
            "command line: optim.lr =3: an override is written section.key=value, such as optim.lr=1e-3.",
        ),
        (
            "model.num_layers.x=1",
            "command line: model.num_layers.x=1: model.num_layers has no keys of its own; its value is 2.",
        ),
        ("optim.lrr=1", "command line: optim.lrr: there is no such key. Did you mean optim.lr?"),
        ("optim.clip-norm=1", "command line: optim.clip-norm: there is no such key. Did you mean optim.clip_norm?"),
        ("optm.lr=1", "command line: optm: there is no such key. Did you mean optim?"),
        (
            "optim.lr=abc",
            'command line: optim.lr: must be a number, greater than 0, but got "abc". (peak learning rate of AdamW)',
        ),
        (
            "optim.lr=",
            'command line: optim.lr: must be a number, greater than 0, but got "". (peak learning rate of AdamW)',
        ),
        (
            "optim.betas=[0.9",
            "command line: optim.betas: must be a list of 2, each a number, at least 0 and less than 1, but got "
            '"[0.9". (AdamW\'s decay rates of the two moments)',
        ),
        (
            "train.seq_len=1024",
            "command line: train.seq_len must be at most model.max_seq_len, 256, but got 1024. "
            "Lower one or raise the other.",
        ),
        ("run.dir=\udcff", "command line: 'run.dir=\\udcff': must be UTF-8 text."),
    ],
)
def test_a_bad_override_is_blamed_on_the_command_line(override, message):
    assert error(override) == message


@pytest.mark.parametrize(("value", "shown"), [("[moe]", '["moe"]'), ("{a: 1}", '{"a": 1}'), ("MoE", '"MoE"')])
def test_an_architecture_that_there_is_not(value, shown):
    rule = "model.arch: must be gpt or moe but got"
    assert error(num_layers=f"arch: {value}").startswith(f"c.yaml:6: {rule} {shown}.")
    assert error(f"model.arch={value}") == f"command line: {rule} {shown}."


@pytest.mark.parametrize("text", ["moe", '"moe"', "'moe'", " moe"])
def test_the_command_line_chooses_the_architecture_and_its_keys(text):
    config = load(f"model.arch={text}", "model.num_experts=4")
    assert (type(config.model), config.model.num_experts) == (MoEConfig, 4)
    assert type(load("model.arch=moe", "model.arch=gpt").model) is GPTConfig
    assert "no such key" in error("model.num_experts=4")


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (
            (),
            "normalize_gates must be false with experts_per_token: 1 but got true, which is its default: ",
        ),
        (("model.num_experts=1",), "num_experts must be at least 2 in a new model but got 1: "),
    ],
)
def test_a_new_router_that_would_learn_nothing_is_refused(experts, message):
    assert f": model.{message}" in error("model.arch=moe", "model.experts_per_token=1", *experts)
    assert load("model.arch=moe", "model.experts_per_token=1", "model.normalize_gates=false").model.num_experts == 8


def test_the_help_names_every_architecture():
    description = TrainConfig.model_fields["model"].description
    assert all(name in description for name in ARCHITECTURES)


def test_a_rate_for_experts_that_nothing_would_have_is_refused():
    rate, experts, muon = "optim.muon_expert_lr=5e-3", "model.arch=moe", "optim.name=muon"
    assert error(rate, experts) == (
        "command line: optim.muon_expert_lr must be null with optim.name: adamw but got 0.005: only Muon has a rate "
        "for experts. Set it to null, or optim.name to muon."
    )
    assert error(rate, muon) == (
        "command line: optim.muon_expert_lr must be null with model.arch: gpt but got 0.005: the model has no experts. "
        "Set it to null."
    )
    assert load(rate, muon, experts).optim.muon_expert_lr == 5e-3
    assert load("optim.muon_expert_lr=null").optim.muon_expert_lr is None


@pytest.mark.parametrize("end", [10, 11])
def test_an_end_of_quantisation_that_leaves_no_float_step_is_refused(end):
    assert error(f"qat.end_step={end}", "qat.weights=affine") == (
        f"command line: qat.end_step must be less than train.steps, 10, or null, but got {end}: no step in float would "
        "be left. Lower it, or set it to null for a model that is deployed quantised."
    )
    assert load("qat.end_step=9").qat.end_step == 9
    assert load("qat.end_step=null").qat.end_step is None


def test_a_problem_of_the_file_is_not_blamed_on_the_command_line():
    assert error("optim.eps=1e-6", lr="lr: x").startswith("c.yaml:12: optim.lr: ")
    assert error("optm.lr=1", optim="optm:").startswith("c.yaml:11: optm: ")


QAT = """\
qat:
  bits: 4
  overrides:
    embed_tokens: {bits: 8}
    layers.*.mlp.*:
      group_size: 32
"""


@pytest.mark.parametrize(
    ("overrides", "replaced", "message"),
    [
        (
            ["qat.bits=7"],
            {},
            "command line: qat.bits must be 4, 2, 3, 5, 6 or 8 in the mode 'affine' but got 7.",
        ),
        ([], {"bits": "bits: 7"}, "c.yaml:14: qat.bits must be 4, 2, 3, 5, 6 or 8 in the mode 'affine' but got 7."),
        (
            ["qat.group_size=48"],
            {},
            "command line: qat.group_size must be 64, 32 or 128 in the mode 'affine' but got 48.",
        ),
        (
            [],
            {"group_size": "group_size: 48"},
            "c.yaml:18: qat.overrides.layers.*.mlp.*.group_size must be 64, 32 or 128 in the mode 'affine' but got 48.",
        ),
        (
            ["qat.end_step=2", "qat.start_step=3"],
            {},
            "command line: qat.end_step must be greater than start_step, 3, but got 2.",
        ),
        (
            [],
            {"embed_tokens": "embed_tokens: {bitz: 8}"},
            "c.yaml:16: qat.overrides.embed_tokens.bitz: there is no such key. Did you mean "
            "qat.overrides.embed_tokens.bits?",
        ),
        (
            [],
            {"embed_tokens": "embed_tokens: 8"},
            "c.yaml:16: qat.overrides.embed_tokens: must be a section with the keys weights, bits, group_size, "
            "granularity, activations, or null, but got 8.",
        ),
        (
            ["qat.overrides.embed_tokens.weights=int3"],
            {},
            "command line: qat.overrides.embed_tokens.weights: must be affine, mxfp4, mxfp8, nvfp4, int8, int4, "
            'ternary or fp8_e4m3, or null, but got "int3". Did you mean int8? (Format of the weights; another than the '
            "others' has its own defaults)",
        ),
        (
            ["qat=affine"],
            {},
            "command line: qat=affine: a whole section can only be left out, by qat=null. Set its keys one by one, "
            "such as qat.key=value.",
        ),
        (
            ["qat=null", "qat.bits=7"],
            {},
            "command line: qat.bits must be 4, 2, 3, 5, 6 or 8 in the mode 'affine' but got 7.",
        ),
    ],
)
def test_what_is_wrong_with_quantisation_is_said_once_with_key_and_place(overrides, replaced, message):
    assert error(*overrides, text=BASE + QAT, **replaced) == message


def test_the_command_line_leaves_quantisation_out_and_brings_it_back():
    assert load(text=BASE + QAT).qat.overrides["embed_tokens"].bits == 8
    assert load("qat=null", text=BASE + QAT).qat is None
    assert load("qat=null", "qat.bits=3", text=BASE + QAT).qat == QATConfig(bits=3)
    assert load("qat.bits=3", text=BASE + "qat:\n").qat == QATConfig(bits=3)


VARIANTS = {
    "defaults": (),
    "nulls": ("optim.clip_norm=null", "train.final_eval_tokens=null", "model.vocab_size=null"),
    "learned": ("model.position=learned", "model.norm=layer_norm", "model.mlp=gelu_tanh", "model.bias=true"),
    "no positions": ("model.position=none", "model.mlp=silu"),
    "grouped": ("model.num_kv_heads=2", "model.head_dim=64", "model.mlp=geglu", "model.rope_base=5e5"),
    "experts": ("model.arch=moe", "optim.name=muon", "optim.muon_expert_lr=1e-2", "qat.end_step=5"),
    "muon": ("optim.name=muon", "model.logit_softcap=15.0", "model.mlp=relu2", "optim.schedule=wsd"),
    "texts": ("data.source=[a b, 'no', '1', null.txt, 'größe: #1']", "train.sample_prompt=def f():\n\t# x: 'y' 🙂"),
    "texts that look otherwise": ("run.dir=2024-01-31", "train.sample_prompt=1e-3", "data.tokenizer.path='true'"),
    "tiny and large numbers": ("optim.eps=1e-30", "optim.lr=1e6", "train.steps=1000000000000"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_dumped_config_loads_again_with_every_default_spelt_out(name):
    config = load(*VARIANTS[name])
    dump_config(config, Path("resolved.yaml"))
    assert load_config(Path("resolved.yaml")) == config
    text = Path("resolved.yaml").read_text(encoding="utf-8")
    for section in ("run", "model", "data", "train", "optim"):
        for key in type(getattr(config, section)).model_fields:
            assert f"\n  {key}:" in text


def test_a_dumped_config_is_pleasant_to_read():
    dump_config(load("optim.clip_norm=null", "data.source=[a, b]"), Path("resolved.yaml"))
    text = Path("resolved.yaml").read_text(encoding="utf-8")
    assert text.startswith("# Every setting of this run, defaults included.\n\nrun:\n  dir: runs/x\n  seed: 0\n")
    assert "\n\ndata:\n  source:\n  - a\n  - b\n  text_field: text\n" in text
    assert "\n  betas: [0.9, 0.95]\n" in text
    assert "\n  clip_norm: null\n" in text


def test_every_field_has_a_help_text():
    def check(model):
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                check(field.annotation)
            else:
                assert field.description, f"{model.__name__}.{name}"

    check(TrainConfig)


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_config_loads_and_begins_with_its_launch_command(path):
    first, second = path.read_text(encoding="utf-8").splitlines()[:2]
    assert first == f"# python -m forge_mlx.train models/configs/{path.name}"
    assert second == "#"
    config = load_config(path)
    assert config.run.dir == Path("runs") / path.stem
    # Nothing is given that the field would reject as JSON, and nothing that is not there after a round trip.
    assert TrainConfig.model_validate_json(json.dumps(config.model_dump(mode="json"))) == config


def test_the_families_are_shipped():
    assert {path.stem for path in NEW} >= {"quickstart", "gpt2-124m", "llama-small", "modded-small"}


def test_every_method_of_fine_tuning_is_shipped():
    methods = {"full", "lora", "rslora", "dora", "qlora", "qat", "qat_lora", "dpo", "orpo"}
    assert {path.stem for path in FINETUNING} == methods
