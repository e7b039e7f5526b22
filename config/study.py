"""The first study: every residual method on the 100M trunk for 1,000 short steps, minutes a run on one GPU.

    make study CONFIG=config/study.py           # methods x heads x seeds, probes, report
    python train.py config/study.py --residual=attnres --seed=2 --out_dir=out/study/attnres_s2

8.2M tokens of a text of 8.3M (RESULTS.md says how to make data/study): no window is seen twice. That is a
three-hundredth of the paper's 2.6B, at its peak rate; differences at this length need not be those at 20,000
steps.
"""

_base = "mhar_100m.py"
dataset = "study"  # 35 MB of English documentation and Python sources, half of each, as Qwen3 tokens
block_size = 1024
global_batch_size = 8  # 8,192 tokens per step
max_steps = 1_000
warmup_steps = 100
eval_interval = 50  # the tail mean of eleven evaluations is that of the second half of the run
eval_windows = 96  # 98k held-out tokens; forward only, evaluating takes less than a tenth of the time
save_interval = 10_000  # at the end only: 1.4 GB
