"""What a run trains, and on what: model, tokenizer, rows of text, prompts, made as the config says."""

from collections.abc import Callable
from dataclasses import dataclass

from forge_mlx._text import count
from forge_mlx.data.config import DataConfig
from forge_mlx.data.example_config import ExampleConfig
from forge_mlx.data.preference_rows import PreferenceRows
from forge_mlx.data.prepare import DataFacts, PreparedData, prepare
from forge_mlx.data.prepare_examples import ExampleFacts
from forge_mlx.data.stream import Rows, TrainingRows, require_full_batch, training_rows, validation_rows
from forge_mlx.data.text_tokenizer import TextTokenizer
from forge_mlx.hub.fingerprint import weights_fingerprint
from forge_mlx.hub.pretrained import Pretrained, load_pretrained, read_shape
from forge_mlx.models.adapters import adapted_layers, add_adapters
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.dequantize import dequantize_layers
from forge_mlx.models.gpt import GPT
from forge_mlx.models.qat import convert_qat, prepare_qat, set_fake_quant
from forge_mlx.models.registry import build_model
from forge_mlx.nn.adapted_base import weight_shape
from forge_mlx.nn.coded import coded_layers
from forge_mlx.train.config import TrainConfig, require_fitting_shape
from forge_mlx.train.device import Placement
from forge_mlx.train.examples import begin_examples
from forge_mlx.train.folder import RunFolder
from forge_mlx.train.nonfinite import nonfinite_arrays
from forge_mlx.train.preference import PairPreference
from forge_mlx.train.pretrained_config import PretrainedConfig
from forge_mlx.train.prompts import Prompt, corpus_prompt
from forge_mlx.train.reference import Reference, find_reference
import mlx.core as mx

Log = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """What a run trains, and on what.

    Attributes:
        config: of the run, with what the data and the checkpoint decided filled in.
        model: as training begins: adapters are added, fake quantisation is prepared and off.
        tokenizer: the model's.
        rows: the training text as rows.
        valid_rows: the validation text as rows.
        facts: counts of both.
        prompts: what samples continue.
        total_steps: updates of the whole run.
        source: the checkpoint that training goes on from; None: a new model.
        base: fingerprint of its weights.
        reference: what the loss of pairs compares with; None: nothing.
    """

    config: TrainConfig
    model: GPT
    tokenizer: TextTokenizer
    rows: TrainingRows
    valid_rows: Rows
    facts: DataFacts | ExampleFacts
    prompts: list[Prompt]
    total_steps: int
    source: Pretrained | None = None
    base: str | None = None
    reference: Reference | None = None


def begin_work(config: TrainConfig, placement: Placement, log: Log) -> Work:
    """Prepare the data and make the model, as they are before the first step.

    Args:
        config: of the run.
        placement: device and dtype.
        log: takes a line for people.

    Raises:
        ValueError: the checkpoint cannot be read or does not fit the config, the data are missing or malformed, the
            epochs take too few steps, or the sample's prompt leaves no room for a sample.
        OSError: the cache's folder cannot be written.
    """
    if isinstance(config.model, PretrainedConfig):
        return _continued(config, placement, log)
    assert isinstance(config.data, DataConfig)
    data = prepare(config.data, log=log)
    config = config.with_vocab_size(data.tokenizer.vocab_size)
    shape = config.model
    assert isinstance(shape, DecoderConfig)
    # What only the first evaluation or sample would find out ends a run before it begins.
    rows, valid = _corpus_rows(config, data)
    steps = config.total_steps(rows.num_rows)
    prompt = corpus_prompt(config, shape, data.tokenizer, valid, data.facts.train_documents)
    model = build_model(shape, seed=config.run.seed)
    if config.qat is not None:
        set_fake_quant(prepare_qat(model, config.qat), False)
    return Work(config, model, data.tokenizer, rows, valid, data.facts, [prompt], steps)


def _continued(config: TrainConfig, placement: Placement, log: Log) -> Work:
    """The work of a run that goes on from a checkpoint."""
    source = load_base(config, placement, log)
    model, tokenizer, shape = source.model, source.tokenizer, source.model.config
    _require_finite(model, config, placement)
    base = weights_fingerprint(source.folder)
    rows: TrainingRows
    valid: Rows
    facts: DataFacts | ExampleFacts
    if isinstance(config.data, ExampleConfig):
        examples, prompts, lines = begin_examples(config, tokenizer, shape, log)
        for line in lines:
            log(line)
        source = source._replace(tokenizer=examples.tokenizer)
        rows, valid, facts, tokenizer = examples.train, examples.valid, examples.facts, examples.tokenizer
    else:
        data = prepare(config.data, log=log, tokenizer=tokenizer)
        rows, valid = _corpus_rows(config, data)
        prompts = [corpus_prompt(config, shape, tokenizer, valid, data.facts.train_documents)]
        facts = data.facts
    steps = config.total_steps(rows.num_rows)
    make_trainable(config, model)
    _say_if_wide(model, log)
    reference = None
    if isinstance(rows, PreferenceRows) and PairPreference(config.preference).needs_reference:
        assert isinstance(valid, PreferenceRows)
        splits, file = {"train": rows, "valid": valid}, RunFolder(config.run.dir).reference_file
        reference = find_reference(config, placement, model, splits, base, file, log)
        rows, valid = rows.with_reference(*reference.train.T), valid.with_reference(*reference.valid.T)
    return Work(config, model, tokenizer, rows, valid, facts, prompts, steps, source, base, reference)


def load_base(config: TrainConfig, placement: Placement, log: Log) -> Pretrained:
    """The checkpoint that a run goes on from, made floats or quantised as its section says.

    Args:
        config: of the run; its model is one that exists.
        placement: device and dtype.
        log: takes a line for people.

    Raises:
        ValueError: it cannot be read, or does not fit the config, which is known before its weights are read.
    """
    base, dtype = config.model, _trained_dtype(config, placement)
    assert isinstance(base, PretrainedConfig)
    # What of the file is not used, loading it says.
    shape = read_shape(base.path, revision=base.revision, log=lambda _: None)
    require_fitting_shape(config, shape)
    source = load_pretrained(base.path, dtype=dtype, revision=base.revision, log=log)
    _prepare_base(base, source.model, dtype)
    return source


def _require_finite(model: GPT, config: TrainConfig, placement: Placement) -> None:
    """Raise for weights that no training can go on from."""
    if not (bad := nonfinite_arrays(model.parameters())):
        return
    assert isinstance(config.model, PretrainedConfig)
    others = f" and {count(len(bad) - 1, 'more tensor')}" if len(bad) > 1 else ""
    narrow = _trained_dtype(config, placement) == mx.float16
    way_out = " or another run.dtype: float16 ends at 65,504" if narrow else ""
    raise ValueError(
        f"model.path must be a checkpoint of finite weights but {bad[0]}{others} of {config.model.path} "
        f"{'have' if others else 'has'} NaN or infinity. Take an intact copy{way_out}."
    )


def _say_if_wide(model: GPT, log: Log) -> None:
    layers = adapted_layers(model)
    wide = [name for name, layer in layers if layer.adapter.rank > min(weight_shape(layer.base)[-2:])]
    if wide:
        log(
            f"WARNING: adapter.rank {layers[0][1].adapter.rank} is above the width of {count(len(wide), 'layer')}, "
            f"{wide[0]} first: it learns no more than the width would, of more parameters"
        )


def _trained_dtype(config: TrainConfig, placement: Placement) -> mx.Dtype:
    """The dtype that a checkpoint's floats are loaded in: what is frozen is in that of the forward pass, else float32.

    Args:
        config: of the run.
        placement: device and dtype.
    """
    return mx.float32 if config.adapter is None else placement.dtype


def _corpus_rows(config: TrainConfig, data: PreparedData) -> tuple[TrainingRows, Rows]:
    """The rows of a corpus to train and to validate on. It must fill a batch: epochs of no rows would be no steps."""
    assert isinstance(config.data, DataConfig)
    size, packing = config.train.seq_len, config.data.packing
    rows = training_rows(data.train, size, packing)
    require_full_batch(rows, config.train.batch_size)
    return rows, validation_rows(data.valid, size, packing)


def make_trainable(config: TrainConfig, model: GPT) -> None:
    """Turn a base into what the config trains: adapted, prepared.

    Args:
        config: of the run.
        model: from `load_base`; changed in place.

    Raises:
        ValueError: all is to be trained and the model holds codes, or a section does not fit the model.
    """
    assert isinstance(config.model, PretrainedConfig)
    if config.adapter is not None:
        add_adapters(model, config.adapter, seed=config.run.seed, qat=config.qat)
    elif coded := coded_layers(model):
        raise ValueError(
            f"model.path must be a checkpoint of floats without adapter, but {coded[0]} and "
            f"{count(len(coded) - 1, 'other layer')} of {config.model.path} are quantised: codes cannot be trained. "
            "Add a section adapter, or set model.dequantize: true."
        )
    elif config.qat is not None:
        prepare_qat(model, config.qat)
    if config.qat is not None:
        set_fake_quant(model, False)
    model.checkpoint_blocks = config.train.grad_checkpoint
    model.train()


def _prepare_base(base: PretrainedConfig, model: GPT, dtype: mx.Dtype) -> None:
    """Make floats of a loaded model's codes or codes of its floats, as its section says.

    Args:
        base: of the run.
        model: as it was loaded; changed in place.
        dtype: of its floats.

    Raises:
        ValueError: there are no codes to make floats of, or the model is quantised already.
    """
    coded = coded_layers(model)
    if base.dequantize and not coded:
        raise ValueError(f"model.dequantize must be false with {base.path}, which is not quantised. Remove it.")
    if base.dequantize:
        dequantize_layers(model, dtype)
    if base.quantize is not None:
        if coded and not base.dequantize:
            raise ValueError(
                f"model.quantize must be null with a quantised checkpoint, as {base.path} is. Remove it, or set "
                "model.dequantize: true."
            )
        convert_qat(prepare_qat(model, base.quantize.as_qat()))
