"""A tokenizer in which every ASCII character is one token, so that masks can be written by hand."""

import json

from forge_mlx.data.hub_tokenizer import HubTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END, START_TURN, END_TURN)


def character_tokenizer(template=None):
    """Byte-level and without merges, with the special tokens of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={each: index for index, each in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    config = {"eos_token": END} | ({"chat_template": template} if template else {})
    files = {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    tokenizer = HubTokenizer(files, "characters")
    return tokenizer if template else tokenizer.with_chat_template("chatml")


def shown(tokenizer, ids):
    """Tokens as text, special ones by name."""
    return "".join(
        tokenizer.token_name(token) if token in tokenizer.special_ids else tokenizer.token_to_bytes(token).decode()
        for token in ids
    )


def learnt(tokenizer, batch, row=0):
    """A row's targets as text, with `[` and `]` around those that count."""
    text = ""
    for target, weight in zip(batch.targets[row].tolist(), batch.weights[row].tolist(), strict=True):
        name = shown(tokenizer, [target])
        text += f"[{name}]" if weight else name
    return text.replace("][", "")
