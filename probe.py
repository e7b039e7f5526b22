"""What the router learned: the paper's Table 6 and Figure 4 from a checkpoint of attnres, mhar or delta.

    python probe.py out/mhar_100m_attnres                 # do the slices of its one query want to read different depths?
    python probe.py out/mhar_100m_mhar                    # how far does each head go its own way? Tables, sites.png, perhead.png
    python probe.py CKPT --text=book.txt --out_dir=probe  # on this text instead of the run's held-out documents

Slices (Table 6). A site's query is cut into --slices parts. Part s alone would read a_s = softmax_n <q[s], key_n[s]>, all together read
alpha = softmax_n <q, key_n>. Width disagreement is the mean of KL(a_s || alpha) over parts, tokens and sites. A random query of the same norm
gives what the sources' geometry alone would show; the rest is learned. Cosines between sources are their collinearity. This is the paper's
measure; it also grows where all parts agree, since alpha, from the sum of their logits, is then sharper than each. So the disagreement between
the parts themselves stands beside it: the mean of KL(a_s || mean of the a_s), which is 0 where they agree.
Heads (Figure 4). A head's deviation is its mean weights minus the mean over heads, per site and source. It should be larger than under random
queries of the same norm, the same again on other text, and not alike between heads: deviations sum to zero over them, so that heads without
anything in common correlate by -1 / (H - 1).
"""
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt
import numpy as np
import torch

from configurator import Parser, UserError, cli, output_folder
from prepare_data import ValWindows, find_dataset, open_bin
from report import table
from sample import load_text
from train import check_device, load_model


def weights_of(keys, query, heads):
    """Routing weights [N, M, H] of a query [D] over keys [N, M, D], in `heads` parts with a softmax each."""
    return (keys * query).unflatten(-1, (heads, -1)).sum(-1).softmax(0)


def disagreement(keys, query, slices, interleaved=False):
    """(mean over slices and tokens of KL(a_s || alpha), the same of KL(a_s || mean of the a_s)) in nats. Slices are contiguous channels, or
    every slices-th one."""
    if interleaved:
        order = torch.arange(keys.size(-1)).view(-1, slices).T.flatten().to(keys.device)
        keys, query = keys[..., order], query[order]
    logits = (keys * query).unflatten(-1, (slices, -1)).sum(-1)  # [N, M, slices]
    log_a, log_alpha = logits.log_softmax(0), logits.sum(-1, keepdim=True).log_softmax(0)
    log_mean = log_a.logsumexp(-1, keepdim=True) - np.log(slices)
    return tuple((log_a.exp() * (log_a - log_other)).sum(0).mean().item() for log_other in (log_alpha, log_mean))


def collinearity(sources):
    """Mean cosine between two different sources, over all pairs and tokens. sources [N, M, D]."""
    unit = torch.nn.functional.normalize(sources, dim=-1)
    N = len(unit)
    return ((unit.sum(0).pow(2).sum(-1) - N) / (N * (N - 1))).mean().item()


@torch.no_grad()
def reads(model, idx):
    """One forward pass: yields (site, its sources [N, M, D], its keys [N, M, D]) in fp32 at every site that has a choice. idx [B, T]."""
    r = model.residual
    memory, site = r.start(model.embed(idx), record=[]), 0

    def at(site):
        sources = list(memory.sources)
        if hasattr(r, "null_source"):
            sources = [r.null_source[site].expand_as(memory.x), *sources]
        v = torch.stack(sources).flatten(1, 2).float()
        return site, v, torch.nn.functional.rms_norm(v, v.shape[-1:], eps=r.eps) * r.key_norm[site].float()

    rope = tuple(table[: idx.size(1)] for table in model.rope)
    for layer in model.layers:
        for sublayer, *args in ((layer.attn, rope), (layer.mlp,)):
            got = at(site)
            if len(got[1]) > 1:
                yield got
            memory.write(sublayer(memory.read(), *args))
            site += 1
    if site < len(r.query):
        yield at(site)


@torch.no_grad()
def measure(model, batches, slices, seed=0):
    """Everything the tables and the figure show, averaged over batches of idx [B, T].

    {"sites": [{"site", "sources", "entropy", "kl", "null", "between", ...}], "deviation", "random": {site: [N, H]}}
    """
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(model.residual.query.shape, generator=generator).to(model.residual.query.device)
    random *= model.residual.query.float().norm(dim=1, keepdim=True) / random.norm(dim=1, keepdim=True)  # matched norm, site by site
    H, sites, deviation, null_deviation = model.residual.n_heads, {}, {}, {}
    for idx in batches:
        for site, v, keys in reads(model, idx):
            query = model.residual.query[site].float()
            alpha, by_chance = weights_of(keys, query, H), weights_of(keys, random[site], H)
            (kl, between), (null, null_between) = disagreement(keys, query, slices), disagreement(keys, random[site], slices)
            row = {
                "sources": len(v),
                "entropy": -(alpha * alpha.clamp_min(1e-30).log()).sum(0).mean().item(),
                "interleaved": disagreement(keys, query, slices, interleaved=True)[0],
                "null_interleaved": disagreement(keys, random[site], slices, interleaved=True)[0],
                "collinearity": collinearity(v),
            } | {"kl": kl, "null": null, "between": between, "null_between": null_between}
            sites.setdefault(site, []).append(row)
            for store, w in ((deviation, alpha), (null_deviation, by_chance)):
                mean = w.mean(1)  # [N, H]
                store.setdefault(site, []).append((mean - mean.mean(1, keepdim=True)).cpu())
    mean_of = lambda stored: {site: torch.stack(parts).mean(0).numpy() for site, parts in stored.items()}
    rows = [{"site": s} | {k: float(np.mean([r[k] for r in rs])) for k in rs[0]} for s, rs in sorted(sites.items())]
    return {"sites": rows, "deviation": mean_of(deviation), "random": mean_of(null_deviation)}


def flat(deviation):
    return np.concatenate([deviation[site].ravel() for site in sorted(deviation)])


def between_heads(deviation):
    """Mean correlation of the deviations [N, H] of two different heads, over all sites and sources together."""
    together = np.corrcoef(np.concatenate([deviation[site] for site in sorted(deviation)]).T)
    return float(together[~np.eye(len(together), dtype=bool)].mean())


def plot_sites(rows, path):
    """Left the disagreement of the trained and of a random query along the depth, right the entropy of the routing weights."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    sites = [r["site"] for r in rows]
    for axis, curves in (
        (left, (("trained query", "#D55E00", [r["kl"] for r in rows]), ("random query of its norm", "0.6", [r["null"] for r in rows]))),
        (right, (("routing weights", "#0072B2", [r["entropy"] for r in rows]), ("uniform over the sources", "0.6", [np.log(r["sources"]) for r in rows]))),
    ):
        for label, color, values in curves:
            axis.plot(sites, values, label=label, color=color, marker=".")
        axis.set(xlabel="routing site", ylim=(0, 1.25 * max(max(values) for _, _, values in curves)))  # room for the legend
        axis.legend(frameon=False, loc="upper left", ncols=2)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    left.set(ylabel="KL between slices and whole (nats)", title="Width disagreement")
    right.set(ylabel="nats", title="Entropy")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_heads(deviation, path, first_source="the embedding", most=10):
    """Figure 4: heads by sources, one panel per site; white is the consensus, grey a source that is not there yet."""
    shown = sorted(deviation)[:most]
    limit = max(np.abs(deviation[s]).max() for s in shown) or 1.0
    widest = max(len(deviation[s]) for s in shown)
    figure, panels = plt.subplots(len(shown), 1, figsize=(8, 0.55 * len(shown) * max(1, deviation[shown[0]].shape[1] / 8) + 1.2), sharex=True, squeeze=False)
    for panel, site in zip(panels[:, 0], shown):
        heads = np.full((deviation[site].shape[1], widest), np.nan)
        heads[:, : len(deviation[site])] = deviation[site].T
        panel.set_facecolor("0.8")
        image = panel.imshow(heads, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        panel.set_ylabel(f"site {site}", rotation=0, ha="right", va="center")
        panel.set_yticks([])
    panels[-1, 0].set_xlabel(f"source (0 is {first_source}); one row per head")
    figure.colorbar(image, ax=panels[:, 0], label="weight minus the mean over heads")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("ckpt", metavar="CKPT", help="a checkpoint, or a run's folder")
    parser.add_argument("--slices", type=int, default=4, help="parts that a query is cut into")
    parser.add_argument("--text", help="a text file; default: the held-out documents of the run's dataset")
    parser.add_argument("--windows", type=int, default=8, help="windows of block_size tokens in each of the two halves of the text")
    parser.add_argument("--sources", type=int, default=25, help="the matched-source-count control looks at sites with at most so many")
    parser.add_argument("--weights", choices=["raw", "ema"], default="raw")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokenizer", help="of --text=: bytes, qwen3, llama3, gpt2 or the path of a tokenizer.json; default: the checkpoint's")
    parser.set_defaults(prefix_token="auto")
    parser.add_argument("--out_dir", help="where probe.json, sites.png and perhead.png go; default: CKPT/probe")
    args = parser.parse_args()
    if args.slices < 1 or args.windows < 1 or args.sources < 2:
        raise UserError("--slices and --windows are 1 or more, --sources is 2 or more")
    device = check_device(args.device)
    model, meta = load_model(args.ckpt, device, torch.float32, args.weights, kernel="torch")
    config = model.config
    if config.residual not in ("attnres", "mhar", "delta"):
        raise UserError(f"{args.ckpt} has residual={config.residual}, which routes nothing: give a checkpoint of attnres, mhar or delta")
    out = output_folder(args.out_dir or Path(args.ckpt) / "probe", "--out_dir")
    if config.n_embd % args.slices:
        raise UserError(f"--slices={args.slices} does not divide the width {config.n_embd}")
    if args.text:
        if not Path(args.text).is_file():
            raise UserError(f"--text={args.text} is not a file")
        ids = np.array(load_text(args.ckpt, meta, args).encode(Path(args.text).read_text(errors="replace"), bos=False))
        windows = [ids[i : i + config.block_size] for i in range(0, len(ids) - config.block_size + 1, config.block_size)][: 2 * args.windows]
    elif meta["data"]["dataset"] is None:
        raise UserError(f"{args.ckpt} was imported and knows no dataset: give a text with --text=")
    else:
        val_bin = open_bin(find_dataset(meta["data"]["dataset"]) / "val.bin")
        if val_bin.header["tokenizer"] != meta["data"]["tokenizer"]:
            raise UserError(f"{val_bin.path} has tokens of {val_bin.header['tokenizer']}, {args.ckpt} knows those of {meta['data']['tokenizer']}: give a text with --text=")
        val = ValWindows(val_bin, config.block_size, 2 * args.windows)
        windows = list(val.batch(range(val.n))[:, :-1])
    if len(windows) < 2:
        raise UserError(f"the text has fewer than two windows of block_size={config.block_size} tokens: give a longer one with --text=")
    batches = [torch.from_numpy(w)[None].to(device) for w in windows]
    first, second = (measure(model, half, args.slices) for half in (batches[0::2], batches[1::2]))  # disjoint text

    rows, few = first["sites"], [r for r in first["sites"] if r["sources"] <= args.sources]
    mean = lambda key, of=rows: float(np.mean([r[key] for r in of]))
    summary = {
        "KL of the trained query": mean("kl"),
        "KL of a random query of its norm": mean("null"),
        "learned excess": mean("kl") - mean("null"),
        "learned excess, other text": mean("kl", second["sites"]) - mean("null", second["sites"]),
        "learned excess, interleaved slices": mean("interleaved") - mean("null_interleaved"),
        "disagreement between slices, trained": mean("between"),
        "disagreement between slices, random": mean("null_between"),
        f"median KL, sites of at most {args.sources} sources": float(np.median([r["kl"] for r in few])),
        "the same of a random query": float(np.median([r["null"] for r in few])),
        "source collinearity (mean cosine)": rows[-1]["collinearity"],
        "sources at the last site": rows[-1]["sources"],
        "routing entropy (nats)": mean("entropy"),
    }
    own, chance = flat(first["deviation"]), flat(first["random"])
    if model.residual.n_heads > 1:
        same = float(np.corrcoef(own, flat(second["deviation"]))[0, 1]) if own.std() > 0 else float("nan")
        summary |= {"largest deviation of a head": float(np.abs(own).max()), "the same under random queries": float(np.abs(chance).max()), "correlation with other text": same, "correlation between heads": between_heads(first["deviation"]) if own.std() > 0 else float("nan")}
    print(f"{args.ckpt}: residual={config.residual}, H={config.route_heads}, {args.slices} slices, {len(windows)} windows of {config.block_size} tokens\n")
    print(table(["probe", "value"], [[k, f"{v:.4f}" if isinstance(v, float) and not v.is_integer() else f"{v:g}"] for k, v in summary.items()]))
    print(table(["site", "sources", "entropy", "uniform", "KL", "null"], [[r["site"], f"{r['sources']:g}", f"{r['entropy']:.3f}", f"{np.log(r['sources']):.3f}", f"{r['kl']:.4f}", f"{r['null']:.4f}"] for r in rows]))
    (out / "probe.json").write_text(json.dumps({"ckpt": str(args.ckpt), "model_config": meta["model_config"], "summary": summary, "sites": rows}, indent=1))
    plot_sites(rows, out / "sites.png")
    if model.residual.n_heads > 1:
        plot_heads(first["deviation"], out / "perhead.png", "the null source" if config.residual == "delta" else "the embedding")
    print(f"probe.json, sites.png{', perhead.png' * (model.residual.n_heads > 1)} are in {out}")


if __name__ == "__main__":
    cli(main)
