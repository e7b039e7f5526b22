"""Generate text from a checkpoint, with a KV cache, for every residual method.

    python sample.py out/demo_mhar --prompt="def main("
    python sample.py out/mhar_1b_mhar --prompt="The capital of France" --temperature=0 --max_new_tokens=30
    python sample.py out/demo_mhar --num_samples=4 --top_p=0.9 --seed=1
    python sample.py out/my_import --prompt="Once" --tokenizer=my_model/tokenizer.json   # an imported model whose tokenizer has no name here
"""
import json
import unicodedata
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable

import torch
from torch import nn

from configurator import Parser, UserError, cli
from model import KVCache, choose_kernel
from prepare_data import TOKENIZERS, first_line, load_tokenizer
from train import check_device, load_model, read_meta, the_checkpoint


# ---- Tokenizers: prepare_data.py's, or the tokenizer.json of an imported model ---------------------------------------------------------------------
@dataclass
class Text:
    """A tokenizer and what stands before a text. plain(text) -> list of ids; decode(ids) -> text; ids from n_ids on are padding rows of the
    model; bos is None where the tokenizer has none. prefix stands before an empty context and a whole text; if it is bos, before every prompt."""

    name: str
    plain: Callable
    decode: Callable
    n_ids: int
    bos: int | None
    eot: int
    prefix: int | None = None

    def encode(self, text, bos=None):
        """Ids, with bos before them or not; None: as a prompt has it."""
        ids = self.plain(text)
        return [self.prefix, *ids] if (self.prefix == self.bos if bos is None else bos) and ids[:1] != [self.prefix] else ids


def load_text(path, meta, args):
    """The Text of a checkpoint: what --tokenizer says, or its meta.json, or else the tokenizer.json it was imported with. Its prefix is bos for an
    imported model whose tokenizer has one, as it was trained; else eot, which stood before every document when it was trained here."""
    origin = meta.get("origin") or {}
    config, beside = origin.get("config") or {}, Path(origin.get("source", "/nowhere"), "tokenizer.json")
    name = args.tokenizer or meta["data"]["tokenizer"] or (str(beside) if beside.is_file() else None)
    if name is None:
        raise UserError(f"{path} names no tokenizer: give --tokenizer= one of bytes, {', '.join(TOKENIZERS)}, or the path of its tokenizer.json")
    if name == "bytes" or name in TOKENIZERS:
        t = load_tokenizer(name)
        plain = lambda text: t.encode(unicodedata.normalize("NFC", text) if t.nfc else text).tolist()
        text = Text(name, plain, t.decode, t.n_ids, t.n_text if name == "llama3" else None, t.eot)
        if meta["data"]["dataset"] is None and isinstance(config.get("eos_token_id"), int):
            text.eot = config["eos_token_id"]  # as imported; once trained here, it is what its data has between documents
    else:
        text = load_tokenizer_json(Path(name), config)
    if text.n_ids > meta["model_config"]["vocab_size"]:
        raise UserError(f"the tokenizer {name} has {text.n_ids:,} ids, {path} only {meta['model_config']['vocab_size']:,} rows: give --tokenizer= the one it was trained with")
    auto = text.bos if origin and text.bos is not None else text.eot
    prefix = {"auto": auto, "bos": text.bos, "eot": text.eot}.get(args.prefix_token, args.prefix_token)
    if not str(prefix).isdecimal() or int(prefix) >= text.n_ids:
        has = "" if text.bos is not None else f"; the tokenizer {name} puts no bos before a text"
        raise UserError(f"--prefix_token={args.prefix_token} is none of auto, bos, eot and the ids 0 to {text.n_ids - 1}{has}")
    text.prefix = int(prefix)
    return text


def load_tokenizer_json(path, config):
    """The Text of a Hugging Face tokenizer.json or the folder it is in, without a prefix; config: the model's config.json."""
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"--tokenizer={path}: no such file, and no tokenizer of that name: there are bytes, {', '.join(TOKENIZERS)}, and paths of a tokenizer.json")
    try:
        from tokenizers import Tokenizer

        t = Tokenizer.from_file(str(path))
    except ImportError as error:
        raise UserError(f"{path} needs a package that is not here: pip install tokenizers") from error
    except Exception as error:  # the package raises nothing narrower
        raise UserError(f"{path} is not a tokenizer ({first_line(error)}): fetch it again") from error
    beside = path.with_name("tokenizer_config.json")
    said = config | (json.loads(beside.read_text()) if beside.is_file() else {})
    eos = said.get("eos_token") or said.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) else eos["content"] if isinstance(eos, dict) else eos
    eot = t.token_to_id(eos) if isinstance(eos, str) else eos
    if eot is None:
        raise UserError(f"{path} does not say what ends a text: put a tokenizer_config.json with its eos_token beside it")
    plain, whole = lambda text: t.encode(text, add_special_tokens=False).ids, t.encode("a").ids
    bos = whole[0] if whole[1:] == plain("a") else None  # what the tokenizer itself puts before a text
    return Text(str(path), plain, lambda ids: t.decode(ids, skip_special_tokens=True), t.get_vocab_size(), bos, eot)


# ---- The model ---------------------------------------------------------------------------------------------------------------------------------------
def cast_matrices(model, dtype):
    """The model with its matrices in dtype, once for all; norms and routing keep their precision. Run under autocast to dtype, the numbers are those
    of train.py's evaluation, which casts them every time. In float32 everything is cast."""
    for module in model.modules():
        if dtype == torch.float32 or isinstance(module, (nn.Linear, nn.Embedding)):
            module.to(dtype)
    return model


def load_for_inference(path, device, weights="raw", dtype=None):
    """(model, meta, autocast) of a checkpoint. Compute in dtype, "float32" or "bfloat16" (default: bfloat16 on CUDA); run the model under autocast()."""
    model, meta = load_model(path, device, weights=weights)
    dtype = getattr(torch, dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    cast_matrices(model, dtype).residual.kernel = choose_kernel("auto", model.config, device, dtype)[0]
    return model, meta, partial(torch.autocast, device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


# ---- Generation ---------------------------------------------------------------------------------------------------------------------------------------
class LeftPadded(KVCache):
    """A KVCache for prompts of several lengths, aligned at their ends: row b begins at start[b] ([B] int64). Rotary embeddings see
    differences of positions only, so that a row does not notice where it begins."""

    def __init__(self, config, start, length, device, dtype):
        super().__init__(config, len(start), length, device, dtype)
        self.start = start.to(device)

    def open(self, T):
        rope, layers = super().open(T)
        _, _, positions, causal = layers[0]
        keys = torch.arange(causal.size(1), device=causal.device)
        seen = (keys >= self.start[:, None, None]) | (keys == positions[:, None])  # padding sees itself: a row of nothing would be NaN
        return rope, [(k, v, positions, (causal & seen)[:, None]) for k, v, _, _ in layers]  # mask [B, 1, T, length]


def choose(logits, temperature, top_k, top_p, generator):
    """Token ids [B] drawn from logits [B, V], fp32. temperature 0 takes the best; top_k 0 and top_p 1 leave all; ties at the cut stay in."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        p = ordered.softmax(-1)
        ordered = ordered.masked_fill(p.cumsum(-1) - p >= top_p, float("-inf"))  # what comes before a token already makes up top_p
        logits = torch.full_like(logits, float("-inf")).scatter(-1, order, ordered)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


@torch.no_grad()
def generate(model, prompt, max_new_tokens, n_ids, temperature=1.0, top_k=0, top_p=1.0, generator=None, start=None):
    """Yields token ids [B], one step at a time. prompt: [B, T] ids, of which row b's begin at start[b] (default 0: all of them); n_ids: ids from
    here on are padding rows and never drawn.

    On CUDA the step is recorded as a CUDA graph and replayed. ValueError if prompt and new tokens do not fit into block_size.
    """
    B, T = prompt.shape
    if T + max_new_tokens > model.config.block_size:
        raise ValueError(f"{T} prompt tokens and {max_new_tokens} new ones do not fit into block_size={model.config.block_size}")
    where = T + max_new_tokens, prompt.device, model.embed.weight.dtype
    cache = KVCache(model.config, B, *where) if start is None else LeftPadded(model.config, start, *where)
    for part in prompt.split(512, 1):  # all of a long prompt's logits and attention scores would be the most memory of all
        logits = model(part, cache=cache)[:, -1]
    step = None
    for i in range(max_new_tokens):
        token = choose(logits[:, :n_ids].float(), temperature, top_k, top_p, generator)
        yield token
        if i + 1 == max_new_tokens:
            return
        if step is None:
            step = recorded(model, token, cache) if prompt.is_cuda else lambda token: model(token[:, None], cache=cache)[:, -1]
        logits = step(token)


def recorded(model, token, cache):
    """model(token, cache=cache) as a CUDA graph: a function of token [B] that gives the logits [B, V]."""
    token, position = token[:, None].clone(), cache.position.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(token, cache=cache)  # what it writes into the cache is written again
    torch.cuda.current_stream().wait_stream(side)
    cache.position.copy_(position)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(token, cache=cache)[:, -1]

    def step(new):
        token.copy_(new[:, None])
        graph.replay()
        return logits

    return step


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("ckpt", metavar="CKPT", help="a checkpoint, or a run's folder")
    parser.add_argument("--prompt", default="", help="text to go on from; without it a new document")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="tokens to generate (default 200); with the prompt at most block_size")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top_k", type=int, default=0, help="draw from the k likeliest; 0: from all")
    parser.add_argument("--top_p", type=float, default=1.0, help="draw from the likeliest that make up this share")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--num_samples", type=int, default=1, help="how many, drawn side by side (default 1)")
    parser.add_argument("--tokenizer", help="bytes, qwen3, llama3, gpt2 or the path of a tokenizer.json; default: the checkpoint's")
    parser.add_argument("--weights", choices=["raw", "ema"], default="raw", help="ema: the running average, of a run with --ema_decay=")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.set_defaults(prefix_token="auto")
    args = parser.parse_args()
    if not 0 <= args.temperature < 1e9 or 0 < args.temperature < 1e-6 or not 0 <= args.seed < 2**63 or args.top_k < 0 or not 0 < args.top_p <= 1 or args.max_new_tokens < 1 or args.num_samples < 1:
        raise UserError("--temperature (0, or 1e-6 and more), --top_k and --seed are 0 or more, --top_p is over 0 and at most 1, --max_new_tokens and --num_samples are 1 or more")
    if any("\ud800" <= c <= "\udfff" for c in args.prompt):  # what Python makes of bytes that are no text
        raise UserError("--prompt= is not UTF-8 text")
    device = check_device(args.device)
    ckpt = the_checkpoint(args.ckpt)
    text = load_text(ckpt, read_meta(ckpt), args)
    model, _, autocast = load_for_inference(ckpt, device, args.weights)
    ids = text.encode(args.prompt) or [text.prefix]
    if len(ids) >= model.config.block_size:
        raise UserError(f"the prompt's {len(ids)} tokens fill the model's block_size={model.config.block_size}: shorten it")
    if len(ids) + args.max_new_tokens > model.config.block_size:
        raise UserError(
            f"the prompt's {len(ids)} tokens and --max_new_tokens={args.max_new_tokens} do not fit into the model's block_size={model.config.block_size}: "
            f"shorten it, or give --max_new_tokens={model.config.block_size - len(ids)} or less"
        )
    prompt = torch.tensor([ids] * args.num_samples, device=device)
    drawn, running = [[] for _ in range(args.num_samples)], [True] * args.num_samples
    print(args.prompt, end="" if args.num_samples == 1 else "\n", flush=True)
    shown = ""
    generator = torch.Generator(device).manual_seed(args.seed)
    with autocast():
        for token in generate(model, prompt, args.max_new_tokens, text.n_ids, args.temperature, args.top_k, args.top_p, generator):
            for i, t in enumerate(token.tolist()):
                running[i] &= t != text.eot
                if running[i]:
                    drawn[i].append(t)
            said = text.decode(drawn[0])
            if args.num_samples == 1 and not said.endswith("\ufffd"):  # a token may end within a character
                print(said[len(shown) :], end="", flush=True)
                shown = said
            if not any(running):
                break
    print()
    if args.num_samples > 1:
        for i, new in enumerate(drawn):
            print(f"--- {i + 1}\n{text.decode(new)}")


if __name__ == "__main__":
    cli(main)
