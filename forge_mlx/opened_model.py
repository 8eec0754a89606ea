"""Opening a model for the commands: a run, one of its checkpoints, or a model folder of any kind."""

from collections.abc import Callable
import json
from pathlib import Path
from typing import Any, NamedTuple

from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.text_tokenizer import TextTokenizer
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub.adapter_files import load_adapters
from forge_mlx.hub.native import ModelFolderError, begins_with_end, load_model, load_weights
from forge_mlx.hub.pretrained import Pretrained, is_pretrained, load_pretrained
from forge_mlx.models.gpt import GPT
from forge_mlx.models.qat import fake_quant_enabled
from forge_mlx.models.registry import build_model
from forge_mlx.train.checkpoint import list_checkpoints, load_checkpoint
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.deploy import deployed_model
from forge_mlx.train.device import DTYPES
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
    """

    model: GPT
    tokenizer: TextTokenizer
    source: Path
    begins_with_end: bool
    config: dict[str, Any] | None = None
    generation: dict[str, Any] | None = None

    @property
    def begin_ids(self) -> list[int]:
        """The tokens that stood before every text of training: the tokenizer's own, or the end token, or none."""
        if isinstance(self.tokenizer, HubTokenizer):
            return self.tokenizer.begin_ids
        return [self.tokenizer.end_id] if self.begins_with_end else []


def open_model(
    path: str | Path, *, adapter: Path | None = None, log: Callable[[str], None] = lambda _: None
) -> OpenedModel:
    """Load a model folder, a GGUF file, a model of the hub, one checkpoint, or of a run its final model.

    A run without a final model gives its newest checkpoint. A checkpoint of quantisation-aware training gives what the
    run would deploy at its step: the codes of its weights, or before quantisation begins and after it ends the floats.

    On a CPU the 16-bit weights of Hugging Face's and mlx-lm's folders and of GGUF files become float32, which is
    several times as fast there; elsewhere they stay what they are.

    Args:
        path: where the model is, or the name of a model on the Hugging Face Hub.
        adapter: a folder of adapters that are put on the model; None: none.
        log: told in a line what is downloaded or left out.

    Raises:
        ModelFolderError: there is no model.
        ValueError: the model or the adapters cannot be read.
    """
    opened = _open(path, log)
    if adapter is not None:
        load_adapters(adapter, opened.model)
        opened.model.eval()
    return opened


def _open(path: str | Path, log: Callable[[str], None]) -> OpenedModel:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return _open_pretrained(path, log)
    if (folder / "config.json").is_file():
        return _open_folder(folder, log)
    if (folder / "adapter_config.json").is_file():
        return _open_adapters(RunFolder(folder.resolve().parent), folder, log)
    if (folder / "state.json").is_file():
        return _open_checkpoint(RunFolder(folder.resolve().parent.parent), folder, log)
    run = RunFolder(folder)
    if (run.final / "adapter_config.json").is_file():
        return _open_adapters(run, run.final, log)
    if run.final.is_dir():
        return _open_folder(run.final, log)
    checkpoints = list_checkpoints(run.checkpoints)
    if not run.started or not checkpoints:
        raise ModelFolderError(f"{folder}: is neither a model folder nor a run folder with a checkpoint.")
    return _open_checkpoint(run, checkpoints[-1], log)


def _open_folder(folder: Path, log: Callable[[str], None]) -> OpenedModel:
    """A model folder of forge-mlx's own layout or of Hugging Face's, by its config.json."""
    if is_pretrained(folder):
        return _open_pretrained(folder, log)
    return OpenedModel(*load_model(folder), folder, begins_with_end(folder))


def _open_pretrained(path: str | Path, log: Callable[[str], None]) -> OpenedModel:
    # 16-bit products bypass the BLAS.
    dtype = mx.float32 if mx.default_device() == mx.Device(mx.cpu) else None
    loaded = load_pretrained(path, dtype=dtype, log=log)
    return _published(loaded, loaded.folder)


def _published(loaded: Pretrained, source: Path) -> OpenedModel:
    config, generation = loaded.config or None, loaded.generation or None
    return OpenedModel(loaded.model, loaded.tokenizer, source, False, config, generation)


def _open_adapters(run: RunFolder, folder: Path, log: Callable[[str], None]) -> OpenedModel:
    """The final adapters of a run on the base that they were trained on."""
    if not run.config_file.is_file():
        raise ModelFolderError(
            f"{folder}: holds adapters and not the model that they are for. Give that, and this folder as --adapter."
        )
    return _published(adapted_model(load_config(run.config_file), folder, log), folder)


def _open_checkpoint(run: RunFolder, checkpoint: Path, log: Callable[[str], None]) -> OpenedModel:
    """A checkpoint holds the weights that were trained; the run's folder has the rest, or names it."""
    config = load_config(run.config_file)
    if isinstance(config.model, PretrainedConfig):
        return _published(trained_model(config, load_checkpoint(checkpoint), log), checkpoint)
    # The weights are replaced at once, whatever it is built from.
    model = build_model(config.model)
    load_weights(model, checkpoint / "model.safetensors")
    if config.qat is not None and fake_quant_enabled(config.qat, _step_of(checkpoint)):
        model = deployed_model(config, model, _training_dtype(run, config))
    model.eval()
    return OpenedModel(model, Tokenizer.load(run.tokenizer_file), checkpoint, config.isolates_texts)


def _step_of(checkpoint: Path) -> int:
    """How many updates a checkpoint has seen, whatever its folder is called by now."""
    file = checkpoint / "state.json"
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["state"]["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise ModelFolderError(f"{file}: is damaged: {type(error).__name__}: {error}.") from None


def _training_dtype(run: RunFolder, config: TrainConfig) -> mx.Dtype:
    """The dtype of the forward pass in training, on which the codes depend."""
    if config.run.dtype == "auto":
        raise ModelFolderError(
            f"{run.config_file}: run.dtype must be what the run was trained in but got auto. A run writes it there: "
            f"put back one of {', '.join(DTYPES)}."
        )
    return DTYPES[config.run.dtype]
