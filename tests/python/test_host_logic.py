"""The C++ index logic (visibility, scheduler, splits, shared-memory layouts) against brute force, on the host.

`cutlass_ext_host` is the test-only pybind11 module of tests/cpp/bindings.cpp. `make test` builds it.
"""

import importlib.util
import itertools
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def host():
    """The module, from CUTLASS_EXT_HOST_MODULE_DIR or from build/; it is never skipped."""
    place = Path(os.environ.get("CUTLASS_EXT_HOST_MODULE_DIR", ROOT / "build"))
    found = sorted(place.rglob("cutlass_ext_host*.so"))
    if not found:
        pytest.fail(
            f"cutlass_ext_host*.so is not under {place}. `make test` builds it; by hand: cmake -S . -B build && "
            "cmake --build build --target cutlass_ext_host, or set CUTLASS_EXT_HOST_MODULE_DIR to where it is.",
            pytrace=False,
        )
    spec = importlib.util.spec_from_file_location("cutlass_ext_host", found[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------ visibility
def visible_keys(position, len_kv, left, right):
    """The rule, key by key; causal is right = 0, and keys count from the first after the left padding."""
    return {j for j in range(len_kv) if (left < 0 or j >= position - left) and (right < 0 or j <= position + right)}


def check_tiles(host, row0, rows, n_q, len_kv, start_pos, left, right, block_c):
    tiles = host.visible_tiles(row0, rows, n_q, len_kv, start_pos, left, right, block_c)
    seen = [visible_keys(start_pos + i, len_kv, left, right) for i in range(row0, min(row0 + rows, n_q))]
    by_someone, by_all = set.union(*seen), set.intersection(*seen)
    first_keys = [first for first, _ in tiles]
    assert all(first % block_c == 0 for first in first_keys)
    assert len(set(first_keys)) == len(first_keys), "a tile is visited twice"
    assert set(first_keys) == {j // block_c * block_c for j in by_someone}, "visited are the tiles that some row sees"
    assert not first_keys or first_keys[0] == max(first_keys), "the last, partial tile goes first"
    for first, needs_mask in tiles:
        whole = set(range(first, first + block_c)) <= by_all
        assert needs_mask or whole, f"tile {first} is not masked, but some row does not see all of it"
        assert not (needs_mask and whole), f"tile {first} is masked for nothing"


def test_every_small_case(host):
    """Exhaustive where it is cheap: tiles of 2 x 3, every position of the mask's edges against them."""
    for n_q in range(1, 5):
        for row0 in range(0, n_q, 2):
            for len_kv in range(0, 8):
                for start_pos in range(-6, 10, 1):
                    for left, right in ((-1, -1), (-1, 0), (0, 0), (2, 0), (1, 1), (0, -1), (4, 2), (-1, 3)):
                        check_tiles(host, row0, 2, n_q, len_kv, start_pos, left, right, 3)


@settings(max_examples=500)
@given(
    block=st.sampled_from([(32, 32), (64, 64), (128, 32), (64, 128), (128, 128), (16, 48)]),
    tile=st.integers(0, 5),
    n_q=st.integers(1, 400),
    len_kv=st.integers(0, 500),
    start_pos=st.integers(-450, 600),
    left=st.just(-1) | st.integers(0, 300),
    right=st.just(-1) | st.just(0) | st.integers(0, 300),
)
def test_visible_tiles(host, block, tile, n_q, len_kv, start_pos, left, right):
    block_r, block_c = block
    row0 = min(tile, (n_q - 1) // block_r) * block_r
    check_tiles(host, row0, block_r, n_q, len_kv, start_pos, left, right, block_c)


@settings(max_examples=500)
@given(
    block=st.sampled_from([(32, 32), (64, 64), (128, 32), (64, 128), (16, 48)]),
    tile=st.integers(0, 5),
    n_q=st.integers(0, 400),
    len_kv=st.integers(1, 500),
    start_pos=st.integers(-450, 600),
    left=st.just(-1) | st.integers(0, 300),
    right=st.just(-1) | st.just(0) | st.integers(0, 300),
)
def test_tiles_of_rows_that_see_a_tile_of_keys(host, block, tile, n_q, len_kv, start_pos, left, right):
    """From the other side: the query tiles, and which of them see all of the key tile with rows that all exist."""
    block_r, block_c = block
    key0 = min(tile, (len_kv - 1) // block_c) * block_c
    tile_keys = set(range(key0, key0 + block_c))
    seen = [tile_keys & visible_keys(start_pos + i, len_kv, left, right) for i in range(n_q)]
    tiles = [(row0, seen[row0 : row0 + block_r]) for row0 in range(0, n_q, block_r)]
    assert host.seeing_tiles(key0, block_c, n_q, len_kv, start_pos, left, right, block_r) == [
        (row0, len(rows) < block_r or any(keys != tile_keys for keys in rows)) for row0, rows in tiles if any(rows)
    ]


def test_positions_at_the_ends_of_their_range(host):
    """Lengths and positions just below 2^29, a window just below 2^30: no overflow."""
    far = (1 << 29) - 1
    assert host.visible_tiles(0, 64, 64, 200, far, -1, 0, 64) == [(192, True), (128, False), (64, False), (0, False)]
    assert host.visible_tiles(0, 64, 64, 200, -far, -1, 0, 64) == []
    assert host.visible_tiles(0, 64, 64, 200, far, (1 << 30) - 1, (1 << 30) - 1, 128) == [(128, True), (0, False)]
    last = far // 64 * 64  # of 2^29 - 1 keys the window leaves the last 101: in the partial tile and the one before
    assert host.visible_tiles(0, 1, 1, far, far - 1, 100, 0, 64) == [(last, True), (last - 64, True)]


# ------------------------------------------------------------------------------------------------ packed sequences
ANY_INT = st.integers(-(2**31), 2**31 - 1)
FAR = 1 << 29


@st.composite
def packings(draw, sane):
    batch = draw(st.integers(1, 6))
    if sane:
        lengths = st.lists(st.integers(0, 300), min_size=batch, max_size=batch)
        ends = lambda: [0, *itertools.accumulate(draw(lengths))]  # noqa: E731
    else:
        number = ANY_INT | st.integers(-5, 60)
        ends = lambda: draw(st.lists(number, min_size=batch + 1, max_size=batch + 1))  # noqa: E731
    per_sequence = st.none() | st.lists(ANY_INT | st.integers(-5, 310), min_size=batch, max_size=batch)
    cu_q, cu_k = ends(), ends()
    totals = (cu_q[-1], cu_k[-1]) if sane else (draw(st.integers(0, 50)), draw(st.integers(0, 50)))
    longest = max(b - a for a, b in itertools.pairwise(cu_q)) if sane else draw(st.integers(0, totals[0]))
    return cu_q, cu_k, *totals, longest, draw(per_sequence), draw(per_sequence), draw(per_sequence)


@given(packing=packings(sane=True))
def test_packed_sequence(host, packing):
    cu_q, cu_k, _, _, _, used, leftpad, starts = packing
    for b in range(len(cu_q) - 1):
        length = cu_k[b + 1] - cu_k[b]
        length = min(max(used[b], 0), length) if used else length
        pad = min(max(leftpad[b], 0), length) if leftpad else 0
        n_q = cu_q[b + 1] - cu_q[b]
        start = min(max(starts[b], -FAR), FAR) if starts else length - n_q
        assert host.packed_sequence(b, *packing) == (0, cu_q[b], cu_k[b] + pad, n_q, length - pad, start - pad)


@settings(max_examples=1000)
@given(packing=packings(sane=False))
def test_packed_sequence_of_anything_stays_in_bounds(host, packing):
    cu_q, _, total_q, total_k, longest, *_ = packing
    for b in range(len(cu_q) - 1):
        batch, q_row0, k_row0, n_q, len_kv, start_pos = host.packed_sequence(b, *packing)
        assert batch == 0
        assert 0 <= n_q <= longest and 0 <= q_row0 <= q_row0 + n_q <= total_q
        assert len_kv >= 0 and 0 <= k_row0 <= k_row0 + len_kv <= total_k
        assert abs(start_pos) <= FAR + total_k


# ------------------------------------------------------------------------------------------------ scheduler
SIZES = {
    "batch": st.integers(1, 5), "heads_q": st.integers(1, 9), "n_q": st.integers(1, 300),
    "block_r": st.sampled_from([16, 32, 64, 128]), "num_splits": st.integers(1, 6),
    "section": st.integers(1, 50),
}  # fmt: skip


@given(**SIZES)
def test_schedule_covers_each_work_item_once(host, batch, heads_q, n_q, block_r, num_splits, section):
    items = host.schedule(batch, heads_q, n_q, block_r, num_splits, section)
    every = {
        (b, h, row0, split)
        for b in range(batch) for h in range(heads_q) for row0 in range(0, n_q, block_r) for split in range(num_splits)
    }  # fmt: skip
    assert len(items) == len(every) and set(items) == every


@given(**SIZES)
def test_sections_begin_with_the_last_rows(host, batch, heads_q, n_q, block_r, num_splits, section):
    """Sections of (batch, head) pairs one after the other; in each, the rows that see the most keys under causal come
    first, and the heads of one KV head next to each other."""
    pairs = range(batch * heads_q)
    assert host.schedule(batch, heads_q, n_q, block_r, num_splits, section) == [
        (pair // heads_q, pair % heads_q, row0, split)
        for first in pairs[::section]
        for row0 in reversed(range(0, n_q, block_r))
        for split in range(num_splits)
        for pair in pairs[first : first + section]
    ]


@given(**SIZES)
def test_schedule_over_keys_begins_with_the_first(host, batch, heads_q, n_q, block_r, num_splits, section):
    """The same sections, and in each the keys that the most rows see under causal first."""
    rows, keys = (host.schedule(batch, heads_q, n_q, block_r, num_splits, section, over_keys=k) for k in (False, True))
    last = (n_q - 1) // block_r * block_r
    assert keys == [(b, h, last - row0, split) for b, h, row0, split in rows]


@pytest.mark.parametrize("sizes", [(0, 4, 64), (2, 4, 0)])
def test_schedule_of_nothing(host, sizes):
    assert host.schedule(*sizes, 64, 3, 8) == []


@given(num_tiles=st.integers(0, 5000), num_splits=st.integers(1, 1024))
def test_split_ranges_partition(host, num_tiles, num_splits):
    ranges = [host.split_range(num_tiles, num_splits, split) for split in range(num_splits)]
    assert ranges[0][0] == 0 and ranges[-1][1] == num_tiles
    assert all(begin <= end for begin, end in ranges)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges)), "a gap or an overlap"
    sizes = [end - begin for begin, end in ranges]
    assert max(sizes) - min(sizes) <= 1


@given(work_tiles=st.integers(0, 3000), key_tiles=st.integers(0, 5000), slots=st.integers(1, 2000))
def test_chosen_splits(host, work_tiles, key_tiles, slots):
    splits = host.choose_num_splits(work_tiles, key_tiles, slots)
    assert 1 <= splits <= max(1, key_tiles), "a split without keys"
    if splits > 1:
        assert work_tiles * splits <= slots, "splits that wait for a place only add work"
        longest = -(-key_tiles // splits)
        assert longest >= 2
        assert -(-key_tiles // (splits - 1)) > longest, "one split fewer would be as fast"
    if 4 * work_tiles >= 3 * slots:
        assert splits == 1


def test_single_head_fills_the_gpu(host):
    """(1, 1, 1024) at tiles of 64 on 132 multiprocessors: only splits bring them to work."""
    assert host.choose_num_splits(16, 16, 132) > 4


# ------------------------------------------------------------------------------------------------ decoding
def check_decode_work(host, lengths, groups, num_splits, rows=None, most_q=8):
    """Every tile of every sequence once, in parts that are in key order; a chunk leaves at most two partial results. Of
    packed sequences with `rows` query rows those without one, or with more than `most_q`, are nobody's work."""
    tiles, packed, packed_alone = [-(-n // 16) for n in lengths], (), lambda b: ()
    if rows:
        tiles = [n if 0 < r <= most_q else 0 for n, r in zip(tiles, rows, strict=True)]
        packed, packed_alone = ([0, *itertools.accumulate(rows)], most_q), lambda b: ([0, rows[b]], most_q)
    work = host.decode_work(lengths, groups, num_splits, *packed)
    for b, n in enumerate(tiles):
        parts = sorted((part, begin, end, count) for _, batch, begin, end, part, count, _ in work if batch == b)
        assert [p[0] for p in parts] == list(range(len(parts))), "a part is missing or there twice"
        assert all(p[3] == len(parts) for p in parts), "the last to finish would not know that it is"
        assert [begin for _, begin, _, _ in parts] == [0, *(end for _, _, end, _ in parts)][: len(parts)]
        assert not parts or parts[-1][2] == n
        assert len(parts) == num_splits if num_splits else bool(parts) == (n > 0)
    slots = [(group, slot) for group, _, _, _, _, count, slot in work if count > 1]
    assert num_splits or len(slots) == len(set(slots)), "two partial results in one place"
    if not num_splits:
        for b in {batch for _, batch, *_ in work}:  # where the merge looks for them: consecutive groups
            mine = sorted((part, group, slot) for group, batch, _, _, part, _, slot in work if batch == b)
            assert [group - mine[0][1] for _, group, _ in mine] == list(range(len(mine)))
            assert all(slot == 0 for _, _, slot in mine[1:])
        loads = Counter()
        for group, _, begin, end, *_ in work:
            loads[group] += end - begin
        assert max(loads.values(), default=0) <= max(-(-sum(tiles) // groups), 4)
    else:
        for b, n in enumerate(tiles):
            alone = host.decode_work([lengths[b]], groups, num_splits, *packed_alone(b))
            assert [w[2:6] for w in work if w[1] == b] == [w[2:6] for w in alone], "edges depend on the batch"
            sizes = [w[3] - w[2] for w in alone]
            assert sum(sizes) == n and max(sizes) - min(sizes) <= 1


def test_decode_work_of_every_small_batch(host):
    for lengths in itertools.product((0, 1, 16, 40, 200), repeat=3):
        for groups in (1, 2, 3, 7, 40):
            check_decode_work(host, list(lengths), groups, 0)
        for num_splits in (1, 2, 5):
            check_decode_work(host, list(lengths), 1, num_splits)


@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=20),
    groups=st.integers(1, 264),
    num_splits=st.just(0) | st.integers(1, 40),
)
def test_decode_work(host, lengths, groups, num_splits):
    check_decode_work(host, lengths, groups, num_splits)


@given(
    sequences=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 12)), min_size=1, max_size=20),
    groups=st.integers(1, 264),
    num_splits=st.just(0) | st.integers(1, 40),
)
def test_decode_work_of_packed_sequences(host, sequences, groups, num_splits):
    lengths, rows = (list(x) for x in zip(*sequences, strict=True))
    check_decode_work(host, lengths, groups, num_splits, rows)


# ------------------------------------------------------------------------------------------------ shared memory
def test_no_bank_conflicts(host):
    """For each access that a warp makes: how many more rounds it takes than an access without conflicts."""
    configs = host.kernel_configs()
    assert configs
    for config in configs:
        conflicts = host.bank_conflicts(config)
        for tensor, way in itertools.product("QKVP", ("store", "load")):
            assert any(access.startswith(tensor) and way in access for access in conflicts), f"no {tensor} {way}"
        assert not Counter(conflicts) - Counter(), f"{config}: {conflicts}"
