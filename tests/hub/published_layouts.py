"""Model folders as the hub has them: their files, their config.json, the names of their tensors, at small sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
import json
from pathlib import Path
from typing import Any

import numpy as np
import published_configs as configs
import published_tensors as tensors
import published_tokens as tokens
from safetensors.torch import save_file
from tokenizers import Tokenizer
import torch

from tests.data.chat_templates import FAMILIES


@dataclass(frozen=True)
class Layout:
    """What a published folder has.

    Attributes:
        config: Its config.json; names stand for ids of tokens.
        shapes: Its tensors by such a config.
        files: Its tokenizer's.
        generation: Its generation_config.json.
        dtype: Of its tensors.
        shards: How many files they are in; several have an index.
        extra: What else lies there.
        said: Ends of the lines that opening it says.
    """

    config: Mapping[str, Any]
    shapes: Callable[[Mapping[str, Any]], tensors.Shapes]
    files: tokens.Files
    generation: Mapping[str, Any]
    dtype: torch.dtype = torch.bfloat16
    shards: int = 1
    extra: Mapping[str, bytes] = field(default_factory=dict)
    said: tuple[str, ...] = ()

    @property
    def text(self) -> Mapping[str, Any]:
        """The keys of the text model."""
        return self.config.get("text_config", self.config)


def write_published(layout: Layout, folder: Path) -> Path:
    """Write the folder of a layout."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer.from_buffer(layout.files["tokenizer.json"])
    (folder / "config.json").write_text(json.dumps(_numbered(layout.config, backend), indent=2))
    (folder / "generation_config.json").write_text(json.dumps(_numbered(layout.generation, backend)))
    for file, content in {**layout.files, **layout.extra}.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content)
    arrays = _arrays(layout)
    if layout.shards == 1:
        save_file(arrays, folder / "model.safetensors", {"format": "pt"})
        return folder
    places = {}
    for shard in range(layout.shards):
        file = f"model-{shard + 1:05d}-of-{layout.shards:05d}.safetensors"
        part = {name: arrays[name] for name in sorted(arrays)[shard :: layout.shards]}
        save_file(part, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(each.nbytes for each in arrays.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _arrays(layout: Layout) -> dict[str, torch.Tensor]:
    draw = np.random.default_rng(11)
    found = {}
    for name, shape in layout.shapes(layout.text).items():
        if name.endswith((".attn.bias", ".masked_bias", ".inv_freq")):
            found[name] = torch.ones(shape)
        elif name.endswith("e_score_correction_bias"):
            # Not negative: mlx-lm gives experts of groups that are out a score of 0.
            found[name] = torch.tensor(draw.uniform(0, 0.2, shape), dtype=torch.float32)
        else:
            found[name] = torch.tensor(draw.normal(0, 0.2, shape), dtype=layout.dtype)
    return found


def _numbered(values: Mapping[str, Any], backend: Tokenizer) -> dict[str, Any]:
    """Names of tokens as their ids."""

    def number(value: Any) -> Any:
        return [number(each) for each in value] if isinstance(value, list) else backend.token_to_id(value)

    is_named = {key for key, value in values.items() if key.endswith("_token_id") and isinstance(value, (str, list))}
    return {key: number(value) if key in is_named else value for key, value in values.items()}


_MODEL = {"_from_model_config": True}
_LLAMA_2 = {**_MODEL, "bos_token_id": "<s>", "eos_token_id": "</s>"}
_QWEN = {
    **{"bos_token_id": "<|endoftext|>", "do_sample": True, "eos_token_id": ["<|im_end|>", "<|endoftext|>"]},
    **{"pad_token_id": "<|endoftext|>", "repetition_penalty": 1.1, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
}
_MISTRAL_TEMPLATES = [
    {"name": "default", "template": FAMILIES["mistral"][0]},
    {"name": "tool_use", "template": "{{ messages[0].content }}"},
]
_GEMMA_TEMPLATE = FAMILIES["gemma"][0]
_PICKLES = {"pytorch_model.bin": b"a pickle", "tokenizer.model": b"not read"}


def _unknown(key: str) -> tuple[str]:
    return (f"1 keys are not known and not used: {key}",)


LAYOUTS = {
    "SmolLM2-135M-Instruct": Layout(
        configs.SMOLLM2,
        tensors.llama,
        tokens.smollm(),
        {**_MODEL, "bos_token_id": "<|im_start|>", "eos_token_id": "<|im_end|>", "pad_token_id": "<|im_end|>"},
        extra={"onnx/model.onnx": b"", "runs/events.out": b"", "all_results.json": b"{}"},
    ),
    "TinyLlama-1.1B-Chat-v1.0": Layout(
        configs.LLAMA,
        tensors.llama,
        tokens.llama_2(chat_template=FAMILIES["zephyr"][0], pad_token="</s>", padding_side="right"),
        {"bos_token_id": "<s>", "eos_token_id": "</s>", "max_length": 2048, "pad_token_id": 0},
        extra=_PICKLES,
    ),
    "llama-7b of 2023": Layout(
        configs.LLAMA_OF_2023,
        tensors.old_llama,
        tokens.llama_of_2023(),
        {**_LLAMA_2, "pad_token_id": 0},
        torch.float16,
        shards=2,
        extra={"pytorch_model.bin.index.json": b"{}", "pytorch_model-00001-of-00002.bin": b"a pickle"},
        said=_unknown("max_sequence_length"),
    ),
    "Llama-3.2-1B-Instruct": Layout(
        configs.LLAMA_32,
        tensors.llama,
        tokens.llama_3(),
        {**configs.LLAMA_32_ENDS, "do_sample": True, "temperature": 0.6, "top_p": 0.9},
        extra={"original/params.json": b"{}", "original/consolidated.00.pth": b"a pickle", "LICENSE.txt": b""},
    ),
    "Mistral-7B-v0.1": Layout(configs.MISTRAL, tensors.llama, tokens.llama_2(), _LLAMA_2, shards=2, extra=_PICKLES),
    "Mistral-7B-Instruct-v0.3": Layout(
        configs.MISTRAL_03,
        tensors.llama,
        tokens.llama_2(chat_template=_MISTRAL_TEMPLATES),
        _LLAMA_2,
        shards=2,
        extra={"consolidated.safetensors": b"other names of the same", "params.json": b"{}", "tokenizer.model.v3": b""},
    ),
    "Mistral-Nemo-Base-2407": Layout(configs.NEMO, tensors.llama, tokens.nemo(), _LLAMA_2),
    "Qwen2.5-0.5B-Instruct": Layout(configs.QWEN2, tensors.qwen2, tokens.qwen(), _QWEN),
    "Qwen2.5-7B-Instruct with YaRN": Layout(configs.QWEN2_YARN, tensors.qwen2, tokens.qwen(), _QWEN, shards=2),
    "Qwen2.5-7B-Instruct-1M": Layout(
        configs.QWEN2_1M, tensors.qwen2, tokens.qwen(), _QWEN, said=_unknown("dual_chunk_attention_config")
    ),
    "Qwen3-0.6B": Layout(configs.QWEN3, tensors.qwen3, tokens.qwen("qwen 3"), _QWEN),
    "gemma-2-2b-it": Layout(configs.GEMMA2, tensors.gemma2, tokens.gemma(), {**_MODEL, **configs.GEMMA_ENDS}, shards=2),
    "gemma-3-1b-it": Layout(configs.GEMMA3, tensors.gemma3, tokens.gemma(), {**configs.GEMMA_ENDS, "do_sample": True}),
    "gemma-3-270m-it": Layout(
        configs.GEMMA3_270M,
        tensors.gemma3,
        tokens.gemma(template=False),
        configs.GEMMA_ENDS,
        extra={"chat_template.jinja": _GEMMA_TEMPLATE.encode()},
    ),
    "gemma-3-4b-it": Layout(
        configs.GEMMA3_4B,
        tensors.gemma3_with_images,
        tokens.gemma(image_token="<image_soft_token>", processor_class="Gemma3Processor"),
        configs.GEMMA_ENDS,
        shards=2,
        extra={
            "chat_template.json": tokens.encoded({"chat_template": _GEMMA_TEMPLATE}),
            "added_tokens.json": tokens.encoded({"<image_soft_token>": 262144}),
            **{"preprocessor_config.json": b"{}", "processor_config.json": b"{}"},
        },
        said=("2 tensors that are no part of the text model were left out",),
    ),
    "gpt2": Layout(
        configs.GPT2,
        tensors.gpt2,
        tokens.gpt2(),
        {**_MODEL, **configs.GPT2_ENDS},
        torch.float32,
        extra={"tf_model.h5": b"", "rust_model.ot": b"", "64.tflite": b"", **_PICKLES},
    ),
    "gpt2-medium": Layout(configs.GPT2_MEDIUM, tensors.gpt2, tokens.gpt2(), configs.GPT2_ENDS, torch.float32),
    "distilgpt2": Layout(configs.DISTILGPT2, tensors.distilgpt2, tokens.gpt2(), configs.GPT2_ENDS, torch.float32),
    "Mixtral-8x7B-v0.1": Layout(configs.MIXTRAL, tensors.mixtral, tokens.llama_2(), _LLAMA_2, shards=2),
    "OLMoE-1B-7B-0924": Layout(
        configs.OLMOE, tensors.olmoe, tokens.olmoe(), {**_MODEL, "eos_token_id": "<|endoftext|>", "pad_token_id": 1}
    ),
    "Qwen3-30B-A3B": Layout(configs.QWEN3_MOE, tensors.qwen3_moe, tokens.qwen("qwen 3"), _QWEN, shards=2),
    "dots.llm1.inst": Layout(configs.DOTS1, tensors.dots1, tokens.qwen(), _QWEN, shards=2),
}
"""By what the hub calls the model."""
