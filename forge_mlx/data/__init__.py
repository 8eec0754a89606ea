"""Corpora, tokenizers, token files, packing, and a batch stream whose position can be saved."""

from forge_mlx.data.batch import Batch
from forge_mlx.data.cache import TokenFile
from forge_mlx.data.config import DataConfig, TokenizerConfig
from forge_mlx.data.prepare import DataFacts, PreparedData, prepare
from forge_mlx.data.stream import BatchStream, eval_batches, training_rows, validation_rows
from forge_mlx.data.stream_decoder import StreamDecoder
from forge_mlx.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "BatchStream",
    "DataConfig",
    "DataFacts",
    "PreparedData",
    "StreamDecoder",
    "TokenFile",
    "Tokenizer",
    "TokenizerConfig",
    "eval_batches",
    "prepare",
    "training_rows",
    "validation_rows",
]
