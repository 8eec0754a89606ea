"""llama.cpp, asked what comes after a prompt, in a process of its own."""

import importlib.util
import json
import subprocess
import sys
from typing import NamedTuple

import pytest

# Run apart: the library writes to the streams of its process, and ends with it if a file is not to its liking.
_ASK = """
import json, sys
import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx, parameters.n_parallel, parameters.warmup = 256, 1, False
parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(parameters)
answers = []
for prompt in json.loads(sys.argv[2]):
    request = {"prompt": prompt, "max_tokens": int(sys.argv[3]), "temperature": 0, "logprobs": 20}
    answers.append(server.handle_completions(request))
print("ANSWERS" + json.dumps(answers))
"""


class Answer(NamedTuple):
    """What llama.cpp says to a prompt.

    Attributes:
        count: How many tokens the prompt has.
        text: The likeliest continuation.
        top: For each token of it the likeliest ones at that place, with their log-probability.
    """

    count: int
    text: str
    top: list[dict[int, float]]


def ask(file, prompts, max_tokens=1):
    """An answer to each prompt, which is a text or ids."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.fail("needs the package xllamacpp: pip install --no-deps xllamacpp==2026.10.11549")
    command = [sys.executable, "-c", _ASK, str(file), json.dumps(prompts), str(max_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "ANSWERS" in done.stdout, done.stderr[-2000:]
    return [
        Answer(
            answer["usage"]["prompt_tokens"],
            answer["choices"][0]["text"],
            [
                {each["id"]: each["logprob"] for each in token["top_logprobs"]}
                for token in answer["choices"][0]["logprobs"]["content"]
            ],
        )
        for answer in json.loads(done.stdout.partition("ANSWERS")[2].splitlines()[0])
    ]
