"""The study at length: every residual method on the 100M trunk for 4,000 short steps on text that is not
repeated.

    make study                                  # methods x heads x seeds, probes, report
    python train.py config/study_long.py --residual=attnres --seed=2 --out_dir=out/study_long/attnres_s2

32.8M of the 40.2M tokens of data/study_long (RESULTS.md says how to make it), an eightieth of the paper's
2.6B. The tail mean of eleven evaluations is that of the last quarter of the run, as in the paper.
"""

_base = "study.py"
dataset = "study_long"  # 150 MB of English documentation and source code, as Qwen3 tokens
max_steps = 4_000
eval_interval = 100
eval_windows = 192  # 197k held-out tokens; forward only, evaluating takes less than a tenth of the time
log_interval = 100  # seconds apart on a GPU; thirty logs are small enough to be kept with the results
