"""Keys in pages (`block_table`), under packed and padded queries: against the oracle with every feature, page size and
mix of rows; what must not reach an output; bits; graphs, the operator, flash-attn's names, errors."""

import dataclasses
import itertools

import pytest
import torch
from conftest import F16, Target, poison_like_results
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same_bits, expect_packed
from test_features import options_of
from test_varlen import ends
from torch._dynamo.testing import CompileCounterWithBackend

import cutlass_ext

NAN = float("nan")
PAGE_SIZES = [1, 2, 4, 8, 16, 48, 64, 80, 256, 272, 784, 1024]
# Query rows and keys of eight sequences: a draft, single rows, chunks on a past, more rows than keys, none of either.
MIX = [70, 0, 1, 131, 5, 16, 200, 1], [70, 33, 140, 300, 0, 64, 129, 700]
ANYTHING = [-1, 1 << 30, -(1 << 31), 0]  # what entries of a table may be that nobody follows


@dataclasses.dataclass
class Paged:
    """Sequences whose keys are in pages. `k` and `v` have them one after the other, for the oracle."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    lengths: dict  # block_table, seqused_k
    longest: int

    @property
    def arguments(self):
        packing = {"cu_seqlens_q": self.cu_seqlens_q, "max_seqlen_q": self.longest}
        return {"q": self.q, "k": self.k_pages, "v": self.v_pages} | packing | self.lengths

    @property
    def contiguous(self):
        """Arguments that say the same without pages."""
        n_k = int(self.cu_seqlens_k.diff().max()) if len(self.cu_seqlens_k) > 1 else 0
        packing = {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k}
        return {"q": self.q, "k": self.k, "v": self.v, "max_seqlen_q": self.longest, "max_seqlen_k": n_k} | packing

    @property
    def padded(self):
        """Arguments for sequences of as many rows each, as a batch."""
        batch = len(self.cu_seqlens_q) - 1
        q = self.q.view(batch, len(self.q) // max(batch, 1), *self.q.shape[1:])
        return {"q": q, "k": self.k_pages, "v": self.v_pages} | self.lengths

    def expected(self, **options):
        return expect_packed(
            self.q, self.k, self.v, cu_seqlens_q=self.cu_seqlens_q, cu_seqlens_k=self.cu_seqlens_k, **options
        )

    def alone(self, b, **options):
        """Sequence `b` as a call of its own, what `options` become there, and its rows here."""
        rows, keys = (slice(*cu[b : b + 2].tolist()) for cu in (self.cu_seqlens_q, self.cu_seqlens_k))
        n_q, n_k = rows.stop - rows.start, keys.stop - keys.start
        cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=self.q.device) for n in (n_q, n_k))
        for name, x in options.items():
            if isinstance(x, torch.Tensor) and (name != "alibi_slopes" or x.dim() == 2) and name != "sink":
                options[name] = x[b : b + 1]
        lengths = {name: x[b : b + 1] for name, x in self.lengths.items()}
        case = Paged(self.q[rows], self.k[keys], self.v[keys], self.k_pages, self.v_pages, cu_q, cu_k, lengths, n_q)
        return case, options, rows


def table_of(lengths_k, page, columns, spare=3):
    """A block table in random order, anything in what nobody follows, and the number of pages."""
    counts = [-(-n // page) for n in lengths_k]
    order = torch.randperm(sum(counts) + spare).tolist()
    table = [[ANYTHING[(b + j) % len(ANYTHING)] for j in range(columns)] for b in range(len(counts))]
    for row, count in zip(table, counts, strict=True):
        row[:count] = [order.pop() for _ in range(count)]
    return torch.tensor(table, dtype=torch.int32).view(len(counts), columns), sum(counts) + spare


def in_pages(x, lengths_k, table, page, pages):
    """Rows `x`, packed, in their pages; NaN in all other rows, and in pages that nobody has."""
    held = x.new_full((pages, page, *x.shape[1:]), NAN)
    for b, (begin, end) in enumerate(itertools.pairwise(ends(lengths_k))):
        j = torch.arange(end - begin)
        held[table[b, j // page].long().to(x.device), (j % page).to(x.device)] = x[begin:end]
    return held


def build(target, lengths_q, lengths_k, *, page=16, heads=(4, 2), d=64, d_v=None, more_columns=1):
    q = target.randn(sum(lengths_q), heads[0], d)
    k, v = (target.randn(sum(lengths_k), heads[1], n) for n in (d, d_v or d))
    columns = -(-max(lengths_k, default=0) // page) + more_columns
    table, pages = table_of(lengths_k, page, columns)
    k_pages, v_pages = (in_pages(x, lengths_k, table, page, pages) for x in (k, v))
    lengths = {"block_table": table.to(target.device), "seqused_k": target.int32(lengths_k)}
    cu = target.int32(ends(lengths_q)), target.int32(ends(lengths_k))
    return Paged(q, k, v, k_pages, v_pages, *cu, lengths, max(lengths_q, default=0))


def run(target, arguments, **options):
    """Out and lse, None where Hopper's kernels, asked for by name, do not take the call (see `test_hopper_takes`)."""
    try:
        return target.fmha(**arguments, **options)
    except NotImplementedError:
        if target.backend != "sm90":
            raise
        return None


def check(target, case, *, num_splits=0, padded=False, what="", **options):
    got = run(target, case.padded if padded else case.arguments, num_splits=num_splits, **options)
    if got is None:
        return
    assert all(t.is_contiguous() for t in got)
    if padded:
        got = got[0].flatten(0, 1), got[1].transpose(0, 1).flatten(1)
    case.expected(**options).check(*got, small=True, what=f"{what} {options}")


# ------------------------------------------------------------------------------------------------ every feature
ROWS = st.one_of(st.integers(0, 16), st.sampled_from([1, 1, 63, 64, 65, 127, 128, 129, 192, 193]), st.integers(0, 260))
KEYS = st.one_of(st.integers(0, 8), st.sampled_from([15, 16, 17, 63, 64, 65, 127, 128, 129]), st.integers(0, 400))


@st.composite
def cases(draw):
    batch, heads_kv, group = draw(st.integers(0, 6)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4, 5, 8]))
    several = lambda each: draw(st.lists(each, min_size=batch, max_size=batch))  # noqa: E731
    padded = draw(st.integers(0, 3)) == 0
    side, position = st.sampled_from([-1, -1, 0, 1, 15, 64, 150]), st.integers(-140, 460)
    lengths_k = several(KEYS)
    return {
        "lengths": ([draw(ROWS)] * batch if padded else several(ROWS), lengths_k),
        "padded": padded,
        "page": draw(st.sampled_from(PAGE_SIZES)),
        "heads": (heads_kv * group, heads_kv),
        "steps": (draw(st.integers(1, 32)), draw(st.integers(1, 32))),
        "seed": draw(st.integers(0, 2**31)),
        "causal": draw(st.booleans()),
        "start_pos": draw(st.just("end") | st.just(0) | position | st.just(several(position))),
        "window": (draw(side), draw(side)),
        "softmax_scale": draw(st.none() | st.floats(0.02, 0.3)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.0, 30.0])),
        "alibi": draw(st.sampled_from([None, None, "[H]", "[B, H]"])),
        "sink": draw(st.booleans()),
        "leftpad_k": draw(st.none() | st.just([draw(st.integers(0, n)) for n in lengths_k])),
        "num_splits": draw(st.integers(0, 5)),
    }


PLAIN = {"lengths": MIX, "page": 16, "heads": (4, 2), "steps": None, "seed": 0, "causal": False, "start_pos": "end",
         "window": (-1, -1), "softmax_scale": None, "softcap": 0.0, "alibi": None, "sink": False,
         "leftpad_k": None}  # fmt: skip
PADS = [3, 20, 0, 64, 0, 0, 129, 300]
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "causal, 0": {"causal": True, "start_pos": 0},
    "causal, int": {"causal": True, "start_pos": 17},
    "causal, tensor": {"causal": True, "start_pos": [0, 5, 139, -40, 3, 57, -71, 800]},
    "mqa": {"heads": (8, 1), "causal": True},
    "window": {"causal": True, "window": (63, 0)},
    "window both sides": {"window": (20, 33)},
    "softcap": {"softcap": 15.0, "causal": True},
    "alibi": {"causal": True, "alibi": "[H]"},
    "alibi, a slope a sequence": {"alibi": "[B, H]"},
    "sink": {"causal": True, "sink": True, "window": (31, -1)},
    "leftpad": {"leftpad_k": PADS, "causal": True},
    "everything": {
        "heads": (6, 2), "causal": True, "window": (90, -1), "softcap": 8.0, "alibi": "[B, H]", "sink": True,
        "leftpad_k": PADS, "start_pos": [20, -7, 60, 0, 1, 9, -1, 650],
    },
}  # fmt: skip


def built(target, case):
    """A case in words as tensors: what is before `leftpad_k` is NaN too."""
    torch.manual_seed(case["seed"])
    d, d_v = (n * target.step for n in case["steps"]) if case["steps"] else (64, 64)
    paged = build(target, *case["lengths"], page=case["page"], heads=case["heads"], d=d, d_v=d_v)
    for b, pad in enumerate(case["leftpad_k"] or ()):
        j = torch.arange(pad, device=target.device)
        pages = paged.lengths["block_table"][b, j // case["page"]].long()
        paged.k_pages[pages, j % case["page"]] = NAN
        paged.v_pages[pages, j % case["page"]] = NAN
    return paged, options_of(target, case, len(case["lengths"][0]))


@settings(max_examples=40)
@given(case=cases())
def test_any_case(target, case):
    paged, options = built(target, case)
    check(target, paged, num_splits=case["num_splits"], padded=case["padded"], **options)


@settings(max_examples=15)
@given(case=cases())
def test_any_case_torch_16_bit(target_16_bit, case):
    paged, options = built(target_16_bit, case)
    check(target_16_bit, paged, padded=case["padded"], **options)


@pytest.mark.parametrize("page,num_splits", [(16, 0), (64, 1), (80, 3)])
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(target, feature, page, num_splits):
    paged, options = built(target, PLAIN | FEATURES[feature] | {"page": page})
    check(target, paged, num_splits=num_splits, **options)


@pytest.mark.parametrize("feature", FEATURES)
def test_torch_backend_on_cuda(gpu, feature):
    """There the room of a table's row is gathered: lengths are not read."""
    paged, options = built(gpu, PLAIN | FEATURES[feature])
    check(dataclasses.replace(gpu, backend="torch"), paged, **options)


# ------------------------------------------------------------------------------------------------ sizes
@pytest.mark.parametrize("d,num_splits", [(64, 0), (128, 3)])
@pytest.mark.parametrize("page", sorted([*PAGE_SIZES, 32, 128, 512, 4096]))
def test_page_sizes(target, page, d, num_splits):
    check(target, build(target, *MIX, page=page, d=d), causal=True, start_pos="end", num_splits=num_splits)
    padded = build(target, [70] * 3, [500, 70, 1], page=page, d=d)
    check(target, padded, padded=True, causal=True, start_pos="end", num_splits=num_splits)


DIMS = [*[(d, d) for d in (8, 24, 40, 72, 80, 96, 104, 112, 120, 160, 192, 224, 256)],
        (192, 128), (64, 128), (8, 256), (256, 8)]  # fmt: skip


@pytest.mark.parametrize("d,d_v", DIMS)
def test_head_dims(target, d, d_v):
    check(target, build(target, *MIX, page=64 if d % 64 else 16, d=d, d_v=d_v), causal=True, start_pos="end")


@pytest.mark.parametrize("group,heads_kv", [(1, 3), (4, 2), (5, 1), (7, 2), (8, 1), (64, 1)])
def test_query_heads_of_a_key_head(target, group, heads_kv):
    for page, num_splits in ((16, 0), (48, 2)):
        paged = build(target, *MIX, page=page, heads=(group * heads_kv, heads_kv))
        check(target, paged, causal=True, start_pos="end", num_splits=num_splits)


EVERY_ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300, 0, 1, 1]


@pytest.mark.parametrize("page", [16, 80, 256])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_rows_of_every_kind_in_one_call(target, d, page):
    """Single rows, drafts and chunks, each on a past of its own, around the edges of tiles of rows and of keys."""
    keys = [n + past for n, past in zip(EVERY_ROWS, itertools.cycle([0, 64, 700, 1, 127, 128, 333]), strict=False)]
    check(target, build(target, EVERY_ROWS, keys, page=page, d=d), causal=True, start_pos="end")


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 17, 64, 65, 128, 192, 200])
def test_padded_rows(target, rows):
    for page, d, num_splits in ((16, 64, 0), (64, 128, 3), (48, 128, 0)):
        paged = build(target, [rows] * 4, [rows, 0, 517, 300], page=page, d=d, heads=(8, 2))
        check(target, paged, padded=True, causal=True, start_pos="end", num_splits=num_splits)


ZEROS = {
    "first": ([0, 5, 9], [0, 70, 9]), "last": ([5, 9, 0], [70, 9, 0]), "all": ([0, 0, 0], [0, 0, 0]),
    "queries": ([0, 0], [5, 70]), "keys": ([5, 130, 1], [0, 0, 0]), "one": ([0], [0]), "none": ([], []),
    "here and there": ([0, 5, 0, 0, 9, 1], [7, 0, 0, 70, 9, 0]),
}  # fmt: skip


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("where", ZEROS)
def test_lengths_of_zero(target, where, num_splits):
    for options, more_columns in (({}, 0), ({"causal": True, "sink": target.vector(4)}, 1)):
        paged = build(target, *ZEROS[where], d_v=24, more_columns=more_columns)
        check(target, paged, start_pos="end", num_splits=num_splits, **options)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pages,columns", [(0, 3), (0, 0), (2, 0)])
def test_no_keys_at_all(target, pages, columns, padded):
    """Without pages, or without a column in the table: zeros, and lse of the sinks alone, whatever `seqused_k` says."""
    sink = target.vector(4)
    k = torch.full((pages, 16, 2, 64), NAN, device=target.device, dtype=target.dtype)
    arguments = {"q": target.randn(6, 4, 64), "cu_seqlens_q": target.int32([0, 1, 6]), "max_seqlen_q": 5}
    if padded:
        arguments = {"q": target.randn(2, 3, 4, 64)}
    lengths = {"block_table": target.int32([[-1] * columns] * 2).view(2, columns), "seqused_k": target.int32([7, 9])}
    for causal in (False, True):
        got = run(target, arguments | {"k": k, "v": k}, causal=causal, start_pos="end", sink=sink, **lengths)
        if got is not None:
            assert not got[0].any()
            torch.testing.assert_close(got[1], sink[:, None].expand_as(got[1]))  # exp2 and log2 round on a GPU


def test_no_sequences(target):
    paged = build(target, [], [])
    for arguments in (paged.arguments, paged.padded):
        out, lse = run(target, arguments) or (None, None)
        assert out is None or out.numel() == lse.numel() == 0


def test_more_work_than_fits_on_the_gpu(kernels):
    """Many sequences, heads, and several tiles of each, of lengths that differ."""
    rows = [90 + 13 * i % 120 if i % 3 else 1 + i % 5 for i in range(48)]
    keys = [n + 97 * i % 350 for i, n in enumerate(rows)]
    for d, page in ((64, 16), (128, 64)):
        paged = build(kernels, rows, keys, heads=(16, 2), page=page, d=d)
        check(kernels, paged, causal=True, start_pos="end")


def test_default_lengths(target):
    """Without `seqused_k` every row that there is room for is a key."""
    paged = build(target, [30, 1, 70], [96, 96, 96], page=48, more_columns=0)
    want = run(target, paged.arguments, causal=True, start_pos="end", num_splits=1)
    del paged.lengths["seqused_k"]
    check(target, paged, causal=True, start_pos="end")
    if want is not None:
        assert_same_bits(run(target, paged.arguments, causal=True, start_pos="end", num_splits=1), want)


# ------------------------------------------------------------------------------------------------ where pages lie
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("layout", ["k beside v", "k after v", "heads first", "spread"])
def test_layouts_of_pages(target, layout, page):
    """As engines lay them out: k and v of a page in one block, heads before rows, pages apart."""
    paged = build(target, *MIX, page=page)
    k, v = paged.k_pages, paged.v_pages
    paged.k_pages, paged.v_pages = {
        "k beside v": lambda: torch.stack([k, v]).unbind(0),
        "k after v": lambda: torch.stack([k, v], 1).unbind(1),
        "heads first": lambda: [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)],
        "spread": lambda: [torch.stack([x, torch.full_like(x, NAN)], 1).flatten(0, 1)[::2] for x in (k, v)],
    }[layout]()
    check(target, paged, causal=True, start_pos="end")


def test_a_table_that_is_part_of_a_wider_one(target):
    paged = build(target, *MIX)
    table = paged.lengths["block_table"]
    wide = torch.cat([table, torch.full_like(table, 1 << 30)], 1)
    paged.lengths["block_table"] = wide[:, : table.shape[1]]
    check(target, paged, causal=True, start_pos="end")


def test_pages_shared_between_sequences(target):
    """A prefix that four sequences have in common is stored once."""
    paged = build(target, [70, 1, 6, 128], [200, 180, 133, 300], page=16)
    table, prefix = paged.lengths["block_table"], 8 * 16
    for b, begin in enumerate(paged.cu_seqlens_k[:-1].tolist()):
        paged.k[begin : begin + prefix], paged.v[begin : begin + prefix] = paged.k[:prefix], paged.v[:prefix]
        paged.k_pages[table[b, :8].long()] = NAN
        paged.v_pages[table[b, :8].long()] = NAN
        table[b, :8] = table[0, :8]
    for x, pages in ((paged.k, paged.k_pages), (paged.v, paged.v_pages)):
        pages[table[0, :8].long()] = x[:prefix].unflatten(0, (8, 16))
    check(target, paged, causal=True, start_pos="end")


# ------------------------------------------------------------------------------------------------ what stays outside
@pytest.mark.parametrize("page", [1, 16, 80])
@pytest.mark.parametrize("d,num_splits", [(64, 1), (128, 3), (256, 1)])
def test_whatever_is_unused(target, d, num_splits, page):
    """Rows and pages that nobody has, and entries of the table past the keys: bit for bit the same."""
    paged = build(target, *MIX, page=page, d=d)
    options = {"causal": True, "start_pos": "end", "num_splits": num_splits}
    want = run(target, paged.arguments, **options)
    if want is None:
        return
    table, unused = paged.lengths["block_table"], paged.k_pages.isnan()
    followed = torch.arange(table.shape[1]) * page < torch.tensor(MIX[1])[:, None]
    for plant, entry in zip((float("inf"), 0.0, NAN, 1.0), ANYTHING, strict=True):
        paged.k_pages[unused] = paged.v_pages[unused] = plant
        table[~followed.to(table.device)] = entry
        assert_same_bits(run(target, paged.arguments, **options), want)


@pytest.mark.parametrize("entry,nearest", [(-1, 0), (-(1 << 31), 0), (1 << 30, -1)])
def test_an_entry_outside_the_pages_reads_the_nearest(target, entry, nearest):
    paged = build(target, *MIX)
    for pages in (paged.k_pages, paged.v_pages):
        pages.nan_to_num_(0.5)
    paged.lengths["block_table"][3, 2] = nearest % len(paged.k_pages)
    want = run(target, paged.arguments, num_splits=1)
    paged.lengths["block_table"][3, 2] = entry
    if want is not None:
        assert_same_bits(run(target, paged.arguments, num_splits=1), want)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_longer_maxima_change_nothing(target, num_splits):
    paged = build(target, *MIX)
    options = {"causal": True, "start_pos": "end", "num_splits": num_splits}
    want = run(target, paged.arguments, **options)
    for hint in (0, 1, 700, 1 << 28):
        got = run(target, paged.arguments | {"max_seqlen_q": 5000}, max_seqlen_k=hint, **options)
        if want is not None:
            assert_same_bits(got, want)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("wild", [-(1 << 31), -5, 90, 1 << 30])
def test_whatever_the_gpu_holds_stays_in_bounds(gpu, wild, backend):
    """The host reads neither lengths nor the table. The first sequence is right, and nothing outside is written."""
    paged = build(gpu, [30, 30, 40], [100, 64, 77])
    target = dataclasses.replace(gpu, backend=backend)
    held = torch.full((300, 4, 64), NAN, device="cuda", dtype=gpu.dtype)
    paged.q = held[100:200].copy_(paged.q)
    want = run(target, paged.arguments, num_splits=2)
    paged.cu_seqlens_q[2], paged.lengths["seqused_k"][1], paged.lengths["block_table"][2] = wild, wild, wild
    out, lse = run(target, paged.arguments, num_splits=2)
    torch.cuda.synchronize()
    if wild > 0:
        assert_same_bits((out[:30], lse[:, :30]), (want[0][:30], want[1][:, :30]))
    assert held[:100].isnan().all() and held[200:].isnan().all()


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("padded", [False, True])
def test_nothing_waits_for_the_gpu(gpu, padded, backend):
    paged = build(gpu, [40] * 3, [300, 40, 0])
    arguments = (paged.padded if padded else paged.arguments) | {"causal": True, "start_pos": "end"}
    cutlass_ext.fmha(**arguments, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cutlass_ext.fmha(**arguments, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------------ bits
@pytest.mark.parametrize("feature", ["plain", "causal", "everything"])
@pytest.mark.parametrize("page", [1, 48, 64])
def test_pages_or_none_on_the_cpu(feature, page):
    """Bit for bit what the same keys give one after the other."""
    target = Target("cpu", "torch")
    paged, options = built(target, PLAIN | FEATURES[feature] | {"page": page})
    assert_same_bits(target.fmha(**paged.arguments, **options), target.fmha(**paged.contiguous, **options))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_pages_or_none(kernels, d, num_splits):
    """With num_splits fixed: the same bits wherever `explain` says that kernel and tile are the same."""
    options = {"causal": True, "start_pos": "end", "num_splits": num_splits}
    for page in (16, 64, 80, 256):
        paged = build(kernels, [200, 131, 300, 70], [200, 400, 300, 513], page=page, d=d)
        got = run(kernels, paged.arguments, **options)
        if got is None:
            return
        calls = [
            cutlass_ext.explain(**arguments, **options, backend=kernels.backend)
            for arguments in (paged.arguments, paged.contiguous)
        ]
        if (calls[0].kernel, calls[0].tile) == (calls[1].kernel, calls[1].tile):
            assert_same_bits(got, run(kernels, paged.contiguous, **options))


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("feature", ["plain", "causal", "everything"])
def test_each_sequence_has_the_bits_that_it_has_alone(target, feature, d, num_splits):
    """With num_splits fixed: whatever else is in the call, chunks beside single rows."""
    steps = (d // target.step, d // target.step)
    paged, options = built(target, PLAIN | FEATURES[feature] | {"steps": steps})
    got = run(target, paged.arguments, num_splits=num_splits, **options)
    for b in range(len(MIX[0]) if got else 0):
        alone, own, rows = paged.alone(b, **options)
        want = run(target, alone.arguments, num_splits=num_splits, **own)
        assert_same_bits((got[0][rows], got[1][:, rows]), want)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_the_same_bits_each_time(target, num_splits):
    rows, keys = [n for n in EVERY_ROWS for _ in "ab"], [n + 90 for n in EVERY_ROWS for _ in "ab"]
    paged = build(target, rows, keys, heads=(8, 2))
    options = {"causal": True, "start_pos": "end", "num_splits": num_splits}
    want = run(target, paged.arguments, **options)
    for _ in range((100 if target.cuda else 2) if want else 0):
        assert_same_bits(run(target, paged.arguments, **options), want)


def test_two_streams(gpu):
    """Calls on two streams at once do not meet: not in workspaces, not in the counters by which CTAs take work."""
    both = [build(gpu, EVERY_ROWS, [n + 90 for n in EVERY_ROWS], heads=(8, 2)) for _ in range(2)]
    options = {"causal": True, "start_pos": "end", "return_lse": True}
    want = [cutlass_ext.fmha(**paged.arguments, **options) for paged in both]
    streams, got = [torch.cuda.Stream() for _ in both], [[], []]
    torch.cuda.synchronize()
    for _ in range(30):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(cutlass_ext.fmha(**both[i].arguments, **options))
    torch.cuda.synchronize()
    for i in range(2):
        for result in got[i]:
            assert_same_bits(result, want[i])


@pytest.mark.parametrize("num_splits", [0, 17])
def test_memory_that_is_filled_first(gpu, num_splits):
    """PyTorch's deterministic mode fills new memory on the call's stream. What decodes beside it must not begin before:
    it does where the call's stream is behind the host, and both wait for the same work."""
    paged = build(gpu, [0, 1, 0, 6, 33, 33], [20, 23, 0, 300, 40, 90], page=8, heads=(3, 3), d=256)
    options = {"causal": True, "start_pos": "end", "num_splits": num_splits, "return_lse": True}
    want = cutlass_ext.fmha(**paged.arguments, **options)
    torch.use_deterministic_algorithms(True)
    try:
        torch.cuda._sleep(20_000_000)
        got = [cutlass_ext.fmha(**paged.arguments, **options) for _ in range(100)]
    finally:
        torch.use_deterministic_algorithms(False)
    for results in got:
        assert_same_bits(results, want)


# ------------------------------------------------------------------------------------------------ graphs, the operator
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_cuda_graph(gpu, num_splits):
    """Captured once, replayed with other lengths, tables and mixes of rows: they live on the device."""
    page, total, room = 16, 240, 640
    q = gpu.randn(total, 8, 64)
    pages = [gpu.randn(200, page, 2, 64) for _ in "kv"]
    cu, used = gpu.int32([0, 60, 120, 180, 240]), gpu.int32([60] * 4)
    table = torch.zeros(4, room // page, dtype=torch.int32, device="cuda")
    arguments = {"cu_seqlens_q": cu, "max_seqlen_q": total, "seqused_k": used, "block_table": table}
    options = {"causal": True, "start_pos": "end"}
    call = lambda: cutlass_ext.fmha(  # noqa: E731
        q, *pages, **arguments, **options, num_splits=num_splits, return_lse=True
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for rows, keys in (
        ([240, 0, 0, 0], [640, 5, 0, 0]),
        ([1, 1, 1, 1], [640, 300, 1, 0]),
        ([1, 197, 5, 37], [640, 197, 77, 600]),
        ([0, 120, 120, 0], [0, 120, 500, 0]),
    ):
        k, v = (gpu.randn(sum(keys), 2, 64) for _ in "kv")
        drawn, _ = table_of(keys, page, room // page, spare=200 - sum(-(-n // page) for n in keys))
        for held, x in zip(pages, (k, v), strict=True):
            held.copy_(in_pages(x, keys, drawn, page, 200))
        q.copy_(gpu.randn(total, 8, 64)), table.copy_(drawn)
        cu.copy_(gpu.int32(ends(rows))), used.copy_(gpu.int32(keys))
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
        n = sum(rows)
        want = expect_packed(q[:n], k, v, cu_seqlens_q=cu, cu_seqlens_k=gpu.int32(ends(keys)), **options)
        want.check(out[:n], lse[:, :n], small=True, what=f"{rows} {keys}")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("padded", [False, True])
def test_opcheck(target, padded):
    paged = build(target, [17, 17], [40, 9], d=32, d_v=16)
    arguments = paged.padded if padded else paged.arguments
    tensors = [arguments.pop(name) for name in "qkv"]
    if run(target, dict(zip("qkv", tensors, strict=True)) | arguments) is not None:
        options = arguments | {"causal": True, "return_lse": True, "backend": target.backend}
        options |= {"num_splits": 1} if target.backend == "sm90" else {}
        torch.library.opcheck(torch.ops.cutlass_ext.fmha.default, tuple(tensors), options)


@pytest.mark.parametrize("padded", [False, True])
def test_fake_shapes(padded):
    with torch._subclasses.FakeTensorMode():
        q = torch.empty((3, 7, 4, 32) if padded else (21, 4, 32), dtype=F16)
        k, v = (torch.empty(9, 16, 2, d, dtype=F16) for d in (32, 16))
        packing = {} if padded else {"cu_seqlens_q": torch.empty(4, dtype=torch.int32), "max_seqlen_q": 9}
        table = torch.empty(3, 5, dtype=torch.int32)
        out, lse = cutlass_ext.fmha(q, k, v, block_table=table, return_lse=True, **packing)
    assert out.shape == (*q.shape[:-1], 16) and out.dtype == F16
    assert lse.shape == ((3, 4, 7) if padded else (4, 21)) and lse.dtype == torch.float32


@pytest.mark.timeout(180)
def test_steps_do_not_recompile(target_fp32):
    """Rows, maxima and lengths that change from step to step, and the result in a buffer, as engines have it."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k, v, cu_seqlens_q, longest, table, used, out):
        return cutlass_ext.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, max_seqlen_q=longest, max_seqlen_k=longest + 50, causal=True, block_table=table,
            seqused_k=used, out=out, fa_version=3,
        )  # fmt: skip

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    compilations = []
    for rows in ([5, 9], [70, 3], [130, 64], [33, 30]):
        paged = build(target_fp32, rows, [n + 20 for n in rows], more_columns=4)  # no size of two things at once
        arguments = paged.arguments
        given = [arguments[name] for name in ("q", "k", "v", "cu_seqlens_q")]
        given += [paged.longest, paged.lengths["block_table"], paged.lengths["seqused_k"]]
        buffers = [torch.full_like(paged.q, NAN) for _ in "ab"]
        compiled(*given, buffers[0]), step(*given, buffers[1])
        assert_same_bits([buffers[0]], [buffers[1]])
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[-1]


def test_explain(target):
    paged = build(target, *MIX)
    if run(target, paged.arguments) is not None:
        explanation = cutlass_ext.explain(**paged.arguments, causal=True, backend=target.backend)
        assert explanation.backend == target.family


@pytest.mark.parametrize("page", [1, 16, 48, 64, 256, 272])
@pytest.mark.parametrize("d,d_v", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_hopper_takes(hopper, d, d_v, page):
    """Chunks over pages run on Hopper's own kernel, whether "auto" is to choose or it is asked for."""
    paged = build(hopper, [512] * 4, [2048] * 4, page=page, d=d, d_v=d_v, heads=(16, 4))
    for backend in ("auto", "sm90"):
        explanation = cutlass_ext.explain(**paged.arguments, causal=True, start_pos="end", backend=backend)
        assert explanation.backend == "sm90", explanation


# ------------------------------------------------------------------------------------------------ flash-attn's names
def flash(target, paged, **options):
    """`flash_attn_varlen_func` as vLLM calls it."""
    arguments = paged.arguments
    if target.cuda:
        poison_like_results(paged.q, paged.v)
    return cutlass_ext.flash_attn_varlen_func(**{"max_seqlen_k": 700, "causal": True} | arguments | options)


def test_as_vllm_calls_it(target):
    paged, sink = build(target, *MIX), target.vector(4)
    out = torch.full_like(paged.q, NAN)
    engine = {"fa_version": 3, "scheduler_metadata": target.int32([1, 2, 3]), "q_descale": None, "k_descale": None,
              "v_descale": None, "num_splits": 0, "dropout_p": 0.0, "alibi_slopes": None, "softcap": 0.0}  # fmt: skip
    got = flash(target, paged, window_size=[63, 0], s_aux=sink, out=out, return_softmax_lse=True, **engine)
    assert got[0] is out and len(got) == 2
    paged.expected(causal=True, start_pos="end", window=(63, 0), sink=sink).check(*got, small=True)
    assert flash(target, paged, window_size=None, out=out, **engine) is out
    paged.expected(causal=True, start_pos="end").check(out, small=True)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_splits_under_flash_attns_names(target, num_splits):
    """What `fmha` makes of them, bit for bit: a sequence's results then do not depend on its batch."""
    paged = build(target, *MIX)
    options = {"causal": True, "start_pos": "end", "return_lse": True}
    want = cutlass_ext.fmha(**paged.arguments, **options, num_splits=num_splits)
    assert_same_bits(flash(target, paged, return_softmax_lse=True, num_splits=num_splits, fa_version=3), want)


def test_lengths_in_cu_seqlens_k(target):
    """As flash-attn has it, in its order of arguments; `seqused_k` comes first where both are given."""
    paged = build(target, *MIX)
    table, used = paged.lengths["block_table"], paged.lengths["seqused_k"]
    places = paged.q, paged.k_pages, paged.v_pages, paged.cu_seqlens_q
    want = flash(target, paged, return_attn_probs=True)
    options = {"causal": True, "block_table": table, "return_attn_probs": True}
    for cu_seqlens_k, seqused_k in ((paged.cu_seqlens_k, None), (paged.cu_seqlens_k * 0, used)):
        got = cutlass_ext.flash_attn_varlen_func(
            *places, cu_seqlens_k, paged.longest, 700, **options, seqused_k=seqused_k
        )
        assert_same_bits(got[:2], want[:2])
        assert got[2] is want[2] is None
    paged.expected(causal=True, start_pos="end").check(*want[:2], small=True)


@pytest.mark.parametrize("page", [1, 16, 48, 272])
@pytest.mark.parametrize("rows,new", [(1, 0), (9, 9), (200, 0), (150, 150)])
def test_kvcache_over_such_pages(target, rows, new, page):
    """`flash_attn_with_kvcache` with any number of rows, and a whole chunk appended, over the same page sizes."""
    if target.backend == "sm90":
        return  # of this function it takes what clusters can, which "auto" gives to them
    lengths = [300, 33, 0]
    after = [n + new for n in lengths]
    paged = build(target, [rows] * 3, after, page=page)
    table = paged.lengths["block_table"]
    q, k, v, used = (paged.padded[name] for name in ("q", "k", "v", "seqused_k"))
    fresh = {}
    if new:
        tokens = [torch.arange(end - new, end) for end in ends(after)[1:]]
        fresh = {name: torch.stack([x[i.to(x.device)] for i in tokens]) for name, x in (("k", paged.k), ("v", paged.v))}
        want = k.clone(), v.clone()
        for b, n in enumerate(lengths):
            j = torch.arange(n, n + new, device=k.device)
            places = table[b, j // page].long(), j % page
            k[places], v[places] = NAN, NAN
    options = {"causal": True, "return_softmax_lse": True, "cache_seqlens": used - new, "block_table": table}
    out, lse = cutlass_ext.flash_attn_with_kvcache(q, k, v, **fresh, **options, backend=target.backend)
    if new:
        torch.testing.assert_close((k, v), want, rtol=0, atol=0, equal_nan=True)
    got = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    paged.expected(causal=True, start_pos="end").check(*got, small=True)


# ------------------------------------------------------------------------------------------------ errors
V, T = ValueError, TypeError
INT32 = torch.int32
WRONG = [
    *[("k", V, {"k": torch.zeros(4, page, 2, 16), "v": torch.zeros(4, page, 2, 16)}) for page in (0, 3, 24, 5000)],
    ("k", V, {"k": torch.zeros(12, 2, 16), "v": torch.zeros(12, 2, 16)}),
    ("v", V, {"v": torch.zeros(5, 16, 2, 16)}),
    ("v", V, {"v": torch.zeros(4, 32, 2, 16)}),
    ("k", V, {"k": torch.zeros(4, 16, 3, 16), "v": torch.zeros(4, 16, 3, 16)}),
    ("k", T, {"k": torch.zeros(4, 16, 2, 16, dtype=F16)}),
    *[("block_table", T, {"block_table": x}) for x in (torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64), 7)],
    *[("block_table", V, {"block_table": torch.zeros(shape, dtype=INT32)})
      for shape in ((2, 2), (4, 2), (3,), (3, 1, 2))],
    ("block_table", V, {"block_table": torch.zeros(2, 3, dtype=INT32).T}),
    *[("seqused_k", V, {"seqused_k": torch.zeros(n, dtype=INT32)}) for n in (2, 4)],
    ("seqused_k", T, {"seqused_k": torch.zeros(3)}),
    ("leftpad_k", V, {"leftpad_k": torch.zeros(4, dtype=INT32)}),
    ("start_pos", V, {"start_pos": torch.zeros(2, dtype=INT32)}),
]  # fmt: skip
WRONG_PACKED = [
    ("cu_seqlens_k", V, {"cu_seqlens_k": torch.tensor([0, 5, 5, 12], dtype=INT32)}),
    ("cu_seqlens_q", V, {"cu_seqlens_q": None}),
    ("max_seqlen_q", V, {"max_seqlen_q": None}),
    ("q", V, {"q": torch.zeros(3, 4, 4, 16)}),
    *[("max_seqlen_k", V, {"max_seqlen_k": -1})],
]
WRONG_PADDED = [("block_table", V, {"q": torch.zeros(2, 4, 4, 16)}), ("q", V, {"q": torch.zeros(12, 4, 16)})]


def valid(padded):
    pages = {name: torch.zeros(4, 16, 2, 16) for name in "kv"} | {"block_table": torch.zeros(3, 2, dtype=INT32)}
    packing = {"cu_seqlens_q": torch.tensor([0, 5, 5, 12], dtype=INT32), "max_seqlen_q": 7}
    return pages | ({"q": torch.zeros(3, 4, 4, 16)} if padded else {"q": torch.zeros(12, 4, 16)} | packing)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "padded,name,error,spoilt",
    [
        *[(False, *case) for case in WRONG + WRONG_PACKED],
        *[(True, *case) for case in WRONG + WRONG_PADDED],
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_argument(device, padded, name, error, spoilt):
    arguments = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in (valid(padded) | spoilt).items()}
    for function in (cutlass_ext.fmha, cutlass_ext.explain):
        with pytest.raises(error, match=rf"\b{name}\b") as raised:
            function(**arguments)
        assert type(raised.value) is error and "\n" not in str(raised.value)


@pytest.mark.parametrize("padded", [False, True])
def test_the_valid_arguments_are_valid(padded):
    arguments = valid(padded)
    assert cutlass_ext.fmha(**arguments).shape == arguments["q"].shape


@pytest.mark.parametrize(
    "name,error,given",
    [
        ("cu_seqlens_k", T, torch.tensor([0, 5, 5, 12])),
        ("cu_seqlens_k", T, [0, 5, 5, 12]),
        ("cu_seqlens_k", V, torch.tensor([0, 5, 12], dtype=INT32)),
        ("cu_seqlens_k", V, torch.tensor(3, dtype=INT32)),
        ("block_table", T, torch.zeros(3, 2)),
        ("max_seqlen_q", V, None),
        ("window_size", T, 5),
        ("window_size", V, [1, 2, 3]),
    ],
    ids=str,
)
def test_wrong_argument_of_flash_attn_varlen(name, error, given):
    with pytest.raises(error, match=rf"\b{name}\b"):
        cutlass_ext.flash_attn_varlen_func(**valid(False) | {name: given})


@pytest.mark.parametrize(
    "spoilt", [{"cu_seqlens_q": torch.tensor([0, 5, 4, 12], dtype=INT32)}, {"max_seqlen_q": 6}], ids=str
)
def test_lengths_that_only_a_cpu_can_check(spoilt):
    (name,) = spoilt
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        cutlass_ext.fmha(**valid(False) | spoilt)
