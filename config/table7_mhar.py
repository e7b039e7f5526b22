"""MHAR as in Table 7 at 100M: as many heads as the attention has KV heads, on web text.

    torchrun --nproc_per_node=8 train.py config/table7_mhar.py
    torchrun --nproc_per_node=8 train.py config/table7_mhar_hw.py     # its counterpart

For 350M and 1B, _base is fineweb_350m.py and fineweb_1b.py, and route_heads is 8.
"""

_base = "fineweb_100m.py"
route_heads = 4
