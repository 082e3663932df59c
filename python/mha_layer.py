"""torch.nn.MultiheadAttention with its attention done by cutlass_ext: same weights, same numbers.

python python/mha_layer.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import cutlass_ext


def attention_layer(mha: nn.MultiheadAttention, x: Tensor, causal: bool) -> Tensor:
    """What `mha(x, x, x)` returns, for self-attention with batch_first; `x` is [batch, rows, embed_dim]."""
    batch, rows, width = x.shape
    packed = linear(x, mha.in_proj_weight, mha.in_proj_bias).view(batch, rows, 3, mha.num_heads, width // mha.num_heads)
    out = cutlass_ext.flash_attn_qkvpacked_func(packed, causal=causal)
    return mha.out_proj(out.reshape(batch, rows, width))


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(512, 8, batch_first=True, device=device).eval()
    x = torch.randn(4, 490, 512, device=device)
    hidden = torch.ones(490, 490, dtype=torch.bool, device=device).triu(1)
    with torch.no_grad():
        for causal in (False, True):
            expected, _ = mha(x, x, x, attn_mask=hidden if causal else None, need_weights=False)
            error = (attention_layer(mha, x, causal) - expected).abs().max().item()
            print(f"{'causal' if causal else 'full':>6}: max difference from nn.MultiheadAttention {error:.1e}")
