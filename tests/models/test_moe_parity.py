"""MoE against mlx-lm's models of the same families, with the same small random weights: logits, cache and gradients."""

from forge_mlx.models.moe import MoE, MoEConfig
from forge_mlx.nn.losses import cross_entropy
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm_moe import FAMILIES, LAYERS, V, as_theirs, our_model, routings, their_model
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")

TOKENS, TARGETS = (mx.array(np.random.default_rng(seed).integers(0, V, (2, 17)).astype(np.int32)) for seed in range(2))
# Both sum in float32, in different orders: of a sum of 60 terms that costs about sqrt(60) 2^-24 = 5e-7, and a logit
# lies behind some twenty sums in a row, a gradient behind forty, whose errors add up as their squares do: 3e-6 at most,
# the largest of a thousand three times that.
RTOL = 1e-5


def far(got, want):
    """The largest difference, as a share of the largest value."""
    got, want = np.array(got), np.array(want)
    assert got.shape == want.shape
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_mlx_lm(family):
    ours = our_model(family)
    want = their_model(family, ours.parameters())(TOKENS)
    assert far(ours(TOKENS), want) <= RTOL


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_single_tokens_behind_a_cache_are_those_of_mlx_lm(family):
    cache = pytest.importorskip("mlx_lm.models.cache", reason="mlx-lm needs Python 3.11")
    ours = our_model(family)
    theirs = their_model(family, ours.parameters())
    our_cache, their_cache = ours.make_cache(), cache.make_prompt_cache(theirs)
    for part in (TOKENS[:, :6], *mx.split(TOKENS[:, 6:], 11, axis=1)):
        want = theirs(part, their_cache)
        assert far(ours(part, our_cache), want) <= RTOL


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_every_parameter_are_those_of_mlx_lm(family):
    ours = our_model(family)
    theirs = their_model(family, ours.parameters())
    loss, gradients = nn.value_and_grad(ours, lambda m: cross_entropy(m(TOKENS), TARGETS))(ours)
    want, wants = nn.value_and_grad(theirs, lambda m: nn.losses.cross_entropy(m(TOKENS), TARGETS, reduction="mean"))(
        theirs
    )
    assert far(loss, want) <= RTOL
    gradients, wants = as_theirs(theirs, family.split(",")[0], gradients), dict(tree_flatten(wants))
    biases = {name for name in wants if name.endswith("e_score_correction_bias")}
    assert not any(mx.any(wants.pop(name)).item() for name in biases)
    assert gradients.keys() == wants.keys()
    for name, value in wants.items():
        assert far(gradients[name], value) <= RTOL, name


def best(values, k):
    """The indices of the k largest of each row, sorted, and by which share the last of them is above the next."""
    ranked = np.sort(values, axis=1)[:, ::-1]
    margin = (ranked[:, k - 1] - ranked[:, k]) / ranked[:, k - 1]
    return np.sort(np.argsort(-values, axis=1)[:, :k], axis=1), margin.min()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_choice_of_experts_is_decided_and_differs_from_token_to_token(family, monkeypatch):
    """Otherwise equal logits would say little, or rounding could decide."""
    ours = our_model(family)
    k, groups, kept = ours.config.experts_per_token, ours.config.expert_groups, ours.config.groups_per_token
    found = routings(ours, TOKENS, monkeypatch)
    assert len(found) == LAYERS - ours.config.dense_layers
    for routing, bias in found:
        scores, gates = (np.array(x).reshape(TOKENS.size, -1) for x in (routing.scores, routing.gates))
        chosen = np.sort(np.array(routing.indices).reshape(TOKENS.size, k), axis=1)
        assert len(np.unique(chosen)) > scores.shape[1] / 2
        assert len(np.unique(chosen, axis=0)) > 10
        of_chosen = np.take_along_axis(gates, chosen, axis=1)
        assert (of_chosen.max(axis=1) > 1.1 * of_chosen.min(axis=1)).mean() > 0.7
        wish = scores + np.array(bias)
        if groups > 1:
            best_two = np.sort(wish.reshape(TOKENS.size, groups, -1), axis=2)[..., -2:].sum(axis=2)
            of_groups, margin = best(best_two, kept)
            assert margin > 1e-4
            is_in = (np.arange(groups) == of_groups[..., None]).any(axis=1).repeat(scores.shape[1] // groups, axis=1)
            for without_one in (wish, scores * is_in):
                assert (chosen != best(without_one, k)[0]).any(axis=1).mean() > 0.1
            # 0 is what mlx-lm gives to experts of the other groups.
            wish = wish * is_in
        want, margin = best(wish, k)
        assert np.array_equal(chosen, want)
        assert margin > 1e-4


OTHERWISE = {
    "mixtral": [{"normalize_gates": False}, {"experts_per_token": 3}, {"rope_base": 1e4}, {"routed_scaling": 1.1}],
    "olmoe": [{"normalize_gates": True}, {"experts_per_token": 3}, {"qk_norm": False}, {"norm_eps": 1e-3}],
    "qwen3_moe": [{"normalize_gates": False}, {"experts_per_token": 3}, {"qk_norm": False}, {"mlp": "geglu"}],
    "deepseek_v3": [
        {"normalize_gates": False},
        {"router_scores": "softmax"},
        {"routed_scaling": 1.0},
        {"selection_bias": False},
        {"expert_groups": 1, "groups_per_token": 1},
        {"groups_per_token": 3},
        {"expert_groups": 2, "groups_per_token": 1},
        {"shared_experts": 0},
        {"rope_base": 5e3},
        {"norm_eps": 1e-3},
    ],
    "dots1": [{"selection_bias": False}, {"expert_groups": 1, "groups_per_token": 1}, {"qk_norm": False}],
}


def with_weights_of(model, **changes):
    """The model of a changed config with the other's weights, as far as it has them."""
    other = MoE(MoEConfig(**{**model.config.model_dump(), **changes}))
    known = dict(tree_flatten(other.parameters()))
    shared = [(name, value) for name, value in tree_flatten(model.parameters()) if name in known]
    other.update(tree_unflatten(shared))
    return other.eval()


@pytest.mark.parametrize(
    ("family", "changes"),
    [(family, changes) for family, all_changes in OTHERWISE.items() for changes in all_changes],
    ids=lambda value: value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()),
)
def test_any_other_setting_gives_other_logits(family, changes):
    """So that a comparison above fails where one is forgotten."""
    ours = our_model(family)
    assert far(with_weights_of(ours)(TOKENS), ours(TOKENS)) <= RTOL
    assert far(with_weights_of(ours, **changes)(TOKENS), ours(TOKENS)) > 100 * RTOL
