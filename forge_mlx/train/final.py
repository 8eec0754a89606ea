"""The final folder of a run: forge-mlx's own for a new model, Hugging Face's or an adapter's for one that existed."""

from pathlib import Path

from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub.adapter_files import TEMPLATE_FILE, save_adapters
from forge_mlx.hub.native import save_model
from forge_mlx.hub.pretrained import save_pretrained
from forge_mlx.train.deploy import deployed_model
from forge_mlx.train.pretrained_config import PretrainedConfig
from forge_mlx.train.work import Work
import mlx.core as mx


def write_final(folder: Path, work: Work, dtype: mx.Dtype, *, quantised: bool) -> None:
    """Write what a run leaves.

    | run | folder |
    |---|---|
    | a new model | `model.safetensors`, `config.json`, `tokenizer.model` |
    | adapters | `adapters.safetensors`, `adapter_config.json`, as mlx-lm reads them; the chat template |
    | all of a checkpoint | Hugging Face's layout, in the checkpoint's dtype |
    | quantisation-aware | as above, with the codes |

    Args:
        folder: an empty one.
        work: the run's.
        dtype: of the forward pass in training, on which codes depend.
        quantised: whether the weights are to be written as codes.

    Raises:
        OSError: a file cannot be written.
    """
    model = deployed_model(work.config, work.model, dtype) if quantised else work.model
    source = work.source
    if source is None:
        assert isinstance(work.tokenizer, Tokenizer)
        save_model(folder, model, work.tokenizer, texts_begin_with_end=work.config.isolates_texts)
    elif work.config.adapter is not None and not quantised:
        assert isinstance(work.config.model, PretrainedConfig)
        base = work.config.model.anchored()
        save_adapters(folder, model, work.config.adapter, base.path, revision=base.revision, fingerprint=work.base)
        if source.tokenizer.chat_template is not None:
            (folder / TEMPLATE_FILE).write_text(source.tokenizer.chat_template, encoding="utf-8")
    else:
        save_pretrained(
            folder,
            model,
            source.tokenizer,
            source=source.config,
            generation=source.generation,
            dtype=None if quantised else source.stored_dtype,
        )
