"""The model against what is known of it: counts, transformers' Qwen3, the identities of residual methods.

python -m pytest tests/test_model.py
"""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import data
import routing_kernels
from model import GPT, Attention, GPTConfig, RoutedMemory, choose_kernel, peak_flops, rope_tables

ROOT = Path(__file__).parent.parent
METHODS = {
    "baseline": {}, "hc static": dict(hc_form="static"), "hc": {}, "hc paper": dict(hc_form="paper"),
    "hc manifold": dict(hc_form="manifold"), "attnres": {}, "mhar": {}, "mhar_hw": {}, "block": {},
    "delta": {}, "delta recursive": dict(delta_recursive=True),
}  # fmt: skip
HYPER = [method for method in METHODS if method.startswith("hc")]


def tiny(method="mhar", seed=1, **changes):
    shape = dict(block_size=24, vocab_size=50, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=48)
    shape |= dict(route_heads=4, hc_streams=4, depth_blocks=2, delta_blocks=2, residual=method.split()[0])
    return GPT(GPTConfig(**shape | METHODS[method] | changes), seed=seed)


def tokens(B=2, T=24, V=50, seed=0):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


def scramble(module, std=0.3, seed=5):
    """Random values for every parameter: a state that training could reach, nothing at its neutral start."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.empty(p.shape).normal_(0, std, generator=g))


# ---- counts ----
SCALES = {
    "100m": (dict(n_embd=512, n_layer=12, n_head=8, n_kv_head=4, ffn_dim=1536), 115_554_304),
    "350m": (dict(n_embd=1024, n_layer=24, n_head=16, n_kv_head=8, ffn_dim=4096), 533_123_072),
    "1b": (dict(n_embd=1280, n_layer=36, n_head=16, n_kv_head=8, ffn_dim=5120), 1_079_313_280),
    "8b": (
        dict(
            n_embd=4096,
            n_layer=32,
            n_head=32,
            n_kv_head=8,
            ffn_dim=14336,
            vocab_size=128_256,
            tie_embeddings=False,
            qk_norm=False,
        ),
        8_030_261_248,
    ),
}
ADDED = {
    "100m": {"attnres": 25_600, "mhar": 25_600, "block": 25_600, "mhar_hw": 44_032, "hc static": 576,
             "hc": 86_640, "hc paper": 576, "hc manifold": 1_180_296, "delta": 36_888},
    "350m": {"attnres": 100_352, "mhar": 100_352, "block": 100_352, "mhar_hw": 272_384, "hc static": 1_152,
             "hc": 345_312, "hc paper": 1_152, "hc manifold": 4_719_888, "delta": 147_504},
    "1b": {"attnres": 186_880, "mhar": 186_880, "block": 186_880, "mhar_hw": 509_440, "hc static": 1_728,
           "hc": 646_992, "hc paper": 1_728, "hc manifold": 8_849_304, "delta": 276_552},
    "8b": {"delta": 786_496},
}  # fmt: skip


@pytest.mark.parametrize("scale", SCALES)
def test_parameter_counts(scale):
    shape, baseline = SCALES[scale]
    for method, added in {"baseline": 0, **ADDED[scale]}.items():
        residual = dict(vocab_size=151_936, residual=method.split()[0]) | METHODS[method]
        with torch.device("meta"):
            model = GPT(GPTConfig(**residual | shape))
        assert model.parameter_counts() == {"total": baseline + added, "routing": added}, method


def test_flops():
    """Against arithmetic by hand at 100M, T = 2048: projections, output head, causal attention, routing."""
    with torch.device("meta"):
        config = dict(vocab_size=151_936, **SCALES["100m"][0])
        model, routed = (GPT(GPTConfig(residual=method, **config)) for method in ("baseline", "mhar"))
    projections = 12 * (512 * (512 + 256 + 256 + 512) + 3 * 512 * 1536)
    attention = 12 * 2048 * 512
    assert model.flops_per_token(2048) == 3 * 2 * (projections + 151_936 * 512 + attention)
    routing = routed.flops_per_token(2048) - model.flops_per_token(2048)
    assert routing == 3 * 4 * 512 * (25 * 26 // 2)
    # pairs of source and site: 8 blocks of 3 sublayers; 4 groups at 12 attention sites of 1, 3, .. 23 sources
    for method, pairs in (("block", 1 + 3 * sum(range(2, 10))), ("mhar_hw", 325 + 3 * 144)):
        with torch.device("meta"):
            routed = GPT(GPTConfig(residual=method, **config))
        assert routed.residual.flops(routed.config) == 4 * 512 * pairs, method


def test_unknown_device_has_no_peak(monkeypatch):
    peaks = {
        "H200": 989e12,
        "H100 PCIe": 756e12,
        "A100-SXM4-80GB": 312e12,
        "RTX A4000": None,
        "GB200": 2500e12,
    }
    for name, peak in peaks.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: f"NVIDIA {name}")
        assert peak_flops("cuda:0") == peak, name
    assert peak_flops("cpu") is None


# ---- the trunk ----
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_dim", [8, 32])
def test_equals_qwen3(tied, head_dim):
    """Equal weights and logits at 300 positions with transformers' Qwen3: layout, norms, GQA, rotary."""
    transformers = pytest.importorskip("transformers")
    ours = tiny("baseline", block_size=300, head_dim=head_dim, tie_embeddings=tied, vocab_size=128, n_layer=2)
    scramble(ours, 0.1)
    c = ours.config
    config = transformers.Qwen3Config(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=600, rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, tie_word_embeddings=tied,
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    names = {"layers.": "model.layers.", "attn.": "self_attn.", "self_attn.norm": "input_layernorm"}
    names |= {"mlp.norm": "post_attention_layernorm", "embed.": "model.embed_tokens.", "head.": "lm_head."}
    state = {"lm_head.weight": ours.embed.weight}
    for name, p in ours.named_parameters():
        name = "model.norm.weight" if name == "norm.weight" else name
        for mine, other in names.items():
            name = name.replace(mine, other)
        state[name] = p
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
    torch.testing.assert_close(
        loss.double(), expected + 0.01 * log_z[counted].pow(2).mean(), atol=1e-6, rtol=0
    )
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

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 256}
    config = LlamaConfig(head_dim=64, rope_parameters=scaling | {"rope_theta": 5e5})
    theirs, _ = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
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
    models = [dict(tiny(m, route_init="normal").named_parameters()) for m in METHODS]
    trunks = [{n: p for n, p in model.items() if not n.startswith("residual.")} for model in models]
    for other in trunks[1:]:
        assert other.keys() == trunks[0].keys() and all(torch.equal(other[n], trunks[0][n]) for n in other)
    assert not torch.equal(trunks[0]["embed.weight"], tiny(seed=2).embed.weight)


# ---- the residual methods ----
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


# ---- against plain implementations in fp64, of the parameters p of one residual method ----
def plain_mix(p, form, k, X, n, D, eps=1e-6):
    """Coefficients read [.., n], mix [.., new, old] and write [.., n] for streams X [.., n, D]."""
    c, rms_norm = p["static"][k], torch.nn.functional.rms_norm
    if form in ("static", "paper"):
        return c[0].softmax(0) if form == "paper" else c[0], c[1:-1], c[-1]
    scale = p["scale"][k]
    if form == "dynamic":  # arXiv 2409.19606, equations 8 to 14
        dynamic = torch.tanh(
            rms_norm(X, (D,), p["norm_weight"][k], eps) @ p["proj"][k].T
        ).mT  # [.., n + 2, n]
        c = c + dynamic * torch.stack([scale[0]] * (n + 1) + [scale[1]])[:, None]
        return c[..., 0, :], c[..., 1:-1, :], c[..., -1, :]
    z = (rms_norm(X.flatten(-2), (n * D,), eps=eps) @ p["proj"][k].T).unflatten(-1, (n + 2, n))
    mix = (scale[1] * z[..., 1:-1, :] + c[1:-1]).exp()
    for _ in range(20):
        mix = mix / mix.sum(-2, keepdim=True)
        mix = mix / mix.sum(-1, keepdim=True)
    return (scale[0] * z[..., 0, :] + c[0]).sigmoid(), mix, 2 * (scale[2] * z[..., -1, :] + c[-1]).sigmoid()


def plain_hyper(p, config, x, sublayers):
    X = torch.stack([x] * config.hc_streams, -2)  # [B, T, n, D]
    for k, sublayer in enumerate(sublayers):
        read, mix, write = plain_mix(p, config.hc_form, k, X, config.hc_streams, config.n_embd)
        f = sublayer((read[..., None] * X).sum(-2))
        X = mix @ X + write[..., None] * f[..., None, :]
    return X.mean(-2) if config.hc_form == "paper" else X.sum(-2)


def plain_read(sources, query, key_norm, heads, eps=1e-6):
    V = torch.stack(sources)
    keys = torch.nn.functional.rms_norm(V, V.shape[-1:], key_norm, eps)
    alpha = (keys * query).unflatten(-1, (heads, -1)).sum(-1).softmax(0)  # [N, B, T, H]
    return (alpha.repeat_interleave(V.shape[-1] // heads, -1) * V).sum(0)


def plain_routed(p, config, x, sublayers):
    fs, L, H, method = [], config.n_layer, config.route_heads, config.residual
    length = -(-2 * L // config.depth_blocks) if method == "block" else 1
    for site, sublayer in enumerate([*sublayers, lambda h: h]):
        sources = [
            x,
            *(sum(fs[i : i + length]) for i in range(0, site, length)),
        ]  # the last may be unfinished
        g = p["key_norm"][site]
        if method == "mhar_hw" and site < 2 * L and site % 2 == 0:
            h = torch.stack([plain_read(sources, q, g, 1) for q in p["group_query"][site // 2]])
        else:
            h = plain_read(sources, p["query"][site // 2 if method == "mhar_hw" else site], g, H)
        fs.append(sublayer(h))
    return fs[-1]


@pytest.mark.parametrize("method", [*HYPER, "mhar", "mhar_hw", "block"])
@pytest.mark.parametrize("scrambled", [True, False])
def test_equals_a_plain_implementation(method, scrambled):
    """Output and gradients of a chain of sublayers tanh(h W), at the start and in a state of training."""
    model = tiny(method, route_init="normal")
    r, config = model.residual, model.config
    if scrambled:
        scramble(r)
    g = torch.Generator().manual_seed(3)
    x, W = torch.randn(2, 5, 32, generator=g), torch.randn(6, 32, 32, generator=g) / 6
    wide = lambda h, w: torch.tanh((h if h.dim() == 3 else h[0] + 2 * h[1]) @ w)  # mhar_hw: two groups
    results = []
    for dtype in (torch.float32, torch.float64):
        tensors = dict(r.named_parameters()) | {"x": x, "W": W}
        leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in tensors.items()}
        sublayers = [partial(wide, w=w) for w in leaves["W"]]
        if dtype == torch.float64:
            out = (plain_hyper if method in HYPER else plain_routed)(leaves, config, leaves["x"], sublayers)
        else:
            leaves |= dict(r.named_parameters())
            memory = r.start(leaves["x"])
            for sublayer in sublayers:
                memory.write(sublayer(memory.read()))
            out = memory.output()
        grads = torch.autograd.grad((out * torch.linspace(-1, 1, 32, dtype=dtype)).sum(), leaves.values())
        results.append(dict(zip(leaves, grads)) | {"out": out})
    for name, ours in results[0].items():
        exact = results[1][name]
        assert (ours - exact).abs().max() <= 1e-5 * exact.abs().max() + 1e-9, name


def test_grouped_attention():
    """Each KV head's group on its own input, as an attention of its own; with equal inputs the usual one."""
    config = tiny().config
    whole, rope = tiny(n_head=4, n_kv_head=2).layers[0].attn, tuple(table[:7] for table in tiny().rope)
    h, total = torch.randn(2, 3, 7, 32), 0
    for g in range(2):
        part = Attention(replace(config, n_head=2, n_kv_head=1, head_dim=8))
        rows = {"q_proj": slice(16 * g, 16 * g + 16), "k_proj": slice(8 * g, 8 * g + 8)}
        rows["v_proj"] = rows["k_proj"]
        state = {n: p[rows[n[:6]]] if n[:6] in rows else p for n, p in whole.state_dict().items()}
        part.load_state_dict(state | {"o_proj.weight": whole.o_proj.weight[:, 16 * g : 16 * g + 16]})
        total = total + part(h[g], rope)
    torch.testing.assert_close(whole(h, rope), total)
    torch.testing.assert_close(whole(h[:1].expand(2, -1, -1, -1), rope), whole(h[0], rope))


def test_limits_of_mhar_hw_and_block():
    """One group and one head read like attnres; blocks of one sublayer like mhar."""
    heads = dict(n_head=2, n_kv_head=1, route_heads=1)
    models = [tiny("mhar_hw", **heads), tiny("attnres", **heads), tiny("block", depth_blocks=6), tiny("mhar")]
    for model in models:
        scramble(model.residual)
    aligned, single, block, mhar = models
    single.residual.query.data = torch.stack([query.flatten() for query in aligned.residual.queries()])
    single.residual.key_norm.data = aligned.residual.key_norm.data
    torch.testing.assert_close(aligned(tokens()), single(tokens()))
    assert torch.equal(block(tokens()), mhar(tokens()))


def test_chains_of_fused_groups(monkeypatch):
    """Each group's chain and the others' read what the reference reads, with a stand-in for the kernels."""

    def fused(x, query, key_norm, n_heads, eps):
        residual = tiny("mhar", route_heads=n_heads).residual
        residual.queries, residual.key_norm.data = lambda: query.unbind(0), key_norm
        return RoutedMemory(residual, x, None)

    monkeypatch.setattr(routing_kernels, "FusedRouter", fused)
    model = tiny("mhar_hw")
    scramble(model.residual)
    reference = model(tokens())
    model.residual.kernel = "triton"
    torch.testing.assert_close(model(tokens()), reference)


@pytest.mark.parametrize("n_layer, blocks", [(12, 8), (12, 5), (12, 1), (3, 4), (3, 6), (3, 7)])
def test_block_sources(n_layer, blocks):
    """The embedding, finished blocks, and a running sum past the first sublayer of a block."""
    memory = tiny("block", n_layer=n_layer, depth_blocks=blocks).residual.start(torch.zeros(1))
    length = -(-2 * n_layer // blocks)
    for site in range(2 * n_layer):
        assert len(memory.sources) == 1 + site // length + (site % length > 0)
        memory.write(torch.tensor([2.0**site]))
    sums = [sum(2**i for i in range(b, min(b + length, 2 * n_layer))) for b in range(0, 2 * n_layer, length)]
    assert [source.item() for source in memory.sources] == [0, *sums]


@pytest.mark.parametrize("method", ["hc", "hc static", "hc manifold"])
@pytest.mark.parametrize("n", [2, 4])
def test_hyper_connections_start_as_the_baseline(method, n):
    baseline, hc = tiny("baseline", norm_eps=0.0), tiny(method, hc_streams=n, norm_eps=0.0)
    tolerance = 1e-4 if method == "hc manifold" else 1e-5  # Sinkhorn's eps
    torch.testing.assert_close(hc(tokens()), baseline(tokens()), atol=tolerance, rtol=tolerance)
    plain, streams = baseline.residual.start(baseline.embed(tokens())), hc.residual.start(hc.embed(tokens()))
    weight = torch.tensor([3.0] + [-3.0] * (n - 1)).sigmoid().sum() if method == "hc manifold" else 1
    for f in torch.randn(6, 2, 24, 32):
        torch.testing.assert_close(streams.read(), weight * plain.read(), atol=tolerance, rtol=tolerance)
        plain.write(f), streams.write(f)
    torch.testing.assert_close(streams.output(), n * plain.output(), atol=10 * tolerance, rtol=tolerance)


def test_paper_hyper_connections_start():
    static = tiny("hc paper", n_layer=60).residual.static.detach()
    exact = torch.zeros(6, 4)
    exact[1:5], exact[5, 0] = torch.eye(4), 1
    assert (static.mean(0) - exact).abs().max() < 0.01 and abs((static - exact).std() - 0.02) < 0.001
    assert not tiny("hc paper").residual.never_decay


@pytest.mark.parametrize("spread", [0, 1, 1000])
def test_manifold(spread):
    """Bounds; a doubly stochastic mix, near the identity at the start; finite whatever the logits."""
    r = tiny("hc manifold").residual
    if spread:
        r.static.data.normal_(0, spread, generator=torch.Generator().manual_seed(0))
    streams = [torch.randn(2, 5, 32, requires_grad=True) for _ in range(4)]
    c = r.coefficients(streams, *(p[3] for p in r.per_site(torch.float32)))[..., 0]  # [n + 2, n, B, T]
    read, mix, write = c[0], c[1:-1], c[-1]
    assert ((0 <= read) & (read <= 1) & (0 <= write) & (write <= 2)).all() and (mix >= 0).all()
    grads = torch.autograd.grad(c.square().sum(), [*streams, *r.parameters()])
    assert all(torch.isfinite(t).all() for t in (c, *grads))
    assert (mix.sum(1) - 1).abs().max() < 1e-5  # rows are scaled last
    assert spread > 1 or (mix.sum(0) - 1).abs().max() < 1e-3
    assert spread > 0 or (mix[range(4), range(4)] > 0.99).all()


def test_manifold_learns_from_its_start():
    """Streams are equal at first; three steps later every parameter has a gradient at every site."""
    model = tiny("hc manifold")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        model(tokens(), tokens(seed=step))[0].backward()
        optimizer.step()
    for name, p in model.residual.named_parameters():
        gradient = p.grad.flatten(1).abs()  # [sub, ...]
        assert (gradient.amax(1) > 1e-8).all(), name
    assert (model.residual.static.grad[1:, 1:-1].abs() > 0).all()


@pytest.mark.parametrize("method, graphs", [(method, 3) for method in HYPER] + [("block", 4)])
def test_one_graph_serves_all_sites(method, graphs):
    """Of each method that a residual method names for compiling, and for each number of sources."""
    model = tiny(method, n_layer=4, depth_blocks=3, hc_streams=3)
    scramble(model.residual, 0.1)
    model(tokens(), tokens(seed=1))[0].backward()
    eager = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for name in model.residual.compiled:
        compiled = torch.compile(
            getattr(model.residual, name), fullgraph=True, dynamic=False, backend=counter
        )
        setattr(model.residual, name, compiled)
    model(tokens(), tokens(seed=1))[0].backward()
    assert counter.frame_count == graphs
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, eager[n], msg=n, atol=1e-6, rtol=1e-4)


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
    """Sites of block b read null, embedding and true deltas of blocks 0..b-1; the last may be short."""
    model = tiny("delta", n_layer=n_layer, delta_blocks=blocks)
    per_block = -(-n_layer // blocks)
    x, writes = torch.randn(1, 2, 32), torch.randn(2 * n_layer, 1, 2, 32)
    memory, stream = model.residual.start(x), [x]
    for site in range(2 * n_layer):
        finished = site // (2 * per_block)
        expected = [x] + [
            stream[2 * per_block * (b + 1)] - stream[2 * per_block * b] for b in range(finished)
        ]
        assert len(memory.sources) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(memory.sources, expected))
        memory.write(writes[site])
        stream.append(stream[-1] + writes[site])
    assert torch.equal(memory.output(), stream[-1])


def test_recursive_delta_as_released():
    """s_0 = e, s_1 = D_0, s_2 = e + D_1, s_3 = D_0 + D_2; a block's first site reads the older list."""
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
    """The model with its loss is traced without a break, forward and backward, with the eager gradients."""
    model, x, y = tiny(method, n_layer=2, hc_streams=2), tokens(), tokens(seed=1)
    scramble(model.residual, 0.1)
    model(x, y)[0].backward()
    eager = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x, y)[0].backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, eager[n], msg=n)


def test_large_logits_are_freed_early():
    """Many tokens for the width: the logits' gradient is used up before the backward of the layers."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    model, x, y = (
        tiny("baseline", n_layer=1).bfloat16(),
        tokens(12),
        tokens(12, seed=1),
    )  # 288 tokens, 32 wide
    model(x, y)[0].backward()
    eager = model.embed.weight.grad.clone()
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    backward = run_and_get_code(lambda: compiled(x, y)[0].backward())[1][-1]
    torch.testing.assert_close(model.embed.weight.grad, eager, atol=2e-3, rtol=2e-2)
    products = [line for line in backward.splitlines() if "extern_kernels" in line and "mm(" in line]
    assert [i for i, line in enumerate(products) if ".addmm(" in line] in ([0], [1]) and len(products) > 4


# ---- settings ----
def test_wrong_shapes():
    for wrong, words in (
        (dict(n_head=8, n_kv_head=3), "n_kv_head=3"),
        (dict(n_embd=512, route_heads=7), "route_heads=7"),
        (dict(head_dim=7), "head_dim=7"),
        (dict(n_layer=0), "n_layer=0"),
        (dict(rope_scaling={"rope_type": "yarn"}), "yarn"),
    ):
        with pytest.raises(ValueError, match=words):
            GPTConfig(**wrong)
    GPTConfig(residual="baseline", n_embd=512, route_heads=7)  # routes nothing


def test_too_long_and_unsized():
    with pytest.raises(ValueError, match="block_size=24"):
        tiny()(tokens(1, 25))
    with pytest.raises(ValueError, match="vocab_size"):
        GPT(GPTConfig())


def test_choose_kernel():
    config = GPTConfig(residual="mhar")
    assert choose_kernel("auto", config, "cpu", torch.float32)[0] == "torch"
    assert choose_kernel("torch", config, "cpu", torch.float32) == ("torch", "requested")
    with pytest.raises(ValueError, match="kernel=triton"):
        choose_kernel("triton", config, "cpu", torch.float32)
    for residual in ("baseline", "hc", "block"):
        why = choose_kernel("auto", GPTConfig(residual=residual), "cuda", torch.bfloat16)
        assert why == ("torch", f"residual={residual} has no fused kernels")
    with pytest.raises(ValueError, match="has no fused kernels"):
        choose_kernel("triton", GPTConfig(residual="baseline"), "cpu", torch.float32)


def test_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import model; config = model.GPTConfig()"
    code += "; assert model.choose_kernel('auto', config, 'cpu', None)[0] == 'torch'"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_readmes_own_method(tmp_path):
    """Pasted into model.py, it trains; weight decay spares what it says, and nothing asks it for routing."""
    block = re.search(r"```python\n(# in model.py\n.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    shutil.copytree(ROOT / "config", tmp_path / "config")
    text = (tmp_path / "model.py").read_text()
    (tmp_path / "model.py").write_text(
        re.sub(r"(?ms)^RESIDUALS = .*?\}.*?\n", lambda m: m[0] + "\n\n" + block, text)
    )
    for split in ("train", "val"):
        ids = np.random.default_rng(0).integers(0, 256, 2000, np.uint32)
        header = {"tokens": 2000, "vocab": 320, "largest_id": 255, "tokenizer": "bytes", "sha256": split}
        (tmp_path / f"{split}.bin").write_bytes(data.pack_header(header) + ids.tobytes())
    command = [sys.executable, "train.py", "--residual=gated", "--dataset=.", "--max_steps=2", "--device=cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "weight decay 0.0, learning rate x1.0" in done.stdout
    assert "residual=gated has no fused" in done.stdout
    assert '"gate_grad_norm"' in next(tmp_path.glob("out/*/log.jsonl")).read_text()
