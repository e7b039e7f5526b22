"""convert_8b.py against transformers: logits, what comes back, what is refused, what a stop leaves."""

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from configurator import UserError, configure

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM

import convert_8b
import data
import model
import train
from checkpoint import load_model, read_meta

ROOT = Path(__file__).parent.parent
SHAPE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=320, max_position_embeddings=100)  # fmt: skip
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}  # fmt: skip
SCALED = dict(rope_parameters=SCALING | {"rope_theta": 5e5}, rms_norm_eps=1e-5)
TIED = dict(tie_word_embeddings=True)
MODELS = {  # class, settings, size of a shard, precision
    "llama scaled": (LlamaForCausalLM, SCALED, "30KB", "float32"),
    "llama tied": (LlamaForCausalLM, TIED | dict(num_key_value_heads=4, vocab_size=50304), "1GB", "float16"),
    "llama wide": (LlamaForCausalLM, dict(head_dim=20), "1GB", "bfloat16"),
    "qwen tied": (Qwen3ForCausalLM, TIED | dict(head_dim=24), "30KB", "float32"),
    "qwen scaled": (Qwen3ForCausalLM, SCALED | dict(head_dim=8), "1GB", "float32"),
}  # fmt: skip


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """name in MODELS -> its Hugging Face folder. Norms and projections are large: every weight matters."""
    folders = {}
    for name, (kind, settings, shard, dtype) in MODELS.items():
        torch.manual_seed(0)
        m = kind(kind.config_class(**SHAPE | settings))
        with torch.no_grad():
            for key, p in m.named_parameters():
                p.copy_(1 + 0.5 * torch.randn_like(p) if "norm" in key else 0.15 * torch.randn_like(p))
        folders[name] = tmp_path_factory.mktemp("hf")
        m.to(getattr(torch, dtype)).save_pretrained(folders[name], max_shard_size=shard)
        (folders[name] / "tokenizer.json").write_text("{}")
    return folders


@pytest.fixture(scope="session")
def imported(source, tmp_path_factory):
    """name in MODELS -> (its checkpoint with delta routing, its checkpoint without)"""
    folder = tmp_path_factory.mktemp("ckpt")
    for name, src in source.items():
        convert("import", src, folder / name / "delta", "--route_heads=4", "--delta_blocks=2")
        convert("import", src, folder / name / "plain", "--residual=baseline")
    return {name: (folder / name / "delta", folder / name / "plain") for name in source}


def convert(*argv):
    """convert_8b.py in this process; its exit code."""
    before, sys.argv = sys.argv, ["convert_8b.py", *map(str, argv)]
    try:
        convert_8b.main()
        return 0
    except SystemExit as stop:
        assert str(stop).startswith("error: ")
        return 1
    finally:
        sys.argv = before


def wrong(words, *argv):
    """The command is refused in one line with these words and at most five tensors, and leaves nothing."""
    before = sorted(Path(argv[2]).parent.iterdir())
    with pytest.raises(UserError) as error:
        convert(*argv)
    said = str(error.value)
    assert words in said
    assert "\n" not in said and said.count(".weight") <= 5
    assert sorted(Path(argv[2]).parent.iterdir()) == before


def stored(folder):
    return {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}


def same(a, b):
    """Two {name: tensor} with the same names, precisions and bits."""
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def logits(path):
    """[1, T, V] in float32, by this repository where it is a checkpoint and else by transformers."""
    ids = torch.randint(320, (1, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if (path / "meta.json").exists():
            return load_model(path, torch.device("cpu"))[0](ids)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits


def changed(ckpt, path, tensors=None, **config):
    """A copy of a checkpoint with other tensors, and other numbers in its model_config."""
    shutil.copytree(ckpt, path, dirs_exist_ok=True)
    meta = read_meta(path)[1]
    meta["model_config"] |= config
    (path / "meta.json").write_text(json.dumps(meta))
    if tensors:
        save_file(tensors, path / "model.safetensors")
    return path


# ----------------------------------------------------------------------------------------------------------
# there and back
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name, source, imported, tmp_path, capsys):
    """The logits are transformers' own, with and without routing; an export has every bit of the source."""
    src, (delta, plain), expected = source[name], imported[name], logits(source[name])
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits(plain), expected, atol=1e-5, rtol=0)
    assert torch.equal(logits(delta), logits(plain))
    assert {str(t.dtype) for t in stored(plain).values()} == {f"torch.{MODELS[name][3]}"}
    for flags in ([], ["--dtype=bfloat16"]):
        capsys.readouterr()
        assert convert("verify", src, delta, *flags) == 0
        assert "6 of 6 gates closed, logits moved by 0\n" in capsys.readouterr().out

    convert("export", plain, tmp_path / "back")
    assert same(stored(src), stored(tmp_path / "back"))
    for file in (tmp_path / "back").iterdir():  # others may read what safetensors keeps to the owner
        assert file.stat().st_mode == (tmp_path / "back/config.json").stat().st_mode
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (src / file).read_text() == (tmp_path / "back" / file).read_text()
    assert torch.equal(logits(tmp_path / "back"), expected)


def test_what_the_checkpoint_records(source, imported):
    """No tokenizer is guessed from 50,304 rows, which are gpt2's: the model's own is where it came from."""
    for name, (delta, _) in imported.items():
        meta = read_meta(delta)[1]
        assert meta["data"] == {"dataset": None, "tokenizer": None}
        configs = {
            f: json.loads((source[name] / f"{f}.json").read_text()) for f in ("config", "generation_config")
        }
        assert meta["origin"] == {"source": str(source[name])} | configs
    meta = read_meta(imported["llama scaled"][0])[1]
    expected = {"residual": "delta", "route_heads": 4, "delta_blocks": 2, "norm_eps": 1e-5, "rope_theta": 5e5}
    assert meta["model_config"] | expected | {"rope_scaling": SCALING} == meta["model_config"]
    assert meta["params"]["routing"] == 6 * (3 * 32 + 1)


def test_shards(imported, tmp_path, monkeypatch):
    """Each file is written by itself; load_model and transformers find them by the index."""
    split, sizes = convert_8b.split_torch_state_dict_into_shards, []

    def save(shard, *args):
        sizes.append(sum(t.nbytes for t in shard.values()))
        save_file(shard, *args)

    small = lambda tensors, max_shard_size: split(tensors, max_shard_size="30KB")
    monkeypatch.setattr(convert_8b, "save_file", save)
    monkeypatch.setattr(convert_8b, "split_torch_state_dict_into_shards", small)
    delta, plain = imported["llama wide"]
    hf, ckpt = tmp_path / "hf", tmp_path / "ckpt"
    convert("export", plain, hf, "--dtype=float32")
    assert len(sizes) > 2 and max(sizes) <= 60_000  # planned in bfloat16
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes) and index["weight_map"].keys() == stored(hf).keys()
    assert json.loads((hf / "config.json").read_text())["dtype"] == "float32"
    assert torch.equal(logits(hf), logits(plain))
    convert("import", hf, ckpt, "--route_heads=4", "--delta_blocks=2")
    assert len(list(ckpt.glob("*.safetensors"))) > 2 and torch.equal(logits(ckpt), logits(delta))


@pytest.mark.parametrize("dtype, weight", [("float16", 1e5), ("float16", -7e4), ("bfloat16", 3.4e38)])
def test_a_weight_too_large_for_the_precision(dtype, weight, imported, tmp_path):
    tensors = load_file(imported["qwen scaled"][1] / "model.safetensors")
    tensors["layers.1.mlp.up_proj.weight"][3, 5] = weight
    ckpt = changed(imported["qwen scaled"][1], tmp_path / "a", tensors)
    words = (
        f"model.layers.1.mlp.up_proj.weight has a weight of {abs(weight):.4g}, too large for torch.{dtype}"
    )
    wrong(words, "export", ckpt, tmp_path / "b", f"--dtype={dtype}")
    assert convert("export", ckpt, tmp_path / "b", "--dtype=float32") == 0


@pytest.mark.parametrize("recursive", [False, True])
def test_routing_out_and_in_again(recursive, imported, tmp_path):
    """transformers refuses an exported delta model; imported again it has every bit, setting and logit."""
    tensors = stored(imported["llama wide"][0])
    torch.manual_seed(0)
    tensors |= {name: torch.randn_like(t) for name, t in tensors.items() if name.startswith("residual.")}
    ckpt = changed(imported["llama wide"][0], tmp_path / "a", tensors, delta_recursive=recursive)
    hf, again = tmp_path / "hf", tmp_path / "again"
    convert("export", ckpt, hf)
    with pytest.raises(ValueError, match="delta_routed"):
        AutoModelForCausalLM.from_pretrained(hf)
    for flag in ("--residual=baseline", "--route_heads=8"):
        wrong(f"routing of its own: omit {flag.split('=')[0]}", "import", hf, again, flag)
    convert("import", hf, again)
    assert same(tensors, stored(again)) and torch.equal(logits(ckpt), logits(again))
    assert (logits(ckpt) - logits(imported["llama wide"][0])).abs().max() > 0.1
    before, after = read_meta(ckpt)[1], read_meta(again)[1]
    assert before["model_config"] == after["model_config"] and before["params"] == after["params"]
    assert before["origin"]["config"] == after["origin"]["config"]
    convert("export", again, tmp_path / "hf2")
    assert (tmp_path / "hf2/config.json").read_text() == (hf / "config.json").read_text()
    wrong("is not the plain model", "verify", hf, again)

    # beside a trunk in bfloat16, the routing keeps its precision
    convert("export", ckpt, tmp_path / "half", "--dtype=bfloat16")
    convert("import", tmp_path / "half", tmp_path / "back")
    for dtype in (None, torch.bfloat16):
        loaded = load_model(tmp_path / "back", torch.device("cpu"), dtype=dtype)[0].state_dict()
        for name in tensors:
            exact = dtype is None or "proj" not in name and "embed" not in name and "head.w" not in name
            want = tensors[name] if name.startswith("residual.") else tensors[name].bfloat16().float()
            assert torch.equal(loaded[name].float(), want) and exact == (loaded[name].dtype == torch.float32)


def test_config_as_transformers_4_writes_it(source, tmp_path):
    src = shutil.copytree(source["llama scaled"], tmp_path / "v4")
    c = json.loads((src / "config.json").read_text())
    c |= {"rope_theta": c.pop("rope_parameters")["rope_theta"], "torch_dtype": c.pop("dtype")}
    c |= {"rope_scaling": SCALING, "head_dim": None}
    (src / "config.json").write_text(json.dumps(c))
    assert convert_8b.read_config(src)[1] == convert_8b.read_config(source["llama scaled"])[1]
    convert("import", src, tmp_path / "a", "--residual=baseline")
    convert("export", tmp_path / "a", tmp_path / "b", "--dtype=bfloat16")
    assert json.loads((tmp_path / "b/config.json").read_text()) == c | {"torch_dtype": "bfloat16"}


def test_a_tied_head_that_is_stored_all_the_same(source, imported, tmp_path):
    """As in some published models: an equal copy is dropped, as old rotary tables are; another is refused."""
    src = shutil.copytree(source["llama tied"], tmp_path / "src")
    tensors = stored(src)
    tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors, src / "model.safetensors")
    convert("import", src, tmp_path / "a", "--residual=baseline")
    assert same(stored(tmp_path / "a"), stored(imported["llama tied"][1]))
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, src / "model.safetensors")
    wrong("lm_head.weight to the embedding, but they differ", "import", src, tmp_path / "b")


# ----------------------------------------------------------------------------------------------------------
# verify fails what is wrong
def test_verify_fails_wrong_numbers(source, imported, tmp_path):
    factor = SCALING | {"factor": 7.0}
    for numbers in (
        {"norm_eps": 1e-6},
        {"rope_theta": 4e5},
        {"rope_scaling": None},
        {"rope_scaling": factor},
    ):
        ckpt = changed(imported["llama scaled"][0], tmp_path / "a", **numbers)
        assert convert("verify", source["llama scaled"], ckpt) == 1, numbers


def test_verify_fails_wrong_tensors(source, imported, tmp_path, capsys):
    src, delta = source["qwen scaled"], imported["qwen scaled"][0]
    right, up, a = stored(delta), "layers.1.mlp.up_proj.weight", tmp_path / "a"
    for one, other in (("mlp.gate", "mlp.up"), ("attn.norm", "mlp.norm"), ("q_norm", "k_norm")):
        swapped = {n.replace(one, "?").replace(other, one).replace("?", other): t for n, t in right.items()}
        assert convert("verify", src, changed(delta, a, swapped)) == 1, one
    assert convert("verify", src, changed(delta, a, right | {up: right[up] * 1.01})) == 1
    for flags in ([], ["--dtype=bfloat16"]):
        assert convert("verify", src, changed(delta, a, right | {up: right[up] * float("nan")}), *flags) == 1
    changed(delta, a, right | {"residual.gate": torch.tensor([0, 0, 0, 0.01, 0, 0])})
    assert convert("verify", src, a) == 1
    assert "5 of 6 gates closed" in capsys.readouterr().out
    assert convert("verify", src, a, "--tolerance=1") == 0


# ----------------------------------------------------------------------------------------------------------
# mistakes and damage
def edit(**changes):
    """A damage: fields of config.json changed."""

    def damage(src):
        content = json.loads((src / "config.json").read_text()) | changes
        (src / "config.json").write_text(json.dumps(content))

    return damage


def without(part, **more):
    """A damage: no tensors whose names contain `part`, but these; in a single file."""

    def damage(src):
        tensors = {name: t for name, t in stored(src).items() if part not in name} | more
        for file in src.glob("model*"):
            file.unlink()
        save_file(tensors, src / "model.safetensors")

    return damage


SHARD = "model-00001-of-00006.safetensors"
Q, BIAS = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.bias"
SLIDING = dict(model_type="qwen3", use_sliding_window=True, sliding_window=16)
LAYERS = dict(model_type="qwen3", layer_types=["full_attention", "full_attention", "sliding_attention"])
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
DAMAGES = [
    (lambda src: (src / SHARD).unlink(), f"{SHARD} is missing"),
    (lambda src: os.truncate(src / SHARD, 9_000), f"{SHARD} is missing or damaged"),
    (lambda src: [file.unlink() for file in src.glob("model*")], "model.safetensors is missing"),
    (lambda src: (src / "config.json").unlink(), "`hf download NAME"),
    (without("lm_head"), "missing lm_head.weight"),
    (without("layers.2"), "missing model.layers.2.input_layernorm.weight, model.layers.2."),
    (without("nothing", **{BIAS: torch.ones(32)}), f"unexpected {BIAS}"),
    (without("nothing", **{Q: torch.ones(16, 32)}), f"of another shape {Q}"),
    (edit(vocab_size=321), "of another shape lm_head.weight, model.embed_tokens.weight"),
    (edit(num_hidden_layers=2), "unexpected model.layers.2.input_layernorm.weight"),
    (edit(attention_bias=True), "attention_bias=True"),
    (edit(mlp_bias=True), "mlp_bias=True"),
    (edit(hidden_act="gelu"), "hidden_act=gelu cannot be converted, only ['silu'] can"),
    (edit(sliding_window=16), "sliding_window=16"),
    (edit(**SLIDING), "sliding_window=16"),
    (edit(**LAYERS), "layer_types="),
    (edit(rope_parameters=YARN), "rope_type=yarn"),
    (edit(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}), "rope_type=linear"),
    (edit(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    (edit(model_type="mistral"), "model_type=mistral cannot be converted, only llama and qwen3 can"),
]  # fmt: skip


@pytest.mark.parametrize("damage, words", DAMAGES)
def test_damaged_sources(damage, words, source, tmp_path):
    src = shutil.copytree(source["llama scaled"], tmp_path / "src")
    damage(src)
    wrong(words, "import", src, tmp_path / "dst")


def test_mistakes(source, imported, tmp_path, monkeypatch):
    src, (delta, plain), new = source["llama scaled"], imported["llama scaled"], tmp_path / "new"
    wrong("route_heads=5", "import", src, new, "--route_heads=5")
    wrong("invalid choice: 'mhar'", "import", src, new, "--residual=mhar")
    wrong("not a checkpoint", "export", src, new)
    wrong("ema.safetensors is missing", "export", plain, new, "--weights=ema")
    wrong("is not the plain model", "verify", source["llama tied"], delta)
    wrong("exists already", "import", src, delta)
    wrong("exists already", "export", plain, delta)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        convert("import", src, tmp_path / "file/new")

    # other residuals, and models that were not imported, have no export
    wrong("only a model imported", "export", changed(plain, tmp_path / "a", residual="mhar"), new)
    meta = read_meta(plain)[1] | {"origin": None}
    (changed(plain, tmp_path / "b") / "meta.json").write_text(json.dumps(meta))
    wrong("only a model imported", "export", tmp_path / "b", new)

    # export alone does without transformers
    monkeypatch.setitem(sys.modules, "transformers", None)
    for argv in (["import", src, new], ["verify", src, plain]):
        wrong("pip install 'transformers>=5'", *argv)
    assert convert("export", plain, new) == 0


def test_a_stop_leaves_nothing(source, tmp_path, monkeypatch):
    """Ctrl-C and a full disk, amid the tensors."""
    src = source["llama scaled"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # bytes of a file
    try:
        wrong("cannot be written", "import", src, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def stop(*args):
        save_file(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_8b, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        convert("import", src, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_kill_9(imported, tmp_path):
    """No folder looks finished, and the part that is left is named."""
    script = """import convert_8b, time
convert_8b.os.sync = lambda: (print(flush=True), time.sleep(60))
convert_8b.main()"""
    plain = imported["llama scaled"][1]
    command = [sys.executable, "-c", script, "export", plain, tmp_path / "a"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout.readline()
    process.kill()
    process.communicate()
    assert [p.name for p in tmp_path.iterdir()] == [".a.part"]
    wrong(".a.part exists already: give another DST, or remove it", "export", plain, tmp_path / "a")


# ----------------------------------------------------------------------------------------------------------
# training what was imported
def test_the_8b_configs_differ_in_the_residual_alone():
    files = [str(ROOT / f"config/marin_8b_{arm}.py") for arm in ("plain", "delta", "single_head")]
    configs = [configure([file], train.TrainConfig, model.GPTConfig) for file in files]
    plain, delta, single = (asdict(cfg) | asdict(config) for cfg, config, _ in configs)
    assert {k for k in plain if plain[k] != delta[k]} == {"out_dir", "init_from", "residual"}
    assert {k for k in delta if delta[k] != single[k]} == {"out_dir", "init_from", "route_heads"}


@pytest.mark.parametrize("arm", ["plain", "delta"])
def test_trained_and_exported(arm, source, tmp_path, monkeypatch):
    """Routing wakes up in turn: gates in step 1, queries and null sources in step 2, key norms in step 3. The
    run's checkpoints remember their origin, and its averaged weights can be exported."""
    tokens = np.random.default_rng(0).integers(0, 257, 2000).astype("<u4")
    header = {"tokens": 2000, "vocab": 320, "largest_id": 256, "tokenizer": "bytes", "sha256": "", "eot": 256}
    for split in ("train", "val"):
        (tmp_path / f"{split}.bin").write_bytes(data.pack_header(header) + tokens.tobytes())
    base, run, hf = tmp_path / "base", tmp_path / "run", tmp_path / "hf"
    flags = {"plain": ["--residual=baseline"], "delta": ["--route_heads=4", "--delta_blocks=2"]}[arm]
    convert("import", source["llama scaled"], base, *flags)
    flags += f"--init_from={base} --out_dir={run} --dataset={tmp_path}".split()
    flags += """--device=cpu --parallel=ddp --block_size=32 --batch_size=4 --global_batch_size=8 --max_steps=3
    --warmup_steps=1 --learning_rate=1e-2 --save_interval=1 --keep_checkpoints=9 --eval_windows=2
    --log_interval=1""".split()
    monkeypatch.setattr(sys, "argv", ["train.py", f"{ROOT}/config/marin_8b_{arm}.py", *flags])
    monkeypatch.setattr("signal.signal", lambda *args: None)
    train.main()

    assert read_meta(run)[1]["origin"] == read_meta(base)[1]["origin"]
    states = [stored(base), *(load_file(file) for file in sorted(run.glob("step_*/model.safetensors")))]
    wakes = {"gate": 1, "query": 2, "null_source": 2, "key_norm": 3} if arm == "delta" else {}
    for name, first in wakes.items():
        tensors = [state[f"residual.{name}"].view(6, -1) for state in states]
        for step in (1, 2, 3):
            moved = (tensors[step] != tensors[step - 1]).any(1)
            assert moved.all() if step >= first else not moved.any(), (name, step)

    convert("export", run, hf, "--weights=ema", "--dtype=bfloat16")
    ema = load_file(run / "step_00000003/ema.safetensors")
    assert torch.equal(stored(hf)["model.norm.weight"], ema["norm.weight"].bfloat16())
    if arm == "plain":
        assert json.loads((hf / "config.json").read_text())["dtype"] == "bfloat16"
        assert convert("verify", hf, run, "--weights=ema", "--tolerance=0.05") == 0
