"""Results and gradients on GPUs before Hopper, which have what is compiled for 8.0 and less shared memory, beside the
CPU path's. Prints the kernels of gradients.

CUTLASS_EXT_EMULATOR_CAPABILITY=80 python tests/emulator/run.py tests/emulator/older_gpus.py
"""

import torch

import cutlass_ext

torch.manual_seed(0)
ROWS, KEYS, HEADS, HEADS_KV = 150, 270, 2, 1
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float32: 5e-6}  # relative, Frobenius
calls = [(torch.bfloat16, "sm80", d) for d in (64, 128, 192, 256)] + [(torch.float32, "simt", d) for d in (64, 128)]
kernels = set()
for dtype, backend, d in calls:
    q, k, v, dout = (torch.randn(1, n, h, d, dtype=dtype) for n, h in
                     ((ROWS, HEADS), (KEYS, HEADS_KV), (KEYS, HEADS_KV), (ROWS, HEADS)))  # fmt: skip
    for options in ({}, {"causal": True}, {"deterministic": True}):
        results = []
        for device, used in (("cuda", backend), ("cpu", "torch")):
            inputs = [x.to(device).requires_grad_() for x in (q, k, v)]
            out = cutlass_ext.fmha(*inputs, backend=used, **options)
            results.append([out.detach().cpu(), *(x.cpu() for x in torch.autograd.grad(out, inputs, dout.to(device)))])
        for name, got, want in zip(("out", "dq", "dk", "dv"), *results, strict=True):
            error = ((got.double() - want.double()).norm() / want.double().norm()).item()
            assert error < 2 * TOLERANCE[dtype], f"{name} of {backend}, head_dim {d}, {options}: {error:.2e}"
    call = [x.cuda() for x in (dout, q, k, v)]
    out, lse = cutlass_ext.fmha(*call[1:], backend=backend, return_lse=True)
    of = cutlass_ext.explain(cutlass_ext.fmha_backward, *call, out, lse, backend=backend)
    kernels.add(f"{backend} {d}: {of.kernel} {of.tile[0]}x{of.tile[1]}")
print("\n".join(sorted(kernels)))
