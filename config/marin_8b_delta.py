"""The paper's 8B mid-training with delta routing added, H = 8: at step 0 the base's own logits, then the
control's recipe and data order.

    python convert_8b.py import marin-8b-base out/marin_8b_base_delta
    torchrun --nproc_per_node=8 train.py config/marin_8b_delta.py
"""

_base = "marin_8b_plain.py"
out_dir = "out/marin_8b_delta"
init_from = "out/marin_8b_base_delta"
residual = "delta"
route_heads = 8
delta_blocks = 8  # of four layers: a site reads the null source, the embedding and at most seven deltas
