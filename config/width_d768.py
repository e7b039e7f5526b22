"""The width control of Table 6: 100M widened from 512 to 768 at the same depth and KV heads, on web text.

    python train.py config/width_d768.py --residual=attnres   # probe.py then reads its queries

The paper says "d alone changes" and gives no more. Taken here: 12 heads, which keep head_dim at 64, and an
MLP of 3 times the width, as at 100M. With the Qwen3 vocabulary that is 199.3M parameters (its table says
124M, without saying what it counts).
"""

_base = "fineweb_100m.py"
n_embd = 768
n_head = 12
ffn_dim = 2304
