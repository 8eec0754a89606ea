"""What samples of a fine-tuning run continue, what a run of pairs does beside its loss, and what is told of both."""

import json

from forge_mlx.data.chat import render_prompt
from forge_mlx.hub.pretrained import load_pretrained, save_pretrained
from forge_mlx.models.moe import MoE, MoEConfig
from forge_mlx.train.__main__ import _next_steps
from forge_mlx.train.dry_run import describe_run
from forge_mlx.train.final import write_final
from forge_mlx.train.load import load_config
from forge_mlx.train.loop import train
from forge_mlx.train.memory import estimate_memory
from forge_mlx.train.outcome import Outcome
import mlx.core as mx
import pytest
from tiny_checkpoint import SHAPE, finetune_config, finetune_values
from tiny_run import records, trainer_of

from tests.data.example_tokenizer import character_tokenizer

LORA = {"adapter": {"rank": 2}}


@pytest.fixture(autouse=True, scope="module")
def _uncompiled():
    """A few steps are not worth the compiler's seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _config_of(folder, examples, kind, **changes):
    """The config of a run on these examples."""
    values = finetune_values(folder, kind, **LORA, **changes)
    (folder / f"{kind}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in examples), encoding="utf-8")
    (folder / "own.yaml").write_text(json.dumps(values), encoding="utf-8")
    return load_config(folder / "own.yaml")


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_half_of_a_text_is_given_and_the_rest_expected(packing, tmp_path):
    texts = [f"{word} " * 8 for word in ("ab", "cd", "ef", "gh", "ij", "kl")]
    config = _config_of(tmp_path, [{"text": text} for text in texts], "text", data__packing=packing)
    prompts = trainer_of(config).work.prompts
    for prompt in prompts:
        assert prompt.text + prompt.expected in texts
        assert len(prompt.text) == 12
    (long,) = trainer_of(
        _config_of(tmp_path, [{"text": text * 8} for text in texts], "text", data__packing=packing, train__seq_len=256)
    ).work.prompts[:1]
    assert len(long.tokens) == 64
    assert long.text + long.expected in [text * 8 for text in texts]


def test_conversations_in_prompts_are_asked_in_the_template(tmp_path):
    turns = [
        {"prompt": [{"role": "user", "content": f"{n}?"}], "completion": [{"role": "assistant", "content": "yes!"}]}
        for n in range(40)
    ]
    config = _config_of(tmp_path, turns, "prompt_completion", train__sample_prompt="why?")
    work = trainer_of(config).work
    (prompt,) = work.prompts
    assert prompt.tokens == render_prompt(work.tokenizer, [{"role": "user", "content": "why?"}])
    texts = [{"prompt": f"{n}?", "completion": "yes!"} for n in range(40)]
    work = trainer_of(_config_of(tmp_path, texts, "prompt_completion", train__sample_prompt="why?")).work
    (prompt,) = work.prompts
    assert prompt.tokens == [*work.tokenizer.begin_ids, *work.tokenizer.encode("why?")]


def test_no_two_prompts_are_the_same(tmp_path):
    asked = ["same?", "same?", "same?", "other?", "third?", "fourth?"]
    turns = [
        {"messages": [{"role": "user", "content": each}, {"role": "assistant", "content": f"{n}"}]}
        for n, each in enumerate(asked)
    ]
    config = _config_of(tmp_path, turns, "chat", data__packing=False)
    held_out = (tmp_path / "chat.jsonl").rename(tmp_path / "held-out.jsonl")
    finetune_values(tmp_path)
    data = config.data.model_copy(update={"valid_paths": [str(held_out)]})
    config = config.model_copy(update={"data": data})
    texts = [prompt.text for prompt in trainer_of(config).work.prompts]
    assert len(texts) == len(set(texts)) == 3


def test_the_deployed_loss_of_pairs_is_that_of_their_tokens(tmp_path):
    config = finetune_config(
        tmp_path, "preference", **LORA, qat={"bits": 4, "group_size": 32}, train__steps=1, train__sample_tokens=1
    )
    (final,) = [record for record in records(train(config, log=lambda _: None).folder, "eval") if record["final"]]
    deployed = final["deployed"]
    # Nats a token of a model that has seen next to nothing.
    assert deployed["trained_loss"] > 4
    assert deployed["loss"] == pytest.approx(deployed["trained_loss"], rel=1e-4)
    assert final["loss"] < 1


def test_routers_do_not_count_the_padding_of_pairs(tmp_path):
    shape = SHAPE | {"num_experts": 4, "experts_per_token": 2, "shared_experts": 0}
    options = {"router_scores": "softmax", "selection_bias": False, "bias_rate": 0.0, "aux_loss_weight": 0.0}
    model = MoE(MoEConfig(**shape, **options), seed=1)
    save_pretrained(tmp_path / "checkpoint-None", model, character_tokenizer(), log=lambda _: None)
    trainer = trainer_of(finetune_config(tmp_path, "preference", adapter={"rank": 2, "targets": ["*.q_proj"]}))
    trainer.train_step()
    pairs = trainer.stream
    pairs.load_state_dict(pairs.state_dict() | {"epoch": 0, "row": 0})
    tokens = int((next(pairs).segment_ids >= 0).sum())
    for record in trainer.step_function.routing:
        assert record.load.sum().item() == 2 * tokens


def test_a_description_of_pairs_counts_two_rows_for_each(tmp_path):
    config = finetune_config(tmp_path, "preference", **LORA, train__accumulate=3)
    assert (config.rows_per_pass, config.positions_per_step) == (4, 4 * 96 * 3)
    chat = finetune_config(tmp_path, "chat", **LORA)
    assert (chat.rows_per_pass, chat.positions_per_step) == (2, 2 * 96)


@pytest.mark.parametrize(("targets", "is_trained"), [(["layers.*"], False), (["embed_tokens"], True)])
def test_the_gradient_of_the_head_is_counted_where_it_is_trained(targets, is_trained, tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr(
        "forge_mlx.train.dry_run.estimate_memory",
        lambda *arguments: counted.append(estimate_memory(*arguments)) or counted[-1],
    )
    describe_run(finetune_config(tmp_path, "preference", adapter={"rank": 2, "targets": targets}))
    # No pair is longer than 64, and so no row.
    rows = 4 * 64
    chunk_bytes = 3 * 4 * 288 * rows
    assert counted[0].logits == chunk_bytes + (4 * 288 * 2 * 64 if is_trained else 0)


def test_a_row_that_is_too_long_is_known_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("forge_mlx.train.work.load_pretrained", None)
    with pytest.raises(ValueError, match=r"train\.seq_len must be at most the model's longest sequence, 256"):
        trainer_of(finetune_config(tmp_path, train__seq_len=512))


def test_a_checkpoint_without_a_generation_config_gets_one(tmp_path):
    trainer = trainer_of(finetune_config(tmp_path))
    work = trainer.work
    tokenizer = work.source.tokenizer
    files = {name: content for name, content in tokenizer.files.items() if name != "generation_config.json"}
    bare = work.source._replace(generation={}, tokenizer=type(tokenizer)(files, "bare"))
    object.__setattr__(work, "source", bare)
    (tmp_path / "final").mkdir()
    write_final(tmp_path / "final", work, mx.float32, quantised=False)
    generation = json.loads((tmp_path / "final" / "generation_config.json").read_text())
    # The template's end of turn is one too.
    assert generation["eos_token_id"] == sorted(tokenizer.stop_ids) == [tokenizer.end_id, 258]
    assert load_pretrained(tmp_path / "final").generation == generation


def test_mlx_lm_is_not_offered_a_gguf_base_whatever_its_path(tmp_path):
    run = tmp_path / "a run"
    (run / "final").mkdir(parents=True)
    (run / "final" / "adapter_config.json").write_text("{}")
    outcome = Outcome(1.0, 1.0, None, "", "", run)
    for path, is_offered in (("it's a base.gguf", False), ("it's a base", True)):
        config = finetune_config(tmp_path, **LORA)
        model = config.model.model_copy(update={"path": path})
        lines = _next_steps(outcome, config.model_copy(update={"model": model}))
        assert any(line.startswith("mlx_lm.generate") for line in lines) == is_offered
