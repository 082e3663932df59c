"""A call of which a launch fails, and the next on the same stream, which must find counters of zero.

python tests/emulator/run.py tests/emulator/failed_launch.py
"""

import torch

import cutlass_ext
import emulator

# Single rows and chunks over pages: a launch that decodes, a persistent one beside it, and more CTAs of that one behind
# both, for which those of the one before wait with their counters.
torch.manual_seed(0)
PAGE, LENGTHS_Q, LENGTHS_K = 16, [1, 70, 1, 130], [40, 70, 33, 144]
heads_q, heads_kv, d = 8, 4, 128
make = lambda *shape: torch.randn(shape, device="cuda").bfloat16()  # noqa: E731
int32 = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")  # noqa: E731
pages = -(-max(LENGTHS_K) // PAGE)
tensors = [make(sum(LENGTHS_Q), heads_q, d), *(make(len(LENGTHS_Q) * pages, PAGE, heads_kv, d) for _ in "kv")]
options = {
    "cu_seqlens_q": int32([0, *torch.tensor(LENGTHS_Q).cumsum(0).tolist()]),
    "max_seqlen_q": max(LENGTHS_Q),
    "seqused_k": int32(LENGTHS_K),
    "block_table": torch.arange(len(LENGTHS_Q) * pages, dtype=torch.int32, device="cuda").view(-1, pages),
    "causal": True,
    "start_pos": "end",
}
reason = cutlass_ext.explain(*tensors, **options).reason
assert "more once what decodes beside them is done" in reason, reason
# Tiles that are alike: CTAs come to the end of the queue together, and none finds what one of them would put right.
alike = [make(1, 128, 12, d) for _ in "qkv"]
of_alike = {"seqused_k": int32([128]), "num_splits": 1, "backend": "sm90"}  # fixed: not for the short kernels
assert cutlass_ext.explain(*alike, **of_alike).kernel == "persistent"
calls = (tensors, options), (alike, of_alike)
want = [cutlass_ext.fmha(*t, **o) for t, o in calls]
for turn in range(24):
    launches, (t, o), result = turn % 3, calls[turn % 2], want[turn % 2]
    emulator.library.emulator_fail_launch(launches)
    try:
        cutlass_ext.fmha(*tensors, **options)
    except RuntimeError as error:
        assert "launching the kernel" in str(error), error
    else:
        raise AssertionError("no launch failed")
    out = torch.full_like(result, torch.nan)  # rows that nobody writes are not to be those of a call before
    got = cutlass_ext.fmha(*t, **o, out=out)
    assert torch.equal(got, result), f"behind a failure of launch {launches} a call gives another result"
print("no launch that failed had a part in the next call")
