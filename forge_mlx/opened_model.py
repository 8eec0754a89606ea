"""Opening a model for the commands: a run, one of its checkpoints, or a model folder of any kind."""

import argparse
from collections.abc import Callable
import json
from pathlib import Path
from typing import Any, NamedTuple

from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub.adapter_files import load_adapters, with_own_template
from forge_mlx.hub.native import ModelFolderError, begins_with_end, load_model, load_weights
from forge_mlx.hub.pretrained import Pretrained, is_pretrained, load_pretrained
from forge_mlx.models.gpt import GPT
from forge_mlx.models.qat import fake_quant_enabled
from forge_mlx.models.registry import build_model
from forge_mlx.train.checkpoint import list_checkpoints, load_checkpoint
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.deploy import deployed_model
from forge_mlx.train.device import recorded_placement
from forge_mlx.train.finetuned import adapted_model, trained_model
from forge_mlx.train.folder import RunFolder
from forge_mlx.train.load import load_config
from forge_mlx.train.pretrained_config import PretrainedConfig
import mlx.core as mx


class OpenedModel(NamedTuple):
    """A model that is ready to be used.

    Attributes:
        model: in evaluation mode.
        tokenizer: the model's.
        source: the folder or file that the weights came from.
        begins_with_end: whether the end token stood before every text of training.
        config: config.json of the checkpoint that it is, or that its training went on from; None: of neither.
        generation: generation_config.json of the same.
        stored_dtype: of the floats of the same, where those of the model may have another; None: of no checkpoint, or
            they are what they were there.
    """

    model: GPT
    tokenizer: HubTokenizer | Tokenizer
    source: Path
    begins_with_end: bool
    config: dict[str, Any] | None = None
    generation: dict[str, Any] | None = None
    stored_dtype: mx.Dtype | None = None

    @property
    def begin_ids(self) -> list[int]:
        """The tokens that stood before every text of training: the tokenizer's own, or the end token, or none."""
        if isinstance(self.tokenizer, HubTokenizer):
            return self.tokenizer.begin_ids
        return [self.tokenizer.end_id] if self.begins_with_end else []


def add_model_arguments(parser: argparse.ArgumentParser, *, adapter: str) -> None:
    """Give a command the arguments `model` and `--adapter`, which `open_model` takes.

    Args:
        parser: the command's; changed in place.
        adapter: what the command does with adapters, for its help.
    """
    parser.add_argument(
        "model",
        help="a run's folder (its final model, else its newest checkpoint), a model folder such as RUN/final, a "
        "checkpoint of a run; a folder in Hugging Face's or mlx-lm's layout, a .gguf file, or a model's name on the "
        "Hugging Face Hub",
    )
    parser.add_argument("--adapter", type=Path, metavar="FOLDER", help=adapter)


def open_model(
    path: str | Path,
    *,
    adapter: Path | None = None,
    keep_dtype: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> OpenedModel:
    """Load a model folder, a GGUF file, a model of the hub, one checkpoint, or of a run its final model.

    A run without a final model gives its newest checkpoint. A checkpoint of quantisation-aware training gives what the
    run would deploy at its step: the codes of its weights, or before quantisation begins and after it ends the floats.

    On a CPU the 16-bit weights of Hugging Face's and mlx-lm's folders, of GGUF files and of fine-tuning runs become
    float32, which is several times as fast there, unless they are to be kept; elsewhere they stay what they are.

    Args:
        path: where the model is, or the name of a model on the Hugging Face Hub.
        adapter: a folder of adapters that are put on the model; None: none.
        keep_dtype: whether the floats of such models keep their dtype on a CPU too, those of runs that of training.
        log: told in a line what is downloaded or left out.

    Raises:
        ModelFolderError: there is no model.
        ValueError: the model or the adapters cannot be read.
    """
    opened = _open(path, keep_dtype, log)
    if adapter is not None:
        is_published = isinstance(opened.tokenizer, HubTokenizer)
        load_adapters(adapter, opened.model, base=opened.source if is_published else None, log=log)
        opened.model.eval()
        if isinstance(opened.tokenizer, HubTokenizer):
            opened = opened._replace(tokenizer=with_own_template(adapter, opened.tokenizer))
    return opened


def run_config(path: str | Path) -> TrainConfig | None:
    """The config of the run that a model is of; None: it is of none.

    Args:
        path: as `open_model` takes it.

    Raises:
        ValueError: the run's config cannot be read.
    """
    file = _run_of(Path(path).expanduser()).config_file
    return load_config(file) if file.is_file() else None


def _run_of(folder: Path) -> RunFolder:
    """The run's folder, which need not be one, of itself, of its final folder, or of a checkpoint."""
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        return RunFolder(folder.resolve().parent)
    if (folder / "state.json").is_file():
        return RunFolder(folder.resolve().parent.parent)
    return RunFolder(folder)


def _open(path: str | Path, keep_dtype: bool, log: Callable[[str], None]) -> OpenedModel:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return _open_pretrained(path, keep_dtype, log)
    if (folder / "config.json").is_file():
        return _open_folder(folder, keep_dtype, log)
    run = _run_of(folder)
    if (folder / "adapter_config.json").is_file():
        return _open_adapters(run, folder, keep_dtype, log)
    if (folder / "state.json").is_file():
        return _open_checkpoint(run, folder, keep_dtype, log)
    if (run.final / "adapter_config.json").is_file():
        return _open_adapters(run, run.final, keep_dtype, log)
    if run.final.is_dir():
        return _open_folder(run.final, keep_dtype, log)
    checkpoints = list_checkpoints(run.checkpoints)
    if not run.started or not checkpoints:
        raise ModelFolderError(f"{folder}: is neither a model folder nor a run folder with a checkpoint.")
    return _open_checkpoint(run, checkpoints[-1], keep_dtype, log)


def _open_folder(folder: Path, keep_dtype: bool, log: Callable[[str], None]) -> OpenedModel:
    """A model folder of forge-mlx's own layout or of Hugging Face's, by its config.json."""
    if is_pretrained(folder):
        return _open_pretrained(folder, keep_dtype, log)
    return OpenedModel(*load_model(folder), folder, begins_with_end(folder))


def _open_pretrained(path: str | Path, keep_dtype: bool, log: Callable[[str], None]) -> OpenedModel:
    # 16-bit products bypass the BLAS.
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    loaded = load_pretrained(path, dtype=mx.float32 if on_cpu and not keep_dtype else None, log=log)
    return _published(loaded, loaded.folder, None if keep_dtype else loaded.stored_dtype)


def _published(loaded: Pretrained, source: Path, stored_dtype: mx.Dtype | None) -> OpenedModel:
    config, generation = loaded.config or None, loaded.generation or None
    return OpenedModel(loaded.model, loaded.tokenizer, source, False, config, generation, stored_dtype)


def _open_adapters(run: RunFolder, folder: Path, keep_dtype: bool, log: Callable[[str], None]) -> OpenedModel:
    """The final adapters of a run on the base that they were trained on."""
    if not run.config_file.is_file():
        raise ModelFolderError(
            f"{folder}: holds adapters and not the model that they are for. Give that, and this folder as --adapter."
        )
    loaded = adapted_model(run, load_config(run.config_file), folder, keep_dtype, log)
    return _published(loaded, folder, loaded.stored_dtype)


def _open_checkpoint(run: RunFolder, checkpoint: Path, keep_dtype: bool, log: Callable[[str], None]) -> OpenedModel:
    """A checkpoint holds the weights that were trained; the run's folder has the rest, or names it."""
    config = load_config(run.config_file)
    quantised = config.qat is not None and fake_quant_enabled(config.qat, _step_of(checkpoint))
    if isinstance(config.model, PretrainedConfig):
        loaded = trained_model(run, config, load_checkpoint(checkpoint), keep_dtype, log)
        # Training saw the codes with their scales as they are.
        return _published(loaded, checkpoint, None if quantised else loaded.stored_dtype)
    # The weights are replaced at once, whatever it is built from.
    model = build_model(config.model)
    load_weights(model, checkpoint / "model.safetensors")
    if quantised:
        model = deployed_model(config, model, recorded_placement(config.run, run.config_file).dtype)
    model.eval()
    return OpenedModel(model, Tokenizer.load(run.tokenizer_file), checkpoint, config.isolates_texts)


def _step_of(checkpoint: Path) -> int:
    """How many updates a checkpoint has seen, whatever its folder is called by now."""
    file = checkpoint / "state.json"
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["state"]["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise ModelFolderError(f"{file}: is damaged: {type(error).__name__}: {error}.") from None
