"""What must not reach an output: padding, other heads, other sequences, memory around the tensors. Bit for bit."""

import pytest
import torch
from oracle import assert_same_bits

import cutlass_ext

NAN, INF = float("nan"), float("inf")
LARGEST = "largest"  # finite number of the dtype
LENGTHS, LEFTPADS = [100, 37, 64, 1], [3, 0, 36, 0]


class Guarded:
    """Tensors inside buffers that hold `fill` (or a huge number) everywhere else; knows whether a buffer changed."""

    GUARD = 1024
    HUGE = 0x7F7F7F7F

    def __init__(self, fill):
        self.fill, self.buffers, self.snapshots = fill, [], []

    def put(self, tensor):
        fill = self.fill if tensor.is_floating_point() else self.HUGE
        fill = torch.finfo(tensor.dtype).max if fill == LARGEST else fill
        buffer = torch.full((tensor.numel() + 2 * self.GUARD,), fill, dtype=tensor.dtype, device=tensor.device)
        inside = buffer[self.GUARD : -self.GUARD].view(tensor.shape)
        inside.copy_(tensor)
        self.buffers.append(buffer)
        self.snapshots.append(buffer.clone())
        return inside

    def assert_unchanged(self):
        for buffer, snapshot in zip(self.buffers, self.snapshots, strict=True):
            assert torch.equal(buffer.view(torch.int32), snapshot.view(torch.int32)), "a guarded tensor changed"


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("fill", [NAN, INF, -INF, LARGEST])
@pytest.mark.parametrize("n_q,n_kv,d", [(33, 65, 64), (1, 100, 128), (70, 70, 20), (130, 40, 200)])
def test_around_every_tensor(target, n_q, n_kv, d, fill, num_splits):
    guarded = Guarded(fill)
    q, k, v = target.qkv(2, n_q, 4, target.head_dim(d), n_kv=n_kv, heads_kv=2)
    features = {
        "alibi_slopes": target.vector(2, 4).abs(), "sink": target.vector(4), "start_pos": target.int32([n_kv - n_q, 9]),
        "seqused_k": target.int32([n_kv, n_kv - 5]), "leftpad_k": target.int32([2, 0]),
    }  # fmt: skip
    options = {"causal": True, "num_splits": num_splits}
    want = target.fmha(q, k, v, **features, **options)
    inside = [guarded.put(t) for t in (q, k, v)]
    got = target.fmha(*inside, **{name: guarded.put(t) for name, t in features.items()}, **options)
    assert_same_bits(got, want)
    guarded.assert_unchanged()


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("plant", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "causal,n_q,d", [(False, 50, 64), (True, 50, 64), (True, 1, 64), (True, 70, 128), (False, 1, 256)]
)
def test_padding(target, causal, n_q, d, plant, num_splits):
    """Past seqused_k and before leftpad_k."""
    q, k, v = target.qkv(4, n_q, 4, d, n_kv=130, heads_kv=2)
    options = {"seqused_k": target.int32(LENGTHS), "leftpad_k": target.int32(LEFTPADS), "causal": causal,
               "start_pos": "end", "num_splits": num_splits}  # fmt: skip
    want = target.fmha(q, k, v, **options)
    planted = k.clone(), v.clone()
    for t in planted:
        for b in range(4):
            t[b, LENGTHS[b] :] = plant
            t[b, : LEFTPADS[b]] = plant
    assert_same_bits(target.fmha(q, *planted, **options), want)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("plant", [NAN, INF])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_other_heads_and_sequences(target, which, plant, num_splits):
    q, k, v = target.qkv(3, 70, 4, 32, n_kv=90, heads_kv=2)
    want = target.fmha(q, k, v, num_splits=num_splits)
    planted = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
    planted[which][1, :, 1] = plant
    # query head 1 alone, or the two query heads (2, 3) that read KV head 1
    spoilt = [1] if which == "q" else [2, 3]
    out, lse = target.fmha(*planted.values(), num_splits=num_splits)
    clean = torch.ones(3, 4, dtype=torch.bool, device=target.device)
    clean[1, spoilt] = False
    assert_same_bits((out.transpose(1, 2)[clean], lse[clean]), (want[0].transpose(1, 2)[clean], want[1][clean]))
    assert not out[1, :, spoilt].isfinite().any(), "what a row does see must show"


@pytest.mark.parametrize("row", [0, 31, 32, 63, 69])
def test_a_row_of_q_is_its_own(target, row):
    q, k, v = target.qkv(2, 70, 2, 64)
    want = target.fmha(q, k, v)
    q = q.clone()
    q[0, row, 1] = NAN
    out, lse = target.fmha(q, k, v)
    clean = torch.ones(2, 70, 2, dtype=torch.bool, device=target.device)
    clean[0, row, 1] = False
    assert_same_bits((out[clean], lse.transpose(1, 2)[clean]), (want[0][clean], want[1].transpose(1, 2)[clean]))


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (16, 0)}, {"window": (5, 3)}], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
def test_hidden_by_a_mask_stays_in_its_sequence_and_head(target, which, options):
    """A non-finite key or value that only causal or window hides may reach rows of its own (b, h), and nothing else."""
    q, k, v = target.qkv(2, 100, 2, 32)
    want = target.fmha(q, k, v, **options)
    planted = {"k": k.clone(), "v": v.clone()}
    planted[which][1, 90:, 0] = NAN
    out, lse = target.fmha(q, *planted.values(), **options)
    clean = torch.tensor([[True, True], [False, True]], device=target.device)
    assert_same_bits((out.transpose(1, 2)[clean], lse[clean]), (want[0].transpose(1, 2)[clean], want[1][clean]))


def test_memory_next_to_the_outputs(gpu):
    """The allocator puts `out` and `lse` into gaps between tensors of NaN, and those keep their bits."""
    q, k, v = gpu.qkv(2, 61, 4, 64)  # `out` takes 122 KB (16-bit: 61), `lse` 2 KB: sizes that nothing else here has
    want = gpu.fmha(q, k, v, causal=True, num_splits=1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = [torch.full((t.numel(),), NAN, dtype=t.dtype, device="cuda") for t in want for _ in range(3)]
    gaps = held.pop(4).data_ptr(), held.pop(1).data_ptr()
    out, lse = cutlass_ext.fmha(q, k, v, causal=True, num_splits=1, return_lse=True)
    assert (lse.data_ptr(), out.data_ptr()) == gaps, "the allocator did not use the gaps: this test shows nothing"
    assert_same_bits((out, lse), want)
    for neighbour in held:
        assert_same_bits([neighbour], [torch.full_like(neighbour, NAN)])
