"""A Llama or Qwen3 model of Hugging Face into a checkpoint, and back.

    python convert_8b.py import marin-8b-base out/marin_8b_base_delta   # adds delta routing, its gates closed
    python convert_8b.py import marin-8b-base out/marin_8b_base_plain --residual=baseline
    python convert_8b.py verify marin-8b-base out/marin_8b_base_delta   # compares the logits
    python convert_8b.py export out/marin_8b_plain marin-8b-plain --weights=ema --dtype=bfloat16

With closed gates the model computes what it did before; training opens them. Tensors keep their bits.
Memory holds one shard of 2 GB at a time, in verify one model (8B: 32 GB in float32, 16 GB in bfloat16).
import and verify need `pip install 'transformers>=5'`, to read config.json and to compare with.
"""

import json
import math
import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from configurator import Parser, RunError, UserError, cli, output_folder

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from checkpoint import load_model, read_meta
from model import GPT, RESIDUALS, GPTConfig
from parallel import choose_device
from sample import read_json

ROUTING_FILE = "depth_routing.safetensors"  # in an exported folder
TOKENIZER_FILES = ("tokenizer*", "special_tokens*", "added_tokens*", "vocab.json", "merges.txt",
                   "chat_template*", "generation_config.json")  # fmt: skip


# ---- config.json ----
# GPTConfig's names of config.json's fields, and what model.py computes (None: not set)
FIELDS = {"block_size": "max_position_embeddings", "vocab_size": "vocab_size", "n_layer": "num_hidden_layers",
          "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads",
          "head_dim": "head_dim", "ffn_dim": "intermediate_size", "norm_eps": "rms_norm_eps",
          "tie_embeddings": "tie_word_embeddings"}  # fmt: skip
COMPUTED = {"hidden_act": ["silu"], "attention_bias": [False], "mlp_bias": [None, False],
            "sliding_window": [None], "layer_types": [{"full_attention"}], "rope_type": ["default", "llama3"],
            "partial_rotary_factor": [None, 1.0]}  # fmt: skip


def read_config(folder):
    """(config.json without routing, GPTConfig) of a folder. UserError for what model.py does not compute."""
    file = folder / "config.json"
    if not (content := read_json(file)):
        raise UserError(f"no {file}: get a model with `hf download NAME --local-dir {folder}`")
    kind = content.get("model_type")
    if kind == "delta_routed":
        return content["plain"], GPTConfig(**content["model_config"])
    try:
        from transformers import AutoConfig
    except ImportError:
        raise UserError("transformers is not installed: pip install 'transformers>=5'") from None
    if kind not in ("llama", "qwen3"):
        raise UserError(f"{file}: model_type={kind} cannot be converted, only llama and qwen3 can")
    c = AutoConfig.from_pretrained(folder).to_dict()  # with defaults for what is not set
    rope = c["rope_parameters"]
    found = c | rope | {"layer_types": set(c.get("layer_types") or ["full_attention"])}
    for key, values in COMPUTED.items():
        if found.get(key) not in values:
            raise UserError(f"{file}: {key}={found[key]} cannot be converted, only {values} can")
    fields = {ours: c[theirs] for ours, theirs in FIELDS.items()}
    fields |= {"rope_theta": rope.pop("rope_theta"), "qk_norm": kind == "qwen3", "residual": "baseline"}
    return content, GPTConfig(**fields, rope_scaling=rope if rope["rope_type"] == "llama3" else None)


# ---- tensors ----
def hf_name(name):
    """layers.3.attn.q_proj.weight -> model.layers.3.self_attn.q_proj.weight; the routing's names stay.

    Both sides hold weights as [out, in], and q and k in the half-split rotary layout: nothing is transposed.
    """
    if name.startswith("residual."):
        return name
    name = name.replace("attn.norm.", "input_layernorm.").replace("mlp.norm.", "post_attention_layernorm.")
    name = name.replace("embed.", "embed_tokens.").replace("attn.", "self_attn.")
    return "lm_head.weight" if name == "head.weight" else f"model.{name}"


def stored_tensors(folder, name="model.safetensors"):
    """{name: tensor} of a safetensors file or of the shards in its index, each memory-mapped by itself."""
    index, tensors = read_json(folder / f"{name}.index.json"), {}
    files = sorted({*index["weight_map"].values()}) if index else [name]
    try:
        for file in files:
            names = safe_open(folder / file, "pt").keys()
            tensors |= {name: safe_open(folder / file, "pt").get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / file} is missing or damaged ({error})") from error
    return tensors


def save_tensors(folder, tensors, dtype=None):
    """Write {name: tensor} as model.safetensors or in shards with an index, cast to dtype if there is one.

    It empties the dict, so that memory holds one shard. UserError if a weight becomes infinite.
    """
    split, total = split_torch_state_dict_into_shards(tensors, max_shard_size="2GB"), 0
    for file, names in tqdm(split.filename_to_tensors.items(), desc="writing", unit="shard"):
        shard = {name: tensors.pop(name) for name in names}
        for name, t in shard.items() if dtype else ():
            shard[name] = t.to(dtype)
            if shard[name].isinf().sum() > t.isinf().sum():
                raise UserError(f"{name} has a weight of {t.abs().max():.4g}, too large for {dtype}")
        save_file(shard, folder / file, {"format": "pt"})
        total += sum(t.nbytes for t in shard.values())
    if split.is_sharded:
        index = {"metadata": {"total_size": total}, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


@contextmanager
def new_folder(path):
    """A folder to write into, which becomes `path` when all is on disk and is removed after an error."""
    part = path.with_name(f".{path.name}.part")
    for folder in (path, part):
        if folder.exists():
            raise UserError(f"{folder} exists already: give another DST, or remove it first")
    output_folder(part, "DST")
    try:
        yield part
        for file in part.iterdir():
            file.chmod(part.stat().st_mode & 0o666)  # safetensors keeps its files to the owner
        os.sync()
        part.rename(path)
    except SafetensorError as error:  # a full disk
        raise RunError(f"{path} cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


# ---- commands ----
@torch.no_grad()
def import_(args):
    src = Path(args.src)
    content, config = read_config(src)
    stored = stored_tensors(src)
    flags = {k: v for k in ("residual", "route_heads", "delta_blocks") if (v := getattr(args, k)) is not None}
    if config.residual == "delta":
        if flags:
            raise UserError(f"{src} has depth routing of its own: omit --{' --'.join(flags)}")
        stored |= stored_tensors(src, ROUTING_FILE)
    else:
        try:
            config = replace(config, **{"residual": "delta"} | flags)
        except ValueError as error:
            raise UserError(error) from error
        residual = RESIDUALS[config.residual](config)
        residual.init_weights(config, None)  # delta: gates are closed
        stored |= {f"residual.{name}": p.detach() for name, p in residual.named_parameters()}

    with torch.device("meta"):
        model = GPT(config)
    shapes = {hf_name(name): p.shape for name, p in model.named_parameters()}
    head = stored.pop("lm_head.weight", None) if config.tie_embeddings else None
    unexpected = [n for n in stored.keys() - shapes if not n.endswith("rotary_emb.inv_freq")]  # a table
    reshaped = [n for n in stored.keys() & shapes if stored[n].shape != shapes[n]]
    wrong = {"missing": shapes.keys() - stored, "unexpected": unexpected, "of another shape": reshaped}
    if wrong := [f"{what} {', '.join(sorted(names)[:5])}" for what, names in wrong.items() if names]:
        raise UserError(f"{src} has other tensors than config.json asks for: {'; '.join(wrong)}")
    if head is not None and not torch.equal(head, stored["model.embed_tokens.weight"]):
        raise UserError(f"{src}: config.json ties lm_head.weight to the embedding, but they differ")
    tensors = {name: stored.pop(hf_name(name)) for name, _ in model.named_parameters()}

    generation = read_json(src / "generation_config.json")  # may name further end ids
    origin = {"source": str(src.absolute()), "config": content, "generation_config": generation}
    meta = {"step": 0, "model_config": asdict(config), "train_config": {}, "origin": origin,
            "params": model.parameter_counts(), "data": {"dataset": None, "tokenizer": None}}  # fmt: skip
    with new_folder(Path(args.dst)) as part:
        save_tensors(part, tensors)
        (part / "meta.json").write_text(json.dumps(meta, indent=1))
    print(f"{args.dst}: {meta['params']['total']:,} parameters, residual={config.residual}")


def export(args):
    ckpt, meta = read_meta(args.src)
    config, origin = GPTConfig(**meta["model_config"]), meta.get("origin")
    if not origin or config.residual not in ("baseline", "delta"):
        raise UserError(f"{ckpt}: only a model imported as baseline or delta can be exported")
    stored = stored_tensors(ckpt, {"raw": "model.safetensors", "ema": "ema.safetensors"}[args.weights])
    routing = {name: stored.pop(name) for name in list(stored) if name.startswith("residual.")}
    dtype = None if args.dtype == "same" else getattr(torch, args.dtype)
    key = "dtype" if "dtype" in origin["config"] else "torch_dtype"
    content = origin["config"] | {key: str(dtype or stored["embed.weight"].dtype).removeprefix("torch.")}
    if routing:  # under a name that no other program takes for the plain model
        content = {"model_type": "delta_routed", "model_config": asdict(config), "plain": content}
    source = Path(origin["source"])
    files = [file for pattern in TOKENIZER_FILES for file in source.glob(pattern)]
    with new_folder(Path(args.dst)) as part:
        trunk = {hf_name(name): stored.pop(name) for name in list(stored)}
        save_tensors(part, trunk, dtype)
        if routing:
            save_file(routing, part / ROUTING_FILE)
        (part / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        for file in files:
            shutil.copy(file, part)
    print(f"{args.dst}: {args.weights} weights of {ckpt}, {len(files)} tokenizer files of {source}")
    if routing:
        print("transformers refuses it, because of its routing; import takes it back")


@torch.no_grad()
def verify(args):
    _, config = read_config(Path(args.src))
    ours = GPTConfig(**read_meta(args.dst)[1]["model_config"])
    if config.residual == "delta" or config.vocab_size != ours.vocab_size:
        raise UserError(f"{args.src} is not the plain model that {args.dst} comes from")
    device, dtype = choose_device(args.device), getattr(torch, args.dtype)
    torch.manual_seed(0)
    ids = torch.randint(ours.vocab_size, (1, min(256, ours.block_size))).to(device)

    from transformers import AutoModelForCausalLM

    # one model at a time
    expected = AutoModelForCausalLM.from_pretrained(args.src, dtype=dtype).to(device)(ids).logits.float()
    model, _ = load_model(args.dst, device, args.weights, dtype)
    logits = model(ids).float()  # [1, T, V]
    deviation, largest = (expected - logits).abs().max().item(), expected.abs().max().item()
    same = expected.argmax(-1) == logits.argmax(-1)
    print(f"{args.dtype}: maximum deviation {deviation:.3g}, largest logit {largest:.3g}")
    print(f"best token: the same at {same.sum()} of {same.numel()} positions")
    usual = 1e-4 if dtype == torch.float32 else math.inf  # bfloat16 moves the logits by any share of them
    failed = not deviation <= largest * (usual if args.tolerance is None else args.tolerance)
    if ours.residual == "delta":
        gates, model.residual = model.residual.gate, RESIDUALS["baseline"](ours)
        moved = (model(ids).float() - logits).abs().max().item()
        print(f"routing: {(gates == 0).sum()} of {len(gates)} gates closed, logits moved by {moved:.3g}")
        failed |= moved != 0 and not gates.any()
    if failed:
        raise SystemExit(f"error: {args.dst} does not compute what {args.src} does")


def main():
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="import | export | verify")
    importer = commands.add_parser("import", help="SRC: a Hugging Face folder, DST: a new checkpoint")
    exporter = commands.add_parser("export", help="SRC: a checkpoint, DST: a new Hugging Face folder")
    verifier = commands.add_parser("verify", help="SRC: a Hugging Face folder, DST: its checkpoint")
    for p in (importer, exporter, verifier):
        p.add_argument("src", metavar="SRC")
        p.add_argument("dst", metavar="DST")
    importer.add_argument("--residual", choices=["delta", "baseline"], help="default: delta")
    importer.add_argument("--route_heads", type=int, help="H of delta (default: 8)")
    importer.add_argument("--delta_blocks", type=int, help="blocks whose deltas are sources (default: 8)")
    for p in (exporter, verifier):
        p.add_argument("--weights", choices=["raw", "ema"], default="raw", help="default: raw")
    dtypes = ["float32", "bfloat16", "float16"]
    exporter.add_argument("--dtype", choices=["same", *dtypes], default="same", help="default: same")
    verifier.add_argument("--dtype", choices=dtypes[:2], default="float32", help="default: float32")
    verifier.add_argument("--tolerance", type=float, help="share of the largest logit (1e-4 in float32)")
    verifier.add_argument("--device", default="auto", help="default: auto")
    parser.epilog = "\n".join(p.format_help() for p in (importer, exporter, verifier))
    args = parser.parse_args()
    {"import": import_, "export": export, "verify": verify}[args.command](args)


if __name__ == "__main__":
    cli(main)
