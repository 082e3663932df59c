"""A first look at cutlass_ext, for its users: the calls, beside what they replace. Runs on a GPU or a CPU.

python python/quickstart.py
"""

import torch

import cutlass_ext as ce

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
batch, n, heads, d = 2, 300, 8, 64


def difference(a: torch.Tensor, b: torch.Tensor) -> str:
    return f"max difference {(a - b).abs().max().item():.1e}"


with torch.no_grad():
    # Self-attention straight from a packed projection: strides, no copies.
    qkv = torch.randn(batch, n, 3, heads, d, device=device)
    q, k, v = qkv.unbind(2)
    out = ce.fmha(q, k, v, causal=True)
    print(ce.explain(q, k, v, causal=True))

    # PyTorch's function and ours, same arguments ([batch, heads, rows, d] there).
    bhsd = [t.transpose(1, 2) for t in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*bhsd, is_causal=True)
    print("scaled_dot_product_attention:", difference(ce.scaled_dot_product_attention(*bhsd, is_causal=True), theirs))
    print("fmha:                        ", difference(out, theirs.transpose(1, 2)))

    # Decoding: row 299 again, as one query row against the cache of all keys.
    row = ce.fmha(q[:, -1:], k, v, causal=True, start_pos="end")
    print("one decoded row:             ", difference(row, out[:, -1:]))

    # Two sequences of 100 and 200 rows, packed one after the other: the first is the beginning of the one above.
    ends = torch.tensor([0, 100, 300], dtype=torch.int32, device=device)
    packed = ce.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 200, 200, causal=True)
    print("packed sequences:            ", difference(packed[:100], out[0, :100]))

    # A window, a cap on the scores, grouped key/value heads, and the log-sum-exp of each row.
    out, lse = ce.fmha(q, k[:, :, :2], v[:, :, :2], causal=True, window=(63, 0), softcap=30.0, return_lse=True)
    print("out", tuple(out.shape), "lse", tuple(lse.shape))

    # A bias of each head that the batch shares, as T5 has it, and a mask of padding: in PyTorch one attn_mask.
    bias = torch.randn(1, heads, n, n, device=device)
    words = (torch.arange(n, device=device) < torch.tensor([[n], [170]], device=device))[:, None, None]
    out = ce.fmha(q, k, v, bias=bias, mask=words)
    attn_mask = bias.masked_fill(~words, -torch.inf)
    theirs = torch.nn.functional.scaled_dot_product_attention(*bhsd, attn_mask=attn_mask)
    print("a bias and a mask:           ", difference(out, theirs.transpose(1, 2)))

    # Dropout goes by position: a seed says which weights are dropped, in the gradients too.
    seed = torch.tensor([20, 26], device=device)
    kept = ce.dropout_mask(batch, heads, n, n, 0.1, seed)
    weights = torch.softmax(bhsd[0] @ bhsd[1].mT / d**0.5, -1) * kept / 0.9
    out = ce.fmha(q, k, v, dropout_p=0.1, dropout_seed=seed)
    print("dropout:                     ", difference(out, (weights @ bhsd[2]).transpose(1, 2)))
