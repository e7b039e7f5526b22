"""The model against what is known of it: parameter counts, transformers' Qwen3, the identities of every residual method.

    python -m pytest tests/test_model.py
"""
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from model import GPT, GPTConfig, choose_kernel, peak_flops, rope_tables
from train import TrainConfig, parameter_groups

METHODS = {
    "baseline": {}, "hc static": dict(hc_dynamic=False), "hc": {}, "attnres": {}, "mhar": {}, "delta": {}, "delta recursive": dict(delta_recursive=True),
}  # fmt: skip


def tiny(method="mhar", seed=1, **changes):
    shape = dict(block_size=24, vocab_size=50, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=48, route_heads=4, hc_streams=4, delta_blocks=2)
    return GPT(GPTConfig(**shape | METHODS[method] | dict(residual=method.split()[0]) | changes), seed=seed)


def tokens(B=2, T=24, V=50, seed=0):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


def scramble(module, std=0.3, seed=5):
    """Random values for every parameter of a module: a state that training could reach, with nothing at its neutral start."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.empty(p.shape).normal_(0, std, generator=g))


# ---- counts -----------------------------------------------------------------------------------------------------------
SCALES = {
    "100m": (dict(n_embd=512, n_layer=12, n_head=8, n_kv_head=4, ffn_dim=1536), 115_554_304),
    "350m": (dict(n_embd=1024, n_layer=24, n_head=16, n_kv_head=8, ffn_dim=4096), 533_123_072),
    "1b": (dict(n_embd=1280, n_layer=36, n_head=16, n_kv_head=8, ffn_dim=5120), 1_079_313_280),
    "8b": (dict(n_embd=4096, n_layer=32, n_head=32, n_kv_head=8, ffn_dim=14336, vocab_size=128_256, tie_embeddings=False, qk_norm=False), 8_030_261_248),
}
ADDED = {
    "100m": {"attnres": 25_600, "mhar": 25_600, "hc static": 576, "hc": 86_640, "delta": 36_888},
    "350m": {"attnres": 100_352, "mhar": 100_352, "hc static": 1_152, "hc": 345_312, "delta": 147_504},
    "1b": {"attnres": 186_880, "mhar": 186_880, "hc static": 1_728, "hc": 646_992, "delta": 276_552},
    "8b": {"delta": 786_496},
}


@pytest.mark.parametrize("scale", SCALES)
def test_parameter_counts(scale):
    shape, baseline = SCALES[scale]
    for method, added in {"baseline": 0, **ADDED[scale]}.items():
        with torch.device("meta"):
            model = GPT(GPTConfig(**dict(vocab_size=151_936, residual=method.split()[0]) | shape | METHODS[method]))
        assert model.parameter_counts() == {"total": baseline + added, "routing": added}, method


def test_flops():
    """Against the arithmetic by hand at 100M, T = 2048: 3 (2 x 37.75M projections + 2 x 151,936 x 512 + 2 x 12 x 2048 x 512)."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=151_936, residual="baseline", **SCALES["100m"][0]))
        routed = GPT(GPTConfig(vocab_size=151_936, residual="mhar", **SCALES["100m"][0]))
    assert model.flops_per_token(2048) == 3 * (2 * 12 * (512 * (512 + 256 + 256 + 512) + 3 * 512 * 1536) + 2 * 151_936 * 512 + 2 * 12 * 2048 * 512)
    assert routed.flops_per_token(2048) - model.flops_per_token(2048) == 3 * 4 * 512 * (25 * 26 // 2)


def test_unknown_device_has_no_peak(monkeypatch):
    for name, peak in {"NVIDIA H200": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA RTX A4000": None, "NVIDIA GB200": 2500e12}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops("cuda:0") == peak, name
    assert peak_flops("cpu") is None


# ---- the trunk --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_dim", [8, 32])
def test_equals_qwen3(tied, head_dim):
    """Equal weights, equal logits at every position of 300, with transformers' Qwen3: layout, order of norms, GQA, rotary far from 0."""
    transformers = pytest.importorskip("transformers")
    ours = tiny("baseline", block_size=300, head_dim=head_dim, tie_embeddings=tied, vocab_size=128, n_layer=2, rope_theta=1e4)
    scramble(ours, 0.1)
    c = ours.config
    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.ffn_dim, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
            num_key_value_heads=c.n_kv_head, head_dim=c.head_dim, max_position_embeddings=600, rms_norm_eps=c.norm_eps, tie_word_embeddings=tied,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4}, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    state = {"model.embed_tokens.weight": ours.embed.weight, "model.norm.weight": ours.norm.weight, "lm_head.weight": ours.embed.weight if tied else ours.head.weight}
    for i, layer in enumerate(ours.layers):
        at = f"model.layers.{i}."
        state |= {at + "input_layernorm.weight": layer.attn.norm.weight, at + "post_attention_layernorm.weight": layer.mlp.norm.weight}
        state |= {f"{at}self_attn.{n}.weight": getattr(layer.attn, n).weight for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
        state |= {f"{at}mlp.{n}.weight": getattr(layer.mlp, n).weight for n in ("gate_proj", "up_proj", "down_proj")}
    theirs.load_state_dict(state)
    idx = tokens(2, 300, 128)
    with torch.no_grad():
        error = (ours(idx) - theirs(idx).logits).abs().amax(-1)  # [B, T]
        assert theirs(idx).logits.abs().max() > 1  # or closeness would say nothing
    assert error.max() < 1e-4, f"worst at position {error.amax(0).argmax()}: {error.max()}"


def test_loss_is_cross_entropy_and_z_loss():
    model, x, y = tiny("baseline"), tokens(), tokens(seed=1)
    y[0, :5] = -100
    logits = model(x).view(-1, 50).double()
    log_z, counted = logits.logsumexp(-1), y.view(-1) != -100
    expected = (log_z - logits.gather(1, y.view(-1, 1).clamp_min(0))[:, 0])[counted].mean()
    loss, cross_entropy = model(x, y, z_loss=0.01)
    torch.testing.assert_close(cross_entropy.double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(loss.double(), expected + 0.01 * log_z[counted].pow(2).mean(), atol=1e-6, rtol=0)
    assert loss.requires_grad and not cross_entropy.requires_grad


def test_rotary_tables_survive_a_cast():
    config = GPTConfig(head_dim=64)
    cos, _ = rope_tables(config, 4096, "cpu")
    assert cos.dtype == torch.float32
    exact = torch.cos(4095 / 1e4 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64))
    assert (cos[4095].double() - exact).abs().max() < 3e-4
    with torch.device("meta"):
        moved = tiny()
    for model in (tiny().to(torch.bfloat16), moved.to(torch.bfloat16).to_empty(device="cpu")):
        assert all(torch.equal(a, b) for a, b in zip(model.rope, rope_tables(model.config, 24, "cpu")))


def test_llama3_rope_scaling_equals_transformers():
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    theirs, _ = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(head_dim=64, rope_parameters=scaling | {"rope_theta": 5e5}), "cpu")
    cos, sin = rope_tables(GPTConfig(head_dim=64, rope_theta=5e5, rope_scaling=scaling), 2, "cpu")
    torch.testing.assert_close(torch.atan2(sin[1], cos[1]), theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_causal(method):
    model = tiny(method)
    scramble(model.residual)
    a, b = tokens(), tokens()
    b[:, 12:] = tokens(seed=9)[:, 12:]
    with torch.no_grad():
        torch.testing.assert_close(model(a)[:, :12], model(b)[:, :12])
        assert (model(a)[:, 12:] - model(b)[:, 12:]).abs().max() > 1e-3


def test_one_seed_one_trunk():
    trunks = [{n: p for n, p in tiny(m, route_init="normal").named_parameters() if not n.startswith("residual.")} for m in METHODS]
    for other in trunks[1:]:
        assert other.keys() == trunks[0].keys() and all(torch.equal(other[n], trunks[0][n]) for n in other)
    assert not torch.equal(trunks[0]["embed.weight"], tiny(seed=2).embed.weight)


# ---- the residual methods -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_parameter_has_a_gradient(method, checkpointed):
    model = tiny(method)
    loss, _ = model(tokens(), tokens(seed=1))
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert all(g is not None and torch.isfinite(g).all() for g in grads.values())
    if checkpointed:
        model.zero_grad()
        model.grad_checkpoint = True
        model(tokens(), tokens(seed=1))[0].backward()
        assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("method", ["attnres", "mhar"])
def test_one_step_moves_every_query_and_two_every_key_norm(method):
    model = tiny(method)
    optimizer = torch.optim.SGD(model.residual.parameters(), lr=1.0)
    for step in (1, 2):
        optimizer.zero_grad()
        model(tokens(), tokens(seed=step))[0].backward()
        q, g = model.residual.query.grad.abs().amax(1), model.residual.key_norm.grad.abs().amax(1)
        assert (q[1:] > 0).all() and q[0] < 1e-9  # site 0 has one source: nothing to choose
        assert (g[1:] > 0).all() if step == 2 else (g == 0).all()
        optimizer.step()


def test_attnres_is_mhar_with_one_head():
    a, b = tiny("attnres", route_init="normal"), tiny("mhar", route_heads=1, route_init="normal")
    assert torch.equal(a(tokens()), b(tokens()))


@pytest.mark.parametrize("method", ["attnres", "mhar"])
def test_zero_queries_read_the_mean(method):
    memory = tiny(method).residual.start(torch.randn(2, 5, 32))
    sources = [memory.sources[0]]
    for _ in range(6):
        torch.testing.assert_close(memory.read(), torch.stack(sources).mean(0))
        sources.append(torch.randn(2, 5, 32))
        memory.write(sources[-1])
    torch.testing.assert_close(memory.output(), torch.stack(sources).mean(0))


def test_routing_weights_on_request():
    model, record = tiny("mhar"), []
    scramble(model.residual)
    assert torch.equal(model(tokens(), record=record), model(tokens()))
    assert [a.shape for a in record] == [(n, 2, 24, 4) for n in range(1, 8)]
    assert all(torch.allclose(a.sum(0), torch.ones(())) for a in record)
    assert (record[-1][:, :, :, 0] - record[-1][:, :, :, 1]).abs().max() > 0.01  # heads of their own


@pytest.mark.parametrize("method", ["hc", "hc static"])
@pytest.mark.parametrize("n", [2, 4])
def test_hyper_connections_start_as_the_baseline(method, n):
    baseline, hc = tiny("baseline", norm_eps=0.0), tiny(method, hc_streams=n, norm_eps=0.0)
    torch.testing.assert_close(hc(tokens()), baseline(tokens()), atol=2e-6, rtol=1e-5)
    plain, streams = baseline.residual.start(baseline.embed(tokens())), hc.residual.start(hc.embed(tokens()))
    for f in torch.randn(6, 2, 24, 32):
        torch.testing.assert_close(streams.read(), plain.read())
        plain.write(f), streams.write(f)
    torch.testing.assert_close(streams.output(), n * plain.output())


@pytest.mark.parametrize("method", ["hc", "hc static"])
def test_every_hyper_connection_counts(method):
    model = tiny(method)
    scramble(model.residual)
    before = model(tokens())
    for name, p in model.residual.named_parameters():
        for k in range(len(p)):  # of every sublayer
            old = p.detach().clone()
            with torch.no_grad():
                p[k] += torch.randn(p[k].shape, generator=torch.Generator().manual_seed(k))
                assert (model(tokens()) - before).abs().max() > 1e-5, (name, k)
                p.copy_(old)


def test_hyper_connections_against_the_definition():
    """One sublayer against equations 8 to 14 of arXiv 2409.19606, written out with matrices."""
    model = tiny("hc")
    scramble(model.residual)
    r, x, f = model.residual, torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    memory = r.start(x)
    memory.streams = list(torch.randn(4, 2, 5, 32))
    memory.site = k = 3
    H = torch.stack(memory.streams, -2)  # [B, T, n, D]
    Hbar = torch.nn.functional.rms_norm(H, (32,), r.norm_weight[k], r.eps)
    A_m = r.read_scale[k] * torch.tanh(Hbar @ r.read_proj[k]) + r.read_weight[k]  # [B, T, n]
    A_r = r.read_scale[k] * torch.tanh(Hbar @ r.mix_proj[k]) + r.mix_weight[k]  # [B, T, n, n]
    B = r.write_scale[k] * torch.tanh(Hbar @ r.write_proj[k]) + r.write_weight[k]
    torch.testing.assert_close(memory.read(), (A_m.unsqueeze(-2) @ H).squeeze(-2), atol=1e-5, rtol=1e-5)
    memory.write(f)
    torch.testing.assert_close(torch.stack(memory.streams, -2), A_r.mT @ H + B[..., None] * f[..., None, :], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["delta", "delta recursive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_closed_gates_change_nothing(method, dtype):
    baseline, delta = tiny("baseline").to(dtype), tiny(method, route_init="normal").to(dtype)
    with torch.no_grad():
        delta.residual.null_source.normal_()
        assert torch.equal(delta(tokens()), baseline(tokens()))
        delta.residual.gate.fill_(0.5)
        assert not torch.equal(delta(tokens()), baseline(tokens()))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tiny(method)(tokens()), tiny("baseline")(tokens()))


@pytest.mark.parametrize("n_layer, blocks", [(12, 8), (12, 5), (12, 1), (12, 12), (12, 13), (4, 2), (3, 2)])
def test_delta_sources(n_layer, blocks):
    """Every site of block b reads null, embedding and the true deltas of blocks 0..b-1; the last block may be short."""
    model = tiny("delta", n_layer=n_layer, delta_blocks=blocks)
    per_block = -(-n_layer // blocks)
    x, writes = torch.randn(1, 2, 32), torch.randn(2 * n_layer, 1, 2, 32)
    memory, stream = model.residual.start(x), [x]
    for site in range(2 * n_layer):
        finished = site // (2 * per_block)
        expected = [x] + [stream[2 * per_block * (b + 1)] - stream[2 * per_block * b] for b in range(finished)]
        assert len(memory.sources) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(memory.sources, expected))
        memory.write(writes[site])
        stream.append(stream[-1] + writes[site])
    assert torch.equal(memory.output(), stream[-1])


def test_recursive_delta_as_released():
    """s_0 = e, s_1 = D_0, s_2 = e + D_1, s_3 = D_0 + D_2; a block's first attention site still reads the older list."""
    model = tiny("delta recursive", n_layer=8, delta_blocks=4)  # blocks of two layers, four sites
    x = torch.randn(1, 2, 32)
    memory, stream, lengths = model.residual.start(x), [x], []
    for f in torch.randn(16, 1, 2, 32):
        lengths.append(len(memory.sources))
        memory.write(f)
        stream.append(stream[-1] + f)
    assert lengths == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4]
    D = [stream[4 * (b + 1)] - stream[4 * b] for b in range(3)]
    for got, expected in zip(memory.sources, [x, D[0], x + D[1], D[0] + D[2]]):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_streams_and_sources_are_in_the_compute_dtype(method):
    with torch.autocast("cpu", torch.bfloat16):
        model = tiny(method)
        seen = []
        for layer in model.layers:
            for sublayer in (layer.attn, layer.mlp):
                sublayer.register_forward_hook(lambda m, args, out: seen.extend([args[0].dtype, out.dtype]))
        assert model(tokens()).dtype == torch.bfloat16
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("method", METHODS)
def test_one_graph(method):
    """The whole model with its loss is traced without a break, forward and backward, and gives the eager gradients."""
    model, x, y = tiny(method, n_layer=2), tokens(), tokens(seed=1)
    scramble(model.residual, 0.1)
    model(x, y)[0].backward()
    eager = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x, y)[0].backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, eager[n], msg=n)


def test_large_logits_are_freed_early():
    """Many tokens for the width: the logits' gradient is used up before the layers' backward; with few, the compiler merges two products at its end."""
    from torch._inductor.utils import run_and_get_code
    at = {}
    for B in (12, 1):  # 288 and 24 tokens, 32 wide
        torch._dynamo.reset()
        model, x, y = tiny("baseline", n_layer=1).bfloat16(), tokens(B), tokens(B, seed=1)
        model(x, y)[0].backward()
        eager = model.embed.weight.grad.clone()
        model.zero_grad()
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        backward = run_and_get_code(lambda: compiled(x, y)[0].backward())[1][-1]
        torch.testing.assert_close(model.embed.weight.grad, eager, atol=2e-3, rtol=2e-2)
        products = [line for line in backward.splitlines() if "extern_kernels" in line and "mm(" in line]
        at[B] = [i for i, line in enumerate(products) if ".addmm(" in line], len(products) - 1
    assert at[12][0] in ([0], [1]) and at[1][0] == [at[1][1]], at


# ---- settings -----------------------------------------------------------------------------------------------------------
def test_weight_decay_groups():
    def decayed(method, **flags):
        model = tiny(method)
        names = {p: n for n, p in model.named_parameters()}
        groups = parameter_groups(model, TrainConfig(**flags))
        assert sum(len(g["params"]) for g in groups) == len(names)
        return {names[p]: (g["weight_decay"], g["lr_scale"]) for g in groups for p in g["params"]}

    assert set(decayed("mhar").values()) == {(0.1, 1.0)}  # the paper: everything
    static = {f"residual.{n}_weight" for n in ("read", "mix", "write")}
    assert {n for n, (wd, _) in decayed("hc").items() if not wd} == static
    assert not {n for n, (wd, _) in decayed("hc", decay_hc_static=True).items() if not wd}
    got = decayed("mhar", decay_norms=False, decay_embeddings=False, route_weight_decay=0.02, route_lr_scale=10.0)
    assert got["residual.query"] == (0.02, 10.0) and got["residual.key_norm"] == (0.0, 10.0)
    assert got["embed.weight"][0] == got["norm.weight"][0] == got["layers.0.attn.q_norm.weight"][0] == 0.0
    assert got["layers.0.mlp.up_proj.weight"] == (0.1, 1.0)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(n_head=8, n_kv_head=3), "n_kv_head=3"), (dict(n_embd=512, route_heads=7), "route_heads=7"), (dict(head_dim=7), "head_dim=7"),
        (dict(n_layer=0), "n_layer=0"), (dict(rope_scaling={"rope_type": "yarn"}), "yarn"),
    ],
)  # fmt: skip
def test_wrong_shapes(wrong, words):
    with pytest.raises(ValueError, match=words):
        GPTConfig(**wrong)


def test_too_long_and_unsized():
    with pytest.raises(ValueError, match="block_size=24"):
        tiny()(tokens(1, 25))
    with pytest.raises(ValueError, match="vocab_size"):
        GPT(GPTConfig())


def test_choose_kernel():
    config = GPTConfig(residual="mhar")
    assert choose_kernel("auto", config, "cpu", torch.float32)[0] == "torch"
    assert choose_kernel("torch", config, "cpu", torch.float32) == ("torch", "asked for")
    with pytest.raises(ValueError, match="kernel=triton"):
        choose_kernel("triton", config, "cpu", torch.float32)
    with pytest.raises(ValueError, match="nothing to route"):
        choose_kernel("triton", GPTConfig(residual="baseline"), "cpu", torch.float32)


def test_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import model; assert model.choose_kernel('auto', model.GPTConfig(), 'cpu', None)[0] == 'torch'"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=True)
