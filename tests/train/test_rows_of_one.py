"""Rows of one example each need no segment ids: causal order hides the padding, and plain attention is faster."""

from forge_mlx.data.stream import eval_batches
from forge_mlx.models.gpt import GPT
from forge_mlx.train.banner import log_path
from forge_mlx.train.objective import NextToken
from forge_mlx.train.step import make_evaluator
import mlx.core as mx
import pytest
from tiny_checkpoint import finetune_config
from tiny_run import trainer_of


@pytest.fixture(autouse=True)
def uncompiled():
    """A few steps are not worth the compiler's seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture
def seen(monkeypatch):
    """Whether the model was given segment ids, call by call."""
    found = []
    hidden = GPT.hidden

    def spy(self, tokens, cache=None, *, segment_ids=None, positions=None):
        found.append(segment_ids is not None)
        return hidden(self, tokens, cache, segment_ids=segment_ids, positions=positions)

    monkeypatch.setattr(GPT, "hidden", spy)
    return found


@pytest.mark.parametrize(("seq_len", "packing"), [(64, "padded"), (128, "examples")])
def test_segments_are_given_where_texts_share_a_row(seq_len, packing, tmp_path, seen):
    trainer = trainer_of(finetune_config(tmp_path, train__seq_len=seq_len, adapter={"rank": 2}))
    assert trainer.rows.packing == packing
    trainer.train_step()
    trainer.evaluate(None)
    assert set(seen) == {packing == "examples"}
    lines: list[str] = []
    log_path(trainer, lines.append)
    assert ("documents" in lines[0]) == (packing == "examples")
    assert ("one example in a row" in lines[1]) == (packing == "padded")


def test_the_loss_is_the_same_with_them(tmp_path, seen):
    trainer = trainer_of(finetune_config(tmp_path, train__seq_len=64, adapter={"rank": 2}))
    batch = next(iter(eval_batches(trainer.valid_rows, 2)))
    params = trainer.model.trainable_parameters()
    with_ids, without = (
        make_evaluator(trainer.model, mx.float32, NextToken(segments=segments))(params, batch)[0].item()
        for segments in (True, False)
    )
    assert seen == [True, False]
    assert with_ids == pytest.approx(without, rel=1e-6)
