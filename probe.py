"""What the router learned: the paper's Table 6 and Figure 4 from a checkpoint of attnres, mhar or delta.

    python probe.py out/mhar_100m_attnres                 # do slices of its query want to read other depths?
    python probe.py out/mhar_100m_mhar                    # how far do its heads differ?
    python probe.py CKPT --text=book.txt --out_dir=probe  # on a text, not the run's held-out documents

Slices (Table 6): a query is cut into --slices parts. Part s alone would read a_s = softmax_n <q[s],
key_n[s]>, all together read alpha = softmax_n <q, key_n>. The paper's measure is KL(a_s || alpha). It also
grows where the parts agree, as alpha is then sharper than each: KL(a_s || mean of the a_s) stands beside it.
A random query of the same norm shows what the sources' geometry alone gives.
Heads (Figure 4): a head's deviation is its mean weights minus the mean over heads. It should exceed that of
random queries, replicate on other text, and differ between heads: deviations sum to zero over them, so heads
without anything in common correlate by -1 / (H - 1).
"""

import json
import math
from collections import defaultdict
from pathlib import Path

from configurator import Parser, UserError, cli, output_folder, table

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from checkpoint import load_model
from data import ValWindows, find_dataset, open_bin
from parallel import choose_device
from sample import load_text


# ---- Measures ----
def weights_of(keys, query, heads):
    """Routing weights [N, M, H] of a query [D] over keys [N, M, D], in `heads` parts with a softmax each."""
    return (keys * query).unflatten(-1, (heads, -1)).sum(-1).softmax(0)


def disagreement(keys, query, slices):
    """Means over slices and tokens of KL(a_s || alpha) and KL(a_s || mean of the a_s), in nats."""
    logits = (keys * query).unflatten(-1, (slices, -1)).sum(-1)  # [N, M, slices]
    log_a, log_alpha = logits.log_softmax(0), logits.sum(-1, keepdim=True).log_softmax(0)
    log_mean = log_a.logsumexp(-1, keepdim=True) - np.log(slices)
    return tuple((log_a.exp() * (log_a - other)).sum(0).mean().item() for other in (log_alpha, log_mean))


def collinearity(sources):
    """Mean cosine between two different sources, over all pairs and tokens. sources [N, M, D]."""
    unit, N = F.normalize(sources, dim=-1), len(sources)
    return ((unit.sum(0).pow(2).sum(-1) - N) / (N * (N - 1))).mean().item()


@torch.no_grad()
def reads(model, idx):
    """One forward pass over idx [B, T]: yields (site, sources [N, M, D], keys [N, M, D]), fp32, of N > 1."""
    r = model.residual
    memory = r.start(model.embed(idx), record=[])
    rope = tuple(table[: idx.size(1)] for table in model.rope)
    sublayers = [call for layer in model.layers for call in ((layer.attn, rope), (layer.mlp,))]
    for site in range(len(r.query)):
        sources = list(memory.sources)
        if model.config.residual == "delta":
            sources = [r.null_source[site].expand_as(memory.x), *sources]
        if len(sources) > 1:
            v = torch.stack(sources).flatten(1, 2).float()  # [N, M, D]
            yield site, v, F.rms_norm(v, v.shape[-1:], eps=r.eps) * r.key_norm[site].float()
        if site < len(sublayers):  # the last site of attnres and mhar feeds the final norm
            sublayer, *args = sublayers[site]
            memory.write(sublayer(memory.read(), *args))


@torch.no_grad()
def measure(model, batches, slices, seed=0):
    """One row per site, averaged over batches of idx [B, T]: the heads' deviation under trained and random
    queries, arrays [N, H], all else numbers."""
    query, H, found = model.residual.query.float(), model.residual.n_heads, defaultdict(list)  # query [S, D]
    random = torch.randn(query.shape, generator=torch.Generator().manual_seed(seed)).to(query.device)
    random *= query.norm(dim=1, keepdim=True) / random.norm(dim=1, keepdim=True)
    order = torch.arange(query.size(1)).unflatten(0, (-1, slices)).T.flatten()  # slices of every n-th channel
    for idx in batches:
        for site, v, keys in reads(model, idx):
            row = {"site": site, "sources": len(v), "uniform": math.log(len(v))}
            row["collinearity"] = collinearity(v)
            alpha = weights_of(keys, query[site], H)
            row["entropy"] = -(alpha * alpha.clamp_min(1e-30).log()).sum(0).mean().item()
            row["deviation"], row["random"] = deviation(alpha), deviation(weights_of(keys, random[site], H))
            row["kl"], row["between"] = disagreement(keys, query[site], slices)
            row["null"], row["null_between"] = disagreement(keys, random[site], slices)
            row["interleaved"], _ = disagreement(keys[..., order], query[site, order], slices)
            row["null_interleaved"], _ = disagreement(keys[..., order], random[site, order], slices)
            found[site].append(row)
    return [{key: np.mean([row[key] for row in rows], 0) for key in rows[0]} for rows in found.values()]


def deviation(alpha):
    """Of weights [N, M, H]: [N, H], their mean over tokens minus its mean over heads."""
    mean = alpha.mean(1)
    return (mean - mean.mean(1, keepdim=True)).cpu().numpy()


def flat(rows, key):
    return np.concatenate([row[key].ravel() for row in rows])


def between_heads(rows):
    """Mean correlation of the deviations of two different heads, over all sites and sources."""
    together = np.corrcoef(np.concatenate([row["deviation"] for row in rows]).T)
    return together[~np.eye(len(together), dtype=bool)].mean()


# ---- Figures ----
def plot_sites(rows, path):
    """By depth, left the disagreement of the trained and of a random query, right the entropy."""
    figure = Figure((10, 3.6), layout="tight")
    left, right = figure.subplots(1, 2)
    for axis, key, color, label in [
        (left, "kl", "#D55E00", "trained query"), (left, "null", "0.6", "random query of its norm"),
        (right, "entropy", "#0072B2", "routing weights"), (right, "uniform", "0.6", "uniform weights"),
    ]:  # fmt: skip
        axis.plot([row["site"] for row in rows], [row[key] for row in rows], ".-", color=color, label=label)
    left.set_ylabel("KL between slices and whole (nats)")
    right.set_ylabel("entropy (nats)")
    for axis in (left, right):
        axis.set(xlabel="routing site", ylim=(0, None))
        axis.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False
        )  # clear of the curves
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def plot_heads(rows, path, first_source):
    """Figure 4: heads by sources, a panel per site; white is the consensus, grey a source not there yet."""
    limit = max(np.abs(row["deviation"]).max() for row in rows) or 1.0
    widest, H = rows[-1]["deviation"].shape
    figure = Figure((8, 0.55 * len(rows) * max(1, H / 8) + 1.2))
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for panel, row in zip(panels, rows):
        heads = np.full((H, widest), np.nan)
        heads[:, : len(row["deviation"])] = row["deviation"].T
        panel.set(facecolor="0.8", yticks=[])
        image = panel.imshow(heads, "RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        panel.set_ylabel(f"site {row['site']:g}", rotation=0, ha="right", va="center")
    panels[-1].set_xlabel(f"source (0 is {first_source}); one row per head")
    figure.colorbar(image, ax=panels, label="weight minus the mean over heads")
    figure.savefig(path, dpi=150, bbox_inches="tight")


# ---- All of it ----
def read_windows(args, model, meta):
    """Arrays [T] of token ids, of --text= or of the run's held-out documents."""
    T, count, data = model.config.block_size, 2 * args.windows, meta["data"]  # two halves
    if args.text:
        if not Path(args.text).is_file():
            raise UserError(f"--text={args.text} is not a file")
        text = load_text(args.ckpt, meta, args.tokenizer)
        ids = np.array(text.encode(Path(args.text).read_text(errors="replace"), bos=False))
        return [ids[i : i + T] for i in range(0, len(ids) - T + 1, T)][:count]
    if data["dataset"] is None:
        raise UserError(f"{args.ckpt} was imported and knows no dataset: give a text with --text=")
    val = open_bin(find_dataset(data["dataset"]) / "val.bin")
    if val.header["tokenizer"] != data["tokenizer"]:
        raise UserError(f"{val.path} is not in tokens of {data['tokenizer']}: give a text with --text=")
    windows = ValWindows(val, T, count)
    return [window[:-1] for window in windows.batch(range(windows.n))]


def main():
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("ckpt", metavar="CKPT", help="a checkpoint, or a run's folder")
    add("--slices", type=int, default=4, help="parts that a query is cut into [%(default)s]")
    add("--text", help="a text file [the held-out documents of the run's dataset]")
    add("--windows", type=int, default=8, help="windows in each of the two halves of the text [%(default)s]")
    add("--weights", choices=["raw", "ema"], default="raw", help="ema: the running average [%(default)s]")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps [%(default)s]")
    add("--tokenizer", help="of --text=: bytes, qwen3, llama3, gpt2 or a tokenizer.json [the checkpoint's]")
    add("--out_dir", help="where probe.json, sites.png and perhead.png go [CKPT/probe]")
    args = parser.parse_args()
    device = choose_device(args.device)
    model, meta = load_model(args.ckpt, device, args.weights, torch.float32, kernel="torch")
    config, H = model.config, model.config.route_heads
    if not model.residual.routes or config.residual == "mhar_hw":
        raise UserError(f"{args.ckpt} does not route by one query a site (residual={config.residual})")
    if args.slices < 1 or config.n_embd % args.slices:
        raise UserError(f"--slices={args.slices} does not divide the width {config.n_embd}")
    windows = read_windows(args, model, meta)
    if len(windows) < 2:
        raise UserError(f"no two windows of {config.block_size} tokens: give a longer text, or --windows=8")
    out = output_folder(args.out_dir or Path(args.ckpt) / "probe", "--out_dir")
    batches = [torch.from_numpy(window)[None].to(device) for window in windows]
    rows, other = (measure(model, batches[half::2], args.slices) for half in (0, 1))  # disjoint text

    mean = lambda key, of=rows: np.mean([row[key] for row in of])
    summary = {
        "KL of the trained query": mean("kl"),
        "KL of a random query of its norm": mean("null"),
        "learned excess": mean("kl") - mean("null"),
        "learned excess, other text": mean("kl", other) - mean("null", other),
        "learned excess, interleaved slices": mean("interleaved") - mean("null_interleaved"),
        "disagreement between slices, trained": mean("between"),
        "disagreement between slices, random": mean("null_between"),
        "source collinearity (mean cosine)": rows[-1]["collinearity"],
        "sources at the last site": rows[-1]["sources"],
        "routing entropy (nats)": mean("entropy"),
    }
    if H > 1:
        own, again = flat(rows, "deviation"), flat(other, "deviation")
        summary |= {
            "largest deviation of a head": np.abs(own).max(),
            "the same under random queries": np.abs(flat(rows, "random")).max(),
            "correlation with other text": np.corrcoef(own, again)[0, 1],  # NaN while all queries are zero
            "correlation between heads": between_heads(rows),
        }
        zeroth = "the null source" if config.residual == "delta" else "the embedding"
        plot_heads(rows[:10], out / "perhead.png", zeroth)
    plot_sites(rows, out / "sites.png")
    print(f"{args.ckpt}: residual={config.residual}, H={H}, {args.slices} slices, {len(windows)} windows\n")
    show = lambda v: f"{v:g}" if float(v).is_integer() else f"{v:.4f}"
    print(table(["probe", "value"], [[key, show(value)] for key, value in summary.items()]))
    head = ["site", "sources", "entropy", "uniform", "kl", "null"]
    print(table(head, [[show(row[key]) for key in head] for row in rows]))
    report = {"ckpt": args.ckpt, "model_config": meta["model_config"], "summary": summary, "sites": rows}
    (out / "probe.json").write_text(json.dumps(report, default=lambda x: x.tolist()))
    print(f"probe.json and the figures are in {out}")


if __name__ == "__main__":
    cli(main)
