"""The 100M model on web text, as in the paper's web-corpus tables (appendix H): a larger peak rate, random
queries.

    torchrun --nproc_per_node=8 train.py config/fineweb_100m.py

Everything else is the recipe of mhar_100m.py.
"""

_base = "mhar_100m.py"
dataset = "fineweb_edu"  # python prepare_data.py config/data_fineweb_edu.py
learning_rate = 1e-3  # best for all but attnres, which prefers 5e-4 at 350M and 1B (Table 11)
route_init = "normal"  # these runs came before the zero initialisation
