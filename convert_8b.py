"""A Llama- or Qwen3-style checkpoint into ours and back; on the way in, delta routing is added without changing a single logit.

    python convert_8b.py import marin-8b-base out/marin_8b_base_delta                          # --residual=delta, every gate shut
    python convert_8b.py import marin-8b-base out/marin_8b_base_plain --residual=baseline
    python convert_8b.py verify marin-8b-base out/marin_8b_base_delta                          # logits of both, layer by layer
    python convert_8b.py export out/marin_8b_plain marin-8b-plain --weights=ema --dtype=bfloat16

A Hugging Face folder holds config.json and safetensors, whole or in shards; ours is any CKPT (a folder with meta.json, or a run's folder).
Tensors are copied as bytes, piece by piece, in the precision they have, and verify holds one layer at a time: memory does not grow with the
model. A destination appears whole or not at all. What config.json says and this file does not understand is refused by name.
"""
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from configurator import Parser, UserError, cli
from model import GPT, RESIDUALS, GPTConfig, choose_kernel, rope_tables
from prepare_data import TOKENIZERS, load_tokenizer
from train import find_checkpoint

SHARD = 5_000_000_000  # bytes of a shard at most, the hub's custom
PIECE = 1 << 18  # bytes copied at a time: what a core's cache holds; a megabyte took twice as long
ROUTING = "depth_routing.safetensors"  # the routing's own file, in our folders and in exported ones
ROUTED = "delta_routed_"  # before the model_type of an exported model with routing: transformers' Auto classes then refuse it
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # the formats' names; all else is quantised or not weights
TOP = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
PARTS = {"attn.norm": "input_layernorm", "mlp.norm": "post_attention_layernorm"}
PARTS |= {f"attn.{part}": f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
PARTS |= {f"mlp.{part}": f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")}


def hf_name(name):
    """layers.3.attn.q_proj.weight -> model.layers.3.self_attn.q_proj.weight. Both sides hold weights as [out, in], and q and k in the
    half-split rotary layout, so that nothing is transposed or permuted."""
    if name in TOP:
        return TOP[name]
    _, i, part = name.removesuffix(".weight").split(".", 2)
    return f"model.layers.{i}.{PARTS[part]}.weight"


# ----------------------------------------------------------------------------------------------------------------------
# What lies in a folder
# ----------------------------------------------------------------------------------------------------------------------
@dataclass
class Stored:
    """A tensor in a file: `size` bytes from byte `start` on."""

    file: Path
    name: str
    dtype: str
    shape: list
    start: int
    size: int

    def load(self):
        """The tensor, memory-mapped."""
        with safe_open(self.file, "pt") as f:
            return f.get_tensor(self.name)

    def pieces(self, first=0):
        """Its bytes from the first on, up to PIECE at a time, in an array that the next piece overwrites. UserError if the file is too short."""
        buffer = np.empty(min(PIECE, self.size), np.uint8)
        with open(self.file, "rb", buffering=0) as f:
            f.seek(self.start + first)
            for done in range(first, self.size, PIECE):
                piece = buffer[: self.size - done]
                if f.readinto(piece) != len(piece):
                    raise UserError(f"{self.file} became shorter while it was read: fetch it again")
                yield piece

    def copy_to(self, out):
        """Append its bytes to a file opened without buffering; yields how many at a time. Within the kernel where that can be, which takes half
        the time of read and write, and not on macOS or between file systems of two kinds."""
        done = 0
        if hasattr(os, "copy_file_range"):
            with open(self.file, "rb") as f:
                try:
                    while n := os.copy_file_range(f.fileno(), out.fileno(), min(self.size - done, 1 << 24), self.start + done):
                        done += n
                        yield n
                except OSError as error:
                    if done or error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                        raise
        for piece in self.pieces(done):
            yield write(out, piece)


def write(file, data):
    """Write all of it to a file opened without buffering, and return its length."""
    if file.write(data) != len(data):  # the disk took a part
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return len(data)


@dataclass
class Side:
    """A model in a folder, of either kind."""

    path: Path
    config: GPTConfig
    tensors: dict  # {our name: Stored}
    meta: dict | None = None  # ours: meta.json
    hf: dict | None = None  # theirs: config.json
    dropped: dict = field(default_factory=dict)  # theirs: {tensor that is no part of the model: why}
    files: list = field(default_factory=list)  # theirs: all that was read

    @property
    def tokenizer(self):
        """The name of its tokenizer, which for a Hugging Face folder the number of rows tells; None where it does not."""
        if self.meta:
            return self.meta["data"]["tokenizer"]
        return next((name for name, entry in TOKENIZERS.items() if entry[4] == self.config.vocab_size), None)


def read_header(file):
    """{name: Stored} of a safetensors file; UserError if it is missing, damaged or cut short."""
    try:
        with safe_open(file, "pt"):  # checks the header, and it against the file's length
            pass
        with open(file, "rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(length))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is missing, damaged or cut short ({error}): fetch it again") from error
    header.pop("__metadata__", None)
    spans = {name: t["data_offsets"] for name, t in header.items()}
    return {name: Stored(file, name, t["dtype"], t["shape"], 8 + length + spans[name][0], spans[name][1] - spans[name][0]) for name, t in header.items()}


def read_json(file):
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError("not an object")
        return found
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): fetch it again") from error


def read_tensors(folder, name="model.safetensors"):
    """{name in the file: Stored} of a file, or of the shards in its index; UserError where the index and its shards disagree."""
    index = folder / f"{name}.index.json"
    if not index.exists():
        return read_header(folder / name)
    listed = read_json(index).get("weight_map")
    if not listed or any(not isinstance(f, str) or Path(f).name != f for f in listed.values()):
        raise UserError(f"{index} has no weight_map from tensors to files beside it: fetch it again")
    tensors = {}
    for file in sorted(set(listed.values())):
        held = read_header(folder / file)
        absent, extra = [t for t in listed if listed[t] == file and t not in held], [t for t in held if listed.get(t) != file]
        if absent or extra:
            wrong = f"{file} lacks {absent[:5]}" if absent else f"{file} holds {extra[:5]}, which the index does not say"
            raise UserError(f"{index} does not describe its files: {wrong}; fetch the folder again")
        tensors |= held
    return tensors


def model_shapes(config):
    """{our name: shape} of the whole model."""
    with torch.device("meta"):
        return {name: list(p.shape) for name, p in GPT(config).named_parameters()}


def check(found, shapes, where):
    """UserError unless `found` {name: Stored} are the tensors of these shapes {name: shape}, in a precision that holds weights."""
    wrong = {
        "is missing": [name for name in shapes if name not in found],
        "is not part of such a model": [name for name in found if name not in shapes],
        "contradicts it": [f"{n} {found[n].shape} (should be {s})" for n, s in shapes.items() if n in found and found[n].shape != s],
        "is in a precision that is not understood": [f"{n} {t.dtype}" for n, t in found.items() if t.dtype not in DTYPES],
    }
    said = [f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''} {what}" for what, names in wrong.items() if names]
    if said:
        raise UserError(f"{where} and its tensors do not go together: {'; '.join(said)}")


# ----------------------------------------------------------------------------------------------------------------------
# config.json. A key is read, must have a certain value, or has nothing to do with what the model computes; any other is refused.
# ----------------------------------------------------------------------------------------------------------------------
READ = {"vocab_size": int, "hidden_size": int, "num_hidden_layers": int, "num_attention_heads": int, "num_key_value_heads": int, "head_dim": int,
        "intermediate_size": int, "max_position_embeddings": int, "rms_norm_eps": float, "rope_theta": float, "tie_word_embeddings": bool,
        "rope_scaling": dict, "rope_parameters": dict}  # fmt: skip
FIXED = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "attention_dropout": 0, "use_sliding_window": False}
OTHER = {"model_type", "architectures", "layer_types", "sliding_window", "max_window_layers", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
         "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type",
         "is_encoder_decoder", "chunk_size_feed_forward", "torchscript", "unsloth_version", "unsloth_fixed", "depth_routing"}  # fmt: skip
KINDS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE = {"rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def trunk_config(c, where):
    """GPTConfig's fields of the trunk, from config.json's content as transformers 4 or 5 writes it; absent keys mean what they mean there."""

    def refuse(key, why):
        raise UserError(f"{where}: {key}={json.dumps(c.get(key))} is not understood: {why}")

    routed, kind = str(c.get("model_type")).startswith(ROUTED), str(c.get("model_type")).removeprefix(ROUTED)
    if kind not in KINDS:
        refuse("model_type", f"there are {', '.join(KINDS)}")
    architecture = (("DeltaRouted" if routed else "") + KINDS[kind],)
    if c.get("architectures") is not None and tuple(c["architectures"]) != architecture:
        refuse("architectures", f"a {kind} with a language model's head is {architecture[0]}")
    for key, value in c.items():
        if key in FIXED and value is not None and value != FIXED[key]:
            refuse(key, f"only {json.dumps(FIXED[key])} is")
        if key not in READ and key not in FIXED and key not in OTHER and not key.startswith("_") and value is not None:
            refuse(key, "if it does not change what the model computes, take it out")
    if c.get("sliding_window") is not None and "use_sliding_window" not in c:
        refuse("sliding_window", "attention here is full")
    if set(c.get("layer_types") or ()) - {"full_attention"}:
        refuse("layer_types", "attention here is full")

    def read(key, default=None):
        value = c.get(key, default)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{where} has no {key}: fetch it again")
        if not isinstance(value, (int, float) if READ[key] is float else READ[key]) or isinstance(value, bool) is not (READ[key] is bool):
            refuse(key, f"it should be {READ[key].__name__}")
        if READ[key] in (int, float) and value <= 0:
            refuse(key, "it should be positive")
        return value

    heads, width = read("num_attention_heads"), read("hidden_size")
    rope = {**read("rope_scaling", {}), **read("rope_parameters", {})}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    key = "rope_parameters" if c.get("rope_parameters") else "rope_scaling"
    if scaling not in ("default", "llama3") or rope.get("type", scaling) != scaling:
        refuse(key, "only the rope_type default and llama3 are")
    if unknown := [k for k, v in rope.items() if k not in ROPE and (k, v) != ("partial_rotary_factor", 1.0)]:
        refuse(key, f"{unknown[0]} is not among {', '.join(sorted(ROPE))}")
    theta = rope.get("rope_theta", read("rope_theta", 1e4))
    if not isinstance(theta, (int, float)) or theta <= 0:
        refuse(key, "rope_theta should be a positive number")
    if c.get("rope_theta") not in (None, theta):
        refuse("rope_theta", f"{key} says {theta}")
    if scaling == "llama3":
        numbers = sorted(ROPE - {"rope_type", "type", "rope_theta"})
        if any(not isinstance(rope.get(k), (int, float)) or rope[k] <= 0 for k in numbers) or rope["high_freq_factor"] <= rope["low_freq_factor"]:
            refuse(key, f"llama3 needs {', '.join(numbers)}, all positive, the high factor over the low")
        scaled = {"rope_type": "llama3"} | {k: rope[k] for k in numbers}
    return {
        "block_size": read("max_position_embeddings"),
        "vocab_size": read("vocab_size"),
        "n_layer": read("num_hidden_layers"),
        "n_head": heads,
        "n_kv_head": read("num_key_value_heads", heads if kind == "llama" else None),
        "n_embd": width,
        "head_dim": read("head_dim", width // heads if kind == "llama" else 128),
        "ffn_dim": read("intermediate_size"),
        "rope_theta": float(theta),
        "rope_scaling": scaled if scaling == "llama3" else None,
        "norm_eps": float(read("rms_norm_eps")),
        "qk_norm": kind == "qwen3",
        "tie_embeddings": read("tie_word_embeddings", False),
    }


def hf_config(side, dtype):
    """config.json of a trunk of ours: that of the base it came from, or else one that says the same. dtype: a torch dtype or None."""
    config, c = side.config, dict((side.meta.get("origin") or {}).get("config") or {})
    if c:  # what an export with routing had put in
        c["model_type"] = c["model_type"].removeprefix(ROUTED)
        c["architectures"] = [KINDS[c["model_type"]]]
        c.pop("depth_routing", None)
    if not c or any(getattr(config, k) != v for k, v in trunk_config(c, f"{side.path}/meta.json").items() if k != "block_size"):
        kind = "qwen3" if config.qk_norm else "llama"
        c = {"model_type": kind, "architectures": [KINDS[kind]], "vocab_size": config.vocab_size, "hidden_size": config.n_embd, "intermediate_size": config.ffn_dim,
             "num_hidden_layers": config.n_layer, "num_attention_heads": config.n_head, "num_key_value_heads": config.n_kv_head, "head_dim": config.head_dim,
             "max_position_embeddings": config.block_size, "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling,
             "tie_word_embeddings": config.tie_embeddings, "attention_bias": False, "hidden_act": "silu", "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    if dtype:
        c["dtype" if "dtype" in c else "torch_dtype"] = str(dtype).removeprefix("torch.")
    return c


def open_hf(folder):
    """The Side of a Hugging Face folder. UserError for all that is missing, extra, contradictory or not understood."""
    c = read_json(folder / "config.json")
    trunk = trunk_config(c, folder / "config.json")
    routed = c["model_type"].startswith(ROUTED)
    listed = folder / "model.safetensors.index.json"
    if not listed.exists() and not (folder / "model.safetensors").exists():
        raise UserError(f"{folder} has neither model.safetensors nor its index" + ("; pickled weights are not read: save them as safetensors" if any(folder.glob("*.bin")) else ""))
    found = read_tensors(folder)
    found |= read_header(folder / ROUTING) if routed else {}
    files = {folder / "config.json", *[listed] * listed.exists(), *(t.file for t in found.values())}
    extra = sorted(p.name for p in set(folder.glob("*.safetensors")) - files)
    if extra:
        raise UserError(f"{folder} holds {', '.join(extra[:5])}, which belongs to no model there: move it away")
    dropped = {name: "a table that every version computes afresh" for name in found if re.fullmatch(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", name)}
    head, embed = found.get(TOP["head.weight"]), found.get(TOP["embed.weight"])
    if trunk["tie_embeddings"] and head and embed:
        if not same_bytes(head, embed):
            raise UserError(f"{folder}/config.json ties the head to the embedding, but lm_head.weight differs from it: say tie_word_embeddings=false, or take it out")
        dropped[head.name] = "equal to the embedding, to which config.json ties it"
    found = {name: t for name, t in found.items() if name not in dropped}
    routing = {"residual": "baseline"}
    if routed:
        routing = c.get("depth_routing")
        if not isinstance(routing, dict) or set(routing) != {"residual", "route_heads", "delta_blocks", "delta_recursive"}:
            raise UserError(f"{folder}/config.json: depth_routing={json.dumps(routing)} is not what convert_8b.py export writes")
    try:
        config = GPTConfig(**trunk, **routing)
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder}/config.json: {error}") from error
    shapes = model_shapes(config)
    names = {name: name if name.startswith("residual.") else hf_name(name) for name in shapes}
    check(found, {names[name]: shape for name, shape in shapes.items()}, folder / "config.json")
    return Side(folder, config, {name: found[names[name]] for name in shapes}, hf=c, dropped=dropped, files=sorted(files))


def open_ours(path, weights="raw"):
    """The Side of a CKPT of ours."""
    folder, name = find_checkpoint(path), {"raw": "model.safetensors", "ema": "ema.safetensors"}[weights]
    if not (folder / name).exists() and not (folder / f"{name}.index.json").exists():
        raise UserError(f"{folder} has no {name}" + ("; use --weights=raw" if weights == "ema" else ": it is not whole"))
    meta = read_json(folder / "meta.json")
    try:
        config = GPTConfig(**meta["model_config"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder}/meta.json describes no model of this version ({error})") from error
    found = read_tensors(folder, name)
    check(found, model_shapes(config), folder / "meta.json")
    return Side(folder, config, found, meta=meta)


def open_side(path, weights="raw"):
    if find_checkpoint(path):
        return open_ours(path, weights)
    if (Path(path) / "config.json").is_file():
        return open_hf(Path(path))
    raise UserError(f"{path} is neither a Hugging Face folder (with config.json) nor a checkpoint (with meta.json, or a run's folder with `latest`)")


def same_bytes(a, b):
    return (a.dtype, a.shape) == (b.dtype, b.shape) and all(np.array_equal(x, y) for x, y in zip(a.pieces(), b.pieces()))


# ----------------------------------------------------------------------------------------------------------------------
# Writing
# ----------------------------------------------------------------------------------------------------------------------
@contextmanager
def new_folder(dst, size):
    """A folder to write `size` bytes into, which takes its name only when all of it is on disk. UserError if it exists or cannot be written."""
    dst = Path(dst).absolute()
    part = dst.with_name(f".{dst.name}.part")
    if dst.exists() or dst.is_symlink():
        raise UserError(f"{dst} exists already: give another name, or remove it first")
    if part.exists():
        raise UserError(f"{part} is there: another conversion is writing it, or one was killed; if none is running, remove it and start again")
    try:
        part.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{dst} cannot be made ({error.strerror}): give another name") from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the lines below are reached
    try:
        if (free := shutil.disk_usage(part).free) < size:
            raise UserError(f"{dst} needs {size / 1e9:,.1f} GB and its disk has {free / 1e9:,.1f} GB left: make room, or give another place")
        yield part
        for path in [*part.iterdir(), part]:
            sync(path)
        os.rename(part, dst)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):  # safetensors wraps what the disk says
            raise UserError(f"{dst} could not be written ({error}); nothing of it was left: make room and start again") from error
        raise
    sync(dst.parent)


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_shards(folder, tensors, progress, dtype=None):
    """Write tensors {new name: Stored} as model.safetensors, or as shards of up to SHARD bytes; -> {name: file name}, in bytes as they
    are, or cast to `dtype`. Tensors of one source file stay together, in their order, so that each file is read once from end to end."""
    code = next((c for c, t in DTYPES.items() if t == dtype), None)
    sizes = {name: t.size if dtype is None else t.size // DTYPES[t.dtype].itemsize * dtype.itemsize for name, t in tensors.items()}
    shards = []  # lists of names
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].file, item[1].start)):
        if not shards or tensors[shards[-1][-1]].file != t.file or sum(sizes[n] for n in shards[-1]) + sizes[name] > SHARD:
            shards.append([])
        shards[-1].append(name)
    where = {}
    for i, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        names.sort(key=lambda name: -DTYPES[code or tensors[name].dtype].itemsize)  # wide ones first keeps every tensor aligned
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name in names:
            header[name] = {"dtype": code or tensors[name].dtype, "shape": tensors[name].shape, "data_offsets": [end, end + sizes[name]]}
            end += sizes[name]
        head = json.dumps(header, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        with open(folder / file, "wb", buffering=0) as f:
            write(f, struct.pack("<Q", len(head)) + head)
            for name in names:
                stored = DTYPES[tensors[name].dtype]
                if dtype in (None, stored):
                    for n in tensors[name].copy_to(f):
                        progress.update(n)
                else:
                    for piece in tensors[name].pieces():
                        progress.update(write(f, torch.from_numpy(piece).view(stored).to(dtype).view(torch.uint8).numpy()))
        where |= dict.fromkeys(names, file)
    return where


def write_json(file, content):
    file.write_text(json.dumps(content, indent=2) + "\n")


def write_index(folder, where, tensors_bytes):
    if len(set(where.values())) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": tensors_bytes}, "weight_map": dict(sorted(where.items()))})


def provenance(file):
    """What tells a file of the source from another: its size; what the hub's own download notes of it (revision, and its sha256 if it is a
    large one); and of a small file the sha256 itself, which of 16 GB would take longer than the import."""
    noted = file.parent / f".cache/huggingface/download/{file.name}.metadata"
    revision, tag = noted.read_text().split()[:2] if noted.exists() else (None, None)
    small = file.suffix == ".json"
    return {"bytes": file.stat().st_size, "hub_revision": revision, "hub_tag": tag} | ({"sha256": hashlib.sha256(file.read_bytes()).hexdigest()} if small else {})


def bar(size, what):
    return tqdm(total=size, unit="B", unit_scale=True, desc=what, dynamic_ncols=True, mininterval=0.5 if sys.stderr.isatty() else 30)


# ----------------------------------------------------------------------------------------------------------------------
# import, export
# ----------------------------------------------------------------------------------------------------------------------
def import_(args):
    src = Path(args.src)
    if not (src / "config.json").is_file():
        raise UserError(f"{src} is not a Hugging Face folder: it has no config.json")
    side = open_hf(src)
    routed = side.config.residual != "baseline"
    wanted = {"residual": args.residual} | {k: v for k in ("route_heads", "delta_blocks") if (v := getattr(args, k)) is not None}
    if args.residual == "baseline" and len(wanted) > 1:
        raise UserError("--residual=baseline routes nothing: leave --route_heads and --delta_blocks away")
    if routed and any(getattr(side.config, k) != v for k, v in wanted.items()):
        raise UserError(f"{src} holds depth routing with {side.hf['depth_routing']}, and its trunk alone is another model: import it as --residual=delta without further flags")
    try:
        config = replace(side.config, **wanted)
    except ValueError as error:
        raise UserError(error) from error

    trunk = {name: t for name, t in side.tensors.items() if not name.startswith("residual.")}
    routing = {name: t.load() for name, t in side.tensors.items() if name not in trunk} or identity(config)
    size = sum(t.size for t in trunk.values())
    precisions = {code: sum(t.dtype == code for t in trunk.values()) for code in {t.dtype for t in trunk.values()}}
    numel = sum(torch.Size(t.shape).numel() for t in trunk.values())
    added = sum(t.numel() for t in routing.values())
    with new_folder(args.dst, size + 8 * added) as part, bar(size, "import") as progress:
        where = write_shards(part, trunk, progress)
        if routing:
            save_file(routing, part / ROUTING)
            where |= dict.fromkeys(routing, ROUTING)
        write_index(part, where, size + 4 * added)
        origin = {"source": str(src.absolute()), "config": side.hf, "files": {f.name: provenance(f) for f in side.files}, "tensors": len(side.tensors), "precisions": precisions,
                  "added": sorted(routing) if not routed else [], "left_out": side.dropped}  # fmt: skip
        param_dtype = str(DTYPES[max(precisions, key=precisions.get)]).removeprefix("torch.")
        write_json(part / "meta.json", {"step": 0, "model_config": asdict(config), "train_config": {"param_dtype": param_dtype}, "params": {"total": numel + added, "routing": added},
                                        "data": {"dataset": None, "tokenizer": side.tokenizer}, "origin": origin})  # fmt: skip
    said = ", ".join(f"{n} in {code}" for code, n in precisions.items())
    print(f"{args.dst}: {len(trunk)} tensors, {numel:,} parameters, {size / 1e9:,.2f} GB, in the precision they had ({said})")
    for name, why in side.dropped.items():
        print(f"left out    {name}: {why}")
    scaling = f"llama3 scaling by {config.rope_scaling['factor']:g} from {config.rope_scaling['original_max_position_embeddings']:,}" if config.rope_scaling else "no scaling"
    print(f"trunk       rotary base {config.rope_theta:g} with {scaling}, norm eps {config.norm_eps:g}, head_dim {config.head_dim}, context {config.block_size:,}")
    if routing:
        print(f"routing     {added:,} parameters in fp32, {'as they were' if routed else 'gates, queries and null sources zero, key norms one'}; H = {config.route_heads}, {config.delta_blocks} blocks")
    print(f"tokenizer   {side.tokenizer or 'unknown'}, by the {config.vocab_size:,} rows of the embedding")
    print(f"next        python convert_8b.py verify {args.src} {args.dst}")


def identity(config):
    """{our name: tensor} of the residual method's parameters, fp32, as they start: with them the model computes what it did without."""
    residual = RESIDUALS[config.residual](config)
    with torch.no_grad():
        residual.init_weights(config, None)
    return {f"residual.{name}": p.detach() for name, p in residual.named_parameters()}


TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
                   "chat_template.jinja", "generation_config.json"]  # fmt: skip


def export(args):
    if find_checkpoint(args.src) is None:
        raise UserError(f"{args.src} is not a checkpoint: give a folder with meta.json, or a run's folder with `latest`")
    side = open_ours(args.src, args.weights)
    if side.config.residual not in ("baseline", "delta"):
        raise UserError(f"{side.path} is residual={side.config.residual}, whose sublayers read something else than the sum: no class of transformers computes that; only baseline and delta have an export")
    trunk = {hf_name(name): t for name, t in side.tensors.items() if not name.startswith("residual.")}
    routing = {name: t.load().float() for name, t in side.tensors.items() if name.startswith("residual.")}
    dtype = None if args.dtype == "same" else getattr(torch, args.dtype)
    stored = {DTYPES[t.dtype] for t in trunk.values()}
    c = hf_config(side, dtype or (stored.pop() if len(stored) == 1 else None))
    size = sum(torch.Size(t.shape).numel() * (dtype or DTYPES[t.dtype]).itemsize for t in trunk.values())
    base = Path((side.meta.get("origin") or {}).get("source", ""))
    copied = [f for f in TOKENIZER_FILES if base.is_absolute() and (base / f).is_file()]
    with new_folder(args.dst, size + 4 * sum(t.numel() for t in routing.values())) as part, bar(size, "export") as progress:
        write_index(part, write_shards(part, trunk, progress, dtype), size)
        for f in copied:
            shutil.copyfile(base / f, part / f)
        if routing:
            shapes = {k: getattr(side.config, k) for k in ("residual", "route_heads", "delta_blocks", "delta_recursive")}
            kind = c["model_type"]
            c |= {"model_type": ROUTED + kind, "architectures": ["DeltaRouted" + KINDS[kind]], "depth_routing": shapes}
            save_file(routing, part / ROUTING, {"format": "pt"})
            (part / "README.md").write_text(EXPORT_README.format(kind=KINDS[kind], gate=routing["residual.gate"].abs().max().item(), routing=ROUTING, blocks=side.config.delta_blocks,
                                                                 heads=side.config.route_heads, sites=len(routing["residual.gate"]), difference=DIFFERENCE[side.config.delta_recursive]))  # fmt: skip
        write_json(part / "config.json", c)
    print(f"{args.dst}: {len(trunk)} tensors, {size / 1e9:,.2f} GB, {args.weights} weights of {side.path}, in {args.dtype if dtype else 'the precision they had'}")
    print(f"tokenizer   {', '.join(copied)} copied from {base}" if copied else "tokenizer   no files of it are at hand: copy them from the base model's folder")
    if routing:
        print(f"routing     in {ROUTING}; transformers does not know it, so its Auto classes refuse this folder, and {KINDS[kind]} loads the trunk alone, which is another model: see its README.md")


DIFFERENCE = {False: "the stream at its end minus the stream at its start",
              True: "the stream at its end minus the source before it, read from the MLP of the next block's first layer on; before that, there is no embedding"}  # fmt: skip
EXPORT_README = """# A {kind} with delta routing

The safetensors beside this file but for one are the trunk, under the names that {kind} gives them. The routing is in
`{routing}`, and transformers has no class that reads it. Therefore `config.json` names a model type that its Auto classes
refuse. `{kind}.from_pretrained` still loads the trunk, with a warning: **that is not this model**, unless the gates are
zero (the largest here is {gate:.3g}).

To use the whole model, turn it into a checkpoint of the repository it comes from, with that repository's script:

    python convert_8b.py import THIS_FOLDER CKPT --residual=delta
    python sample.py CKPT --prompt="..."

or compute it: there are {sites} sites, two a layer, attention before MLP. What sublayer s reads, before its own norm, is no longer the
stream x but

    h = x + gate[s] * mix,    mix = sum_i alpha_i v_i in each of {heads} slices of the width,
    alpha = softmax_i <query[s], (v_i / rms(v_i)) * key_norm[s]> over that slice, with rms over the full width and the trunk's eps.

The v_i are null_source[s], the token embedding, and one source for each finished block of layers (of {blocks} in all): {difference}.
The stream itself stays x <- x + f(h).
"""


# ----------------------------------------------------------------------------------------------------------------------
# verify
# ----------------------------------------------------------------------------------------------------------------------
def last_stream(side, idx, device, dtype, kernel="auto", residual=None):
    """What the output head reads, [1, T, D], by this repository's layers; one of them is in memory at a time. residual: another than its own."""
    config = replace(side.config, residual=residual or side.config.residual)
    with torch.device("meta"):
        model = GPT(config, choose_kernel(kernel, config, device, dtype)[0])

    def fill(module, prefix, dtype=dtype):
        module.load_state_dict({name: side.tensors[prefix + name].load().to(device, dtype) for name, _ in module.named_parameters()}, assign=True)

    fill(model.residual, "residual.", torch.float32)
    fill(model.norm, "norm.")
    memory = model.residual.start(F.embedding(idx.cpu(), side.tensors["embed.weight"].load()).to(device, dtype))
    rope = rope_tables(config, idx.size(1), device)
    for i, layer in enumerate(tqdm(model.layers, desc=f"{side.path.name}, {config.residual}", unit="layer", leave=False, disable=not sys.stderr.isatty())):
        fill(layer, f"layers.{i}.")
        memory.write(layer.attn(memory.read(), rope))
        memory.write(layer.mlp(memory.read()))
        layer.to("meta")
    return model.norm(memory.output())


def last_stream_of_transformers(side, idx, device, dtype):
    """The same by the layers of transformers, from config.json and the tensors under their own names: nothing here is shared with our code."""
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3 import modeling_qwen3

    module, kind = {"llama": (modeling_llama, "Llama"), "qwen3": (modeling_qwen3, "Qwen3")}[side.hf["model_type"]]
    config = getattr(module, f"{kind}Config").from_dict(side.hf)
    config._attn_implementation = "sdpa"  # causal where no mask is given
    stored = {t.name: t for t in side.tensors.values()}
    positions = torch.arange(idx.size(1), device=device)[None]

    def filled(module, prefix):
        names = [name for name in stored if name.startswith(prefix)]
        module.load_state_dict({name.removeprefix(prefix): stored[name].load().to(device, dtype) for name in names}, assign=True)
        return module

    x = F.embedding(idx.cpu(), stored["model.embed_tokens.weight"].load()).to(device, dtype)
    rope = getattr(module, f"{kind}RotaryEmbedding")(config).to(device)(x, positions)
    for i in tqdm(range(config.num_hidden_layers), desc=f"{side.path.name}, transformers", unit="layer", leave=False, disable=not sys.stderr.isatty()):
        with torch.device("meta"):
            layer = getattr(module, f"{kind}DecoderLayer")(config, i)
        out = filled(layer, f"model.layers.{i}.")(x, attention_mask=None, position_ids=positions, position_embeddings=rope)
        x = out[0] if isinstance(out, tuple) else out
    with torch.device("meta"):
        norm = getattr(module, f"{kind}RMSNorm")(config.hidden_size, eps=config.rms_norm_eps)
    return filled(norm, "model.norm.")(x)


def compare_logits(a, side_a, b, side_b, rows=8192):
    """(largest |a - b|, largest |a|, positions of equal argmax) of the logits of two last streams, `rows` rows of the vocabulary at a time."""
    heads = [(x, side.tensors["embed.weight" if side.config.tie_embeddings else "head.weight"].load()) for x, side in ((a, side_a), (b, side_b))]
    deviation, largest, best = 0.0, 0.0, [None, None]
    for i in range(0, len(heads[0][1]), rows):
        pair = [F.linear(x[0], w[i : i + rows].to(x.device, x.dtype)).float() for x, w in heads]  # [T, rows]
        deviation = max(deviation, (pair[0] - pair[1]).abs().max().nan_to_num(float("inf")).item())
        largest = max(largest, pair[0].abs().max().item())
        for j, logits in enumerate(pair):
            value, where = logits.max(-1)
            if best[j] is None:
                best[j] = value, where
            else:
                higher = value > best[j][0]
                best[j] = torch.where(higher, value, best[j][0]), torch.where(higher, where + i, best[j][1])
    return deviation, largest, (best[0][1] == best[1][1]).sum().item()


@torch.no_grad()
def verify(args):
    src, dst = open_side(args.src, args.weights), open_side(args.dst, args.weights)
    differ = [f"{k} {v} and {getattr(dst.config, k)}" for k, v in asdict(src.config).items() if k in ("vocab_size", "n_embd") and v != getattr(dst.config, k)]
    if differ:
        raise UserError(f"{args.src} and {args.dst} are not the same model: {', '.join(differ)}")
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    tolerance = {"float32": 1e-4, "bfloat16": 5e-2}[args.dtype] if args.tolerance is None else args.tolerance
    idx, what = token_ids(args, dst.tokenizer or src.tokenizer, src.config.vocab_size)
    idx = idx.to(device)
    longest = min(src.config.block_size, dst.config.block_size)
    print(f"text        {what}: positions 0..{idx.size(1) - 1}" + (f", beyond the context of {longest:,} that was configured" if idx.size(1) > longest else ""))

    common = [name for name in src.tensors if name in dst.tensors and not name.startswith("residual.")]
    size = sum(src.tensors[name].size for name in common)
    with bar(size, "tensors") as progress:
        equal = 0
        for name in common:
            equal += same_bytes(src.tensors[name], dst.tensors[name])
            progress.update(src.tensors[name].size)
    print(f"tensors     {equal} of {len(common)} of the trunk's are equal bit for bit")

    streams, by, installed = [], [], transformers_version()
    for side in (src, dst):
        use = installed if side.hf and side.config.residual == "baseline" else None
        streams.append(last_stream_of_transformers(side, idx, device, dtype) if use else last_stream(side, idx, device, dtype, args.kernel if side.config.residual == "delta" else "auto"))
        by.append(f"transformers {use}" if use else f"this repository's layers, {side.config.residual}")
    if not installed and any(side.hf and side.config.residual == "baseline" for side in (src, dst)):
        by.append("which checks the tensors and not the arithmetic: pip install transformers for that")
    deviation, largest, same = compare_logits(streams[0], src, streams[1], dst)
    allowed = tolerance * max(1.0, largest)
    print(f"computed    in {args.dtype} on {device}, by {' | '.join(by)}")
    print(f"logits      maximum deviation {deviation:.3g} (largest logit {largest:.3g}, {allowed:.3g} allowed); the same best token at {same} of {idx.size(1)} positions")
    failed = [f"the logits deviate by {deviation:.3g}, over the {allowed:.3g} allowed"] * (not deviation <= allowed)

    if dst.config.residual == "delta":
        gates = dst.tensors["residual.gate"].load()
        plain = last_stream(dst, idx, device, dtype, residual="baseline")
        own, _, _ = compare_logits(plain, dst, streams[1], dst)
        print(f"routing     {(gates == 0).sum()} of {len(gates)} gates are zero; maximum deviation from the same weights without routing {own:.3g}")
        failed += [f"all gates are zero, yet routing moves the logits by {own:.3g}"] * (not gates.any().item() and own != 0)
    if failed:
        sys.exit("error: " + "; ".join(failed))


def transformers_version():
    try:
        import transformers
    except ImportError:
        return None
    return transformers.__version__


def token_ids(args, tokenizer, rows):
    """(ids [1, T], where they are from in words): --tokens, else --text, else this file as text, or for an unknown tokenizer drawn ids."""
    if args.tokens == "random" or not (args.tokens or args.text or tokenizer):
        return torch.randint(rows, (1, args.length), generator=torch.Generator().manual_seed(0)), f"{args.length} drawn ids"
    if args.tokens:
        try:
            ids = [int(i) for i in args.tokens.split(",")]
        except ValueError:
            raise UserError(f"--tokens={args.tokens}: give ids separated by commas, or random") from None
        if not all(0 <= i < rows for i in ids):
            raise UserError(f"--tokens={args.tokens}: ids go from 0 to {rows - 1}")
        return torch.tensor([ids]), f"the {len(ids)} ids given"
    if tokenizer is None:
        raise UserError(f"no tokenizer is known for {rows:,} rows: give ids, --tokens=1,2,3")
    file = Path(args.text or __file__)
    text = file.read_text() if file.is_file() else args.text
    try:
        ids = load_tokenizer(tokenizer).encode(text).astype("int64")[: args.length]
    except UserError as error:
        raise UserError(f"{error}; or give ids, --tokens=1,2,3 or --tokens=random") from error
    if not len(ids):
        raise UserError("--text is empty: give some, or a file of it")
    return torch.from_numpy(ids)[None], f"{len(ids)} {tokenizer} tokens of {file.name if file.is_file() else 'the text given'}"


def main():
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="import | export | verify")
    p = commands.add_parser("import", help="a Hugging Face folder -> a checkpoint for train.py --init_from and sample.py")
    p.add_argument("src", metavar="SRC", help="folder with config.json and safetensors")
    p.add_argument("dst", metavar="DST", help="checkpoint folder to make")
    p.add_argument("--residual", choices=["delta", "baseline"], default="delta")
    p.add_argument("--route_heads", type=int, help="H of delta; 8 if not given")
    p.add_argument("--delta_blocks", type=int, help="blocks of layers whose deltas are sources; 8 if not given")
    p = commands.add_parser("export", help="a checkpoint -> a Hugging Face folder")
    p.add_argument("src", metavar="SRC", help="CKPT")
    p.add_argument("dst", metavar="DST", help="folder to make")
    p.add_argument("--weights", choices=["raw", "ema"], default="raw")
    p.add_argument("--dtype", choices=["same", "float32", "bfloat16", "float16"], default="same", help="same: as in the checkpoint, bit for bit")
    p = commands.add_parser("verify", help="the logits of two folders, of either kind; exit code 1 if they deviate")
    p.add_argument("src", metavar="SRC")
    p.add_argument("dst", metavar="DST")
    p.add_argument("--text", help="a file, or the text itself; else this script's own source")
    p.add_argument("--tokens", help="ids instead of text: 1,2,3, or random")
    p.add_argument("--length", type=int, default=256, help="tokens of the text at most [256]")
    p.add_argument("--tolerance", type=float, help="deviation allowed, as a share of the largest logit or of 1, whichever is more [1e-4; bfloat16: 5e-2]")
    p.add_argument("--weights", choices=["raw", "ema"], default="raw", help="of checkpoints")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    p.add_argument("--kernel", choices=["auto", "triton", "torch"], default="auto", help="of delta routing; auto: triton on CUDA")
    p.add_argument("--device", default="cpu", help="cpu | cuda [cpu]")
    args = parser.parse_args()
    if args.command == "verify":
        if args.length < 1:
            raise UserError(f"--length={args.length} must be at least 1")
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"--device={args.device}: torch sees no CUDA GPU here; use --device=cpu")
    {"import": import_, "export": export, "verify": verify}[args.command](args)


if __name__ == "__main__":
    cli(main)
