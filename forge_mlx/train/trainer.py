"""One run in memory: model, optimizer and data position; a step, an evaluation, a sample, a checkpoint."""

from dataclasses import asdict, dataclass, field
import math
from pathlib import Path
import time
from typing import Any

from forge_mlx.data.batch import Batch
from forge_mlx.data.prepare import PreparedData
from forge_mlx.data.stream import BatchStream, eval_batches, training_rows, validation_rows
from forge_mlx.hub.native import save_model
from forge_mlx.models.gpt import GPT
from forge_mlx.models.moe import MoE
from forge_mlx.models.qat import fake_quant_enabled, prepare_qat, set_fake_quant
from forge_mlx.models.registry import build_model
from forge_mlx.nn.parameters import named_arrays
from forge_mlx.optim import build_optimizer, learning_rate_factor
from forge_mlx.sampling import Sampler, generate_tokens
from forge_mlx.train.checkpoint import (
    UNFINISHED,
    Checkpoint,
    RunState,
    install_folder,
    remove_unfinished,
    save_checkpoint,
)
from forge_mlx.train.config import TrainConfig
from forge_mlx.train.deploy import deployed_model, summed_logits_loss
from forge_mlx.train.device import Placement
from forge_mlx.train.folder import RunFolder
from forge_mlx.train.nonfinite import describe_nonfinite, nonfinite_arrays
from forge_mlx.train.outcome import NonFiniteLoss, TrainingStopped
from forge_mlx.train.routing_log import RoutingWindow
from forge_mlx.train.step import TrainStep, make_evaluator

# A sample without a prompt starts behind an end token, as documents do. With few documents the model hardly ever saw
# what follows one, so the sample continues the start of the validation text instead.
_DOCUMENTS_TO_LEARN_STARTS = 100
_BORROWED_TOKENS = 16


@dataclass
class Window:
    """Sums since the last training record.

    Attributes:
        nats: loss, summed over tokens.
        seconds: time in training steps, that of evaluations and checkpoints not counted.
        tokens: target tokens.
        bytes: UTF-8 bytes of their text.
        routing: what the routers of an MoE model did.
    """

    nats: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    bytes: int = 0
    routing: RoutingWindow = field(default_factory=RoutingWindow)

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Window":
        """A window that a checkpoint has kept as dictionaries."""
        return cls(**state | {"routing": RoutingWindow(**state.get("routing", {}))})

    @property
    def loss(self) -> float:
        """Mean loss, nats a token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Mean loss in bits a byte of text."""
        return _bits_per_byte(self.nats, self.bytes)


class Trainer:
    """One run in memory: model, optimizer, data position, and where they are written.

    Args:
        config: the resolved config: device, dtype and vocabulary size are filled in.
        placement: device and dtype.
        data: tokenizer and token files.
        folder: the run's folder, locked by the caller.

    Attributes:
        rows: the training text as rows.
        valid_rows: the validation text as rows.
        step: updates done.
        tokens: target tokens seen.
        window: sums since the last training record; the loop starts a new one with each record.
        saved_step: the step of the newest checkpoint, None without one.
        fake_quant: whether the forward pass sees quantised weights now.

    Raises:
        ValueError: the data is shorter than a batch, or the sample's prompt leaves no room for a sample.
    """

    def __init__(self, config: TrainConfig, placement: Placement, data: PreparedData, folder: RunFolder) -> None:
        self.config, self.placement, self.data, self.folder = config, placement, data, folder
        loop = config.train
        # What only the first evaluation or sample would find out ends a run before it begins.
        self.rows = training_rows(data.train, loop.seq_len, config.data.packing)
        self.stream = BatchStream(self.rows, loop.batch_size, config.run.seed)
        self.valid_rows = validation_rows(data.valid, loop.seq_len, config.data.packing)
        self._prompt = self._checked_prompt()
        self.model = self._built()
        optimizer = build_optimizer(config.optim)
        self.step_function = TrainStep(self.model, optimizer, placement.dtype, config.optim.clip_norm)
        self.evaluate_batch = make_evaluator(self.model, placement.dtype)
        self.fake_quant = False
        self.step = self.tokens = 0
        self.window = Window()
        self.saved_step: int | None = None
        self._seconds_before, self._started = 0.0, time.perf_counter()

    @property
    def fill(self) -> float:
        """Share of the positions of rows that are targets; the rest is padding."""
        return self.rows.num_targets / (self.rows.num_rows * self.rows.seq_len)

    @property
    def tokens_per_step(self) -> int:
        """Targets of one update, on average."""
        return round(self.config.tokens_per_step * self.fill)

    @property
    def seconds(self) -> float:
        """Time in the loop, of earlier starts too."""
        return self._seconds_before + time.perf_counter() - self._started

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint was made.

        Raises:
            ValueError: it does not fit the model, the optimizer or the data; nothing is changed on the disk.
        """
        state = checkpoint.state
        if state.data.get("corpus") != self.stream.state_dict()["corpus"]:
            raise ValueError(
                "the training text or its tokenizer is not that of this run: a file was edited, added or removed "
                "since. Bring the old text back."
            )
        self.stream.load_state_dict(state.data)
        self.model.load_weights(list(checkpoint.weights.items()), strict=True)
        self.step_function.optimizer.load_flat_state(checkpoint.optimizer)
        self.step, self.tokens, self.window = state.step, state.tokens, Window.of_state(state.window)
        self._seconds_before, self._started = state.seconds, time.perf_counter()
        self.saved_step = state.step
        # The log has said it already.
        self.enter_phase()

    def save(self) -> Path:
        """Write a checkpoint.

        Raises:
            NonFiniteLoss: a weight or a moment is not finite: what cannot be gone on from replaces no checkpoint.
            TrainingStopped: it cannot be written, as when the disk is full.
        """
        weights = dict(named_arrays(self.model.parameters()))
        moments = self.step_function.optimizer.flat_state()
        if bad := nonfinite_arrays(weights) or nonfinite_arrays(moments):
            raise NonFiniteLoss(
                f"step {self.step}: the update left {bad[0]} with values that are not finite; "
                "no checkpoint was made of them."
            )
        state = RunState(self.step, self.tokens, self.seconds, self.stream.state_dict(), asdict(self.window))
        try:
            path = save_checkpoint(self.folder.checkpoints, weights, moments, state, self.config.train.keep_checkpoints)
        except (OSError, RuntimeError) as error:
            raise TrainingStopped(f"step {self.step}: the checkpoint could not be written: {error}.") from error
        self.saved_step = self.step
        return path

    def train_step(self) -> tuple[float, float]:
        """One update. Returns the gradient norm before clipping and AdamW's learning rate.

        Raises:
            NonFiniteLoss: before anything is updated.
        """
        loop, optim = self.config.train, self.config.optim
        began = time.perf_counter()
        batches = [next(self.stream) for _ in range(loop.accumulate)]
        # Distinct for every step of a run; runs of different seeds may meet far apart, which harms nothing.
        seed = self.config.run.seed * 1_000_003 + self.step
        loss, norm, grads, count = self.step_function.gradients(batches, seed)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            where = describe_nonfinite(self.model, batches, grads, self.placement.dtype)
            raise NonFiniteLoss(
                f"step {self.step + 1}: the loss is {loss}, its gradient norm {norm}: {where}. "
                "Nothing was updated in this step."
            )
        factor = learning_rate_factor(optim, self.step, loop.steps)
        self.step_function.update(grads, norm, count, factor)
        if isinstance(self.model, MoE):
            self.model.balance([record.load for record in self.step_function.routing])
            self.window.routing.add(self.step_function.routing, self.model.config.experts_per_token)
        self.step += 1
        self.tokens += count
        self.window.nats += loss * count
        self.window.tokens += count
        self.window.bytes += sum(self._num_bytes(batch) for batch in batches)
        self.window.seconds += time.perf_counter() - began
        return norm, factor * optim.lr

    def routing_fields(self) -> dict[str, Any]:
        """What the window's record says of the MoE layers; nothing without any."""
        if not isinstance(self.model, MoE):
            return {}
        return self.window.routing.fields(self.model.moe_layers, self.model.selection_biases)

    def enter_phase(self) -> str | None:
        """Switch fake quantisation on or off as the config says for the next step. Returns what is to be said of it."""
        qat = self.config.qat
        if qat is None or self.fake_quant == (wanted := fake_quant_enabled(qat, self.step)):
            return None
        self.fake_quant = wanted
        set_fake_quant(self.model, wanted)
        self.step_function.recompile()
        self.evaluate_batch = make_evaluator(self.model, self.placement.dtype)
        return f"fake quantisation {'begins' if wanted else 'ends'} after step {self.step}"

    def evaluate(self, max_tokens: int | None) -> dict[str, float]:
        """Validation loss (nats a token), bits per byte and the number of targets, over fixed rows."""
        loop = self.config.train
        params = self.model.trainable_parameters()
        nats, tokens, num_bytes = 0.0, 0, 0
        for batch in eval_batches(self.valid_rows, loop.batch_size, max_tokens):
            nats += float(self.evaluate_batch(params, batch))
            tokens += batch.counted_targets().size
            num_bytes += self._num_bytes(batch)
        return {
            "loss": nats / tokens,
            "bits_per_byte": _bits_per_byte(nats, num_bytes),
            "tokens": tokens,
        }

    @property
    def prompt_text(self) -> str:
        """What samples continue: the config's prompt, or what stands in for it."""
        # The end token decodes to nothing.
        return self.data.tokenizer.decode(self._prompt)

    def sample(self) -> str:
        """A text by the model as it is now, without its prompt."""
        loop, tokenizer = self.config.train, self.data.tokenizer
        sampler = Sampler(temperature=loop.sample_temperature, top_p=0.95)
        most = min(loop.sample_tokens, self.config.model.max_seq_len - len(self._prompt))
        self.model.eval()
        try:
            tokens = generate_tokens(
                self.model, self._prompt, sampler, most, stop=tokenizer.end_id, seed=self.config.run.seed
            )
            return tokenizer.decode(list(tokens))
        finally:
            self.model.train()

    def deployed_evaluation(self) -> dict[str, Any] | None:
        """The loss of the model as it is deployed, its weights held as codes, beside that of the model in training.

        Over one batch: MLX's quantised products are slow on a CPU, and what is compared is the same model twice.

        Returns:
            ``loss``, ``trained_loss`` (nats a token) and ``tokens``; None unless fake quantisation is on.
        """
        if not self.fake_quant:
            return None
        loop = self.config.train
        batch = next(iter(eval_batches(self.valid_rows, loop.batch_size, loop.batch_size * loop.seq_len)))
        tokens = batch.counted_targets().size
        trained = float(self.evaluate_batch(self.model.trainable_parameters(), batch))
        deployed = summed_logits_loss(deployed_model(self.config, self.model, self.placement.dtype), batch)
        return {"loss": deployed / tokens, "trained_loss": trained / tokens, "tokens": tokens}

    def save_final(self) -> None:
        """Write the final model folder, whole or not at all; quantised where fake quantisation is on.

        Raises:
            TrainingStopped: it cannot be written.
        """
        temporary = self.folder.path / f"{UNFINISHED}final"
        try:
            remove_unfinished(self.folder.path)
            temporary.mkdir()
            model = self.model
            if self.fake_quant:
                model = deployed_model(self.config, model, self.placement.dtype)
            save_model(temporary, model, self.data.tokenizer, texts_begin_with_end=self._end_first)
            install_folder(temporary, self.folder.final)
        except (OSError, RuntimeError) as error:
            raise TrainingStopped(f"the final model could not be written: {error}.") from error

    def _built(self) -> GPT:
        """The model, float at first."""
        model = build_model(self.config.model, seed=self.config.run.seed)
        if self.config.qat is not None:
            set_fake_quant(prepare_qat(model, self.config.qat), False)
        return model

    def _num_bytes(self, batch: Batch) -> int:
        """UTF-8 bytes of the targets that count."""
        return int(self.data.tokenizer.token_bytes[batch.counted_targets()].sum())

    @property
    def _end_first(self) -> bool:
        """Whether every text of training begins behind an end token."""
        return self.config.data.packing == "documents"

    def _checked_prompt(self) -> list[int]:
        """What a sample continues, as tokens."""
        tokenizer, limit = self.data.tokenizer, self.config.model.max_seq_len
        first = [tokenizer.end_id] if self._end_first else []
        prompt = tokenizer.encode(self.config.train.sample_prompt)
        if prompt and len(first) + len(prompt) >= limit:
            raise ValueError(
                f"train.sample_prompt must be shorter than model.max_seq_len, {limit} tokens, but has "
                f"{len(first) + len(prompt)}{' with the end token before it' if first else ''}. Shorten it."
            )
        if prompt:
            return first + prompt
        if self.data.facts.train_documents >= _DOCUMENTS_TO_LEARN_STARTS:
            return [tokenizer.end_id]
        room = max(0, limit - 1 - len(first))
        borrowed = [int(token) for token in self.data.valid.tokens[: min(_BORROWED_TOKENS, room)]]
        if first and tokenizer.end_id in borrowed:
            borrowed = borrowed[: borrowed.index(tokenizer.end_id)]
        return first + borrowed


def _bits_per_byte(nats: float, num_bytes: int) -> float:
    return nats / math.log(2) / max(num_bytes, 1)
