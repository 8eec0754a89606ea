import math

from forge_mlx.data import Batch
from forge_mlx.kernels.linear_cross_entropy import linear_cross_entropy
from forge_mlx.kernels.linear_cross_entropy.forward_gradients import chosen_variables
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.nn.losses import cross_entropy
from forge_mlx.nn.parameters import cast_floats
from forge_mlx.optim import OptimConfig, build_optimizer
from forge_mlx.train.objective import batch_arrays, summed_loss
from forge_mlx.train.step import TrainStep, global_norm, make_evaluator
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
import numpy as np
import pytest
import torch

V = 19
CONFIG = GPTConfig(vocab_size=V, num_layers=2, hidden_size=16, num_heads=2, intermediate_size=32, mlp="relu2")


@pytest.fixture(autouse=True)
def on_cpu():
    with mx.stream(mx.cpu):
        yield


def rows(batch, length, seed=0, weights=None, vocabulary=V):
    tokens = np.random.default_rng(seed).integers(0, vocabulary, (batch, length + 1)).astype(np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights)


def stepper(config=CONFIG, optim=None, dtype=mx.float32, clip=None):
    return TrainStep(GPT(config, seed=2), build_optimizer(optim or OptimConfig()), dtype, clip)


def arrays(tree):
    return {name: np.array(array.astype(mx.float32)) for name, array in tree_flatten(tree)}


def nested(flat):
    return tree_unflatten([(name, mx.array(array)) for name, array in flat.items()])


def assert_close(found, expected, rtol):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.abs(found[name] - array).max() <= rtol * np.abs(array).max() + 1e-12, name


class Headed(nn.Module):
    """What a model outside of forge_mlx has for its logits to be left out."""

    def __init__(self):
        super().__init__()
        self.config = CONFIG
        self.table = nn.Embedding(V, 16)
        self.head_weight = mx.random.normal((V, 16), key=mx.random.key(5))

    def hidden(self, tokens, **_documents):
        return self.table(tokens)


class Bigram(nn.Module):
    """Logits of the next token from one table each: small enough to differentiate by hand."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(V, 6)
        self.head = nn.Linear(6, V)

    def __call__(self, tokens):
        return self.head(self.table(tokens))


def test_loss_gradient_and_norm_are_those_of_torch():
    mx.random.seed(3)
    step = TrainStep(Bigram(), build_optimizer(OptimConfig()), mx.float32, None)
    batches = [rows(2, 5), rows(3, 7, seed=1)]
    loss, norm, grads, count = step.gradients(batches, 0)
    assert count == 2 * 5 + 3 * 7
    weights = arrays(step.model.parameters())
    tensors = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in weights.items()}
    total = 0.0
    for batch in batches:
        inputs, targets = (torch.tensor(each, dtype=torch.long) for each in batch[:2])
        logits = tensors["table.weight"][inputs] @ tensors["head.weight"].T + tensors["head.bias"]
        total = total + torch.nn.functional.cross_entropy(logits.reshape(-1, V), targets.reshape(-1), reduction="sum")
    mean = total / count
    mean.backward()
    assert loss == pytest.approx(mean.item(), rel=1e-6)
    assert norm == pytest.approx(math.sqrt(sum((t.grad**2).sum().item() for t in tensors.values())), rel=1e-6)
    assert_close(arrays(grads), {n: count * t.grad.numpy() for n, t in tensors.items()}, 1e-5)


def test_accumulated_passes_are_one_large_batch():
    whole, parts = stepper(clip=0.5), stepper(clip=0.5)
    batch = rows(8, 12)
    for _ in range(3):
        one = whole.gradients([batch], 0)
        four = parts.gradients([Batch(batch.inputs[i : i + 2], batch.targets[i : i + 2]) for i in range(0, 8, 2)], 0)
        assert four[0] == pytest.approx(one[0], rel=1e-6)
        assert four[1] == pytest.approx(one[1], rel=1e-5)
        assert four[3] == one[3] == 96
        assert_close(arrays(four[2]), arrays(one[2]), 1e-5)
        for step, (_, norm, grads, count) in ((whole, one), (parts, four)):
            step.update(grads, norm, count, 1.0)
    assert_close(arrays(parts.model.parameters()), arrays(whole.model.parameters()), 1e-4)


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e3])
def test_clipping_is_that_of_torch(max_norm):
    step = stepper(optim=OptimConfig(weight_decay=0.0, eps=1.0), clip=max_norm)
    twin = stepper(optim=OptimConfig(weight_decay=0.0, eps=1.0), clip=None)
    _, norm, grads, count = step.gradients([rows(2, 6)], 0)
    tensors = [torch.zeros(a.shape) for _, a in tree_flatten(grads)]
    for tensor, (_, grad) in zip(tensors, tree_flatten(grads), strict=True):
        tensor.grad = torch.tensor(np.array(grad)) / count
    total = torch.nn.utils.clip_grad_norm_(tensors, max_norm)
    assert norm == pytest.approx(total.item(), rel=1e-6)
    clipped = {n: t.grad.numpy() for (n, _), t in zip(tree_flatten(grads), tensors, strict=True)}
    assert global_norm({n: mx.array(a) for n, a in clipped.items()}).item() == pytest.approx(
        min(max_norm, total.item()), rel=1e-4
    )
    # With eps 1 AdamW's step depends on the gradient's size, so both must have seen the same one.
    step.update(grads, norm, count, 1.0)
    twin.update(nested(clipped), norm, 1, 1.0)
    assert_close(arrays(step.model.parameters()), arrays(twin.model.parameters()), 1e-6)


def test_an_update_is_the_optimizers_on_the_mean_gradient_at_the_scaled_rate():
    config = OptimConfig(lr=0.01, eps=1e-3)
    step = stepper(optim=config)
    _, norm, grads, count = step.gradients([rows(2, 6)], 0)
    optimizer = build_optimizer(config.model_copy(update={"lr": 0.0025}))
    params = step.model.trainable_parameters()
    optimizer.init(params)
    expected = optimizer.apply_gradients(nested({n: a / count for n, a in arrays(grads).items()}), params)
    step.update(grads, norm, count, 0.25)
    assert_close(arrays(step.model.parameters()), arrays(expected), 1e-6)


def test_nothing_changes_before_the_update_and_the_model_holds_arrays():
    step = stepper()
    before = arrays(step.model.parameters())
    state = arrays(step.optimizer.flat_state())
    for count in (1, 2, 3):
        step.gradients([rows(2, 6, seed=s) for s in range(count)], 0)
        # A placeholder of tracing could not be read.
        for name, array in arrays(step.model.parameters()).items():
            np.testing.assert_array_equal(array, before[name], err_msg=name)
    for name, array in arrays(step.optimizer.flat_state()).items():
        np.testing.assert_array_equal(array, state[name], err_msg=name)


def test_the_model_holds_arrays_when_the_batches_end_in_an_error():
    step = stepper()
    before = arrays(step.model.parameters())

    def batches():
        yield rows(2, 6)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        step.gradients(batches(), 0)
    assert_close(arrays(step.model.parameters()), before, 0)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(mx.bfloat16, "adamw"), (mx.bfloat16, "muon"), (mx.float16, "adamw")],
    ids=["bfloat16 adamw", "bfloat16 muon", "float16 adamw"],
)
def test_16_bit_compute_keeps_float32_weights_gradients_and_moments(dtype, name):
    step, exact = (stepper(optim=OptimConfig(name=name), dtype=d) for d in (dtype, mx.float32))
    seen = []

    class Probe(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def __call__(self, x, *args, **kwargs):
            seen.append(x.dtype)
            return self.layer(x, *args, **kwargs)

    step.model.layers[0] = Probe(step.model.layers[0])
    step = TrainStep(step.model, build_optimizer(OptimConfig(name=name)), dtype, 1.0)
    batch = rows(4, 8)
    for _ in range(2):
        loss, norm, grads, count = step.gradients([batch, batch], 0)
        loss32, norm32, grads32, _ = exact.gradients([batch, batch], 0)
        assert {a.dtype for _, a in tree_flatten(grads)} == {mx.float32}
        assert loss == pytest.approx(loss32, rel=1e-2)
        assert norm == pytest.approx(norm32, rel=5e-2)
        step.update(grads, norm, count, 1.0)
        exact.update(grads32, norm32, count, 1.0)
    assert set(seen) == {dtype}
    assert {a.dtype for _, a in tree_flatten(step.model.parameters())} == {mx.float32}
    floating = [a.dtype for _, a in tree_flatten(step.optimizer.state) if mx.issubdtype(a.dtype, mx.floating)]
    assert set(floating) == {mx.float32}


def test_constant_shapes_are_traced_once():
    calls = []

    class Counting(Bigram):
        def __call__(self, tokens):
            calls.append(tokens.shape)
            return super().__call__(tokens)

    step = TrainStep(Counting(), build_optimizer(OptimConfig(name="muon")), mx.float32, 1.0)
    applied = []
    apply_gradients = step.optimizer.apply_gradients
    step.optimizer.apply_gradients = lambda *args: (applied.append(1), apply_gradients(*args))[1]
    for seed in range(4):
        _, norm, grads, count = step.gradients([rows(2, 6, seed=seed + s) for s in range(3)], seed)
        step.update(grads, norm, count, 1.0 / (seed + 1))
    # The first pass and the ones after it are two functions.
    assert calls == [(2, 6), (2, 6)]
    assert applied == [1]
    evaluate = make_evaluator(step.model, mx.float32)
    for seed in range(3):
        evaluate(step.model.trainable_parameters(), rows(2, 6, seed, np.ones((2, 6), np.float32)))
    assert len(calls) == 3


def test_dropout_follows_from_the_seed_and_differs_from_step_to_step_and_pass_to_pass():
    step = stepper(CONFIG.model_copy(update={"dropout": 0.3}))
    batch = rows(2, 8)

    def loss(seed, passes=1):
        return step.gradients([batch] * passes, seed)[0]

    mx.random.seed(5)
    first = loss(7)
    mx.random.seed(6)
    assert loss(7) == first
    assert loss(8) != first
    # Two passes with the mask of the first would have its mean.
    assert loss(7, passes=2) != pytest.approx(first, rel=1e-6)
    assert loss(7, passes=2) == loss(7, passes=2)
    second = {seed: 2 * loss(seed, passes=2) - loss(seed) for seed in (7, 8)}
    assert second[7] != pytest.approx(second[8], rel=1e-4)
    still = stepper()
    assert still.gradients([batch], 1)[0] == still.gradients([batch], 2)[0]


def test_summed_loss_is_minus_log_p_over_the_targets_that_count():
    model = Bigram()
    weights = np.array([[1, 1, 0, 1, 0], [0, 0, 1, 1, 1]], np.float32)
    batch = rows(2, 5)
    logits = np.array(model(mx.array(batch.inputs))).astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(logp, batch.targets[..., None].astype(np.int64), -1)[..., 0]
    assert summed_loss(model, *batch_arrays(batch)[:5]).item() == pytest.approx(nll.sum(), rel=1e-5)
    weighted = batch_arrays(batch._replace(weights=weights))[:5]
    assert summed_loss(model, *weighted).item() == pytest.approx((nll * weights).sum(), rel=1e-5)


def test_a_step_is_the_mean_over_the_targets_that_count_whichever_pass_they_come_in():
    weights = np.zeros((4, 6), np.float32)
    weights[0, 1], weights[2, 3:], weights[3] = 1, 1, 1
    batch = rows(4, 6, weights=weights)
    halves = [Batch(*(each[part] for each in batch[:3])) for part in (slice(2), slice(2, 4))]
    step = stepper()
    loss, norm, grads, count = step.gradients(halves, 0)
    assert count == weights.sum() == 1 + 9
    assert loss * count == pytest.approx(summed_loss(step.model, *batch_arrays(batch)[:5]).item(), rel=1e-6)
    whole = step.gradients([batch], 0)
    assert (norm, count) == (pytest.approx(whole[1], rel=1e-5), whole[3])
    assert_close(arrays(grads), arrays(whole[2]), 1e-5)


@pytest.mark.parametrize("changes", [{}, {"logit_softcap": 0.5}, {"tie_embeddings": False}], ids=str)
def test_chunks_have_the_loss_and_the_gradients_of_whole_logits(changes):
    config = CONFIG.model_copy(update=changes)
    step, model = stepper(config), GPT(config, seed=2)
    weights = np.random.default_rng(1).uniform(0, 2, (3, 11)).astype(np.float32)
    batch = rows(3, 11)

    def whole(params, weights=None):
        model.update(params)
        logits = model(mx.array(batch.inputs))
        return cross_entropy(logits, mx.array(batch.targets), weights=weights, reduction="sum")

    params = model.trainable_parameters()
    want, want_grads = mx.value_and_grad(whole)(params)
    loss, _, grads, count = step.gradients([batch], 0)
    assert loss * count == pytest.approx(want.item(), rel=1e-6)
    assert_close(arrays(grads), arrays(want_grads), 1e-5)
    weighted = batch._replace(weights=weights)
    found, _ = make_evaluator(step.model, mx.float32)(step.model.trainable_parameters(), weighted)
    assert found.item() == pytest.approx(whole(params, mx.array(weights)).item(), rel=1e-6)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gradients_come_with_the_loss_in_training_only(tied, monkeypatch):
    """And none for a frozen head."""
    asked = []

    def spy(*args, **options):
        asked.append(chosen_variables())
        return linear_cross_entropy(*args, **options)

    monkeypatch.setattr("forge_mlx.train.objective.linear_cross_entropy", spy)
    model = GPT(CONFIG.model_copy(update={"tie_embeddings": tied}), seed=2)
    evaluate = make_evaluator(model, mx.float32)
    head = model.embed_tokens if tied else model.lm_head
    for freeze in (lambda: None, head.freeze):
        freeze()
        TrainStep(model, build_optimizer(OptimConfig()), mx.float32, None).gradients([rows(2, 6)], 0)
    evaluate(model.trainable_parameters(), rows(2, 6))
    assert asked == [("hidden", "weight", "bias"), ("hidden",), ()]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_model_with_a_head_weight_alone_needs_no_logits(frozen, monkeypatch):
    """Its head is then the parameter itself."""
    asked = []

    def spy(*args, **options):
        asked.append(chosen_variables())
        return linear_cross_entropy(*args, **options)

    monkeypatch.setattr("forge_mlx.train.objective.linear_cross_entropy", spy)
    model = Headed()
    if frozen:
        model.freeze(keys="head_weight", recurse=False)
    step = TrainStep(model, build_optimizer(OptimConfig()), mx.float32, None)
    loss, _, grads, _ = step.gradients([rows(2, 6)], 0)
    assert asked == [("hidden",) if frozen else ("hidden", "weight", "bias")]
    inputs, targets = (mx.array(each) for each in rows(2, 6)[:2])
    logits = model.table(inputs) @ model.head_weight.T
    assert loss == pytest.approx(nn.losses.cross_entropy(logits, targets, reduction="mean").item(), rel=1e-6)
    assert ("head_weight" in grads) is not frozen


def test_logits_are_never_whole():
    vocabulary, batch, length = 2048, 64, 128
    config = GPTConfig(vocab_size=vocabulary, num_layers=1, hidden_size=16, num_heads=1, max_seq_len=length)
    step = stepper(config)
    evaluate = make_evaluator(step.model, mx.float32)
    many = rows(batch, length, vocabulary=vocabulary)
    for work in (
        lambda: step.gradients([many], 0),
        lambda: evaluate(step.model.trainable_parameters(), many),
    ):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        work()
        # With whole logits it is more than three times their size.
        assert mx.get_peak_memory() - before < 1.5 * batch * length * vocabulary * 4


def test_evaluation_drops_nothing_and_leaves_the_model_as_it_was():
    model = GPT(CONFIG.model_copy(update={"dropout": 0.5}), seed=2)
    plain = GPT(CONFIG, seed=2)
    before = arrays(model.parameters())
    evaluate = make_evaluator(model, mx.float32)
    batch = rows(2, 6)
    for _ in range(2):
        found = evaluate(model.trainable_parameters(), batch)[0].item()
        assert found == pytest.approx(summed_loss(plain, *batch_arrays(batch)[:5]).item(), rel=1e-6)
        assert model.training
        assert model.layers[0].training
        assert_close(arrays(model.parameters()), before, 0)


def test_cast_floats_leaves_integers():
    tree = cast_floats({"a": mx.zeros(2), "b": [mx.zeros(2, mx.int32)]}, mx.bfloat16)
    assert (tree["a"].dtype, tree["b"][0].dtype) == (mx.bfloat16, mx.int32)
