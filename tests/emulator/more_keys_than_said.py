"""Gradients of packed sequences with more keys than their caller says, of heads that a CTA has whole: a head ends with
the last tile that the launch has for it, or the launch would not.

CUTLASS_EXT_EMULATOR_SMS=4 python tests/emulator/run.py tests/emulator/more_keys_than_said.py
"""

import torch

import cutlass_ext

torch.manual_seed(0)
HEADS, D, SAID = 2, 64, 256
for longer in (4, 2):  # of four sequences, the first
    rows, keys = [70] * 4, [300] * longer + [200] * (4 - longer)
    make = lambda n: torch.randn(n, HEADS, D, device="cuda").bfloat16()  # noqa: E731
    q, k, v, dout = make(sum(rows)), make(sum(keys)), make(sum(keys)), make(sum(rows))
    ends = {
        f"cu_seqlens_{of}": torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        for of, n in (("q", rows), ("k", keys))
    }
    gradients = []
    for max_seqlen_k in (SAID, max(keys)):
        packing = ends | {"max_seqlen_q": max(rows), "max_seqlen_k": max_seqlen_k}
        call = dout, q, k, v, *cutlass_ext.fmha(q, k, v, return_lse=True, **packing)
        assert cutlass_ext.explain(cutlass_ext.fmha_backward, *call, **packing).kernel == "head_gradients"
        gradients.append(cutlass_ext.fmha_backward(*call, **packing))
    for got, want, behind in zip(*gradients, (rows, keys, keys), strict=True):
        behind = sum(behind[:longer])
        assert torch.equal(got[behind:].cpu(), want[behind:].cpu()), f"{longer} of four are longer"
print("the launches end, and other sequences get what they have to")
