import math

from forge_mlx.optim import OptimConfig, learning_rate_factor
import pytest


def factors(total, **settings):
    config = OptimConfig(**settings)
    return [learning_rate_factor(config, step, total) for step in range(total)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warmup_rises_by_equal_steps_to_exactly_the_peak(schedule):
    found = factors(40, schedule=schedule, warmup_steps=4, decay_fraction=0.25)
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_without_warmup_the_first_step_has_the_peak():
    for schedule in ("cosine", "wsd", "constant"):
        assert factors(10, schedule=schedule)[0] == 1.0


def test_cosine_is_half_a_period_down_to_the_last_rate():
    found = factors(11, schedule="cosine", warmup_steps=2, final_lr=0.2)
    # Step 2 is the top, step 10 the end, step 6 the middle.
    assert found[2] == 1.0
    assert found[6] == pytest.approx(0.6, abs=1e-15)
    assert found[4] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2, abs=1e-15)
    assert found[10] == pytest.approx(0.2, abs=1e-15)


def test_wsd_is_flat_and_then_falls_by_equal_steps():
    found = factors(20, schedule="wsd", warmup_steps=3, decay_fraction=0.25, final_lr=0.5)
    assert found[2:15] == [1.0] * 13
    assert found[15:] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5], abs=1e-15)


def test_wsd_that_decays_all_the_way_begins_at_the_peak_behind_the_warmup():
    found = factors(12, schedule="wsd", warmup_steps=2, decay_fraction=1.0, final_lr=0.0)
    assert found[1:3] == [1.0, 1.0]
    assert found[2:] == pytest.approx([1 - i / 9 for i in range(10)], abs=1e-15)


def test_constant_stays_at_the_peak():
    assert factors(7, schedule="constant", warmup_steps=2, final_lr=0.0)[2:] == [1.0] * 5


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("final_lr", [0.0, 0.1, 1.0])
def test_never_outside_0_to_1_for_any_length(schedule, final_lr):
    for total in range(1, 30):
        for warmup in range(total):
            for fraction in (0.01, 0.5, 1.0):
                found = factors(
                    total, schedule=schedule, warmup_steps=warmup, decay_fraction=fraction, final_lr=final_lr
                )
                assert all(0 <= factor <= 1 for factor in found)
                top = max(warmup - 1, 0)
                assert found[top] == 1.0
                assert found[top:] == sorted(found[top:], reverse=True)
                if schedule != "constant" and warmup + 1 < total:
                    assert found[-1] == pytest.approx(final_lr, abs=1e-15)


def test_a_single_step_has_the_peak():
    for schedule in ("cosine", "wsd", "constant"):
        assert factors(1, schedule=schedule, final_lr=0.0) == [1.0]


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_outside_the_run_is_an_error(step):
    with pytest.raises(ValueError, match=rf"^\[learning_rate_factor\] step must lie in \[0, 10\) but got {step}\.$"):
        learning_rate_factor(OptimConfig(), step, 10)
