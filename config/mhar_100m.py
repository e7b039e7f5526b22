"""The paper's 100M model and recipe (section 3.1, appendix I).

115.6M parameters with the Qwen3 vocabulary, 37.8M outside the embedding.

    torchrun --nproc_per_node=8 train.py config/mhar_100m.py
    python train.py config/mhar_100m.py --residual=baseline   # one GPU; or attnres, hc: the same data

Master weights are fp32 with bf16 compute. The paper kept bf16 parameters: --param_dtype=bfloat16.
"""

dataset = "anneal"  # the mix of its Table 13: python prepare_data.py config/data_anneal.py
n_layer = 12
n_embd = 512
n_head = 8
n_kv_head = 4
ffn_dim = 1536
block_size = 2048
residual = "mhar"
route_heads = 8  # the column of Table 1; its text says H = KV heads, 4 here: the basin is flat from 4 to 8

batch_size = 8  # sequences per device and micro-step, the paper's; the rest of the next line is accumulated
global_batch_size = 64  # 131,072 tokens per step, 2.6B in all
max_steps = 20_000
warmup_steps = 1_000
learning_rate = 5e-4  # one peak for every method; cosine to a tenth of it
eval_interval = 500  # the score is the mean of the last eleven: steps 15k to 20k
save_interval = 2_000  # a save is 1.4 GB: at 1 GB/s under 3% of a run on eight GPUs
weight_decay = (
    0.1  # on every parameter, norms and routing queries too (paper); never on static hyper-connections
)
seed = 42
