"""What the tests hold the library against: the formulas of docs/semantics.md in float64 (the oracle), the same in fp32
with P and O rounded to the inputs' dtype (the reference, `ref`), and the bounds that both give; their gradients; packed
sequences, rotary embedding and where a cache keeps its keys. Called by every test module and by tests/soak.py."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

CHUNK_ELEMENTS = 1 << 23  # scores held at a time, so that a long case fits next to the tensors under test


def visible(positions, keys, *, causal, window, leftpad, len_kv):
    """Which of `keys` [n] a query row at each of `positions` [m] sees: bool [m, n]."""
    p, j = positions[:, None], keys[None, :]
    seen = (j >= leftpad) & (j < len_kv)
    if causal:
        seen = seen & (j <= p)
    if window[0] >= 0:
        seen = seen & (j >= p - window[0])
    if window[1] >= 0:
        seen = seen & (j <= p + window[1])
    return seen


def keeps(dropout_p, seed, sequence, heads, positions, keys):
    """Which weights dropout keeps: bool [heads, positions, keys]. Philox4x32-7, on unsigned numbers."""
    word = np.uint64(0xFFFFFFFF)
    low, high = (lambda x: x & word), (lambda x: x >> np.uint64(32))
    seed, spread = [int(x) % 2**64 for x in seed.tolist()], 0x9E3779B97F4A7C15
    spread = seed[1] * spread % 2**64
    j, p, h = (np.asarray(x.cpu() if isinstance(x, torch.Tensor) else x, np.int64) for x in (keys, positions, heads))
    words = []
    for row in (p - p % 2, p - p % 2 + 1):  # which draw together
        c = [
            low((j // 16).astype(np.uint64))[None, None], low(row.astype(np.uint64))[None, :, None],
            low(h.astype(np.uint64) + np.uint64(spread % 2**32))[:, None, None],
            np.full((1, 1, 1), (sequence + (spread >> 32)) % 2**32, np.uint64),
        ]  # fmt: skip
        key = [seed[0] % 2**32, seed[0] >> 32]
        for _ in range(7):
            a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
            c = [high(b) ^ c[1] ^ np.uint64(key[0]), low(b), high(a) ^ c[3] ^ np.uint64(key[1]), low(a)]
            key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
        words += np.broadcast_arrays(*c)
    place = (j % 4 * 8 + j % 8 // 4 * 4 + j % 16 // 8 * 2)[None] + (p % 2)[:, None]
    number = sum((word >> place.astype(np.uint64) & np.uint64(1)) << np.uint64(24 + i) for i, word in enumerate(words))
    rotated = lambda x, by: low(x << np.uint64(by)) | x >> np.uint64(32 - by)  # noqa: E731
    number |= (words[0] ^ rotated(words[1], 11) ^ rotated(words[2], 22)) >> np.uint64(8)
    return torch.from_numpy(number.astype(np.int64) >= math.floor(dropout_p * 2**32 + 0.5))


def rounded(x, dtype):
    """`x` as `dtype` holds it, and its gradient untouched."""
    return x + (x.to(dtype).to(x.dtype) - x).detach()


def attention(
    q, k, v, *, causal=False, start_pos=0, window=(-1, -1), softmax_scale=None, softcap=0.0, alibi_slopes=None,
    sink=None, seqused_k=None, leftpad_k=None, bias=None, mask=None, dropout_p=0.0, dropout_seed=None, head_start=0,
    sequence_start=0, key_start=0, rows=None, compute=torch.float64, round_to=None,
):  # fmt: skip
    """The formula, one sequence at a time. Same arguments as `cutlass_ext.fmha`; `rows` picks query rows.

    Returns out [B, rows, H_q, d_v] and lse [B, H_q, rows], both in `compute`, and the largest |s| that a row saw. P, O
    and, where autograd goes through, dS are rounded to `round_to`, and rowsum(dO O) in dS is that of the rounded O.
    """
    batch, n_q, heads_q, head_dim = q.shape
    n_kv, heads_kv, device = k.shape[1], k.shape[2], q.device
    rows = torch.arange(n_q, device=device) if rows is None else torch.as_tensor(rows, device=device)
    lengths = [n_kv] * batch if seqused_k is None else seqused_k.tolist()
    leftpads = [0] * batch if leftpad_k is None else leftpad_k.tolist()
    key_starts = key_start.tolist() if isinstance(key_start, torch.Tensor) else [key_start] * batch
    if isinstance(start_pos, str):
        starts = [first + length - n_q for first, length in zip(key_starts, lengths, strict=True)]
    else:
        starts = start_pos.tolist() if isinstance(start_pos, torch.Tensor) else [start_pos] * batch
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    slopes = None if alibi_slopes is None else alibi_slopes.to(compute).expand(batch, heads_q)
    out = torch.zeros(batch, len(rows), heads_q, v.shape[-1], dtype=compute, device=device)
    lse = torch.full((batch, heads_q, len(rows)), float("-inf"), dtype=compute, device=device)
    if sink is not None:
        lse = sink.to(compute)[None, :, None].expand_as(lse).clone()
    largest = 0.0
    bias, mask = (None if x is None else x.expand(batch, heads_q, n_q, n_kv) for x in (bias, mask))

    for b in range(batch):
        first, last = leftpads[b], lengths[b]
        if last <= first or heads_q == 0 or len(rows) == 0:
            continue
        keys = torch.arange(first, last, device=device) + key_starts[b]  # their positions
        # [H_q, n, d]: each query head next to the KV head that it reads
        k_b = k[b, first:last].to(compute).transpose(0, 1).repeat_interleave(heads_q // heads_kv, 0)
        v_b = v[b, first:last].to(compute).transpose(0, 1).repeat_interleave(heads_q // heads_kv, 0)
        chunk = max(1, CHUNK_ELEMENTS // (heads_q * len(keys)))
        for r in range(0, len(rows), chunk):
            i = rows[r : r + chunk]
            position = starts[b] + i
            s = scale * (q[b, rows[r : r + chunk]].to(compute).transpose(0, 1) @ k_b.mT)
            if round_to is not None and s.requires_grad:
                s.register_hook(lambda ds: ds.to(round_to).to(compute))
            if softcap > 0:
                s = softcap * torch.tanh(s / softcap)
            if slopes is not None:
                s = s - slopes[b, :, None, None] * (position[:, None] - keys[None, :]).abs()
            seen = visible(position, keys, causal=causal, window=window, leftpad=keys[0], len_kv=keys[-1] + 1)
            if bias is not None:
                of_pairs = bias[b, :, i, first:last].to(compute)
                s, seen = s + of_pairs, seen & (of_pairs != float("-inf"))
            if mask is not None:
                seen = seen & mask[b, :, i, first:last]
            largest = max(largest, s.masked_fill(~seen, 0.0).abs().max().item())
            s = s.masked_fill(~seen, float("-inf"))
            if sink is not None:
                s = torch.cat([s, sink.to(compute)[:, None, None].expand(heads_q, len(position), 1)], dim=-1)
            row_max = s.amax(-1, keepdim=True)
            row_max = row_max.masked_fill(row_max == float("-inf"), 0.0)
            p = torch.exp(s - row_max)
            row_sum = p.sum(-1, keepdim=True)
            row_lse = row_max + row_sum.log()
            lse[b, :, r : r + chunk] = row_lse.squeeze(-1)
            p = (p / row_sum.masked_fill(row_sum == 0, 1.0))[..., : len(keys)]
            if round_to is not None:
                p = rounded(p, round_to)
            if dropout_p > 0:
                heads = torch.arange(heads_q) + head_start
                keep = keeps(dropout_p, dropout_seed, b + sequence_start, heads, position, keys).to(device)
                p = p * keep / (1 - dropout_p)
            o = p @ v_b
            if round_to is not None:
                change = (o.to(round_to).to(compute) - o).detach()
                zero = row_lse.masked_fill(row_sum == 0, 0.0)
                o = o + change - change * (zero - zero.detach())  # of the gradient dO it takes P rowsum(dO change)
            out[b, r : r + chunk] = o.transpose(0, 1)
    return out, lse, largest


@dataclasses.dataclass
class Expected:
    """The oracle's and the reference's answer to one case; `check` holds a result to the bounds."""

    out: torch.Tensor
    lse: torch.Tensor
    ref_out: torch.Tensor
    ref_lse: torch.Tensor
    dtype: torch.dtype
    largest_score: float
    rows: object
    head_dim: int

    def check(self, out, lse=None, *, small=False, rotated=False, what=""):
        """The two bounds of docs/semantics.md on `out`; the first of them, in fp32, on `lse`.

        `small` is for cases of a few rows and keys, where the ratio of two rounding errors is luck: it allows, on top,
        the expected rounding error of the largest score, a chain of `head_dim` fp32 additions (sqrt(head_dim) / 4 ulp).
        `rotated` is for a q that was rounded once more on the way: it allows as much in q's dtype.
        """
        assert out.dtype == self.dtype, f"{what}: out is {out.dtype}, q is {self.dtype}"
        if self.rows is not None:
            out = out[:, self.rows]
            lse = lse if lse is None else lse[..., self.rows]
        eps = torch.finfo(self.dtype).eps
        chain = max(1.0, self.head_dim**0.5 / 4)
        slack = chain * (1 + self.largest_score) * torch.finfo(torch.float32).eps if small else 0.0
        slack += chain * (1 + self.largest_score) * eps if rotated else 0.0
        assert_bounds(out, self.ref_out, self.out, eps=eps, slack=slack, one_row=small, what=f"{what} out")
        if lse is not None:
            assert lse.dtype == torch.float32, f"{what}: lse is {lse.dtype}"
            assert lse.shape == self.lse.shape, f"{what}: lse is {tuple(lse.shape)}, should be {tuple(self.lse.shape)}"
            assert torch.equal(lse.isinf(), self.lse.isinf()), f"{what}: lse is infinite in the wrong rows"
            finite = self.lse.isfinite()
            assert torch.equal(lse[~finite].double(), self.lse[~finite]), f"{what}: lse has the wrong infinity"
            worst, allowed = _largest_errors(lse[finite], self.ref_lse[finite], self.lse[finite], 2**-23, slack)
            allowed += slack  # an error of a score is one of lse, which may be next to 0
            assert worst <= allowed, f"{what}: lse is off by {worst:.3e}, the bounds allow {allowed:.3e}"


def _largest_errors(got, ref, oracle, eps, slack):
    if oracle.numel() == 0:
        return 0.0, 0.0
    worst = (got.double() - oracle).abs().max().item()
    allowed = 2 * (ref.double() - oracle).abs().max() + (2 * eps + slack) * oracle.abs().max()
    return worst, allowed.item()


def assert_bounds(got, ref, oracle, *, eps, slack=0.0, absolute=0.0, one_row=False, what=""):
    """max|got - oracle| <= 2 max|ref - oracle| + 2 eps max|oracle|  and  ||got - oracle|| <= 1.5 ||ref - oracle||

    `one_row` allows the norm, on top, a row of the errors that the first inequality allows an element anyway: nothing
    beside many rows; of one row the norms of two rounding errors are more than 1.5 apart in some of a hundred draws.
    `slack` is relative to the oracle's largest, `absolute` is not: for what may be 0 as a difference of large numbers.
    """
    assert got.shape == oracle.shape, f"{what}: shape {tuple(got.shape)}, should be {tuple(oracle.shape)}"
    assert got.isfinite().all(), f"{what}: {(~got.isfinite()).sum().item()} of {got.numel()} elements are not finite"
    worst, allowed = _largest_errors(got, ref, oracle, eps, slack)
    allowed += absolute
    assert worst <= allowed, f"{what}: largest error {worst:.3e}, the bounds allow {allowed:.3e}"
    norm = (got.double() - oracle).norm().item()
    allowed = (1.5 * (ref.double() - oracle).norm() + slack * oracle.norm()).item() + absolute * oracle.numel() ** 0.5
    if one_row and oracle.numel():
        allowed += 2 * eps * oracle.shape[-1] ** 0.5 * oracle.abs().max().item()
    assert norm <= allowed, f"{what}: error norm {norm:.3e}, the bounds allow {allowed:.3e}"


def assert_same_bits(got, want):
    """Of two lists of tensors of any strides; NaN is like NaN of the same bits."""
    for a, b in zip(got, want, strict=True):
        bits = torch.int16 if a.element_size() == 2 else torch.int32
        assert torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def peer_tolerance(dtype):
    """For `assert_close` between two answers of the same dtype, each with its own rounding."""
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    return {"atol": tolerance, "rtol": tolerance}


def expect(q, k, v, *, rows=None, **kwargs) -> Expected:
    """What `cutlass_ext.fmha(q, k, v, **kwargs)` should give (at query rows `rows`), with the reference."""
    out, lse, largest = attention(q, k, v, rows=rows, **kwargs)
    round_to = None if q.dtype == torch.float32 else q.dtype
    ref_out, ref_lse, _ = attention(q, k, v, rows=rows, compute=torch.float32, round_to=round_to, **kwargs)
    return Expected(out, lse, ref_out, ref_lse, q.dtype, largest, rows, q.shape[-1])


def of_sequence(b, options):
    """What of the options of packed sequences is for sequence `b` alone."""
    of_each = {"start_pos", "seqused_k", "leftpad_k", "key_start"}
    own = {
        name: x[b : b + 1]
        if isinstance(x, torch.Tensor) and (name in of_each or (name == "alibi_slopes" and x.dim() == 2))
        else x
        for name, x in options.items()
    }
    return own | {"sequence_start": options.get("sequence_start", 0) + b}


def expect_packed(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, **kwargs) -> Expected:
    """`expect` for packed sequences, each of them alone: out [total_q, H_q, d_v], lse [H_q, total_q]."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    alone = []
    for b in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        alone.append(expect(q[None, rows], k[None, keys], v[None, keys], **of_sequence(b, kwargs)))

    def joined(field, dim, *empty_shape):
        parts = [getattr(e, field)[0] for e in alone]
        dtype = torch.float64 if field in ("out", "lse") else torch.float32
        return torch.cat(parts, dim) if parts else q.new_empty(*empty_shape, dtype=dtype)

    H_q, d_v = q.shape[1], v.shape[2]
    return Expected(
        joined("out", 0, 0, H_q, d_v), joined("lse", 1, H_q, 0), joined("ref_out", 0, 0, H_q, d_v),
        joined("ref_lse", 1, H_q, 0), q.dtype, max((e.largest_score for e in alone), default=0.0), None, q.shape[-1],
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ gradients
@dataclasses.dataclass
class ExpectedGradients:
    """The oracle's and the reference's gradients, by name: dq, dk, dv, dsink where there is a sink, dbias."""

    oracle: dict[str, torch.Tensor]
    ref: dict[str, torch.Tensor]
    dtype: torch.dtype
    noise: dict[str, float]  # what rounding makes of a gradient that is 0, as a difference of large numbers
    largest_score: float
    terms: int  # of the longest sum: of a score, or of dK and dV
    bias_dtype: torch.dtype | None = None

    def check(self, got, *, small=False, what=""):
        """The bounds on each of them. `small` allows what rounding in float32 makes of few rows and keys, as `Expected`
        has it, and of a dS that is 0 because one key takes everything. dsink, a number a head, is allowed what rounding
        O makes of the sum of rowsum(dO O) over all rows: how that falls is luck."""
        assert len(got) == len(self.oracle), f"{what}: {len(got)} gradients, should be {list(self.oracle)}"
        eps = torch.finfo(self.dtype).eps
        for (name, oracle), t in zip(self.oracle.items(), got, strict=True):
            dtype = {"dsink": torch.float32, "dbias": self.bias_dtype}.get(name, self.dtype)
            assert t.dtype == dtype, f"{what}: {name} is {t.dtype}, should be {dtype}"
            chain = max(1.0, self.terms**0.5 / 4)
            slack = chain * (1 + self.largest_score) * torch.finfo(torch.float32).eps if small else 0.0
            noise = self.noise[name] if small or name == "dsink" else 0.0
            assert_bounds(
                t, self.ref[name], oracle, eps=max(eps, torch.finfo(dtype).eps), slack=slack, absolute=noise,
                one_row=small or name == "dsink", what=f"{what} {name}",
            )  # fmt: skip


@torch.enable_grad()
def gradients(q, k, v, dout, dlse=None, *, sink=None, bias=None, compute=torch.float64, round_to=None, **options):
    """Of `attention`, by autograd through it, in `compute`; the largest |s|, and the largest norms of dO O, of a row
    and of a head. `dlse` counts where lse is finite."""
    leaves = {"dq": q, "dk": k, "dv": v, "dsink": sink, "dbias": bias}
    leaves = {name: t.detach().to(compute).requires_grad_() for name, t in leaves.items() if t is not None}
    options |= {"sink": leaves.get("dsink"), "bias": leaves.get("dbias")}
    out, lse, largest = attention(*list(leaves.values())[:3], compute=compute, round_to=round_to, **options)
    results = [(out, dout.to(compute))]
    if dlse is not None:
        results.append((lse, dlse.to(compute).masked_fill(lse.isinf(), 0.0)))
    results = [(x, dx) for x, dx in results if x.requires_grad]
    found = [None] * len(leaves)
    if results:
        outputs, grad_outputs = zip(*results, strict=True)
        found = torch.autograd.grad(outputs, list(leaves.values()), grad_outputs, allow_unused=True)
    found = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), found, strict=True)}
    if round_to is not None:
        round_all = {name: round_to for name in ("dq", "dk", "dv")} | ({} if bias is None else {"dbias": bias.dtype})
        found = {name: t.to(round_all.get(name, compute)).to(compute) for name, t in found.items()}
    products = (dout.to(compute) * out.detach()).square().nansum(-1)
    norms = [max(x.sqrt().flatten().tolist(), default=0.0) for x in (products, products.sum((0, 1)))]
    return found, largest, norms


def expect_gradients(q, k, v, dout, dlse=None, **options) -> ExpectedGradients:
    """What the gradients of `cutlass_ext.fmha(q, k, v, **options)` should be, with the reference."""
    oracle, largest, (of_row, of_head) = gradients(q, k, v, dout, dlse, **options)
    round_to = None if q.dtype == torch.float32 else q.dtype
    ref, *_ = gradients(q, k, v, dout, dlse, compute=torch.float32, round_to=round_to, **options)
    if "dbias" in ref:  # of 16 bits beside float32, too
        ref["dbias"] = ref["dbias"].to(options["bias"].dtype).float()

    def longest(t):
        norms = t.double().norm(dim=-1)  # poison is no number
        return max(norms[norms.isfinite()].tolist(), default=0.0)

    scale = options.get("softmax_scale") or q.shape[-1] ** -0.5
    eps, eps32 = torch.finfo(q.dtype).eps, torch.finfo(torch.float32).eps
    # A difference of two sums of d_v products, of which one is of the rounded O.
    of_ds = eps32 * longest(dout) * longest(v) + eps / 2 * of_row
    # A row's dS sum to 0, which is dq of keys that are all alike, but for P of rounded scores.
    of_row_of_ds = of_ds + eps32 * largest * of_row
    rows = q.shape[1] * (q.shape[2] // k.shape[2])
    noise = {
        "dq": of_row_of_ds * scale * longest(k), "dk": of_ds * scale * longest(q) * rows**0.5, "dv": 0.0,
        "dsink": eps * of_head,
    }  # fmt: skip
    terms, bias = max(q.shape[-1], rows), options.get("bias")
    if bias is None:
        return ExpectedGradients(oracle, ref, q.dtype, noise, largest, terms)
    summed = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1] / max(bias.numel(), 1)
    noise["dbias"] = of_ds * summed**0.5
    return ExpectedGradients(oracle, ref, q.dtype, noise, largest, max(terms, int(summed)), bias.dtype)


def expect_gradients_packed(
    q, k, v, dout, dlse=None, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, sink=None, **options
) -> ExpectedGradients:
    """`expect_gradients` for packed sequences, each of them alone; rows in none have gradients of 0."""
    kind = lambda compute: {  # noqa: E731
        f"d{name}": torch.zeros_like(t, dtype=compute)
        for name, t in {"q": q, "k": k, "v": v, "sink": sink}.items()
        if t is not None
    }
    names = "dq", "dk", "dv", "dsink"
    joined = ExpectedGradients(
        kind(torch.float64), kind(torch.float32), q.dtype, dict.fromkeys(names, 0.0), 0.0, q.shape[-1]
    )
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        own = of_sequence(b, options)
        dlse_b = None if dlse is None else dlse[None, :, rows]
        alone = expect_gradients(
            q[None, rows], k[None, keys], v[None, keys], dout[None, rows], dlse_b, sink=sink, **own
        )
        for to, found in ((joined.oracle, alone.oracle), (joined.ref, alone.ref)):
            to["dq"][rows], to["dk"][keys], to["dv"][keys] = found["dq"][0], found["dk"][0], found["dv"][0]
            if sink is not None:
                to["dsink"] += found["dsink"]
        joined.noise = {
            name: (math.hypot if name == "dsink" else max)(joined.noise[name], alone.noise[name]) for name in names
        }
        joined.largest_score = max(joined.largest_score, alone.largest_score)
        joined.terms = max(joined.terms, alone.terms)
    return joined


def rotate(x, positions, cos, sin, interleaved):
    """Rotary embedding of rows `x` [..., H, d] at `positions` [...], by columns, in float64, rounded to x's dtype."""
    positions = torch.as_tensor(positions, device=x.device).long()
    half, dtype, x = cos.shape[1], x.dtype, x.double()
    y = x.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = (table[positions, i].double()[..., None] for table in (cos, sin))
        y[..., a], y[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return y.to(dtype)
