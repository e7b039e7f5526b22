"""MHAR-HW as in Table 7 at 100M: each KV head's group of attention heads reads a mixture of its own.

The rest is table7_mhar.py; MLPs and the output read with its heads.
"""

_base = "table7_mhar.py"
residual = "mhar_hw"
