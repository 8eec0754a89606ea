"""The models of fine-tuning runs, read back: adapters on their base, or a checkpoint of what was trained."""

from collections.abc import Callable
from pathlib import Path

from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.example_reader import with_template
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.hub.adapter_files import load_adapters
from forge_mlx.hub.pretrained import Pretrained, load_pretrained
from forge_mlx.models.qat import fake_quant_enabled, set_fake_quant
from forge_mlx.train.checkpoint import Checkpoint
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.deploy import deployed_model
from forge_mlx.train.device import choose_placement
from forge_mlx.train.kept_weights import put_back
from forge_mlx.train.pretrained_config import PretrainedConfig
from forge_mlx.train.work import make_trainable, prepare_base, trained_dtype

Log = Callable[[str], None]


def adapted_model(config: TrainConfig, adapters: Path, log: Log) -> Pretrained:
    """The base of a run with the adapters that it ended with, in evaluation mode, and the run's chat template.

    Args:
        config: of the run; its model is one that existed.
        adapters: a folder of them.
        log: takes a line for people.

    Raises:
        ValueError: the base or the adapters cannot be read.
    """
    base, dtype = _base(config), trained_dtype(config, choose_placement(config.run))
    source = load_pretrained(base.path, dtype=dtype, revision=base.revision, log=log)
    prepare_base(base, source.model, dtype)
    load_adapters(adapters, source.model)
    source.model.eval()
    return source._replace(tokenizer=_with_template(config, source.tokenizer))


def trained_model(config: TrainConfig, checkpoint: Checkpoint, log: Log) -> Pretrained:
    """What a run would deploy at the step of a checkpoint, in evaluation mode, with the run's chat template.

    Args:
        config: of the run; its model is one that existed.
        checkpoint: of the run.
        log: takes a line for people.

    Raises:
        ValueError: the base cannot be read, or the checkpoint is of another.
    """
    base, placement = _base(config), choose_placement(config.run)
    dtype = trained_dtype(config, placement)
    source = load_pretrained(base.path, dtype=dtype, revision=base.revision, log=log)
    model = source.model
    make_trainable(config, model, dtype)
    put_back(config, model, checkpoint.weights)
    if config.qat is not None and fake_quant_enabled(config.qat, checkpoint.state.step):
        set_fake_quant(model, True)
        model = deployed_model(config, model, placement.dtype)
    model.eval()
    return source._replace(model=model, tokenizer=_with_template(config, source.tokenizer))


def _base(config: TrainConfig) -> PretrainedConfig:
    assert isinstance(config.model, PretrainedConfig)
    return config.model


def _with_template(config: TrainConfig, tokenizer: HubTokenizer) -> HubTokenizer:
    """The tokenizer with the chat template that the run's examples were written in."""
    return with_template(config.data, tokenizer) if isinstance(config.data, ExampleConfig) else tokenizer
