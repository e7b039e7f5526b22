"""A tiny MHAR on text that every machine has, the Python standard library's sources: minutes on two CPU
cores.

    python train.py                                         # this file is the default
    python train.py config/demo.py --residual=baseline      # the same data in the same order

The held-out files end below 1.9 nats per byte.
"""

dataset = "stdlib"  # made on the spot, nothing is downloaded
n_layer = 4
n_embd = 128
n_head = 4
n_kv_head = 2
ffn_dim = 384
block_size = 256
residual = "mhar"
route_heads = 4  # the paper's basin is 4 to 8; 128 channels leave 32 to each of 4

batch_size = 8
global_batch_size = 8  # 2,048 bytes per step, a twelfth of the text in all
max_steps = 500
warmup_steps = 50
learning_rate = 3e-3  # a small model takes large steps
eval_interval = 25  # twenty evaluations: the tail mean of the last eleven is that of the second half
eval_windows = 64
compile = False  # on a GPU too: the run is over before a compiler would be
