"""The models of fine-tuning runs, read back: adapters on their base, or a checkpoint of what was trained."""

from pathlib import Path

from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.example_reader import with_template
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.hub.adapter_files import load_adapters, with_own_template
from forge_mlx.hub.fingerprint import say_if_other_weights
from forge_mlx.hub.pretrained import Pretrained
from forge_mlx.models.gpt import GPT
from forge_mlx.models.qat import fake_quant_enabled, set_fake_quant
from forge_mlx.nn.coded import compute_in_float32
from forge_mlx.train.checkpoint import Checkpoint
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.deploy import deployed_model
from forge_mlx.train.device import recorded_placement
from forge_mlx.train.folder import RunFolder
from forge_mlx.train.kept_weights import put_back
from forge_mlx.train.work import Log, load_base, make_trainable
import mlx.core as mx


def adapted_model(run: RunFolder, config: TrainConfig, adapters: Path, keep_dtype: bool, log: Log) -> Pretrained:
    """The base of a run with the adapters that it ended with, in evaluation mode, and the run's chat template.

    Args:
        run: its folder.
        config: of the run; its model is one that existed.
        adapters: a folder of them.
        keep_dtype: whether floats keep the dtype of training on a CPU, where others are several times slower.
        log: takes a line for people.

    Raises:
        ValueError: the base or the adapters cannot be read.
    """
    source = load_base(config, recorded_placement(config.run, run.config_file), log)
    load_adapters(adapters, source.model, base=source.folder, log=log)
    tokenizer = with_own_template(adapters, _with_template(run, config, source.tokenizer))
    return source._replace(model=_ready(source.model, keep_dtype), tokenizer=tokenizer)


def trained_model(
    run: RunFolder, config: TrainConfig, checkpoint: Checkpoint, keep_dtype: bool, log: Log
) -> Pretrained:
    """What a run would deploy at the step of a checkpoint, in evaluation mode, with the run's chat template.

    Args:
        run: its folder.
        config: of the run; its model is one that existed.
        checkpoint: of the run.
        keep_dtype: whether floats keep the dtype of training on a CPU, where others are several times slower.
        log: takes a line for people.

    Raises:
        ValueError: the base cannot be read, or the checkpoint is of another.
    """
    placement = recorded_placement(config.run, run.config_file)
    source = load_base(config, placement, log)
    model = source.model
    if config.adapter is not None:
        say_if_other_weights(checkpoint.path, source.folder, checkpoint.state.base, log)
    make_trainable(config, model)
    try:
        put_back(config, model, checkpoint.weights)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: does not fit {run.config_file}: {error}") from None
    if config.qat is not None and fake_quant_enabled(config.qat, checkpoint.state.step):
        set_fake_quant(model, True)
        model = deployed_model(config, model, placement.dtype)
    return source._replace(model=_ready(model, keep_dtype), tokenizer=_with_template(run, config, source.tokenizer))


def _ready(model: GPT, keep_dtype: bool) -> GPT:
    """The model in evaluation mode; on a CPU its floats, which training rounded, in float32 from here on."""
    if not keep_dtype and mx.default_device() == mx.Device(mx.cpu):
        compute_in_float32(model)
        mx.eval(model.parameters())
    model.eval()
    return model


def _with_template(run: RunFolder, config: TrainConfig, tokenizer: HubTokenizer) -> HubTokenizer:
    """The tokenizer with the chat template that the run's examples were written in."""
    if run.template_file.is_file():
        return with_own_template(run.path, tokenizer)
    return with_template(config.data, tokenizer) if isinstance(config.data, ExampleConfig) else tokenizer
