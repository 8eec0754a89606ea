"""What a config of quantisation-aware training may say, and what it makes of it for one layer."""

from forge_mlx.kernels.quantize.options import MODES, Options
from forge_mlx.models.qat import QATConfig, QATOverride
from forge_mlx.models.qat_config import LayerQuantization
from pydantic import ValidationError
import pytest


def problems(**settings):
    with pytest.raises(ValidationError) as caught:
        QATConfig(**settings)
    return [error["msg"].removeprefix("Value error, ") for error in caught.value.errors()]


def test_the_default_is_four_bits_in_groups_of_64():
    assert QATConfig().merged(None) == LayerQuantization(Options("affine", 4, 64, None), "identity", None)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_has_its_defaults(mode):
    found = QATConfig(weights=mode, ste="clip", activations="int8").merged(None)
    assert found.options.mode == mode
    assert (found.options.group_size is None) == (mode in ("int8", "int4", "ternary", "fp8_e4m3"))
    assert (found.ste, found.activations) == ("clip", "int8")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 7}, "bits must be 4, 2, 3, 5, 6 or 8 in the mode 'affine' but got 7."),
        ({"group_size": 16}, "group_size must be 64, 32 or 128 in the mode 'affine' but got 16."),
        (
            {"weights": "ternary", "bits": 2},
            "bits: mode 'ternary' takes no bits but got 2. Leave it out.",
        ),
        (
            {"granularity": "row"},
            "granularity: mode 'affine' takes no granularity but got 'row'. Leave it out.",
        ),
        ({"end_step": 5, "start_step": 5}, "end_step must be greater than start_step, 5, but got 5."),
        (
            {"overrides": {"lm_head": {"bits": 7}}},
            "overrides.lm_head.bits must be 4, 2, 3, 5, 6 or 8 in the mode 'affine' but got 7.",
        ),
        (
            {"weights": "int3"},
            "Input should be 'affine', 'mxfp4', 'mxfp8', 'nvfp4', 'int8', 'int4', 'ternary' or 'fp8_e4m3'",
        ),
        ({"modules": []}, "List should have at least 1 item after validation, not 0"),
        ({"start_step": -1}, "Input should be greater than or equal to 0"),
        ({"overrides": {"lm_head": {"bit": 8}}}, "Extra inputs are not permitted"),
        ({"ste": "none"}, "Input should be 'identity' or 'clip'"),
        ({"activations": "int4"}, "Input should be 'int8'"),
    ],
)
def test_what_is_wrong_is_said(settings, message):
    assert problems(**settings) == [message]


def test_all_problems_of_formats_are_said_at_once():
    (text,) = problems(bits=7, overrides={"a.*": {"bits": 9}, "b": {"weights": "int8", "group_size": 32}})
    assert [line.split(" m")[0] for line in text.splitlines()] == [
        *("bits", "overrides.a.*.bits", "overrides.b.group_size:")
    ]


@pytest.mark.parametrize("wrong", [{"group_size": 48}, {"granularity": "row"}, {"weights": "int8", "bits": 8}])
def test_what_an_override_takes_over_is_blamed_once(wrong):
    (text,) = problems(**wrong, overrides={"a": {}, "b": {"activations": "int8"}, "c": None})
    assert "\n" not in text
    assert "overrides" not in text


def test_an_override_of_the_same_mode_keeps_the_rest_and_of_another_takes_its_defaults():
    config = QATConfig(bits=2, group_size=32, activations="int8")
    assert config.merged(QATOverride(bits=8)).options == Options("affine", 8, 32, None)
    assert config.merged(QATOverride(weights="affine", group_size=128)).options == Options("affine", 2, 128, None)
    assert config.merged(QATOverride(weights="mxfp8")).options == Options("mxfp8", 8, 32, None)
    assert config.merged(QATOverride(weights="fp8_e4m3", granularity="tensor")).options.granularity == "tensor"
    assert config.merged(QATOverride()).activations == "int8"
    assert config.merged(QATOverride(activations="float")).activations is None
    assert QATConfig().merged(QATOverride(activations="int8")).activations == "int8"


def test_a_config_survives_json_with_the_order_of_its_overrides():
    config = QATConfig(weights="nvfp4", overrides={"b": {"activations": "int8"}, "a": None, "*": {"weights": "int8"}})
    again = QATConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert list(again.overrides) == ["b", "a", "*"]
    assert again.overrides["a"] is None


def test_every_field_is_described():
    for model in (QATConfig, QATOverride):
        assert all(field.description for field in model.model_fields.values())
