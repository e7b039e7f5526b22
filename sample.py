"""Generate text from a checkpoint, with a KV cache, for every residual method.

    python sample.py out/demo_mhar
    python sample.py out/mhar_1b_mhar --prompt="The capital of France" --temperature=0 --max_new_tokens=30
    python sample.py out/demo_mhar --num_samples=4 --top_p=0.9 --seed=1
    python sample.py out/my_import --prompt="Once" --tokenizer=my_model/tokenizer.json

A text ends where the model says so, or after --max_new_tokens.
"""

import json
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from configurator import Parser, UserError, cli

import torch

from checkpoint import load_model, read_meta
from model import KVCache
from parallel import choose_device
from tokenizer import TOKENIZERS, load_tokenizer

NAMES = ", ".join(["bytes", *TOKENIZERS])  # of tokenizers


# ---- Tokenizers: by name, or the tokenizer.json of an imported model ----
@dataclass
class Text:
    """A tokenizer, and what stands before and behind a text."""

    name: str
    plain: Callable  # text -> list of ids
    decode: Callable  # ids -> text
    n_ids: int  # ids from here on are padding rows of the model
    bos: int | None  # None: the tokenizer puts none before a text
    stops: list  # ids that end a text; the first of them is eot
    prefix: int | None = None  # before an empty prompt and a whole text; if it is bos, before every prompt

    @property
    def eot(self):
        return self.stops[0]

    def encode(self, text, bos=None):
        """Ids, with bos before them or not; None: as a prompt has it."""
        ids = self.plain(text)
        bos = self.prefix == self.bos if bos is None else bos
        return [self.prefix, *ids] if bos and ids[:1] != [self.prefix] else ids

    def continuation(self, prompt, new):
        """The text that ids `new` add to ids `prompt`: decoded alone, it may lose its first space."""
        return self.decode([*prompt, *new])[len(self.decode(prompt)) :]


def load_text(ckpt, meta, tokenizer=None, prefix_token="auto"):
    """The Text of a checkpoint; UserError if there is none.

    tokenizer: a name or the path of a tokenizer.json; None: that of its data, or, as long as an imported
    model was not trained here, its own. prefix_token: bos, eot or an id; auto: bos for an imported model
    that has one, as it was trained, else eot, which stands before every document in training here.
    """
    origin, imported = meta.get("origin"), meta["data"]["dataset"] is None
    name, ends = tokenizer, []
    if origin:
        own = Path(origin["source"], "tokenizer.json")
        if imported and own.is_file():
            name = name or str(own)
        for config in (origin["config"], origin.get("generation_config", {})):
            end = config.get("eos_token_id")
            ends += end if isinstance(end, list) else [] if end is None else [end]
    name = name or meta["data"]["tokenizer"]
    if name is None:
        raise UserError(f"{ckpt} names no tokenizer: give --tokenizer=, {NAMES} or a tokenizer.json")
    named = name == "bytes" or name in TOKENIZERS
    text = named_text(name) if named else json_text(Path(name))
    text.stops = ends + text.stops if named and imported else text.stops + ends
    if not text.stops:
        raise UserError(f"{name}: what ends a text? Put a tokenizer_config.json with its eos_token beside it")
    rows = meta["model_config"]["vocab_size"]
    if text.n_ids > rows:
        raise UserError(f"{name} has {text.n_ids:,} ids, {ckpt} {rows:,} rows: give another --tokenizer=")
    auto = text.bos if origin and text.bos is not None else text.eot
    prefix = str({"auto": auto, "bos": text.bos, "eot": text.eot}.get(prefix_token, prefix_token))
    if not prefix.isdecimal() or int(prefix) >= text.n_ids:
        raise UserError(f"--prefix_token={prefix_token}: {name} has only eot and ids below {text.n_ids}")
    text.prefix = int(prefix)
    return text


def named_text(name):
    t = load_tokenizer(name)
    plain = lambda text: t.encode(unicodedata.normalize("NFC", text) if t.nfc else text).tolist()
    bos = t.n_text if name == "llama3" else None
    stops = [t.eot, t.n_text] if name == "qwen3" else [t.eot]  # its base models end with <|endoftext|>
    return Text(name, plain, t.decode, t.n_ids, bos, stops)


def json_text(path):
    """The Text of a Hugging Face tokenizer.json or the folder it is in."""
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        from tokenizers import Tokenizer

        t = Tokenizer.from_file(str(path))
    except Exception as error:  # no such file or package, or a file of another kind
        raise UserError(f"{path} is neither a tokenizer.json ({error}) nor one of {NAMES}") from error
    t.no_truncation()  # which the file may ask for
    t.no_padding()
    eos = read_json(path.with_name("tokenizer_config.json")).get("eos_token")
    eos = t.token_to_id(eos["content"] if isinstance(eos, dict) else eos) if eos else None
    plain, whole = lambda text: t.encode(text, add_special_tokens=False).ids, t.encode("a").ids
    bos = whole[0] if whole[:1] != plain("a")[:1] else None  # what it puts before a text
    n_ids = 1 + max(t.get_vocab().values())  # some leave out numbers
    return Text(str(path), plain, t.decode, n_ids, bos, [eos] if eos is not None else [])


def read_json(path):
    return json.loads(path.read_text()) if path.is_file() else {}


# ---- Generation ----
class LeftPadded(KVCache):
    """A KVCache for prompts of several lengths, aligned at their ends: row b begins at start[b] ([B] int64).
    Rotary embeddings see only differences of positions, so it does not matter where a row begins."""

    def __init__(self, config, start, length, device, dtype):
        super().__init__(config, len(start), length, device, dtype)
        self.start = start.to(device)

    def open(self, T):
        rope, layers = super().open(T)
        _, _, positions, causal = layers[0]
        keys = torch.arange(causal.size(1), device=causal.device)
        # padding sees itself: a row without any key would be NaN
        seen = (keys >= self.start[:, None, None]) | (keys == positions[:, None])
        mask = (causal & seen)[:, None]  # [B, 1, T, length]
        return rope, [(k, v, positions, mask) for k, v, _, _ in layers]


def choose(logits, temperature, top_k, top_p, generator):
    """Token ids [B] drawn from logits [B, V], fp32. temperature 0 takes the best; top_k 0 and top_p 1 leave
    all. Ties at the cut stay in."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        ordered = logits.sort(descending=True).values
        p = ordered.softmax(-1)
        count = (p.cumsum(-1) - p < top_p).sum(-1, keepdim=True)  # tokens of which the likelier make up less
        logits = logits.masked_fill(logits < ordered.gather(-1, count - 1), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


@torch.no_grad()
def generate(model, prompt, new, n_ids, temperature=1.0, top_k=0, top_p=1.0, generator=None, start=None):
    """Yields `new` times token ids [B], below n_ids; on CUDA a step is replayed as a CUDA graph. prompt: ids
    [B, T], of which row b's begin at start[b] (None: at 0)."""
    B, T = prompt.shape
    if T + new > model.config.block_size:
        both = f"the prompt's {T} tokens and {new} new ones exceed block_size={model.config.block_size}"
        raise UserError(f"{both}: shorten the prompt, or lower --max_new_tokens=")
    where = T + new, prompt.device, model.embed.weight.dtype
    cache = KVCache(model.config, B, *where) if start is None else LeftPadded(model.config, start, *where)
    for part in prompt.split(512, 1):  # a long prompt's logits would need most of the memory
        logits = model(part, cache=cache)[:, -1]
    step = lambda token: model(token[:, None], cache=cache)[:, -1]
    for i in range(new):
        token = choose(logits[:, :n_ids].float(), temperature, top_k, top_p, generator)
        yield token
        if i + 1 == new:
            return
        if i == 1 and prompt.is_cuda:  # the first step has compiled the kernels
            step = record_step(step, token)
        logits = step(token)


def record_step(step, token):
    """step(token), token [B] to logits [B, V], as a CUDA graph."""
    token, graph = token.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records, and computes nothing
        logits = step(token)

    def replay(new):
        token.copy_(new)
        graph.replay()
        return logits

    return replay


def write(model, text, prompts, new, until=(), **how):
    """Yields after each of at most `new` steps what is drawn so far, a list of ids for each of the prompts
    (lists of ids of any lengths). A text ends before an id of text.stops, or when one of the strings `until`
    is in it. how: see generate."""
    device, longest = model.embed.weight.device, max(map(len, prompts))
    start = [longest - len(prompt) for prompt in prompts]
    idx = torch.tensor([[0] * n + prompt for n, prompt in zip(start, prompts)], device=device)
    start = torch.tensor(start) if any(start) else None
    tail = 4 + max([len(stop.encode()) for stop in until], default=0)  # a token is a byte or more
    drawn, running = [[] for _ in prompts], [True for _ in prompts]
    for token in generate(model, idx, new, text.n_ids, start=start, **how):
        for row, id in enumerate(token.tolist()):
            running[row] &= id not in text.stops
            if running[row]:
                drawn[row].append(id)
                end = text.decode(drawn[row][-tail:])
                running[row] = not any(stop in end for stop in until)
        yield drawn
        if not any(running):
            return


def main():
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("ckpt", metavar="CKPT", help="a checkpoint, or a run's folder")
    add("--prompt", type=str, default="def ", help="text to go on from; empty: a new document [%(default)r]")
    add("--max_new_tokens", type=int, default=200, help="with the prompt at most block_size [%(default)s]")
    add("--temperature", type=float, default=0.7, help="0 takes the likeliest token [%(default)s]")
    add("--top_k", type=int, default=0, help="draw from the k likeliest; 0: from all [%(default)s]")
    add("--top_p", type=float, default=1.0, help="from the likeliest that make up this share [%(default)s]")
    add("--seed", type=int, default=0, help="of the draws [%(default)s]")
    add("--num_samples", type=int, default=1, help="how many, drawn side by side [%(default)s]")
    add("--tokenizer", help=f"{NAMES} or the path of a tokenizer.json [the checkpoint's]")
    add("--weights", choices=["raw", "ema"], default="raw", help="ema: the running average [%(default)s]")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps [%(default)s]")
    args = parser.parse_args()
    positive = args.max_new_tokens > 0 and args.num_samples > 0
    if not (positive and args.temperature >= 0 and args.top_k >= 0 and 0 < args.top_p <= 1):
        raise UserError("needs temperature, top_k >= 0, max_new_tokens, num_samples >= 1 and 0 < top_p <= 1")
    device = choose_device(args.device)
    ckpt, meta = read_meta(args.ckpt)
    text = load_text(ckpt, meta, args.tokenizer)
    model, _ = load_model(ckpt, device, args.weights)

    prompt = text.encode(args.prompt) or [text.prefix]
    how = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    how["generator"] = torch.Generator(device).manual_seed(args.seed)
    shown = ""
    for drawn in write(model, text, [prompt] * args.num_samples, args.max_new_tokens, **how):
        said = args.prompt + text.continuation(prompt, drawn[0])
        if args.num_samples == 1 and not said.endswith("\ufffd"):  # a token may end within a character
            print(said[len(shown) :], end="", flush=True)
            shown = said
    if args.num_samples > 1:
        texts = [text.continuation(prompt, new) for new in drawn]
        said = args.prompt + "".join(f"\n--- {i}\n{new}" for i, new in enumerate(texts, 1))
    print(said[len(shown) :])


if __name__ == "__main__":
    cli(main)
