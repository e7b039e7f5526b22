"""FineWeb-Edu's sample of 10 billion tokens, the paper's web corpus (appendix H): 30 GB to read, 40 on disk.

    python prepare_data.py config/data_fineweb_edu.py               # data/fineweb_edu
    python prepare_data.py config/data_fineweb_edu.py --size=3e9    # enough for the paper's runs of 20k steps

Open to all (ODC-BY). sample-100BT and sample-350BT are larger samples of it.
"""

source = "hub:HuggingFaceFW/fineweb-edu:sample-10BT"
out_dir = "data/fineweb_edu"
tokenizer = "qwen3"
val_fraction = 0.0005  # five million tokens that no run can train on
