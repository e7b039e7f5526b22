"""marin_8b_delta.py with one routing head, which the paper's comparison lacks: the gain of routing without
heads.

    python convert_8b.py import marin-8b-base out/marin_8b_base_single_head --route_heads=1
    torchrun --nproc_per_node=8 train.py config/marin_8b_single_head.py
"""

_base = "marin_8b_delta.py"
out_dir = "out/marin_8b_single_head"
init_from = "out/marin_8b_base_single_head"
route_heads = 1
