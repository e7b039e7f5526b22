"""Generate text from a checkpoint, with a KV cache, for every residual method.

    python sample.py out/demo_mhar --prompt="def main("
    python sample.py out/mhar_1b_mhar --prompt="The capital of France" --temperature=0 --max_new_tokens=30
    python sample.py out/demo_mhar --num_samples=4 --top_p=0.9 --seed=1
    python sample.py out/my_import --prompt="Once" --tokenizer=my_model/tokenizer.json   # an imported model whose tokenizer has no name here
"""
import torch

from configurator import Parser, UserError, cli
from model import KVCache
from train import check_device, find_checkpoint, read_meta


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
def generate(model, prompt, max_new_tokens, n_ids, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    """Yields token ids [B], one step at a time. prompt: [B, T] ids; n_ids: ids from here on are padding rows and never drawn.

    On CUDA the step is recorded as a CUDA graph and replayed. ValueError if prompt and new tokens do not fit into block_size.
    """
    B, T = prompt.shape
    if T + max_new_tokens > model.config.block_size:
        raise ValueError(f"{T} prompt tokens and {max_new_tokens} new ones do not fit into block_size={model.config.block_size}")
    device, dtype = prompt.device, model.embed.weight.dtype
    generator = torch.Generator(device).manual_seed(seed)
    cache = KVCache(model.config, B, T + max_new_tokens, device, dtype)
    logits = model(prompt, cache=cache)[:, -1]
    step = None
    for i in range(max_new_tokens):
        token = choose(logits[:, :n_ids].float(), temperature, top_k, top_p, generator)
        yield token
        if i + 1 == max_new_tokens:
            return
        if step is None:
            step = recorded(model, token, cache) if device.type == "cuda" else lambda token: model(token[:, None], cache=cache)[:, -1]
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
    parser.set_defaults(prefix_token="auto", dtype=None, block_size=None, batch_size=1)  # of eval.py's options
    args = parser.parse_args()
    if not 0 <= args.temperature < 1e9 or 0 < args.temperature < 1e-6 or not 0 <= args.seed < 2**63 or args.top_k < 0 or not 0 < args.top_p <= 1 or args.max_new_tokens < 1 or args.num_samples < 1:
        raise UserError("--temperature (0, or 1e-6 and more), --top_k and --seed are 0 or more, --top_p is over 0 and at most 1, --max_new_tokens and --num_samples are 1 or more")
    check_device(args.device)
    folder = find_checkpoint(args.ckpt)
    if folder is None:
        raise UserError(f"{args.ckpt} is not a checkpoint: give a folder with meta.json, or a run's folder with `latest`")
    from eval import Checkpoint, load_text  # here and not above, because eval.py draws with what this file defines

    text = load_text(args.ckpt, read_meta(folder), args)
    ckpt = Checkpoint(args.ckpt, text, args)
    model, ids = ckpt.model, text.encode(args.prompt) or [text.prefix]
    if len(ids) >= model.config.block_size:
        raise UserError(f"the prompt's {len(ids)} tokens fill the model's block_size={model.config.block_size}: shorten it")
    if len(ids) + args.max_new_tokens > model.config.block_size:
        raise UserError(
            f"the prompt's {len(ids)} tokens and --max_new_tokens={args.max_new_tokens} do not fit into the model's block_size={model.config.block_size}: "
            f"shorten it, or give --max_new_tokens={model.config.block_size - len(ids)} or less"
        )
    prompt = torch.tensor([ids] * args.num_samples, device=ckpt.device)
    drawn, running = [[] for _ in range(args.num_samples)], [True] * args.num_samples
    print(args.prompt, end="" if args.num_samples == 1 else "\n", flush=True)
    shown = ""
    with ckpt.autocast():
        for token in generate(model, prompt, args.max_new_tokens, text.n_ids, args.temperature, args.top_k, args.top_p, args.seed):
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
