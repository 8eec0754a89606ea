"""One run in memory: model, optimizer and data position; a step, an evaluation, a sample, a checkpoint."""

from dataclasses import asdict
import math
from pathlib import Path
import time
from typing import Any

from forge_mlx.data.batch import Batch
from forge_mlx.data.stream import BatchStream, eval_batches
from forge_mlx.models.moe import MoE
from forge_mlx.models.qat import fake_quant_enabled, set_fake_quant
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
from forge_mlx.train.deploy import deployed_model, summed_logits_loss
from forge_mlx.train.device import Placement
from forge_mlx.train.final import write_final
from forge_mlx.train.folder import RunFolder
from forge_mlx.train.kept_weights import kept_weights, put_back
from forge_mlx.train.nonfinite import describe_nonfinite, nonfinite_arrays
from forge_mlx.train.objective import NextToken, Objective
from forge_mlx.train.outcome import NonFiniteLoss, TrainingStopped
from forge_mlx.train.preference import PairPreference
from forge_mlx.train.prompts import Prompt
from forge_mlx.train.step import TrainStep, make_evaluator
from forge_mlx.train.window import Window
from forge_mlx.train.work import Work


class Trainer:
    """One run in memory: model, optimizer, data position, and where they are written.

    Args:
        work: what is trained, and on what.
        placement: device and dtype.
        folder: the run's folder, locked by the caller.

    Attributes:
        config: the resolved config: device, dtype and vocabulary size are filled in.
        model: what is trained.
        rows: the training text as rows.
        valid_rows: the validation text as rows.
        total_steps: updates of the whole run.
        step: updates done.
        tokens: target tokens seen.
        window: sums since the last training record; the loop starts a new one with each record.
        saved_step: the step of the newest checkpoint, None without one.
        fake_quant: whether the forward pass sees quantised weights now.

    Raises:
        ValueError: a corpus is shorter than a batch.
    """

    def __init__(self, work: Work, placement: Placement, folder: RunFolder) -> None:
        self.work, self.config, self.placement, self.folder = work, work.config, placement, folder
        self.model, self.tokenizer = work.model, work.tokenizer
        self.rows, self.valid_rows, self.total_steps = work.rows, work.valid_rows, work.total_steps
        self.objective = self._objective()
        self.stream = BatchStream(self.rows, self.config.train.batch_size, self.config.run.seed)
        optimizer = build_optimizer(self.config.optim)
        self.step_function = TrainStep(
            self.model, optimizer, placement.dtype, self.config.optim.clip_norm, self.objective
        )
        self.evaluate_batch = make_evaluator(self.model, placement.dtype, self.objective)
        self.fake_quant = False
        self.step = self.tokens = 0
        self.window = Window()
        self.saved_step: int | None = None
        self._seconds_before, self._started = 0.0, time.perf_counter()

    @property
    def fill(self) -> float:
        """Share of the positions of rows that are targets; the rest is what is only read, and padding."""
        return self.rows.num_targets / (self.rows.num_rows * self.rows.group_size * self.rows.seq_len)

    @property
    def tokens_per_step(self) -> int:
        """Targets of one update, on average."""
        positions = self.config.train.batch_size * self.rows.group_size * self.rows.seq_len
        return round(positions * self.config.train.accumulate * self.fill)

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
        if state.base is not None and state.base != self.work.base:
            assert self.work.source is not None
            raise ValueError(
                f"the weights of {self.work.source.folder} are not those that this run began from: the files were "
                "replaced since. Bring the old ones back."
            )
        self.stream.load_state_dict(state.data)
        put_back(self.config, self.model, checkpoint.weights)
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
        weights = kept_weights(self.config, self.model)
        moments = self.step_function.optimizer.flat_state()
        if bad := nonfinite_arrays(weights) or nonfinite_arrays(moments):
            raise NonFiniteLoss(
                f"step {self.step}: the update left {bad[0]} with values that are not finite; "
                "no checkpoint was made of them."
            )
        state = RunState(
            self.step, self.tokens, self.seconds, self.stream.state_dict(), asdict(self.window), self.work.base
        )
        try:
            path = save_checkpoint(self.folder.checkpoints, weights, moments, state, self.config.train.keep_checkpoints)
        except (OSError, RuntimeError) as error:
            raise TrainingStopped(f"step {self.step}: the checkpoint could not be written: {error}.") from error
        self.saved_step = self.step
        return path

    @property
    def separates_texts(self) -> bool:
        """Whether rows hold several texts of which none sees another."""
        return any(rows.packing in ("documents", "examples") for rows in (self.rows, self.valid_rows))

    def _objective(self) -> Objective:
        if self.config.trains_pairs:
            return PairPreference(self.config.preference)
        # Routers must not count padding, which only segment ids tell.
        return NextToken(segments=self.separates_texts or isinstance(self.model, MoE))

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
        factor = learning_rate_factor(optim, self.step, self.total_steps)
        self.step_function.update(grads, norm, count, factor)
        if isinstance(self.model, MoE):
            self.model.balance([record.load for record in self.step_function.routing])
            self.window.routing.add(self.step_function.routing, self.model.config.experts_per_token)
        tokens = sum(batch.counted_targets().size for batch in batches)
        num_bytes = sum(self._num_bytes(batch) for batch in batches)
        self.step += 1
        self.tokens += tokens
        pairs = count if self.objective.unit == "pair" else 0
        self.window.add(loss * count, tokens, num_bytes, pairs, self.step_function.measures)
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
        self.evaluate_batch = make_evaluator(self.model, self.placement.dtype, self.objective)
        return f"fake quantisation {'begins' if wanted else 'ends'} after step {self.step}"

    def evaluate(self, max_tokens: int | None) -> dict[str, float]:
        """Validation loss (nats a token, or a pair), what is measured beside it, and the number of targets.

        Bits per byte are there where the loss is a text's.

        Args:
            max_tokens: about how many targets to evaluate, in fixed rows; None: all.
        """
        loop = self.config.train
        params = self.model.trainable_parameters()
        sums = Window()
        for batch in eval_batches(self.valid_rows, loop.batch_size, max_tokens):
            nats, measures = self.evaluate_batch(params, batch)
            count = self.objective.count(batch)
            found = {name: float(array) for name, array in measures.items()}
            pairs = count if self.objective.unit == "pair" else 0
            sums.add(float(nats), batch.counted_targets().size, self._num_bytes(batch), pairs, found)
        return {"loss": sums.loss, **self.measured(sums), "tokens": sums.tokens}

    def measured(self, sums: Window) -> dict[str, float]:
        """What a record says beside the loss: bits per byte of text, or the measures of pairs."""
        if (bits := sums.bits_per_byte) is not None:
            return {"bits_per_byte": bits, **self.objective.means(sums.measures, sums.count)}
        return {"pairs": sums.pairs, **self.objective.means(sums.measures, sums.count)}

    def samples(self) -> list[tuple[Prompt, str]]:
        """For each prompt a text by the model as it is now, without the prompt."""
        return [(prompt, self._sample(prompt)) for prompt in self.work.prompts]

    def _sample(self, prompt: Prompt) -> str:
        loop = self.config.train
        sampler = Sampler(temperature=self.config.sample_temperature, top_p=0.95)
        most = min(loop.sample_tokens, self.model.config.max_seq_len - len(prompt.tokens))
        self.model.eval()
        try:
            tokens = generate_tokens(
                self.model,
                prompt.tokens,
                sampler,
                most,
                stop=self.tokenizer.stop_ids,
                vocab_size=self.tokenizer.vocab_size,
                seed=self.config.run.seed,
            )
            return self.tokenizer.decode(list(tokens))
        finally:
            self.model.train()

    def deployed_evaluation(self) -> dict[str, Any] | None:
        """The loss of the model as it is deployed, its weights held as codes, beside that of the model in training.

        Of pairs too it is that of their tokens: what is compared is what both models say, not whom they agree with.
        Over one batch: MLX's quantised products are slow on a CPU, and what is compared is the same model twice.

        Returns:
            ``loss``, ``trained_loss`` (nats a token) and ``tokens``; None unless fake quantisation is on.
        """
        if not self.fake_quant:
            return None
        loop = self.config.train
        batch = next(iter(eval_batches(self.valid_rows, loop.batch_size, loop.batch_size * loop.seq_len)))
        tokens = batch.counted_targets().size
        evaluate = make_evaluator(self.model, self.placement.dtype, NextToken())
        trained = float(evaluate(self.model.trainable_parameters(), batch)[0])
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
            write_final(temporary, self.work, self.placement.dtype, quantised=self.fake_quant)
            install_folder(temporary, self.folder.final)
        except (OSError, RuntimeError) as error:
            raise TrainingStopped(f"the final model could not be written: {error}.") from error

    def _num_bytes(self, batch: Batch) -> int:
        """UTF-8 bytes of the targets that count."""
        return int(self.tokenizer.token_bytes[batch.counted_targets()].sum())
