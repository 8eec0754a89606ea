"""The configs in models/configs, and what replaces the checkpoints of the hub in them."""

from pathlib import Path

from forge_mlx.train.load import load_config
from forge_mlx.train.pretrained_config import PretrainedConfig
from tiny_checkpoint import write_checkpoint

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "models" / "configs").glob("*.yaml"))


def is_finetuning(path: Path) -> bool:
    """Whether a config goes on from a checkpoint."""
    return isinstance(load_config(path).model, PretrainedConfig)


FINETUNING = [path for path in SHIPPED if is_finetuning(path)]
NEW = [path for path in SHIPPED if path not in FINETUNING]


def on_tiny_checkpoint(path: Path, folder: Path) -> list[str]:
    """Overrides with which a shipped config needs no hub: none for a new model.

    Args:
        path: of the config.
        folder: where the checkpoint is, or is written.
    """
    if path not in FINETUNING:
        return []
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        write_checkpoint(checkpoint)
    # Every character is a token of this checkpoint, so that examples are longer than a config expects.
    return [f"model.path={checkpoint}", "train.seq_len=256"]
