"""The paper's 350M model and recipe (section 3.1, appendix I).

533M parameters with the Qwen3 vocabulary, 377.5M outside the embedding.

    torchrun --nproc_per_node=8 train.py config/mhar_350m.py
    python train.py config/mhar_350m.py --residual=baseline   # one GPU; or attnres, hc: the same data

Master weights are fp32 with bf16 compute. The paper kept bf16 parameters: --param_dtype=bfloat16.
"""

dataset = "anneal"  # the mix of its Table 13: python prepare_data.py config/data_anneal.py
n_layer = 24
n_embd = 1024
n_head = 16
n_kv_head = 8
ffn_dim = 4096
block_size = 1024
residual = "mhar"
route_heads = 8  # = KV heads

batch_size = 4  # sequences per device and micro-step, the paper's; the rest of the next line is accumulated
global_batch_size = 32  # 32,768 tokens per step, 0.66B in all, so under-trained: 1.2 per parameter
max_steps = 20_000
warmup_steps = 1_000
learning_rate = 5e-4  # one peak for every method; cosine to a tenth of it
eval_interval = 500  # the score is the mean of the last eleven: steps 15k to 20k
save_interval = 5_000  # a save is 6.4 GB: at 1 GB/s 3% of a run on eight GPUs
weight_decay = (
    0.1  # on every parameter, norms and routing queries too (paper); never on static hyper-connections
)
seed = 42
