"""convert_8b.py against transformers: what it computes, what comes back, what it refuses, and what a kill or a full disk leaves.

    python -m pytest tests/test_convert.py
"""
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import convert_8b
import model
import train
from configurator import UserError, configure
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

T = 100  # positions compared: beyond the context of 64 and far beyond the 16 that the scaling starts from
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LLAMA = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=320, max_position_embeddings=64)
MODELS = {
    "llama3 scaled, untied, sharded, eps 1e-5": (LlamaForCausalLM, LlamaConfig, dict(rope_parameters=SCALING | {"rope_theta": 5e5}, rms_norm_eps=1e-5), "30KB", torch.float32),
    "llama tied, single, eps 1e-6": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=True, num_key_value_heads=4, rms_norm_eps=1e-6), None, torch.float32),
    "llama with its own head_dim, bf16": (LlamaForCausalLM, LlamaConfig, dict(head_dim=20, rms_norm_eps=1e-5), None, torch.bfloat16),
    "qwen3 tied, its own head_dim, sharded": (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=24, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}), "30KB", torch.float32),
    "qwen3 untied, scaled, eps 1e-5": (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=8, rms_norm_eps=1e-5, rope_parameters=SCALING | {"rope_theta": 1e4}), None, torch.float32),
}  # fmt: skip
FIRST, QWEN = list(MODELS)[0], list(MODELS)[3]


def drawn(kind, config, **settings):
    """A model of transformers whose every weight matters: norms far from one, projections large."""
    torch.manual_seed(0)
    m = kind(config(**LLAMA | settings))
    with torch.no_grad():
        for name, p in m.named_parameters():
            p.copy_(1 + 0.5 * torch.randn_like(p) if "norm" in name else 0.15 * torch.randn_like(p))
    return m


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """name of MODELS -> its Hugging Face folder"""
    folders = {}
    for i, (name, (kind, config, settings, shard, dtype)) in enumerate(MODELS.items()):
        folders[name] = tmp_path_factory.mktemp(f"hf{i}")
        drawn(kind, config, **settings).to(dtype).save_pretrained(folders[name], **{"max_shard_size": shard} if shard else {})
        assert (folders[name] / "model.safetensors.index.json").exists() == bool(shard)
    return folders


def convert(*argv):
    """convert_8b.py in this process; returns the exit code."""
    before, handler, sys.argv = sys.argv, signal.getsignal(signal.SIGTERM), ["convert_8b.py", *map(str, argv)]
    try:
        convert_8b.main()
        return 0
    except SystemExit as stop:
        assert str(stop).startswith("error: ")
        return 1
    finally:
        sys.argv = before
        signal.signal(signal.SIGTERM, handler)


def wrong(words, *argv):
    """The command is refused in one line that holds these words, and leaves nothing at its destination or beside it."""
    dst = Path(argv[2])
    before = sorted(p.name for p in dst.parent.iterdir())
    with pytest.raises(UserError) as error:
        convert(*argv)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), error.value
    assert sorted(p.name for p in dst.parent.iterdir()) == before


def logits_of_transformers(folder, kind, dtype=torch.float32):
    with torch.no_grad():
        return kind.from_pretrained(folder, dtype=dtype)(ids())["logits"]


def ids():
    return torch.randint(320, (2, T), generator=torch.Generator().manual_seed(1))


def our_logits(path, dtype=torch.float32):
    m, _ = train.load_model(path, "cpu", dtype)
    m.config.block_size = T
    return m.to(dtype)(ids())  # .to makes the rotary tables anew, for T positions


def stored(folder):
    return {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}


# ---- what it computes -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name, source, tmp_path):
    """Logits of the whole model equal those of transformers, with and without routing; verify says so; exported, every bit is the source's."""
    kind, _, _, _, dtype = MODELS[name]
    src, delta, plain, back = source[name], tmp_path / "delta", tmp_path / "plain", tmp_path / "back"
    convert("import", src, delta, "--route_heads=4", "--delta_blocks=2")
    convert("import", src, plain, "--residual=baseline")
    expected = logits_of_transformers(src, kind)
    assert expected.abs().max() > 1
    torch.testing.assert_close(our_logits(plain), expected, atol=1e-4, rtol=0)
    for compute in (torch.float32, torch.bfloat16):
        assert torch.equal(our_logits(plain, compute), our_logits(delta, compute))
    assert convert("verify", src, delta, f"--length={T}", "--tolerance=2e-5") == 0
    assert convert("verify", plain, delta, "--tolerance=0", "--dtype=bfloat16") == 0
    assert convert("verify", src, delta, f"--length={T}", "--dtype=bfloat16") == 0

    convert("export", plain, back)
    assert json.loads((src / "config.json").read_text()) == json.loads((back / "config.json").read_text())
    a, b = stored(src), stored(back)
    assert a.keys() == b.keys() and all(a[n].dtype == b[n].dtype == dtype and torch.equal(a[n], b[n]) for n in a)
    assert torch.equal(logits_of_transformers(back, kind), expected)
    assert type(AutoModelForCausalLM.from_pretrained(back)) is kind


def test_what_the_checkpoint_records(source, tmp_path):
    src, dst = shutil.copytree(source[FIRST], tmp_path / "src"), tmp_path / "a"
    (src / ".cache/huggingface/download").mkdir(parents=True)
    for shard in src.glob("*.safetensors"):
        (src / f".cache/huggingface/download/{shard.name}.metadata").write_text("abc\n123\n1712656091.1\n")
    convert("import", src, dst, "--route_heads=2")
    meta, shards = train.read_meta(dst), {p.name for p in src.glob("*.safetensors")}
    assert meta["step"] == 0 and meta["model_config"]["residual"] == "delta" and meta["model_config"]["route_heads"] == 2
    assert meta["model_config"]["norm_eps"] == 1e-5 and meta["model_config"]["rope_theta"] == 5e5 and meta["model_config"]["rope_scaling"] == SCALING
    assert meta["origin"]["source"] == str(src) and meta["origin"]["config"] == json.loads((src / "config.json").read_text())
    files = meta["origin"]["files"]
    assert files.keys() == shards | {"config.json", "model.safetensors.index.json"} and files["config.json"]["sha256"] == hashlib.sha256((src / "config.json").read_bytes()).hexdigest()
    assert all(files[f] == {"bytes": (src / f).stat().st_size, "hub_revision": "abc", "hub_tag": "123"} for f in shards) and meta["origin"]["tensors"] == 30
    assert meta["params"] == {"total": sum(t.numel() for t in stored(dst).values()), "routing": 6 * (3 * 32 + 1)}


def test_precision_stays_and_shards_are_cut(source, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_8b, "SHARD", 20_000)
    monkeypatch.setattr(convert_8b, "PIECE", 1_000)
    name = list(MODELS)[2]
    convert("import", source[name], tmp_path / "a", "--residual=baseline")
    files = sorted(p.name for p in (tmp_path / "a").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))] and len(files) > 2
    assert all((tmp_path / "a" / f).stat().st_size < 23_000 for f in files)
    assert all(t.dtype == torch.bfloat16 for t in stored(tmp_path / "a").values())
    torch.testing.assert_close(our_logits(tmp_path / "a"), logits_of_transformers(source[name], LlamaForCausalLM), atol=1e-4, rtol=0)
    convert("export", tmp_path / "a", tmp_path / "b", "--dtype=float32")
    assert json.loads((tmp_path / "b/config.json").read_text())["dtype"] == "float32"
    assert all(t.dtype == torch.float32 and torch.equal(t, stored(source[name])[n].float()) for n, t in stored(tmp_path / "b").items())


def test_config_as_transformers_4_writes_it(source, tmp_path):
    src = shutil.copytree(source[FIRST], tmp_path / "v4")
    c = json.loads((src / "config.json").read_text())
    new = convert_8b.trunk_config(c, "config.json")
    c |= {"rope_theta": c["rope_parameters"]["rope_theta"], "rope_scaling": SCALING, "torch_dtype": c.pop("dtype"), "_name_or_path": "x", "quantization_config": None}
    del c["rope_parameters"], c["head_dim"]
    assert convert_8b.trunk_config(c, "config.json") == new
    (src / "config.json").write_text(json.dumps(c))
    convert("import", src, tmp_path / "a")
    torch.testing.assert_close(our_logits(tmp_path / "a"), logits_of_transformers(src, LlamaForCausalLM), atol=1e-4, rtol=0)


def test_a_tied_head_that_is_stored_all_the_same(source, tmp_path):
    """As some published checkpoints have it: an equal copy is left out, another head is refused. So is the old rotary table left out."""
    src = shutil.copytree(source[list(MODELS)[1]], tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors, src / "model.safetensors")
    convert("import", src, tmp_path / "a", "--residual=baseline")
    assert set(train.read_meta(tmp_path / "a")["origin"]["left_out"]) == {"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}
    assert "head.weight" not in stored(tmp_path / "a")
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, src / "model.safetensors")
    wrong(["lm_head.weight differs", "tie_word_embeddings=false"], "import", src, tmp_path / "b")


# ---- a wrong conversion does not pass ---------------------------------------------------------------------------------------
def interleaved(x, rope):
    cos, sin = (table[:, None, :] for table in rope)
    a, b = x.float()[..., ::2], x.float()[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


@pytest.mark.parametrize("wrong_in, fails", [((torch.float32, torch.bfloat16), ["float32", "bfloat16"]), ((torch.bfloat16,), ["bfloat16"])])
def test_verify_fails_a_wrong_rotary_layout(wrong_in, fails, source, tmp_path, monkeypatch):
    """Also one that is wrong in bfloat16 alone: what bfloat16 costs is measured on the source."""
    convert("import", source[FIRST], tmp_path / "a")
    right = model.rotate
    monkeypatch.setattr(model, "rotate", lambda x, rope: (interleaved if x.dtype in wrong_in else right)(x, rope))
    for dtype in fails:
        assert convert("verify", source[FIRST], tmp_path / "a", f"--length={T}", f"--dtype={dtype}") == 1
    assert convert("verify", source[FIRST], tmp_path / "a", f"--length={T}") == ("float32" in fails)


@pytest.mark.parametrize("field, value", [("norm_eps", 1e-6), ("rope_theta", 4e5), ("rope_scaling", None), ("rope_scaling", SCALING | {"factor": 7.0}), ("n_kv_head", 1), ("head_dim", 16)])
def test_verify_fails_a_wrong_number(field, value, source, tmp_path, monkeypatch):
    if field in ("n_kv_head", "head_dim"):  # these show in the shapes
        wrong = convert_8b.trunk_config
        monkeypatch.setattr(convert_8b, "trunk_config", lambda c, where: wrong(c, where) | {field: value})
        with pytest.raises(UserError, match="contradicts it"):
            convert("import", source[FIRST], tmp_path / "a")
        return
    convert("import", source[FIRST], tmp_path / "a")
    meta = train.read_meta(tmp_path / "a")
    meta["model_config"][field] = value
    (tmp_path / "a/meta.json").write_text(json.dumps(meta))
    for dtype in ("float32", "bfloat16"):  # which alone would hide an eps: it moves the logits by 1/30 of what bfloat16 does
        assert convert("verify", source[FIRST], tmp_path / "a", f"--length={T}", f"--dtype={dtype}") == 1


@pytest.mark.parametrize("a, b", [("mlp.gate_proj", "mlp.up_proj"), ("attn.k_proj", "attn.v_proj"), ("attn.norm", "mlp.norm"), ("attn.q_norm", "attn.k_norm")])
def test_verify_fails_swapped_names(a, b, source, tmp_path, monkeypatch):
    with monkeypatch.context() as swapped:
        swapped.setattr(convert_8b, "PARTS", convert_8b.PARTS | {a: convert_8b.PARTS[b], b: convert_8b.PARTS[a]})
        convert("import", source[QWEN], tmp_path / "a")
        assert convert("verify", source[QWEN], tmp_path / "a", f"--length={T}") == 1  # with the same wrong map, too


def test_verify_fails_one_changed_bit_and_open_gates(source, tmp_path, capsys):
    convert("import", source[QWEN], tmp_path / "a")
    file = next(p for p in sorted((tmp_path / "a").glob("model*.safetensors")) if "layers.1.mlp.up_proj.weight" in load_file(p))
    tensors = load_file(file)
    tensors["layers.1.mlp.up_proj.weight"][0, 0] *= 64
    save_file(tensors, file)
    assert convert("verify", source[QWEN], tmp_path / "a") == 1
    assert "34 of 35 of the trunk's are equal" in capsys.readouterr().out
    convert("import", source[QWEN], tmp_path / "b")
    routing = load_file(tmp_path / "b" / convert_8b.ROUTING)
    routing["residual.gate"][3] = 0.01
    save_file(routing, tmp_path / "b" / convert_8b.ROUTING)
    assert convert("verify", source[QWEN], tmp_path / "b") == 1
    assert "35 of 35 of the trunk's are equal" in capsys.readouterr().out


def test_texts_to_verify_on(source, tmp_path, capsys):
    """A text may be longer than a file's name can be, and a file need not be UTF-8; the checkpoint says whose ids they are."""
    convert("import", source[FIRST], tmp_path / "a")
    meta = train.read_meta(tmp_path / "a")
    meta["data"]["tokenizer"] = "bytes"
    (tmp_path / "a/meta.json").write_text(json.dumps(meta))
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    for flags, words in ((["--text=" + "word " * 100, "--length=300"], "300 bytes tokens of the text given"), ([f"--text={tmp_path}/latin1.txt"], "bytes tokens of latin1.txt"),
                         ([], "256 bytes tokens of convert_8b.py")):  # fmt: skip
        assert convert("verify", source[FIRST], tmp_path / "a", *flags) == 0
        assert words in capsys.readouterr().out
    wrong(["--text is empty"], "verify", source[FIRST], tmp_path / "a", "--text=")


# ---- out again --------------------------------------------------------------------------------------------------------------
def test_delta_out_and_in_again(source, tmp_path):
    """transformers' Auto classes refuse an exported delta model, its class loads the trunk; imported again, nothing is lost."""
    convert("import", source[FIRST], tmp_path / "a", "--route_heads=2", "--delta_blocks=3")
    routing = {n: torch.randn_like(t) for n, t in load_file(tmp_path / "a" / convert_8b.ROUTING).items()}
    save_file(routing, tmp_path / "a" / convert_8b.ROUTING)
    convert("export", tmp_path / "a", tmp_path / "hf")
    with pytest.raises(ValueError, match="delta_routed_llama"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(logits_of_transformers(tmp_path / "hf", LlamaForCausalLM), logits_of_transformers(source[FIRST], LlamaForCausalLM))
    assert "not this model" in (tmp_path / "hf/README.md").read_text()
    wrong(["its trunk alone is another model"], "import", tmp_path / "hf", tmp_path / "c", "--residual=baseline")
    convert("import", tmp_path / "hf", tmp_path / "b")
    a, b = stored(tmp_path / "a"), stored(tmp_path / "b")
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    assert train.read_meta(tmp_path / "a")["model_config"] == train.read_meta(tmp_path / "b")["model_config"]
    assert convert("verify", tmp_path / "hf", tmp_path / "b", "--tolerance=0") == 0
    assert convert("verify", source[FIRST], tmp_path / "b") == 1


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    with open(folder / "text.jsonl", "w") as f:
        for i in range(200):
            f.write(json.dumps({"text": f"{i} " + " ".join(str(i * j % 97) for j in range(40))}) + "\n")
    subprocess.run([sys.executable, ROOT / "prepare_data.py", f"--source={folder}/text.jsonl", f"--out_dir={folder}/set", "--val_fraction=0.1", "--workers=1"], check=True, capture_output=True)
    return folder / "set"


SHORT = ["--device=cpu", "--parallel=ddp", "--fsdp_accumulate=whole", "--block_size=32", "--batch_size=4", "--global_batch_size=8", "--max_steps=3", "--save_interval=1",
         "--eval_interval=1", "--keep_checkpoints=9", "--eval_windows=2", "--log_interval=1"]  # fmt: skip


def run(*argv):
    """train.py in this process; a later flag replaces an earlier one of the same name."""
    argv = list({str(a).split("=")[0]: str(a) for a in argv}.values())
    before, handlers, sys.argv = sys.argv, [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)], ["train.py", *argv]
    try:
        train.main()
    finally:
        sys.argv = before
        for s, handler in zip((signal.SIGTERM, signal.SIGINT), handlers):
            signal.signal(s, handler)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_model_trained_here(qk_norm, dataset, tmp_path):
    """Without a base: a config.json is made, and transformers computes the same; the averaged weights have their own export."""
    flags = ["--n_layer=2", "--n_embd=32", "--n_head=4", "--n_kv_head=2", "--ffn_dim=48", "--ema_decay=0.5", f"--qk_norm={qk_norm}", f"--tie_embeddings={qk_norm}"]
    run(*SHORT, *flags, "--residual=baseline", f"--dataset={dataset}", f"--out_dir={tmp_path}/run")
    kind = Qwen3ForCausalLM if qk_norm else LlamaForCausalLM
    convert("export", tmp_path / "run", tmp_path / "raw")
    torch.testing.assert_close(our_logits(tmp_path / "run"), logits_of_transformers(tmp_path / "raw", kind), atol=1e-4, rtol=0)
    convert("export", tmp_path / "run", tmp_path / "ema", "--weights=ema", "--dtype=bfloat16")
    ema = load_file(tmp_path / "run/step_00000003/ema.safetensors")["embed.weight"]
    assert torch.equal(stored(tmp_path / "ema")["model.embed_tokens.weight"], ema.bfloat16()) and type(AutoModelForCausalLM.from_pretrained(tmp_path / "ema")) is kind


def test_what_has_no_export(dataset, tmp_path):
    run(*SHORT, "--n_layer=1", "--n_embd=32", "--n_head=4", "--ffn_dim=48", "--residual=attnres", "--max_steps=1", f"--dataset={dataset}", f"--out_dir={tmp_path}/run")
    wrong(["residual=attnres", "baseline and delta"], "export", tmp_path / "run", tmp_path / "x")
    wrong(["ema.safetensors", "--weights=raw"], "export", tmp_path / "run", tmp_path / "x", "--weights=ema")


# ---- the 8B configs, on a stand-in ------------------------------------------------------------------------------------------
def settings(file):
    cfg, config, _ = configure([str(ROOT / "config" / file)], train.TrainConfig, model.GPTConfig)
    return vars(cfg) | vars(config)


def test_the_arms_differ_in_the_residual_alone():
    plain, delta, single = (settings(f"marin_8b_{arm}.py") for arm in ("plain", "delta", "single_head"))
    assert {k for k in plain if plain[k] != delta[k]} == {"out_dir", "init_from", "residual"} and plain["route_heads"] == 8
    assert {k for k in delta if delta[k] != single[k]} == {"out_dir", "init_from", "route_heads"} and single["route_heads"] == 1
    assert plain["global_batch_size"] * plain["block_size"] == 1_048_576 and plain["learning_rate"] * plain["min_lr_ratio"] == pytest.approx(4e-6)
    cfg = train.TrainConfig(**{k: v for k, v in plain.items() if hasattr(train.TrainConfig, k)})
    assert [train.learning_rate(cfg, s) for s in (0, 499, 500)] == pytest.approx([8e-7, 4e-4, 4e-4]) and train.learning_rate(cfg, 9499) == pytest.approx(4e-6, rel=0.02)


def test_the_parameters_of_routing_wake_up_in_turn(source, dataset, tmp_path):
    """Step 1 moves every gate and nothing else of the routing, step 2 every query and null source, step 3 every key norm; the arms start from
    one loss; and the trained model remembers its base. At a rate of 1e-2: with the first rates of the warm-up, under 1e-6, a key norm at 1.0
    needs longer to move by what fp32 resolves."""
    arms = {"plain": ["--residual=baseline"], "delta": ["--route_heads=4", "--delta_blocks=2"], "single_head": ["--route_heads=1", "--delta_blocks=2"]}
    losses, flags = {}, [*SHORT, "--learning_rate=1e-2", "--warmup_steps=1", f"--dataset={dataset}"]
    for arm, own in arms.items():
        convert("import", source[FIRST], tmp_path / f"base_{arm}", *own)
        run(ROOT / f"config/marin_8b_{arm}.py", *flags, *own, f"--init_from={tmp_path}/base_{arm}", f"--out_dir={tmp_path}/{arm}")
        events = [json.loads(line) for line in (tmp_path / arm / "log.jsonl").read_text().splitlines()]
        losses[arm] = [e["loss"] for e in events if e["event"] == "train"]
        if arm == "plain":
            continue
        null = [e["null_source_grad_norm"] for e in events if e["event"] == "train"]
        total = [e["grad_norm"] for e in events if e["event"] == "train"]
        assert null[0] == 0 < null[1] and all(n < t for n, t in zip(null, total))
        states = [load_file(tmp_path / f"base_{arm}" / convert_8b.ROUTING), *(load_file(tmp_path / arm / f"step_0000000{i}/model.safetensors") for i in (1, 2, 3))]
        for step, names in enumerate([{"gate"}, {"gate", "query", "null_source"}, {"gate", "query", "null_source", "key_norm"}], 1):
            for name in ("gate", "query", "null_source", "key_norm"):
                moved = (states[step][f"residual.{name}"] != states[step - 1][f"residual.{name}"]).view(6, -1).any(1)
                assert moved.all() if name in names else not moved.any(), (arm, step, name)
    assert losses["plain"][0] == losses["delta"][0] == losses["single_head"][0]
    assert train.read_meta(tmp_path / "delta/step_00000003")["origin"]["source"] == str(source[FIRST])
    convert("export", tmp_path / "plain", tmp_path / "hf", "--weights=ema", "--dtype=bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.rope_parameters == SCALING | {"rope_theta": 5e5}


def test_init_from_another_model(source, dataset, tmp_path):
    convert("import", source[FIRST], tmp_path / "a", "--route_heads=4")
    flags = [ROOT / "config/marin_8b_delta.py", *SHORT, f"--dataset={dataset}", f"--init_from={tmp_path}/a", f"--out_dir={tmp_path}/run"]
    with pytest.raises(UserError, match=r"is another model: route_heads=8 \(.*marin_8b_delta.py\), 4 in"):
        run(*flags)
    with pytest.raises(UserError, match=r"norm_eps=1e-06 \(flag\), 1e-05 in"):
        run(*flags, "--route_heads=4", "--norm_eps=1e-6")
    meta = train.read_meta(tmp_path / "a")
    meta["data"]["tokenizer"] = "llama3"
    (tmp_path / "a/meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="ids of tokenizer llama3.*--tokenizer=llama3"):
        run(*flags, "--route_heads=4")
    assert not (tmp_path / "run").exists()


# ---- mistakes and damage ------------------------------------------------------------------------------------------------------
def edit(**changes):
    """A damage: these keys of config.json changed; None takes one out."""

    def damage(src):
        c = json.loads((src / "config.json").read_text()) | changes
        (src / "config.json").write_text(json.dumps({k: v for k, v in c.items() if v is not None}))

    return damage


def reindexed(change):
    def damage(src):
        index = json.loads((src / "model.safetensors.index.json").read_text())
        change(index["weight_map"])
        (src / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


def retensored(change):
    """A damage: the tensors changed, and written as a single file."""

    def damage(src):
        tensors = stored(src)
        for p in src.glob("model*"):
            p.unlink()
        change(tensors)
        save_file(tensors, src / "model.safetensors")

    return damage


def swap(weight_map):
    a, b = "model.embed_tokens.weight", "lm_head.weight"
    assert weight_map[a] != weight_map[b]
    weight_map[a], weight_map[b] = weight_map[b], weight_map[a]


SHARD1 = "model-00001-of-0000"
HEAD, Q = "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"
DAMAGES = [
    (lambda src: next(src.glob(SHARD1 + "*")).unlink(), [SHARD1, "missing"]),
    (lambda src: os.truncate(next(src.glob(SHARD1 + "*")), 9_000), [SHARD1, "cut short"]),
    (lambda src: shutil.copy(next(src.glob(SHARD1 + "*")), src / "model-00009-of-00009.safetensors"), ["model-00009-of-00009.safetensors", "belongs to no model"]),
    (reindexed(swap), ["does not describe its files", SHARD1]),
    (reindexed(lambda m: m.pop(Q)), ["does not describe its files", Q]),
    (reindexed(lambda m: m.update({"ghost.weight": m[Q]})), ["lacks ['ghost.weight']"]),
    (reindexed(lambda m: m.update({Q: "../elsewhere.safetensors"})), ["no weight_map from tensors to files beside it"]),
    (lambda src: (src / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}'), ["no weight_map from tensors to files beside it"]),
    (lambda src: (src / "model.safetensors.index.json").write_text("{"), ["index.json cannot be read"]),
    (lambda src: (src / "config.json").write_text("[]"), ["config.json cannot be read"]),
    (lambda src: [p.rename(p.with_suffix(".bin")) for p in src.glob("model*")], ["neither model.safetensors nor its index", "pickled"]),
    (retensored(lambda t: t.pop(HEAD)), [HEAD, "is missing"]),
    (retensored(lambda t: t.pop(Q)), [Q, "is missing"]),
    (retensored(lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(32)})), ["q_proj.bias", "is not part of such a model"]),
    (retensored(lambda t: t.update({Q: t[Q].to(torch.int8)})), [Q, "I8", "precision that is not understood"]),
    (retensored(lambda t: t.update({Q: t[Q][:16].clone()})), [f"{Q} [16, 32] (should be [32, 32])"]),
    (edit(hidden_size=64), ["contradicts it", "(should be [320, 64])"]),
    (edit(num_key_value_heads=None), ["k_proj.weight [16, 32] (should be [32, 32])"]),
    (edit(num_hidden_layers=2), ["model.layers.2", "is not part of such a model"]),
    (edit(num_hidden_layers=4), ["model.layers.3", "and 4 more is missing"]),
    (edit(vocab_size=321), ["(should be [321, 32])"]),
    (edit(num_attention_heads=3), ["n_head=3 is not a multiple of n_kv_head=2"]),
    (edit(hidden_size=None), ["has no hidden_size"]),
    (edit(rms_norm_eps=None), ["has no rms_norm_eps"]),
    (edit(num_attention_heads=0), ["num_attention_heads=0", "positive"]),
    (edit(hidden_size="32"), ['hidden_size="32"', "int"]),
    (edit(tie_word_embeddings=1), ["tie_word_embeddings=1", "bool"]),
    (edit(attention_bias=True), ["attention_bias=true is not understood"]),
    (edit(mlp_bias=True), ["mlp_bias=true"]),
    (edit(hidden_act="gelu"), ['hidden_act="gelu"', '"silu"']),
    (edit(use_sliding_window=True, sliding_window=16), ["use_sliding_window=true"]),
    (edit(sliding_window=16), ["sliding_window=16"]),
    (edit(layer_types=5), ["layer_types", "list"]),
    (edit(rms_norm_eps=float("inf")), ["rms_norm_eps", "finite"]),
    (edit(layer_types=["full_attention", "sliding_attention", "full_attention"]), ["layer_types", "full"]),
    (edit(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}), ["rope_scaling", "linear", "rope_type"]),
    (edit(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}), ["rope_parameters", "yarn"]),
    (edit(rope_parameters=SCALING | {"rope_theta": 1e4, "attention_factor": 2.0}), ["attention_factor"]),
    (edit(rope_parameters={k: v for k, v in SCALING.items() if k != "factor"}), ["llama3 needs factor"]),
    (edit(rope_parameters=SCALING | {"rope_theta": "5e5"}), ["rope_theta should be a positive number"]),
    (edit(rope_theta=1e4), ["rope_theta=10000.0", "500000.0"]),
    (edit(model_type="mistral"), ['model_type="mistral"', "llama, qwen3"]),
    (edit(architectures=["LlamaForSequenceClassification"]), ["LlamaForSequenceClassification", "LlamaForCausalLM"]),
    (edit(quantization_config={"bits": 4}), ["quantization_config"]),
    (edit(embedding_multiplier=12.0), ["embedding_multiplier=12.0"]),
]  # fmt: skip


@pytest.mark.parametrize("damage, words", DAMAGES)
def test_damaged_sources(damage, words, source, tmp_path):
    src = shutil.copytree(source[FIRST], tmp_path / "src")
    damage(src)
    wrong(words, "import", src, tmp_path / "dst")


def test_mistakes(source, tmp_path, monkeypatch):
    src = source[FIRST]
    wrong(["n_embd=32", "route_heads=5"], "import", src, tmp_path / "a", "--route_heads=5")
    wrong(["leave --route_heads"], "import", src, tmp_path / "a", "--residual=baseline", "--route_heads=4")
    wrong(["no config.json"], "import", tmp_path, tmp_path / "a")
    wrong(["invalid choice: 'mhar'"], "import", src, tmp_path / "a", "--residual=mhar")
    wrong(["not a checkpoint"], "export", src, tmp_path / "a")
    convert("import", src, tmp_path / "a")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*")}
    wrong(["exists already"], "import", src, tmp_path / "a")
    wrong(["exists already"], "export", tmp_path / "a", tmp_path / "a")
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*")}
    wrong(["neither a Hugging Face folder"], "verify", src, tmp_path / "b")
    wrong(["from 0 to 319"], "verify", src, tmp_path / "a", "--tokens=1,320")
    wrong(["separated by commas"], "verify", src, tmp_path / "a", "--tokens=one")
    wrong(["no tokenizer is known", "--tokens="], "verify", src, tmp_path / "a", "--text=hello")
    wrong(["--device=foo is not a device"], "verify", src, tmp_path / "a", "--device=foo")
    wrong(["kernel=triton cannot run", "kernel=torch"], "verify", src, tmp_path / "a", "--kernel=triton")
    with monkeypatch.context() as two:
        two.setattr(torch.cuda, "is_available", lambda: True)
        two.setattr(torch.cuda, "device_count", lambda: 2)
        wrong(["--device=cuda:7", "2 GPUs", "cuda:0..1"], "verify", src, tmp_path / "a", "--device=cuda:7")
    assert convert("verify", src, tmp_path / "a", "--tokens=5,6,7") == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        convert("import", src, tmp_path / "file/b")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    wrong(["needs 0.0 GB", "make room"], "import", src, tmp_path / "c")


def test_a_disk_that_fills_up(source, tmp_path):
    """Files of over 10 kB cannot be written: one line, exit code 2, nothing is left."""
    script = f"import resource, sys; sys.path.insert(0, {str(ROOT)!r}); resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\nimport convert_8b; convert_8b.cli(convert_8b.main)"
    done = subprocess.run([sys.executable, "-c", script, "import", source[QWEN], tmp_path / "a"], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "could not be written" in last and "Traceback" not in done.stderr and not list(tmp_path.iterdir())


SLOW = f"""import sys, time
sys.path.insert(0, {str(ROOT)!r})
import convert_8b
load = convert_8b.Stored.load
convert_8b.Stored.load = lambda self: (time.sleep(0.2), print(self.name, flush=True), load(self))[2]
convert_8b.cli(convert_8b.main)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killed(how, source, tmp_path):
    """Whatever stops it, no folder looks finished; stopped gently it leaves nothing, killed it leaves a part that the next call names."""
    process = subprocess.Popen([sys.executable, "-c", SLOW, "import", source[FIRST], tmp_path / "a"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # a background shell ignores it
    for _ in range(3):
        assert process.stdout.readline()
    process.send_signal(how)
    process.communicate()
    assert process.returncode != 0 and not (tmp_path / "a").exists()
    if how != signal.SIGKILL:
        assert not list(tmp_path.iterdir())
        return
    assert [p.name for p in tmp_path.iterdir()] == [".a.part"] and not (tmp_path / ".a.part/meta.json").exists()
    wrong([".a.part", "remove it"], "import", source[FIRST], tmp_path / "a")
    shutil.rmtree(tmp_path / ".a.part")
    convert("import", source[FIRST], tmp_path / "a")
    assert convert("verify", source[FIRST], tmp_path / "a") == 0
