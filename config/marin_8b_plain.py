"""The paper's 8B mid-training (section 3.3, appendix I), the control: marin-8b-base as it is, cooled down on
10B tokens of the anneal mix.

    python convert_8b.py import marin-8b-base out/marin_8b_base_plain --residual=baseline
    torchrun --nproc_per_node=8 train.py config/marin_8b_plain.py

The model's shape, rotary base and scaling, and norm eps come with the checkpoint. marin_8b_delta.py and
marin_8b_single_head.py differ in the residual only. The paper leaves open, and this file decides:
- the shape of the decay: it "cools", here linearly (--lr_schedule=cosine is the other candidate);
- the routing's learning rate and decay: the trunk's rate (--route_lr_scale), no decay;
- whether the output head counts as an embedding and is spared the decay: here it is;
- gradient clipping at 1, and AdamW's betas, as in its training from scratch.
"""

# python prepare_data.py config/data_anneal.py --tokenizer=llama3 --size=46e9 --out_dir=data/anneal_llama3
dataset = "anneal_llama3"
out_dir = "out/marin_8b_plain"
init_from = "out/marin_8b_base_plain"
residual = "baseline"
block_size = 4096

batch_size = 2  # sequences per device and micro-step, the paper's
global_batch_size = 256  # 1,048,576 tokens per step
max_steps = 9_500
warmup_steps = 500  # AdamW starts cold: no moments come with the base
learning_rate = 4e-4  # the base's constant 1.7e-3, scaled down with the root of the batch
min_lr_ratio = 0.01  # to 4e-6
lr_schedule = "linear"
weight_decay = 0.05
decay = "matrices"  # not norms, embedding, output head or routing
z_loss = 1e-4
ema_decay = 0.999  # Table 3 is of these weights
parallel = "fsdp"
grad_checkpoint = True
eval_interval = 500
save_interval = 500  # 128 GB: weights, their average and AdamW's moments, all fp32
log_interval = 1  # a step takes seconds, and a signal is obeyed when a line is logged
