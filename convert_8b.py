"""A Llama- or Qwen3-style checkpoint into ours and back; on the way in, delta routing is added without changing a single logit.

    python convert_8b.py import marin-8b-base out/marin_8b_base_delta                          # --residual=delta, every gate shut
    python convert_8b.py import marin-8b-base out/marin_8b_base_plain --residual=baseline
    python convert_8b.py verify marin-8b-base out/marin_8b_base_delta                          # logits of both, layer by layer
    python convert_8b.py export out/marin_8b_plain marin-8b-plain --weights=ema --dtype=bfloat16

A Hugging Face folder holds config.json and safetensors, whole or in shards; ours is any CKPT (a folder with meta.json, or a run's folder).
Tensors are copied as bytes, piece by piece, in the precision they have, and verify holds one layer at a time: memory does not grow with the
model. A destination appears whole or not at all. What config.json says and this file does not understand is refused by name.
"""
import hashlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import struct
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from configurator import Parser, UserError, cli
from model import GPT, RESIDUALS, GPTConfig, choose_kernel, rope_tables
from prepare_data import TOKENIZERS, load_tokenizer
from train import check_device, find_checkpoint, read_meta, the_checkpoint

SHARD = 5_000_000_000  # bytes of a shard at most, the hub's custom
PIECE = 1 << 22  # numbers copied at a time
ROUTING = "depth_routing.safetensors"  # the routing's own file, in our folders and in exported ones
ROUTING_FIELDS = ("residual", "route_heads", "delta_blocks", "delta_recursive")  # what an exported config.json says of it
ROUTED = "delta_routed_"  # before the model_type of an exported model with routing: transformers' Auto classes then refuse it
PRECISIONS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' and torch's names; all else is quantised or not weights
DTYPES = {code: getattr(torch, name) for code, name in PRECISIONS.items()}
TOP = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
PARTS = {"attn.norm": "input_layernorm", "mlp.norm": "post_attention_layernorm"}
PARTS |= {f"attn.{part}": f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
PARTS |= {f"mlp.{part}": f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")}


def hf_name(name):
    """layers.3.attn.q_proj.weight -> model.layers.3.self_attn.q_proj.weight; the routing's names stay. Both sides hold weights as [out, in], and
    q and k in the half-split rotary layout, so that nothing is transposed or permuted."""
    if name in TOP or name.startswith("residual."):
        return TOP.get(name, name)
    _, i, part = name.removesuffix(".weight").split(".", 2)
    return f"model.layers.{i}.{PARTS[part]}.weight"


# ---- What lies in a folder -------------------------------------------------------------------------------------------
@dataclass
class Stored:
    """A tensor in a safetensors file."""

    file: Path
    name: str
    dtype: str  # as the file has it or as it is to be written: a key of DTYPES, or a precision that is refused
    shape: list

    def load(self):
        """The tensor as the file has it, memory-mapped: its bytes are the system's cache of the file and no memory of this process."""
        with safe_open(self.file, "pt") as f:
            return f.get_tensor(self.name)

    @property
    def nbytes(self):
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass
class Side:
    """A model in a folder, of either kind."""

    path: Path
    config: GPTConfig
    tensors: dict  # {our name: Stored}, in the order of the files
    meta: dict | None = None  # ours: meta.json
    hf: dict | None = None  # theirs: config.json
    dropped: dict = field(default_factory=dict)  # theirs: {tensor that is no part of the model: why}

    def __post_init__(self):
        self.trunk = {name: t for name, t in self.tensors.items() if not name.startswith("residual.")}
        self.origin = (self.meta or {}).get("origin") or {}  # ours: what import noted
        self.kind = "qwen3" if self.config.qk_norm else "llama"  # the trunk's model_type

    @property
    def routing(self):
        return {name: t.load() for name, t in self.tensors.items() if name not in self.trunk}

    @property
    def tokenizer(self):
        """The name of its tokenizer, which for a Hugging Face folder the number of rows tells; None where it does not."""
        if self.meta:
            return self.meta["data"]["tokenizer"]
        return next((name for name, entry in TOKENIZERS.items() if entry[4] == self.config.vocab_size), None)


def read_json(file):
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError("not an object")
        return found
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): fetch it again") from error


def read_file(file):
    """{name: Stored} of a safetensors file, in its order; UserError if it is missing, damaged or cut short."""
    try:
        with safe_open(file, "pt") as f:  # checks the header, and it against the file's length
            slices = {name: f.get_slice(name) for name in f.offset_keys()}
            return {name: Stored(file, name, t.get_dtype(), t.get_shape()) for name, t in slices.items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is missing, damaged or cut short ({error}): fetch it again") from error


def read_files(folder, name, hint=""):
    """{name: Stored} of a file, or of the shards in its index. UserError where neither is there, which ends in `hint`, or where the two disagree."""
    index = folder / f"{name}.index.json"
    if not index.exists():
        if not (folder / name).exists():
            raise UserError(f"{folder} has neither {name} nor its index{hint}")
        return read_file(folder / name)
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or any(not isinstance(f, str) or Path(f).name != f for f in listed.values()):
        raise UserError(f"{index} has no weight_map from tensors to files beside it: fetch it again")
    tensors = {}
    for file in sorted(set(listed.values())):
        held = read_file(folder / file)
        absent, extra = [t for t in listed if listed[t] == file and t not in held], [t for t in held if listed.get(t) != file]
        if absent or extra:
            wrong = f"{file} lacks {absent[:5]}" if absent else f"{file} holds {extra[:5]}, which the index does not say"
            raise UserError(f"{index} does not describe its files: {wrong}; fetch the folder again")
        tensors |= held
    return tensors


def model_of(config, found, where, there=str):
    """{our name: Stored} of the tensors `found` {name there: Stored}. UserError unless they are those of such a model, each in a precision that
    holds weights. there(our name) -> name there."""
    with torch.device("meta"):
        ours = {there(name): (name, list(p.shape)) for name, p in GPT(config).named_parameters()}
    wrong = {
        "is missing": [n for n in ours if n not in found],
        "is not part of such a model": [n for n in found if n not in ours],
        "contradicts it": [f"{n} {found[n].shape} (should be {shape})" for n, (_, shape) in ours.items() if n in found and found[n].shape != shape],
        "is in a precision that is not understood": [f"{n} {t.dtype}" for n, t in found.items() if t.dtype not in DTYPES],
    }
    said = [f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''} {what}" for what, names in wrong.items() if names]
    if said:
        raise UserError(f"{where} and its tensors do not go together: {'; '.join(said)}")
    return {ours[n][0]: t for n, t in found.items()}


# ---- config.json. A key is read, must have a certain value, or has nothing to do with what the model computes; any other is refused. ----
FIELDS = {"block_size": "max_position_embeddings", "vocab_size": "vocab_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
          "n_kv_head": "num_key_value_heads", "head_dim": "head_dim", "ffn_dim": "intermediate_size", "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings"}  # fmt: skip
TYPES = {"rms_norm_eps": float, "rope_theta": float, "tie_word_embeddings": bool, "rope_scaling": dict, "rope_parameters": dict, "layer_types": list}  # the others are int
FIXED = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "attention_dropout": 0, "use_sliding_window": False}
OTHER = {"model_type", "architectures", "layer_types", "sliding_window", "max_window_layers", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
         "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type",
         "is_encoder_decoder", "chunk_size_feed_forward", "torchscript", "unsloth_version", "unsloth_fixed", "depth_routing"}  # fmt: skip
KINDS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LLAMA3 = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]  # the numbers of its frequency scaling


def trunk_config(c, where):
    """GPTConfig's fields of the trunk, from config.json's content as transformers 4 or 5 writes it; absent keys mean what they mean there."""

    def refuse(key, why):
        raise UserError(f"{where}: {key}={json.dumps(c.get(key))} is not understood: {why}")

    def read(key, absent=None):
        kind, value = TYPES.get(key, int), absent if c.get(key) is None else c[key]
        if value is None:
            raise UserError(f"{where} has no {key}: fetch it again")
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) is not (kind is bool):
            refuse(key, f"it should be {kind.__name__}")
        if kind in (int, float) and not 0 < value < math.inf:
            refuse(key, "it should be positive and finite")
        return kind(value)

    kind = str(c.get("model_type")).removeprefix(ROUTED)
    if kind not in KINDS:
        refuse("model_type", f"there are {', '.join(KINDS)}")
    architecture = "DeltaRouted" * c["model_type"].startswith(ROUTED) + KINDS[kind]
    if c.get("architectures") not in (None, [architecture]):
        refuse("architectures", f"a {kind} with a language model's head is {architecture}")
    known = OTHER.union(FIELDS.values(), TYPES, FIXED)
    for key, value in c.items():
        if key in FIXED and value not in (None, FIXED[key]):
            refuse(key, f"only {json.dumps(FIXED[key])} is")
        if key not in known and not key.startswith("_") and value is not None:
            refuse(key, "if it does not change what the model computes, take it out")
    if c.get("sliding_window") is not None and "use_sliding_window" not in c:
        refuse("sliding_window", "attention here is full")
    if any(attention != "full_attention" for attention in read("layer_types", [])):
        refuse("layer_types", "attention here is full")

    rope = {"rope_theta": read("rope_theta", 1e4)} | read("rope_scaling", {}) | read("rope_parameters", {})
    section = "rope_parameters" if c.get("rope_parameters") else "rope_scaling"
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling not in ("default", "llama3") or rope.get("type", scaling) != scaling:
        refuse(section, "only the rope_type default and llama3 are")
    for key, value in rope.items():
        if key not in ("rope_type", "type", "rope_theta", *LLAMA3) and (key, value) != ("partial_rotary_factor", 1.0):
            refuse(section, f"{key} is not among rope_type, rope_theta, {', '.join(LLAMA3)}")
    positive = lambda key: isinstance(rope.get(key), (int, float)) and rope[key] > 0
    if not positive("rope_theta"):
        refuse(section, "rope_theta should be a positive number")
    if c.get("rope_theta") not in (None, rope["rope_theta"]):
        refuse("rope_theta", f"{section} says {rope['rope_theta']}")
    if scaling == "llama3" and (not all(map(positive, LLAMA3)) or rope["high_freq_factor"] <= rope["low_freq_factor"]):
        refuse(section, f"llama3 needs {', '.join(LLAMA3)}, all positive, the high factor over the low")

    absent = {"tie_word_embeddings": False, "head_dim": 128}
    if kind == "llama":
        absent |= {"num_key_value_heads": read("num_attention_heads"), "head_dim": read("hidden_size") // read("num_attention_heads")}
    rope_scaling = {"rope_type": "llama3"} | {key: rope[key] for key in LLAMA3} if scaling == "llama3" else None
    fields = {ours: read(key, absent.get(key)) for ours, key in FIELDS.items()}
    return fields | {"rope_theta": float(rope["rope_theta"]), "rope_scaling": rope_scaling, "qk_norm": kind == "qwen3"}


def hf_config(side, precisions):
    """config.json of a model of ours: that of the base it came from, or else one that says the same. precisions: those of its tensors."""
    config, base, kind = side.config, side.origin.get("config"), side.kind
    if base and all(getattr(config, k) == v for k, v in trunk_config(base, f"{side.path}/meta.json").items() if k != "block_size"):
        c = {k: v for k, v in base.items() if k != "depth_routing"}
    else:
        c = {key: getattr(config, ours) for ours, key in FIELDS.items()} | {"rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling}
        c |= {"attention_bias": False, "hidden_act": "silu", "bos_token_id": None, "eos_token_id": None}
    c |= {"model_type": kind, "architectures": [KINDS[kind]]}
    if len(precisions) == 1:
        c["dtype" if "dtype" in c else "torch_dtype"] = PRECISIONS[precisions.pop()]
    if config.residual == "delta":
        c |= {"model_type": ROUTED + kind, "architectures": ["DeltaRouted" + KINDS[kind]], "depth_routing": {k: getattr(config, k) for k in ROUTING_FIELDS}}
    return c


def open_hf(folder):
    """The Side of a Hugging Face folder. UserError for all that is missing, extra, contradictory or not understood."""
    where = folder / "config.json"
    c = read_json(where)
    trunk, routing = trunk_config(c, where), {"residual": "baseline"}
    found = read_files(folder, "model.safetensors", "; pickled weights are not read: save them as safetensors" * any(folder.glob("*.bin")))
    if c["model_type"].startswith(ROUTED):
        found, routing = found | read_file(folder / ROUTING), c.get("depth_routing")
        if not isinstance(routing, dict) or set(routing) != set(ROUTING_FIELDS):
            raise UserError(f"{where}: depth_routing={json.dumps(routing)} is not what convert_8b.py export writes")
    if extra := sorted(p.name for p in set(folder.glob("*.safetensors")) - {t.file for t in found.values()}):
        raise UserError(f"{folder} holds {', '.join(extra[:5])}, which belongs to no model there: move it away")
    dropped = {name: "a table that every version computes afresh" for name in found if re.fullmatch(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", name)}
    head, embed = found.get(TOP["head.weight"]), found.get(TOP["embed.weight"])
    if trunk["tie_embeddings"] and head and embed:
        if not same_bytes(head, embed):
            raise UserError(f"{where} ties the head to the embedding, but lm_head.weight differs from it: say tie_word_embeddings=false, or take it out")
        dropped[head.name] = "equal to the embedding, to which config.json ties it"
    try:
        config = GPTConfig(**trunk, **routing)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from error
    tensors = model_of(config, {name: t for name, t in found.items() if name not in dropped}, where, hf_name)
    return Side(folder, config, tensors, hf=c, dropped=dropped)


def open_ours(path, weights):
    """The Side of a CKPT of ours."""
    folder = the_checkpoint(path)
    meta = read_meta(folder)
    config = GPTConfig(**meta["model_config"])
    found = read_files(folder, {"raw": "model.safetensors", "ema": "ema.safetensors"}[weights], "; use --weights=raw" * (weights == "ema"))
    return Side(folder, config, model_of(config, found, folder / "meta.json"), meta=meta)


def open_side(path, weights):
    if ckpt := find_checkpoint(path):
        return open_ours(ckpt, weights)
    if (Path(path) / "config.json").is_file():
        return open_hf(Path(path))
    raise UserError(f"{path} is neither a Hugging Face folder (with config.json) nor a checkpoint (with meta.json, or a run's folder with `latest`)")


def same_bytes(a, b):
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.load().view(torch.uint8), b.load().view(torch.uint8))


# ---- Writing ---------------------------------------------------------------------------------------------------------
@contextmanager
def new_folder(dst):
    """A folder to write into, which takes its name only when all of it is on disk. UserError if it exists or cannot be written."""
    dst = Path(dst).absolute()
    part = dst.with_name(f".{dst.name}.part")
    if dst.exists() or dst.is_symlink():
        raise UserError(f"{dst} exists already: give another name, or remove it first")
    try:
        part.mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(f"{part} is there: another conversion is writing it, or one was killed; if none is running, remove it and start again") from error
    except OSError as error:
        raise UserError(f"{dst} cannot be made ({error.strerror}): give another name") from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the lines below are reached
    try:
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


def write_file(file, tensors, progress):
    """Write {name: Stored} as a safetensors file, piece by piece: save_file of safetensors would hold all that is cast, and show nothing for a while."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    tensors = dict(sorted(tensors.items(), key=lambda item: -DTYPES[item[1].dtype].itemsize))  # wide ones first keeps every tensor aligned
    for name, t in tensors.items():
        header[name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [end, end := end + t.nbytes]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(file, "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        for t in tensors.values():
            for piece in t.load().flatten().split(PIECE):
                progress.update(f.write(piece.to(DTYPES[t.dtype]).view(torch.uint8).numpy()))


def write_tensors(folder, tensors, routing=None):
    """Write {name: Stored} as model.safetensors, or as shards of up to SHARD bytes and an index; in their order, so that each file is read once
    from end to end. routing {name: tensor} goes into ROUTING, which the index then lists, too. Returns the bytes of the former."""
    size, free = sum(t.nbytes for t in tensors.values()), shutil.disk_usage(folder).free
    if free < size:
        raise UserError(f"the model needs {size / 1e9:,.1f} GB and the disk of {folder.parent} has {free / 1e9:,.1f} GB left: make room, or give another place")
    shards, room = [{}], SHARD
    for name, t in tensors.items():
        if shards[-1] and t.nbytes > room:
            shards.append({})
            room = SHARD
        shards[-1][name] = t
        room -= t.nbytes
    files = {f"model-{i:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors": shard for i, shard in enumerate(shards, 1)}
    with tqdm(total=size, desc="writing", unit="B", unit_scale=True, dynamic_ncols=True, mininterval=0.5 if sys.stderr.isatty() else 30) as progress:
        for file, shard in files.items():
            write_file(folder / file, shard, progress)
    if routing:
        save_file(routing, folder / ROUTING)
        files[ROUTING] = routing
    if len(files) > 1:
        where = {name: file for file, held in files.items() for name in held}
        index = {"metadata": {"total_size": sum(t.nbytes for held in files.values() for t in held.values())}, "weight_map": dict(sorted(where.items()))}
        write_json(folder / "model.safetensors.index.json", index)
    return size


def write_json(file, content):
    file.write_text(json.dumps(content, indent=2) + "\n")


def provenance(file):
    """What tells a file of the source from another: its size; what the hub's own download notes of it (revision, and its sha256 if it is a
    large one); and of a small file the sha256 itself, which of 16 GB would take longer than the import."""
    noted = file.parent / f".cache/huggingface/download/{file.name}.metadata"
    revision, tag = noted.read_text().split()[:2] if noted.exists() else (None, None)
    small = file.suffix == ".json"
    return {"bytes": file.stat().st_size, "hub_revision": revision, "hub_tag": tag} | ({"sha256": hashlib.sha256(file.read_bytes()).hexdigest()} if small else {})


# ---- import, export --------------------------------------------------------------------------------------------------
def import_(args):
    src = Path(args.src)
    if not (src / "config.json").is_file():
        raise UserError(f"{src} is not a Hugging Face folder: it has no config.json")
    side = open_hf(src)
    trunk, given = side.trunk, side.routing
    wanted = {"residual": args.residual} | {k: v for k in ("route_heads", "delta_blocks") if (v := getattr(args, k)) is not None}
    if args.residual == "baseline" and len(wanted) > 1:
        raise UserError("--residual=baseline routes nothing: leave --route_heads and --delta_blocks away")
    if given and any(getattr(side.config, k) != v for k, v in wanted.items()):
        raise UserError(f"{src} holds depth routing with {side.hf['depth_routing']}, and its trunk alone is another model: import it as --residual=delta without further flags")
    try:
        config = replace(side.config, **wanted)
    except ValueError as error:
        raise UserError(error) from error

    routing = given or identity(config)
    numel, added = (sum(math.prod(t.shape) for t in tensors.values()) for tensors in (trunk, routing))
    precisions = Counter(t.dtype for t in trunk.values())
    with new_folder(args.dst) as part:
        size = write_tensors(part, trunk, routing)
        files = sorted(f for kind in ("config.json", "model.safetensors.index.json", "*.safetensors") for f in src.glob(kind))
        origin = {"source": str(src.absolute()), "config": side.hf, "files": {f.name: provenance(f) for f in files}, "tensors": len(side.tensors), "precisions": precisions,
                  "added": [] if given else sorted(routing), "left_out": side.dropped}  # fmt: skip
        param_dtype = PRECISIONS[precisions.most_common(1)[0][0]]
        write_json(part / "meta.json", {"step": 0, "model_config": asdict(config), "train_config": {"param_dtype": param_dtype}, "params": {"total": numel + added, "routing": added},
                                        "data": {"dataset": None, "tokenizer": side.tokenizer}, "origin": origin})  # fmt: skip
    said = ", ".join(f"{n} in {code}" for code, n in precisions.items())
    print(f"{args.dst}: {len(trunk)} tensors, {numel:,} parameters, {size / 1e9:,.2f} GB, in the precision they had ({said})")
    for name, why in side.dropped.items():
        print(f"left out    {name}: {why}")
    scaling = f"llama3 scaling by {config.rope_scaling['factor']:g} from {config.rope_scaling['original_max_position_embeddings']:,}" if config.rope_scaling else "no scaling"
    print(f"trunk       rotary base {config.rope_theta:g} with {scaling}, norm eps {config.norm_eps:g}, head_dim {config.head_dim}, context {config.block_size:,}")
    if routing:
        print(f"routing     {added:,} parameters in fp32, {'as they were' if given else 'gates, queries and null sources zero, key norms one'}; H = {config.route_heads}, {config.delta_blocks} blocks")
    known = f"{side.tokenizer}, by" if side.tokenizer else "not known by"
    print(f"tokenizer   {known} the {config.vocab_size:,} rows of the embedding" + ("" if side.tokenizer else ": sample.py and eval.py take its tokenizer.json"))
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
    side = open_ours(args.src, args.weights)
    config, kind = side.config, KINDS[side.kind]
    if config.residual not in ("baseline", "delta"):
        raise UserError(f"{side.path} is residual={config.residual}, whose sublayers read something else than the sum: no class of transformers computes that; only baseline and delta have an export")
    code = {name: code for code, name in PRECISIONS.items()}.get(args.dtype)
    trunk = {hf_name(name): replace(t, dtype=code or t.dtype) for name, t in side.trunk.items()}
    routing = {name: t.float() for name, t in side.routing.items()}
    c = hf_config(side, {t.dtype for t in trunk.values()})
    base = Path(side.origin.get("source", "/nowhere"))
    copied = [f for f in TOKENIZER_FILES if (base / f).is_file()]
    with new_folder(args.dst) as part:
        size = write_tensors(part, trunk)
        for f in copied:
            shutil.copyfile(base / f, part / f)
        if routing:
            gate = routing["residual.gate"]
            save_file(routing, part / ROUTING, {"format": "pt"})
            (part / "README.md").write_text(EXPORT_README.format(kind=kind, gate=gate.abs().max().item(), routing=ROUTING, blocks=config.delta_blocks, heads=config.route_heads,
                                                                 sites=len(gate), difference=DIFFERENCE[config.delta_recursive]))  # fmt: skip
        write_json(part / "config.json", c)
    print(f"{args.dst}: {len(trunk)} tensors, {size / 1e9:,.2f} GB, {args.weights} weights of {side.path}, in {args.dtype if code else 'the precision they had'}")
    print(f"tokenizer   {', '.join(copied)} copied from {base}" if copied else "tokenizer   no files of it are at hand: copy them from the base model's folder")
    if routing:
        print(f"routing     in {ROUTING}; transformers does not know it, so its Auto classes refuse this folder, and {kind} loads the trunk alone, which is another model: see its README.md")


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


# ---- verify ----------------------------------------------------------------------------------------------------------
def fill(module, tensors, prefix, device, dtype):
    """Give a module on the meta device its weights, of {prefix and name in it: Stored}."""
    module.load_state_dict({name: tensors[prefix + name].load().to(device).to(dtype) for name, _ in module.named_parameters()}, assign=True)
    return module


def steps(items, what, unit):
    return tqdm(items, desc=what, unit=unit, leave=False, disable=not sys.stderr.isatty())


def last_stream(side, idx, device, dtype, kernel="auto"):
    """What the output head reads, [1, T, D], by this repository's layers; one of them is in memory at a time."""
    config = side.config
    with torch.device("meta"):
        model = GPT(config, choose_kernel(kernel if config.residual == "delta" else "auto", config, device, dtype)[0])
    fill(model.residual, side.tensors, "residual.", device, torch.float32)
    memory = model.residual.start(F.embedding(idx.cpu(), side.tensors["embed.weight"].load()).to(device, dtype))
    rope = rope_tables(config, idx.size(1), device)
    for i, layer in enumerate(steps(model.layers, f"{side.path.name}, {config.residual}, {dtype}", "layer")):
        fill(layer, side.tensors, f"layers.{i}.", device, dtype)
        memory.write(layer.attn(memory.read(), rope))
        memory.write(layer.mlp(memory.read()))
        layer.to("meta")
    return fill(model.norm, side.tensors, "norm.", device, dtype)(memory.output())


def last_stream_of_transformers(side, idx, device, dtype):
    """The same by the layers of transformers, from config.json and the tensors under their own names: no arithmetic here is shared with ours."""
    module, kind = importlib.import_module(f"transformers.models.{side.kind}.modeling_{side.kind}"), KINDS[side.kind].removesuffix("ForCausalLM")
    config = getattr(module, f"{kind}Config").from_dict(side.hf)
    config._attn_implementation = "sdpa"  # causal where no mask is given
    stored = {t.name: t for t in side.tensors.values()}
    positions = torch.arange(idx.size(1), device=device)[None]
    x = F.embedding(idx.cpu(), stored["model.embed_tokens.weight"].load()).to(device, dtype)
    rope = getattr(module, f"{kind}RotaryEmbedding")(config).to(device)(x, positions)
    for i in steps(range(config.num_hidden_layers), f"{side.path.name}, transformers, {dtype}", "layer"):
        with torch.device("meta"):
            layer = getattr(module, f"{kind}DecoderLayer")(config, i)
        out = fill(layer, stored, f"model.layers.{i}.", device, dtype)(x, attention_mask=None, position_ids=positions, position_embeddings=rope)
        x = out[0] if isinstance(out, tuple) else out
    with torch.device("meta"):
        norm = getattr(module, f"{kind}RMSNorm")(config.hidden_size, eps=config.rms_norm_eps)
    return fill(norm, stored, "model.norm.", device, dtype)(x)


def compare_logits(a, side_a, b, side_b, rows=8192):
    """(largest |a - b|, largest |a|, positions of equal argmax) of the logits of two last streams, `rows` rows of the vocabulary at a time."""
    heads = [(x[0], side.tensors["embed.weight" if side.config.tie_embeddings else "head.weight"].load()) for x, side in ((a, side_a), (b, side_b))]
    top, best = torch.full((2, a.size(1)), float("-inf"), device=a.device), torch.zeros(2, a.size(1), dtype=torch.int64, device=a.device)
    deviation = largest = 0.0
    for i in range(0, len(heads[0][1]), rows):
        pair = torch.stack([F.linear(x, w[i : i + rows].to(x.device).to(x.dtype)).float() for x, w in heads])  # [2, T, rows]
        deviation = max(deviation, (pair[0] - pair[1]).abs().max().nan_to_num(float("inf")).item())
        largest = max(largest, pair[0].abs().max().item())
        value, row = pair.max(-1)
        top, best = torch.maximum(top, value), torch.where(value > top, row + i, best)
    return deviation, largest, (best[0] == best[1]).sum().item()


@torch.no_grad()
def verify(args):
    if args.length < 1 or (args.tolerance or 0) < 0:
        raise UserError(f"--length={args.length} must be at least 1, --tolerance={args.tolerance} at least 0")
    device, wanted = check_device(args.device), getattr(torch, args.dtype)
    src, dst = open_side(args.src, args.weights), open_side(args.dst, args.weights)
    for key in ("vocab_size", "n_embd"):
        if (a := getattr(src.config, key)) != (b := getattr(dst.config, key)):
            raise UserError(f"{args.src} and {args.dst} are not the same model: {key} {a} and {b}")
    try:
        choose_kernel(args.kernel, (src if dst.config.residual == "baseline" else dst).config, device, wanted)
    except ValueError as error:
        raise UserError(error) from error
    idx, what = token_ids(args, dst.tokenizer or src.tokenizer, src.config.vocab_size)
    idx = idx.to(device)
    longest = min(src.config.block_size, dst.config.block_size)
    print(f"text        {what}: positions 0..{idx.size(1) - 1}" + (f", beyond the context of {longest:,} that was configured" if idx.size(1) > longest else ""))

    common = [name for name in src.trunk if name in dst.trunk]
    equal = sum(same_bytes(src.trunk[name], dst.trunk[name]) for name in steps(common, "comparing", "tensor"))
    print(f"tensors     {equal} of {len(common)} of the trunk's are equal bit for bit")

    try:
        version, note = importlib.metadata.version("transformers"), ""
    except importlib.metadata.PackageNotFoundError:
        version, note = None, "; this checks the tensors and not the arithmetic: pip install transformers for that"
    theirs = lambda side: side.hf and side.config.residual == "baseline"  # transformers has layers for it
    by = lambda side: f"transformers {version}" if version and theirs(side) else f"this repository's layers, {side.config.residual}"
    print(f"computed    on {device}, by {by(src)} | {by(dst)}" + (note if theirs(src) or theirs(dst) else ""))

    def stream(side, dtype):
        return last_stream_of_transformers(side, idx, device, dtype) if version and theirs(side) else last_stream(side, idx, device, dtype, args.kernel)

    failed, exact = [], None
    for dtype in dict.fromkeys([wanted] if args.tolerance is not None else [torch.float32, wanted]):
        a, b, name = stream(src, dtype), stream(dst, dtype), str(dtype).removeprefix("torch.")
        deviation, largest, same = compare_logits(a, src, b, dst)
        allowed, why = (1e-4 if args.tolerance is None else args.tolerance) * max(1.0, largest), ""
        if exact is not None:
            cost = compare_logits(a, src, exact, src)[0]
            allowed, why = 3 * cost, f": 3 times the {cost:.3g} by which SRC in bfloat16 is off itself in float32"
        exact = a
        print(f"{name:12}maximum deviation {deviation:.3g} (largest logit {largest:.3g}, {allowed:.3g} allowed{why}); the same best token at {same} of {idx.size(1)} positions")
        if not deviation <= allowed:
            failed.append(f"the logits deviate by {deviation:.3g} in {name}, over the {allowed:.3g} allowed")

    if dst.config.residual == "delta":
        gates, unrouted = dst.routing["residual.gate"], replace(dst, config=replace(dst.config, residual="baseline"))
        own = compare_logits(last_stream(unrouted, idx, device, wanted), dst, b, dst)[0]
        print(f"routing     {(gates == 0).sum()} of {len(gates)} gates are zero; maximum deviation from the same weights without routing {own:.3g}")
        if own != 0 and not gates.any():
            failed.append(f"all gates are zero, yet routing moves the logits by {own:.3g}")
    if failed:
        sys.exit("error: " + "; ".join(failed))


def token_ids(args, tokenizer, rows):
    """(ids [1, T], where they are from in words): --tokens, else --text, else this file as text, or for an unknown tokenizer drawn ids."""
    if args.tokens == "random" or not args.tokens and args.text is None and tokenizer is None:
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
    text, name = __file__ if args.text is None else args.text, "the text given"
    if os.path.isfile(text):  # Path.is_file is an error where a text is too long for a name
        text, name = Path(text).read_text(errors="replace"), Path(text).name
    try:
        ids = load_tokenizer(tokenizer).encode(text).astype("int64")[: args.length]
    except UserError as error:
        raise UserError(f"{error}; or give ids, --tokens=1,2,3 or --tokens=random") from error
    if not len(ids):
        raise UserError("--text is empty: give some, or a file of it")
    return torch.from_numpy(ids)[None], f"{len(ids)} {tokenizer} tokens of {name}"


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
    p.add_argument("--dtype", choices=["same", *PRECISIONS.values()], default="same", help="same: as in the checkpoint, bit for bit")
    p = commands.add_parser("verify", help="the logits of two folders, of either kind; exit code 1 if they deviate")
    p.add_argument("src", metavar="SRC")
    p.add_argument("dst", metavar="DST")
    p.add_argument("--text", help="a file, or the text itself; else this script's own source")
    p.add_argument("--tokens", help="ids instead of text: 1,2,3, or random")
    p.add_argument("--length", type=int, default=256, help="tokens of the text at most [256]")
    p.add_argument("--tolerance", type=float, help="deviation allowed, as a share of the largest logit or of 1, whichever is more [1e-4 in float32; in bfloat16 that, and 3 times what bfloat16 itself costs SRC]")
    p.add_argument("--weights", choices=["raw", "ema"], default="raw", help="of checkpoints")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    p.add_argument("--kernel", choices=["auto", "triton", "torch"], default="auto", help="of delta routing; auto: triton on CUDA")
    p.add_argument("--device", default="cpu", help="cpu | cuda | cuda:1 [cpu]")
    args = parser.parse_args()
    {"import": import_, "export": export, "verify": verify}[args.command](args)


if __name__ == "__main__":
    cli(main)
