"""DPO and ORPO against their formulas in PyTorch, float64: values, gradients, extremes, padding."""

from types import SimpleNamespace

from forge_mlx.nn.log_probs import HasHead, sequence_log_probs, target_log_probs
from forge_mlx.nn.preference import dpo_loss, orpo_loss
from forge_mlx.train.preference_config import PreferenceConfig
import mlx.core as mx
import numpy as np
from pydantic import ValidationError
import pytest
import torch
import torch.nn.functional as F

PAIRS = 7


def pairs(seed=0, scale=40.0):
    """Log-probabilities of four kinds, token counts of two, for some pairs."""
    rng = np.random.default_rng(seed)
    logs = [-rng.gamma(2.0, scale / 2, PAIRS).astype(np.float32) for _ in range(4)]
    return logs, [rng.integers(1, 60, PAIRS).astype(np.float32) for _ in range(2)]


def torch_dpo(chosen, rejected, ref_chosen, ref_rejected, *, beta, label_smoothing=0.0, variant="sigmoid"):
    h = (chosen - ref_chosen) - (rejected - ref_rejected)
    if variant == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    if variant == "hinge":
        return torch.relu(1 - beta * h)
    return -(1 - label_smoothing) * F.logsigmoid(beta * h) - label_smoothing * F.logsigmoid(-beta * h)


def torch_orpo(chosen, rejected, chosen_tokens, rejected_tokens, *, orpo_lambda):
    chosen, rejected = chosen / chosen_tokens, rejected / rejected_tokens
    log_odds = [x - torch.log(-torch.expm1(x)) for x in (chosen, rejected)]
    return -chosen - orpo_lambda * F.logsigmoid(log_odds[0] - log_odds[1])


def with_gradients(formula, logs, rest, weights=None, **options):
    """Summed loss and the gradients of the first two arguments, in float64."""
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in logs[:2]]
    others = [torch.tensor(x, dtype=torch.float64) for x in [*logs[2:], *rest]]
    losses = formula(*leaves, *others, **options)
    total = (losses if weights is None else losses * torch.tensor(weights, dtype=torch.float64)).sum()
    total.backward()
    return total.item(), [leaf.grad.numpy() for leaf in leaves]


def ours(loss, logs, rest, weights=None, **options):
    arrays = [mx.array(x) for x in [*logs, *rest]]
    given = {} if weights is None else {"weights": mx.array(weights)}

    def total(chosen, rejected):
        return loss(chosen, rejected, *arrays[2:], **given, **options).loss

    return mx.value_and_grad(total, argnums=(0, 1))(*arrays[:2])


def close(got, want, rtol=2e-5):
    got, want = np.asarray(got, np.float64), np.asarray(want)
    assert np.max(np.abs(got - want)) <= rtol * max(np.max(np.abs(want)), 1e-30)


DPO = [
    {"beta": 0.1},
    {"beta": 2.0},
    {"beta": 0.3, "label_smoothing": 0.2},
    {"beta": 0.1, "variant": "hinge"},
    {"beta": 0.05, "variant": "ipo"},
]


@pytest.mark.parametrize("options", DPO, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_dpo_is_the_formula(options, seed):
    logs, _ = pairs(seed)
    weights = np.array([1, 0, 1, 0.5, 1, 0, 2], np.float32)
    for factor in (None, weights):
        want, gradients = with_gradients(torch_dpo, logs, [], factor, **options)
        got, found = ours(dpo_loss, logs, [], factor, **options)
        close(got.item(), want)
        for one, other in zip(found, gradients, strict=True):
            close(one, other, 1e-4)


@pytest.mark.parametrize("orpo_lambda", [0.1, 1.0, 0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0, 3000.0])
def test_orpo_is_the_formula(orpo_lambda, scale):
    """From sequences that are all but certain to such as no model gives."""
    logs, counts = pairs(1, scale)
    logs, options = logs[:2], {"orpo_lambda": orpo_lambda}
    weights = np.array([1, 0, 1, 0.5, 1, 0, 2], np.float32)
    for factor in (None, weights):
        want, gradients = with_gradients(torch_orpo, logs, counts, factor, **options)
        got, found = ours(orpo_loss, logs, counts, factor, **options)
        close(got.item(), want)
        for one, other in zip(found, gradients, strict=True):
            close(one, other, 1e-4)


def test_gradients_are_finite_differences_of_the_formula():
    def orpo(x, y):
        odds = [np.exp(z / n) / -np.expm1(z / n) for z, n in ((x, 9.0), (y, 5.0))]
        return -x / 9 + 0.7 * np.log1p(odds[1] / odds[0])

    def dpo(x, y):
        return np.log1p(np.exp(-0.3 * ((x + 4.0) - (y + 9.0))))

    x, y, step = -6.0, -7.5, 1e-6
    for formula, loss, rest, options in (
        (orpo, orpo_loss, [9.0, 5.0], {"orpo_lambda": 0.7}),
        (dpo, dpo_loss, [-4.0, -9.0], {"beta": 0.3}),
    ):
        slopes = [
            (formula(x + dx, y + dy) - formula(x - dx, y - dy)) / (2 * step) for dx, dy in ((step, 0.0), (0.0, step))
        ]
        arrays = [np.array([value], np.float32) for value in (x, y, *rest)]
        got, found = ours(loss, arrays[:2], arrays[2:], **options)
        close(got.item(), formula(x, y))
        close([one.item() for one in found], slopes, 1e-5)


def test_extremes_stay_finite():
    """p = 1 in float32 and beyond it by rounding, and log-probabilities of thousands of nats."""
    edge = np.array([0.0, 1e-7, -1e-9, -6e-8, -1e-5, -0.6931472, -1e4, -1e30], np.float32)
    chosen, rejected = (np.ascontiguousarray(each).reshape(-1) for each in np.meshgrid(edge, edge))
    one = np.ones_like(chosen)
    got, found = ours(orpo_loss, [chosen, rejected], [one, one])
    assert all(np.isfinite(np.asarray(each)).all() for each in (got, *found))
    # The gradient of the chosen pulls up and that of the rejected pushes down, wherever they are.
    assert (np.asarray(found[0]) <= -1).all()
    assert (np.asarray(found[1]) >= 0).all()
    certain = chosen.argmax()
    assert np.asarray(found[1])[(rejected == 0) & (chosen == np.float32(-1e-5))].item() > 1
    assert np.isfinite(np.asarray(found[0])[certain])
    far = [np.array([a], np.float32) for a in (-5000.0, -1.0, -1.0, -5000.0)]
    for options in DPO:
        got, found = ours(dpo_loss, far, [], **options)
        want, gradients = with_gradients(torch_dpo, far, [], **options)
        close(got.item(), want)
        close([each.item() for each in found], [each.item() for each in gradients])


def test_metrics_are_sums_over_the_pairs_that_count():
    logs, counts = pairs(5)
    weights = np.array([1, 1, 0, 1, 1, 0, 1], np.float32)
    chosen, rejected, ref_chosen, ref_rejected = (each.astype(np.float64) for each in logs)
    arrays = [mx.array(each) for each in logs]
    # Padding may hold anything.
    arrays[0] = mx.where(mx.array(weights) == 0, mx.nan, arrays[0])
    dpo = dpo_loss(*arrays, beta=0.3, weights=mx.array(weights))
    rewards = [0.3 * (chosen - ref_chosen), 0.3 * (rejected - ref_rejected)]
    orpo = orpo_loss(*arrays[:2], *map(mx.array, counts), orpo_lambda=0.4, weights=mx.array(weights))
    means = [0.4 * chosen / counts[0], 0.4 * rejected / counts[1]]
    for result, (good, bad) in ((dpo, rewards), (orpo, means)):
        kept = weights > 0
        wanted = [good[kept].sum(), bad[kept].sum(), (good > bad)[kept].sum(), (good - bad)[kept].sum(), kept.sum()]
        for got, want in zip(result.metrics, wanted, strict=True):
            close(got.item(), want)
        assert np.isfinite(result.loss.item())
    assert 0 < dpo.metrics.accuracy.item() < 5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_pair_that_does_not_count_gives_no_gradient(value):
    logs, counts = pairs(4)
    weights = np.array([1, 0.5, 0, 1, 2, 0, 1], np.float32)
    given = [np.where(weights == 0, np.float32(value), each) for each in logs]
    cases = [(dpo_loss, torch_dpo, given, logs, [], each) for each in DPO]
    cases.append((orpo_loss, torch_orpo, given[:2], logs[:2], counts, {"orpo_lambda": 0.4}))
    for loss, formula, arrays, clean, rest, options in cases:
        got, found = ours(loss, arrays, rest, weights, **options)
        want, gradients = with_gradients(formula, clean, rest, weights, **options)
        close(got.item(), want)
        for each, expected in zip(found, gradients, strict=True):
            assert (np.asarray(each)[weights == 0] == 0).all()
            close(each, expected)


def test_nothing_goes_to_the_reference_or_through_the_metrics():
    logs, _ = pairs(2)

    def loss(*arrays):
        return dpo_loss(*arrays).loss

    def metric(*arrays):
        return sum(dpo_loss(*arrays).metrics)

    arrays = [mx.array(each) for each in logs]
    gradients = mx.grad(loss, argnums=(0, 1, 2, 3))(*arrays)
    assert all(mx.abs(each).max().item() > 0 for each in gradients[:2])
    assert all(mx.abs(each).max().item() == 0 for each in gradients[2:])
    assert all(mx.abs(each).max().item() == 0 for each in mx.grad(metric, argnums=(0, 1))(*arrays))


def test_where_the_model_is_the_reference_the_loss_is_ln_2():
    logs, _ = pairs(3)
    same = [mx.array(each) for each in (*logs[:2], *logs[:2])]
    result = dpo_loss(*same, beta=0.7)
    close(result.loss.item(), PAIRS * np.log(2))
    assert result.metrics.accuracy.item() == result.metrics.margin.item() == 0


class Bigram:
    """The smallest decoder: the hidden state of a token is its row of a table."""

    def __init__(self, table, head, softcap):
        self.table, self.head_weight, self.config = table, head, SimpleNamespace(logit_softcap=softcap)

    def hidden(self, tokens, *, segment_ids=None, positions=None):
        extra = 0 if positions is None else (positions + segment_ids)[..., None] / 10
        return self.table[tokens] + extra


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_sequence_log_probs(softcap, packed):
    rng = np.random.default_rng(0)
    vocab, width, shape = 300, 8, (5, 9)
    table, head = (rng.standard_normal((vocab, width)).astype(np.float32) for _ in range(2))
    inputs, targets = rng.integers(0, vocab, (2, *shape))
    weights = (rng.random(shape) < 0.6).astype(np.float32)
    weights[3] = 0
    extra = {"segment_ids": rng.integers(0, 3, shape), "positions": rng.integers(0, 9, shape)} if packed else {}
    where = {name: mx.array(value) for name, value in extra.items()}

    def summed(table, head):
        model = Bigram(table, head, softcap)
        assert isinstance(model, HasHead)
        rows = sequence_log_probs(model, mx.array(inputs), mx.array(targets), mx.array(weights), **where)
        return (rows * mx.arange(1, 6)).sum(), rows

    leaves = [torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in (table, head)]
    hidden = leaves[0][inputs] + (torch.tensor(sum(extra.values()))[..., None] / 10 if packed else 0)
    logits = hidden @ leaves[1].T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_probs = logits.log_softmax(-1).gather(-1, torch.tensor(targets)[..., None])[..., 0]
    rows = (log_probs * torch.tensor(weights)).sum(-1)
    (rows * torch.arange(1, 6)).sum().backward()

    (_, got), gradients = mx.value_and_grad(summed, argnums=(0, 1))(mx.array(table), mx.array(head))
    close(got, rows.detach().numpy())
    assert got[3].item() == 0
    for one, leaf in zip(gradients, leaves, strict=True):
        close(one, leaf.grad.numpy(), 1e-4)
    model = Bigram(mx.array(table), mx.array(head), softcap)
    each = target_log_probs(model, mx.array(inputs), mx.array(targets), **where)
    close(each, log_probs.detach().numpy())


def test_arguments_are_checked():
    good = [mx.zeros((3,))] * 4
    wrong = [
        (lambda: dpo_loss(*good, beta=0), "[dpo_loss] beta must be a number greater than 0 but got 0."),
        (
            lambda: dpo_loss(*good, label_smoothing=0.5),
            "[dpo_loss] label_smoothing must be 0 or more and below 0.5 but got 0.5.",
        ),
        (
            lambda: dpo_loss(*good, label_smoothing=0.1, variant="ipo"),
            "[dpo_loss] label_smoothing must be 0 with the variant ipo but got 0.1. Leave it out, or take the "
            "variant sigmoid.",
        ),
        (
            lambda: dpo_loss(*good, variant="kto"),
            "[dpo_loss] variant must be sigmoid, hinge or ipo but got 'kto'.",
        ),
        (
            lambda: dpo_loss(*good[:3], mx.zeros((2,))),
            "[dpo_loss] reference_rejected must have the shape (3,), the shape of chosen, but got (2,).",
        ),
        (
            lambda: orpo_loss(*good, weights=mx.zeros((3, 1))),
            "[orpo_loss] weights must have the shape (3,), the shape of chosen, but got (3, 1).",
        ),
        (
            lambda: orpo_loss(*good, orpo_lambda=-1.0),
            "[orpo_loss] orpo_lambda must be a number of 0 or more but got -1.0.",
        ),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            call()
        assert str(error.value) == message


def test_a_dial_without_effect_is_an_error():
    assert PreferenceConfig().loss == "dpo"
    assert PreferenceConfig(loss="orpo", beta=0.1, orpo_lambda=0.2).orpo_lambda == 0.2
    for values, message in (
        ({"orpo_lambda": 0.3}, "orpo_lambda must be left out with loss: dpo but got 0.3: it would do nothing"),
        ({"loss": "orpo", "beta": 0.3}, "beta must be left out with loss: orpo but got 0.3: it would do nothing"),
        ({"loss": "orpo", "variant": "ipo"}, "variant must be left out with loss: orpo but got ipo"),
        ({"variant": "hinge", "label_smoothing": 0.1}, "label_smoothing must be 0 with variant: hinge but got 0.1."),
    ):
        with pytest.raises(ValidationError) as error:
            PreferenceConfig(**values)
        assert message in str(error.value)
