"""Draws calls of every public function, with every feature, layout and odd length, and holds them to the oracle.

`make soak SECONDS=...` runs it; two minutes in eight processes are part of `make verify-gpu`, one on the emulated GPU
of `make test`. Everything that a call has no business with is poison: what lies around its tensors, between their rows,
past the lengths, in pages that nobody has. What is not to be written must keep its bits, the same call again must give
the same bits, on a GPU also from a captured graph. A call is reproducible from its seed: `python tests/soak.py --seed
N`. Calls run in workers: one that dies or hangs is a failure of the call that it said it was at, and another goes on
behind it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from source_tree import ROOT

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "python"))

import torch
from oracle import (
    Expected,
    expect,
    expect_gradients,
    expect_gradients_packed,
    expect_packed,
    peer_tolerance,
    rotate,
)

import cutlass_ext as ce

NAN, HUGE = float("nan"), 0x7F7F7F7F
GUARD = 256  # elements of poison before and after the tensors of a buffer
START_S, CALL_S = 180, 60  # that a worker may take to begin, and for a call, before it counts as hung
MOST_FAILURES = 25  # then the soak ends: more of them say nothing new
WORK = {"cuda": 1 << 28, "cpu": 1 << 24}  # multiplications of a call's two products: 10 to 50 ms beside the oracle
ELEMENTS = {"cuda": 1 << 21, "cpu": 1 << 19}  # of a tensor
UNBOUNDED = 1 << 30  # a window side of so much or more is none

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPES = FLOATS | {"int32": torch.int32, "int64": torch.int64, "bool": torch.bool}


# ------------------------------------------------------------------------------------------------ where tensors lie
@dataclasses.dataclass
class Layout:
    """A tensor inside a buffer, of which it may have a part."""

    shape: tuple
    strides: tuple
    offset: int
    buffer: str
    dtype: str

    @property
    def end(self):
        """The elements up to its last one."""
        if 0 in self.shape:
            return 0
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def part(self, dim, begin, length):
        shape = list(self.shape)
        shape[dim] = length
        return dataclasses.replace(self, shape=tuple(shape), offset=self.offset + begin * self.strides[dim])

    def select(self, dim, index):
        without = lambda x: (*x[:dim], *x[dim + 1 or len(x) :])  # noqa: E731
        offset = self.offset + index * self.strides[dim]
        return dataclasses.replace(self, shape=without(self.shape), strides=without(self.strides), offset=offset)

    def __str__(self):
        return f"{self.dtype}{list(self.shape)} strides {list(self.strides)} at {self.buffer}+{self.offset}"


def contiguous(shape, buffer, dtype="int32", rng=None):
    """In C order; with `rng` the rows of a matrix may lie further apart."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if rng and len(shape) == 2:
        strides[0] += rng.choice((0, 0, 1, 3))
    return Layout(tuple(shape), tuple(strides), 0, buffer, dtype)


def drawn(rng, shape, buffer, dtype, expandable=False):
    """Any strides whose last one is 1: dimensions permuted, rows and tokens apart, any offset; of size 1, odd ones."""
    dims = list(range(len(shape) - 1))
    if rng.random() < 0.4:
        rng.shuffle(dims)
    plain, odd = rng.random() < 0.35, rng.choice((1, 1, 2, 4, 8))  # pads are multiples of `odd`, so rows begin there
    strides, extent = [1] * len(shape), shape[-1] + (0 if plain else rng.choice((0, 0, 1, 3, 8)) * odd)
    for dim in reversed(dims):
        strides[dim] = extent * (1 if plain else rng.choice((1, 1, 1, 2)))
        if expandable and rng.random() < 0.1:
            strides[dim] = 0
        if shape[dim] == 1 and rng.random() < 0.3:
            strides[dim] = rng.choice((0, 1, 3, 7))
        elif strides[dim]:
            extent = strides[dim] * max(shape[dim], 1) + (0 if plain else rng.choice((0, 0, 0, 8)) * odd)
    return Layout(tuple(shape), tuple(strides), rng.choice((0, 0, 0, 1, 2, 3, 4, 8)), buffer, dtype)


class Arena:
    """The tensors of a call, in buffers of poison; it knows what they held, and what may have changed."""

    def __init__(self, layouts, values, device, seed, poison):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.poison, self.layouts = poison, layouts
        self.buffers = {}
        for name in dict.fromkeys(layout.buffer for layout in layouts.values()):
            parts = [layout for layout in layouts.values() if layout.buffer == name]
            size, dtype = max(part.end for part in parts) + 2 * GUARD + 8, DTYPES[parts[0].dtype]
            fill = HUGE if dtype in (torch.int32, torch.int64) else poison  # of a mask: all is visible
            self.buffers[name] = torch.full((size,), fill, dtype=dtype, device=device)
        for name, layout in layouts.items():
            # elements that an expanded tensor has several times are written once
            shape = [min(n, 1) if s == 0 else n for n, s in zip(layout.shape, layout.strides, strict=True)]
            once = self.buffers[layout.buffer].as_strided(shape, layout.strides, GUARD + layout.offset)
            if name in values:
                once.copy_(torch.tensor(values[name]).view(shape))
            elif layout.dtype == "bool":
                once.copy_(torch.rand(shape, device=device, generator=self.generator) < 0.7)
            else:
                once.normal_(generator=self.generator)

    def __getitem__(self, name):
        layout = self.layouts[name]
        return self.buffers[layout.buffer].as_strided(layout.shape, layout.strides, GUARD + layout.offset)

    def keep(self):
        self.kept = {name: buffer.clone() for name, buffer in self.buffers.items()}

    def restore(self):
        for name, buffer in self.buffers.items():
            buffer.copy_(self.kept[name])

    def check_unwritten(self, written):
        """`written`: bool masks of the tensors that the call writes to."""
        for name, buffer in self.buffers.items():
            same = bits(buffer) == bits(self.kept[name])
            for tensor, mask in written.items():
                layout = self.layouts[tensor]
                if layout.buffer == name:
                    view = same.as_strided(layout.shape, layout.strides, GUARD + layout.offset)
                    view |= mask
            assert same.all(), f"the call wrote to {name}, at element {(~same).nonzero()[0].item() - GUARD}"


def bits(x):
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


# ------------------------------------------------------------------------------------------------ drawing
@dataclasses.dataclass
class Call:
    """One call in words: nothing here is on a device. `values` are the contents of the tensors of integers."""

    seed: int
    function: str
    device: str
    dtype: str
    way: str  # eager, on a stream, from a graph
    layouts: dict
    values: dict
    options: dict
    facts: dict  # what the check must know and the call is not told

    def __str__(self):
        tensors = [f"{name}={layout}" for name, layout in self.layouts.items() if name not in self.values]
        lengths = [f"{name}={values}" for name, values in self.values.items()]
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.function}({', '.join(tensors + lengths + options)}) {self.facts} {self.way} on {self.device}"


@dataclasses.dataclass
class Sizes:
    batch: int
    n_q: int
    n_kv: int
    heads_q: int
    heads_kv: int
    d: int
    d_v: int


EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)


def length(rng, most=2000):
    kind = rng.random()
    if kind < 0.06:
        return 0
    if kind < 0.3:
        return rng.randint(1, 16)
    if kind < 0.5:
        return min(rng.choice(EDGES), most)
    if kind < 0.8:
        return rng.randint(1, min(300, most))
    return int(math.exp(rng.uniform(0, math.log(most))))


def head_dims(rng, dtype, equal):
    step = 4 if dtype == "float32" else 8
    if rng.random() < 0.6:
        d, d_v = rng.choice(((64, 64), (64, 64), (128, 128), (128, 128), (96, 96), (192, 192), (256, 256), (192, 128)))
    else:
        d, d_v = (step * rng.randint(1, 256 // step) for _ in "kv")
        d_v = rng.choice((d, d_v))
    return d, d if equal else d_v


def draw_sizes(rng, device, dtype, *, few_rows=False, equal_heads=False, equal_dims=False):
    heads_kv = rng.choice((1, 1, 2, 2, 3, 4, 5, 8, 16, 32))
    group = 1 if equal_heads else rng.choice((1, 1, 1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 128))
    while heads_kv * group > 128:
        heads_kv = (heads_kv + 1) // 2
    d, d_v = head_dims(rng, dtype, equal_dims)
    n_q = rng.choice((1, 1, 1, 2, 3, 4, 8, 16, length(rng, 100))) if few_rows else length(rng)
    batch = 0 if rng.random() < 0.04 else rng.choice((1, 1, 1, 2, 2, 3, 4, 5, 8, 17, 40))
    sizes = Sizes(batch, n_q, length(rng, 8000 if few_rows else 2000), heads_kv * group, heads_kv, d, d_v)
    halve = lambda n: (n + 1) // 2  # noqa: E731
    while True:
        s, dims = sizes, d + d_v
        q = s.batch * s.n_q * s.heads_q * max(d, d_v)
        kv = s.batch * s.n_kv * s.heads_kv * max(d, d_v)
        if max(q, kv) <= ELEMENTS[device] and s.batch * s.n_q * s.n_kv * s.heads_q * dims <= WORK[device]:
            return sizes
        if s.batch > 3:
            s.batch = halve(s.batch)
        elif max(s.n_q, s.n_kv) > 400 or s.heads_q == s.heads_kv == 1:
            name = "n_q" if s.n_q > s.n_kv else "n_kv"
            setattr(s, name, halve(getattr(s, name)))
        elif s.heads_kv > 1:
            s.heads_kv, s.heads_q = halve(s.heads_kv), s.heads_q // s.heads_kv * halve(s.heads_kv)
        else:
            s.heads_q = halve(s.heads_q)


def draw_options(rng, sizes, positions=True):
    """What changes scores, under fmha's names, each with a chance of its own; vectors go to `vectors`."""
    side = lambda: rng.choice((-1, -1, 0, 1, 15, 64, rng.randint(0, 300), 2**31 - 1))  # noqa: E731
    options, vectors = {"causal": rng.random() < 0.5}, {}
    if rng.random() < 0.3:
        options["window"] = (side(), side())
    if rng.random() < 0.3:
        options["softmax_scale"] = round(rng.uniform(0.02, 0.3), 4)
    if rng.random() < 0.2:
        options["softcap"] = rng.choice((1.0, 30.0))
    if rng.random() < 0.2:
        shape = rng.choice(((sizes.heads_q,), (sizes.batch, sizes.heads_q)))
        vectors["alibi_slopes"] = contiguous(shape, "alibi_slopes", "float32", rng)
    if rng.random() < 0.2:
        vectors["sink"] = contiguous((sizes.heads_q,), "sink", "float32")
    if rng.random() < 0.3:
        options["num_splits"] = rng.choice((1, 1, 2, 3, 5, 17))
    if positions:
        start = lambda: rng.randint(-sizes.n_q - 5, sizes.n_kv + 20)  # noqa: E731
        options["start_pos"] = rng.choice((0, "end", "end", start(), [start() for _ in range(sizes.batch)]))
    return options, vectors


def draw_pairs(rng, call, sizes, of_scores=True):
    """Bias, mask and dropout, each with a chance of its own: tensors of scores of any strides, shared or not."""

    def of_all_scores(name, dtype):
        full = sizes.batch, sizes.heads_q, sizes.n_q
        shape = [rng.choice((1, n)) for n in full]
        while math.prod(shape) * sizes.n_kv > ELEMENTS[call.device]:
            shape[shape.index(max(shape))] = 1
        layout = drawn(rng, (*shape, sizes.n_kv), name, dtype, expandable=True)
        if rng.random() < 0.2:  # keys apart
            layout = dataclasses.replace(layout, strides=tuple(2 * stride for stride in layout.strides))
        call.layouts[name] = layout

    if of_scores and rng.random() < 0.2:
        of_all_scores("bias", rng.choice(list(FLOATS)))
    if of_scores and rng.random() < 0.2:
        of_all_scores("mask", "bool")
    if rng.random() < 0.2:
        call.options["dropout_p"] = rng.choice((2**-16, 0.1, 0.1, 0.5, 0.9))
        int_vectors(call, dropout_seed=[rng.randint(-(2**63), 2**63 - 1) for _ in range(2)])
        call.layouts["dropout_seed"].dtype = "int64"
        if rng.random() < 0.3:
            call.options |= {name: rng.randint(0, 100) for name in ("head_start", "sequence_start")}
    if rng.random() < 0.2:
        start = lambda: rng.choice((-1, 1)) * rng.choice((8 * rng.randint(0, 20), rng.randint(0, 100)))  # noqa: E731
        int_vectors(call, key_start=start() if rng.random() < 0.5 else [start() for _ in range(sizes.batch)])


def draw_backend(rng, device, dtype):
    """Of float32 "sm80" has it in parts, as "auto" does on Hopper; "simt" on CUDA cores."""
    families = () if device == "cpu" else ("simt", "sm80") if dtype == "float32" else ("sm80", "sm90", "sm90")
    return rng.choice(("auto",) * 6 + families * 2 + ("torch",))


def int_vectors(call, **vectors):
    """int32 tensors of those that are lists; other values are passed as they are."""
    for name, values in vectors.items():
        if isinstance(values, list):
            shape = (len(values), len(values[0])) if values and isinstance(values[0], list) else (len(values),)
            call.layouts[name], call.values[name] = contiguous(shape, name), values
        else:
            call.options[name] = values


def lay_out_qkv(rng, call, q_shape, k_shape, v_shape):
    """q, k and v apart, or k and v in one buffer, rows side by side or heads side by side, or all three."""
    dtype, kind = call.dtype, rng.random()
    alike = q_shape[:-2] == k_shape[:-2] and q_shape[-1] == k_shape[-1] == v_shape[-1]
    if alike and kind < 0.15:
        heads = q_shape[-2], k_shape[-2], v_shape[-2]
        joint = drawn(rng, (*q_shape[:-2], sum(heads), q_shape[-1]), "qkv", dtype)
        for name, begin, n in zip("qkv", (0, heads[0], heads[0] + heads[1]), heads, strict=True):
            call.layouts[name] = joint.part(len(q_shape) - 2, begin, n)
        return
    call.layouts["q"] = drawn(rng, q_shape, "q", dtype, expandable=True)
    if kind < 0.3:
        joint = drawn(rng, (*k_shape[:-1], k_shape[-1] + v_shape[-1]), "kv", dtype)
        call.layouts["k"] = joint.part(len(k_shape) - 1, 0, k_shape[-1])
        call.layouts["v"] = joint.part(len(k_shape) - 1, k_shape[-1], v_shape[-1])
    else:
        call.layouts["k"] = drawn(rng, k_shape, "k", dtype, expandable=True)
        call.layouts["v"] = drawn(rng, v_shape, "v", dtype, expandable=True)


def draw_padded(rng, call):
    """fmha and its names for sequences of one length."""
    name = call.function
    packs = {"flash_attn_qkvpacked_func": 3, "flash_attn_kvpacked_func": 2}.get(name)
    s = draw_sizes(rng, call.device, call.dtype, equal_heads=packs == 3, equal_dims=packs is not None)
    if packs == 3:
        s.n_kv = s.n_q
    shapes = (s.batch, s.n_q, s.heads_q, s.d), (s.batch, s.n_kv, s.heads_kv, s.d), (s.batch, s.n_kv, s.heads_kv, s.d_v)
    if packs:
        joint = drawn(rng, (s.batch, s.n_kv, packs, s.heads_kv, s.d), "packed", call.dtype)
        call.layouts["qkv" if packs == 3 else "kv"] = joint
        call.facts["packed"] = "qkv"[-packs:]  # tensors that the call is given as one
        for i, part in enumerate("qkv"[-packs:]):
            call.layouts[part] = joint.select(2, i)
        if packs == 2:
            call.layouts["q"] = drawn(rng, shapes[0], "q", call.dtype, expandable=True)
    else:
        lay_out_qkv(rng, call, *shapes)
    ours = name.startswith("fmha")
    call.options, vectors = draw_options(rng, s, positions=ours)
    call.layouts |= vectors
    if ours:
        start = call.options.pop("start_pos")
        used = [rng.randint(0, s.n_kv) for _ in range(s.batch)] if rng.random() < 0.3 else None
        first = [rng.randint(0, n) for n in used or [s.n_kv] * s.batch] if rng.random() < 0.2 else None
        int_vectors(call, start_pos=start, seqused_k=used, leftpad_k=first)
        draw_pairs(rng, call, s)
        call.options["backend"] = draw_backend(rng, call.device, call.dtype)
    if name == "scaled_dot_product_attention":
        call.facts["lead"] = rng.choice(((s.batch,), (1, s.batch), (s.batch, 1), None if s.batch == 1 else (s.batch,)))
        call.options["enable_gqa"] = s.heads_q != s.heads_kv or rng.random() < 0.5
        draw_pairs(rng, call, s)
        call.layouts.pop("bias" if "mask" in call.layouts else "", None)
        # PyTorch's dropout draws its own seed, and knows no positions.
        for name in ("dropout_p", "dropout_seed", "head_start", "sequence_start", "key_start"):
            call.options.pop(name, None), call.layouts.pop(name, None), call.values.pop(name, None)


def draw_training(rng, call):
    """Gradients as training wants them, of rows that lie one behind the other, and of so many that tiles of keys add to
    dq: half of them without anything that changes scores."""
    call.dtype = rng.choice(("float16", "bfloat16"))
    d = rng.choice((64, 64, 40, 96, 128, 128, 192, 256))
    s = Sizes(rng.choice((1, 1, 2, 3)), 0, 0, 0, rng.choice((1, 1, 2, 3, 4)), d, 128 if d == 192 else d)
    s.n_q = (128 if d <= 64 else 512) + rng.choice((1, 64, 65, rng.randint(1, 400)))
    s.n_kv = rng.choice((s.n_q, s.n_q, s.n_q + 1, rng.randint(1, s.n_q + 200)))
    s.heads_q = s.heads_kv * rng.choice((1, 1, 2, 3, 4, 7, 16))
    while s.batch * s.heads_q * s.n_q * s.n_kv * (s.d + s.d_v) > WORK[call.device] and s.heads_q > 1:
        s.batch, s.heads_kv, s.heads_q = 1, 1, (s.heads_q + 1) // 2
    shapes = (s.batch, s.n_q, s.heads_q, s.d), (s.batch, s.n_kv, s.heads_kv, s.d), (s.batch, s.n_kv, s.heads_kv, s.d_v)
    call.layouts |= {name: contiguous(shape, name, call.dtype) for name, shape in zip("qkv", shapes, strict=True)}
    call.layouts["dout"] = contiguous((*shapes[0][:3], s.d_v), "dout", call.dtype)
    call.options = {"causal": rng.random() < 0.6, "backend": "auto"}
    if rng.random() < 0.5:
        options, vectors = draw_options(rng, s)
        call.options |= options
        call.layouts |= vectors
        int_vectors(call, start_pos=call.options.pop("start_pos"))
        draw_pairs(rng, call, s)
    if rng.random() < 0.2:
        int_vectors(call, seqused_k=[rng.randint(0, s.n_kv) for _ in range(s.batch)])


def draw_packed(rng, call):
    """fmha with cu_seqlens, and its names; rows that belong to no sequence lie before, after and hold poison."""
    name = call.function
    packs = {"flash_attn_varlen_qkvpacked_func": 3, "flash_attn_varlen_kvpacked_func": 2}.get(name)
    s = draw_sizes(rng, call.device, call.dtype, equal_heads=packs == 3, equal_dims=packs is not None)
    shorter = lambda n: rng.choice((0, n, n, rng.randint(0, n)))  # noqa: E731
    lengths_q = [shorter(s.n_q) for _ in range(s.batch)]
    lengths_k = lengths_q if packs == 3 else [shorter(s.n_kv) for _ in range(s.batch)]
    outside = lambda: rng.choice((0, 0, 1, 5, 70))  # noqa: E731
    leads = [outside(), outside()]
    totals = [leads[0] + sum(lengths_q) + outside(), leads[1] + sum(lengths_k) + outside()]
    if packs == 3:
        leads[1], totals[1] = leads[0], totals[0]
    cu_q, cu_k = (
        list(itertools.accumulate(n, initial=lead)) for lead, n in zip(leads, (lengths_q, lengths_k), strict=True)
    )
    more = lambda n: max(n, default=0) + rng.choice((0, 0, 0, 1, 300))  # noqa: E731
    if packs:
        joint = drawn(rng, (totals[1], packs, s.heads_kv, s.d), "packed", call.dtype)
        call.layouts["qkv" if packs == 3 else "kv"] = joint
        call.facts["packed"] = "qkv"[-packs:]  # tensors that the call is given as one
        for i, part in enumerate("qkv"[-packs:]):
            call.layouts[part] = joint.select(1, i)
        if packs == 2:
            call.layouts["q"] = drawn(rng, (totals[0], s.heads_q, s.d), "q", call.dtype)
    else:
        kv = totals[1], s.heads_kv
        lay_out_qkv(rng, call, (totals[0], s.heads_q, s.d), (*kv, s.d), (*kv, s.d_v))
    ours = name.startswith("fmha")
    call.options, vectors = draw_options(rng, s, positions=ours)
    call.layouts |= vectors
    used = [rng.randint(0, n) for n in lengths_k] if rng.random() < 0.3 and (ours or not packs) else None
    int_vectors(call, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_k=used)
    call.options |= {"max_seqlen_q": more(lengths_q), "max_seqlen_k": more(lengths_k)}
    if packs == 3:
        call.options["max_seqlen_k"] = call.options["max_seqlen_q"]
    if ours:
        first = [rng.randint(0, n) for n in used or lengths_k] if rng.random() < 0.2 else None
        int_vectors(call, start_pos=call.options.pop("start_pos"), leftpad_k=first)
        draw_pairs(rng, call, s, of_scores=False)
        call.options["backend"] = draw_backend(rng, call.device, call.dtype)


def draw_cache(rng, call):
    """flash_attn_with_kvcache. A contiguous cache is checked as pages of its whole length, one to a sequence."""
    s = draw_sizes(rng, call.device, call.dtype, few_rows=True)
    n_new = rng.choice((None, None, 0, 1, 1, s.n_q, rng.randint(1, 40)))
    page = rng.choice((None, None, 1, 2, 8, 16, 16, 64, 256))
    paged, indexed = page is not None, page is None and rng.random() < 0.4
    page = page or max(s.n_kv, 1)
    to_a_sequence = max(-(-s.n_kv // page), 1)
    pages = s.batch * to_a_sequence + (rng.choice((0, 1, 3)) if paged or indexed else 0)
    s.n_kv = capacity = page * to_a_sequence
    n_new = n_new if n_new is None else min(n_new, capacity)
    fresh, kind = n_new or 0, rng.random()
    if kind < 0.1 and n_new is None:
        cached, given = [capacity] * s.batch, None
    elif kind < 0.2:
        given = rng.randint(0, capacity - fresh)
        cached = [given] * s.batch
    else:
        cached = [rng.choice((0, capacity, rng.randint(0, capacity))) for _ in range(s.batch)]
        given = cached
    idle = [False] * s.batch
    if fresh and given is cached and (paged or indexed) and rng.random() < 0.3:
        idle = [rng.random() < 0.4 for _ in range(s.batch)]
        given = cached = [0 if i else n for i, n in zip(idle, cached, strict=True)]
    lengths = [min(n + fresh, capacity) for n in cached]
    table = [[b * to_a_sequence + j for j in range(to_a_sequence)] for b in range(s.batch)]
    if paged or indexed:
        order = rng.sample(range(pages), s.batch * to_a_sequence)
        table = [[order[place] for place in row] for row in table]
        if not fresh and s.batch > 1 and rng.random() < 0.2:  # what nobody writes may be shared
            table[1] = table[0]
    call.facts = {"table": table, "page": page, "cached": cached, "idle": idle, "capacity": capacity}
    shown = [[HUGE] * to_a_sequence for _ in table]
    for b, row in enumerate(table):
        for j, place in enumerate(row):
            unused = rng.choice((-1, 1 << 30, 0, place))
            shown[b][j] = -1 if idle[b] else place if j * page < lengths[b] else unused

    pool = pages, page, s.heads_kv
    if rng.random() < 0.25:
        joint = drawn(rng, (*pool, s.d + s.d_v), "cache", call.dtype)
        call.layouts |= {"k_cache": joint.part(3, 0, s.d), "v_cache": joint.part(3, s.d, s.d_v)}
    else:
        call.layouts["k_cache"] = drawn(rng, (*pool, s.d), "k_cache", call.dtype, expandable=not fresh)
        call.layouts["v_cache"] = drawn(rng, (*pool, s.d_v), "v_cache", call.dtype, expandable=not fresh)
    call.layouts["q"] = drawn(rng, (s.batch, s.n_q, s.heads_q, s.d), "q", call.dtype, expandable=True)
    if n_new is not None:
        for name, d in (("k", s.d), ("v", s.d_v)):
            call.layouts[name] = drawn(rng, (s.batch, n_new, s.heads_kv, d), name, call.dtype)
    call.options, vectors = draw_options(rng, s)
    call.layouts |= vectors
    pads = [rng.randint(0, n) for n in cached] if rng.random() < 0.2 else None
    int_vectors(call, cache_seqlens=given, cache_leftpad=pads, start_pos=call.options.pop("start_pos"))
    if paged:
        int_vectors(call, block_table=shown)
        call.layouts["block_table"] = contiguous((s.batch, to_a_sequence), "block_table", rng=rng)
    if indexed:
        int_vectors(call, cache_batch_idx=[row[0] if not i else -1 for row, i in zip(table, idle, strict=True)])
    if n_new is not None and rng.random() < 0.5:
        rows = capacity + max(fresh, s.n_q) + rng.choice((0, 5))
        half = rng.choice((s.d // 2, rng.randint(1, s.d // 2)))
        joint = contiguous((rows, 2 * half), "rotary", call.dtype)
        call.layouts |= {"rotary_cos": joint.part(1, 0, half), "rotary_sin": joint.part(1, half, half)}
        call.options["rotary_interleaved"] = rng.random() < 0.5
    call.options["backend"] = draw_backend(rng, call.device, call.dtype)


def draw_paged(rng, call):
    """fmha and flash_attn_varlen_func over pages, of which some may be shared: chunks, drafts, single rows, or none."""
    ours = call.function == "fmha_paged"
    s = draw_sizes(rng, call.device, call.dtype)
    page = rng.choice((1, 2, 4, 8, 16, 16, 16, 48, 64, 64, 80, 256, 272))
    to_a_sequence = -(-s.n_kv // page) + rng.choice((0, 0, 1))
    capacity, packed = to_a_sequence * page, not ours or rng.random() < 0.75
    rows = lambda: rng.choice((0, min(1, s.n_q), min(1, s.n_q), min(rng.randint(2, 16), s.n_q), rng.randint(0, s.n_q)))  # noqa: E731
    lengths_q = [rng.choice((s.n_q, rows())) if packed else s.n_q for _ in range(s.batch)]
    lengths_k = [rng.choice((0, s.n_kv, rng.randint(0, s.n_kv))) for _ in range(s.batch)]
    pages = s.batch * to_a_sequence + rng.choice((0, 1, 3))
    order = rng.sample(range(pages), s.batch * to_a_sequence)
    table = [[order[b * to_a_sequence + j] for j in range(to_a_sequence)] for b in range(s.batch)]
    if s.batch > 1 and rng.random() < 0.3:  # a prefix that two have in common
        common = rng.randint(0, to_a_sequence)
        table[1][:common] = table[0][:common]
    call.facts = {"table": table, "page": page, "capacity": capacity, "ragged": packed}
    shown = [
        [place if j * page < n else rng.choice((-1, 1 << 30, 0, place)) for j, place in enumerate(row)]
        for row, n in zip(table, lengths_k, strict=True)
    ]

    pool = pages, page, s.heads_kv
    if rng.random() < 0.25:
        joint = drawn(rng, (*pool, s.d + s.d_v), "pages", call.dtype)
        call.layouts |= {"k": joint.part(3, 0, s.d), "v": joint.part(3, s.d, s.d_v)}
    else:
        call.layouts |= {n: drawn(rng, (*pool, d), n, call.dtype) for n, d in (("k", s.d), ("v", s.d_v))}
    lead, tail = (rng.choice((0, 0, 1, 70)) for _ in "qq")
    batch = (lead + sum(lengths_q) + tail,) if packed else (s.batch, s.n_q)
    call.layouts["q"] = drawn(rng, (*batch, s.heads_q, s.d), "q", call.dtype, expandable=not packed)
    call.options, vectors = draw_options(rng, s, positions=ours)
    call.layouts |= vectors
    if packed:
        int_vectors(call, cu_seqlens_q=list(itertools.accumulate(lengths_q, initial=lead)))
        call.options["max_seqlen_q"] = max(lengths_q, default=0) + rng.choice((0, 0, 0, 1, 300))
        call.options["max_seqlen_k"] = rng.choice((None, max(lengths_k, default=0), 1 << 20))
    int_vectors(call, seqused_k=lengths_k, block_table=shown)
    call.layouts["block_table"] = contiguous((s.batch, to_a_sequence), "block_table", rng=rng)
    if ours:
        pads = [rng.randint(0, n) for n in lengths_k] if rng.random() < 0.2 else None
        int_vectors(call, start_pos=call.options.pop("start_pos"), leftpad_k=pads)
        draw_pairs(rng, call, dataclasses.replace(s, n_kv=capacity), of_scores=not packed)
        call.options["backend"] = draw_backend(rng, call.device, call.dtype)


PADDED = {"causal", "window", "softmax_scale", "softcap", "alibi_slopes"}  # what flash-attn's functions take
SDPA = {"causal", "softmax_scale", "enable_gqa"}
GRADIENTS = PADDED | {"sink"}
FUNCTIONS = {  # how their calls are drawn, how often, and which options they take where that is not all
    "fmha": (draw_padded, 6, None),
    "fmha_packed": (draw_packed, 5, None),
    "fmha_paged": (draw_paged, 7, None),
    "fmha_backward": (draw_padded, 5, GRADIENTS),
    "fmha_backward_packed": (draw_packed, 5, GRADIENTS),
    "fmha_backward_training": (draw_training, 5, GRADIENTS),
    "flash_attn_with_kvcache": (draw_cache, 8, None),
    "flash_attn_func": (draw_padded, 1, PADDED),
    "flash_attn_kvpacked_func": (draw_padded, 1, PADDED),
    "flash_attn_qkvpacked_func": (draw_padded, 1, PADDED),
    "flash_attn_varlen_func": (draw_packed, 1, PADDED),
    "flash_attn_varlen_kvpacked_func": (draw_packed, 1, PADDED),
    "flash_attn_varlen_qkvpacked_func": (draw_packed, 1, PADDED),
    "flash_attn_varlen_func_paged": (draw_paged, 2, PADDED),
    "scaled_dot_product_attention": (draw_padded, 1, SDPA),
}


def draw(seed, device) -> Call:
    """The call of a seed; the same whichever process asks."""
    rng = random.Random(seed)
    function = rng.choices(list(FUNCTIONS), [often for _, often, _ in FUNCTIONS.values()])[0]
    dtype = rng.choice(("float32", "float16", "bfloat16", "bfloat16"))
    way = rng.choice(("eager", "eager", "stream", "graph")) if device == "cuda" else "eager"
    call = Call(seed, function, device, dtype, way, {}, {}, {}, {})
    draw_call, _, takes = FUNCTIONS[function]
    draw_call(rng, call)
    if takes:
        for name in {"causal", "window", "softmax_scale", "softcap", "alibi_slopes", "sink", "num_splits"} - takes:
            call.options.pop(name, None), call.layouts.pop(name, None)
    if function.startswith("fmha_backward"):
        *batch, n_q, heads, _ = call.layouts["q"].shape
        shape = (*batch, n_q, heads, call.layouts["v"].shape[-1])
        if "dout" not in call.layouts:
            call.layouts["dout"] = drawn(rng, shape, "dout", dtype, expandable=True)
        call.options["deterministic"] = rng.random() < 0.3
        if rng.random() < 0.5:
            call.layouts["dlse"] = contiguous((*batch, heads, n_q), "dlse", "float32")
    call.options = {name: value for name, value in call.options.items() if value is not None}
    call.facts["poison"] = rng.choice((NAN, NAN, NAN, float("inf"), -float("inf")))
    call.facts["lse"] = rng.random() < 0.7
    return call


# ------------------------------------------------------------------------------------------------ running
def poisoned(arena, name, mask):
    """Poison where `mask` is true; not in a tensor whose elements are several at once."""
    layout = arena.layouts[name]
    if all(stride or size == 1 for size, stride in zip(layout.shape, layout.strides, strict=True)):
        arena[name][mask] = arena.poison


def outside(n, firsts, lasts, device):
    """[len(firsts), n]: which positions do not lie within each pair."""
    i = torch.arange(n, device=device)
    first, last = (torch.tensor(x, device=device).view(-1, 1) for x in (firsts, lasts))
    return (i < first) | (i >= last)


def scores(call, arena):
    """What changes scores, as the oracle takes it."""
    names = "causal", "window", "softmax_scale", "softcap", "alibi_slopes", "sink", "start_pos", "leftpad_k"
    names += "bias", "mask", "dropout_p", "dropout_seed", "head_start", "sequence_start", "key_start"
    arguments = {name: call.options[name] for name in names if name in call.options}
    arguments |= {name: arena[name] for name in names if name in call.layouts}
    if call.function.startswith("flash"):
        arguments.setdefault("start_pos", "end")
    return arguments


def graph_if_there_are_any():
    try:
        return torch.cuda.CUDAGraph()
    except unittest.SkipTest:  # the emulated GPU has none
        return None


class Padded:
    """The calls of `draw_padded`: what they poison, what they are called with, and what they should give."""

    def __init__(self, call, arena):
        self.call, self.arena = call, arena
        self.q, self.k, self.v = (arena[name] for name in "qkv")
        self.written = {}

    def plant(self):
        used, first = (self.call.values.get(name) for name in ("seqused_k", "leftpad_k"))
        B, n = self.k.shape[:2]
        hidden = outside(n, first or [0] * B, used or [n] * B, self.k.device)
        for name in "kv":
            poisoned(self.arena, name, hidden)
        if "bias" in self.call.layouts:
            bias, hidden = self.arena["bias"], hidden[:, None, None]
            hidden = hidden if len(bias) == B else hidden.all(0, keepdim=True)
            mask = self.arena["mask"] if "mask" in self.call.layouts else None
            if mask is not None and all(n in (1, m) for n, m in zip(mask.shape, bias.shape, strict=True)):
                hidden = hidden | ~mask
            poisoned(self.arena, "bias", hidden.expand(bias.shape))

    def arguments(self):
        """The function, and its keywords."""
        call, lse = self.call, self.call.facts["lse"]
        names = [name for name in call.layouts if name not in (*call.facts.get("packed", ""),)]
        arguments = call.options | {name: self.arena[name] for name in names}
        renamed = {}
        if call.function == "scaled_dot_product_attention":
            lead = call.facts["lead"]
            for name in "qkv":
                bhsd = arguments[name].transpose(1, 2)
                arguments[name] = bhsd[0] if lead is None else bhsd.unflatten(0, lead)
            renamed = {"q": "query", "k": "key", "v": "value", "causal": "is_causal", "softmax_scale": "scale"}
            renamed |= {"bias": "attn_mask", "mask": "attn_mask"}
            for name in ("bias", "mask"):
                if name in arguments:
                    ones = (1,) * len(lead or (1,))
                    x, split = arguments[name], ones if len(arguments[name]) == 1 else lead
                    arguments[name] = x[0] if lead is None else x.unflatten(0, split)
        elif call.function.startswith("flash"):
            renamed = {"window": "window_size"}
            arguments["return_softmax_lse" if call.function.endswith("kvcache") else "return_attn_probs"] = lse
        else:
            arguments["return_lse"] = lse
        if call.function == "flash_attn_varlen_qkvpacked_func":
            renamed |= {"cu_seqlens_q": "cu_seqlens", "max_seqlen_q": "max_seqlen"}
            del arguments["cu_seqlens_k"], arguments["max_seqlen_k"]
        function = getattr(ce, call.function.removesuffix("_packed").removesuffix("_paged"))
        return function, {renamed.get(name, name): value for name, value in arguments.items()}

    def results(self, got):
        """[out, lse or not], as `fmha` lays them out, of what is defined."""
        out, lse = got[:2] if isinstance(got, tuple) else (got, None)
        if self.call.function == "scaled_dot_product_attention":
            out = out.reshape(*self.q.transpose(1, 2).shape[:3], self.v.shape[3]).transpose(1, 2)
        return [out] if lse is None else [out, lse]

    def expected(self) -> Expected:
        used = {"seqused_k": self.arena["seqused_k"]} if "seqused_k" in self.call.layouts else {}
        return expect(self.q, self.k, self.v, **scores(self.call, self.arena), **used)

    def check(self, results):
        self.expected().check(*results, small=True)


class Packed(Padded):
    def plant(self):
        values = self.call.values
        cu_q, cu_k = values["cu_seqlens_q"], values["cu_seqlens_k"]
        poisoned(self.arena, "q", outside(len(self.q), [cu_q[0]], [cu_q[-1]], self.q.device)[0])
        lengths = [end - begin for begin, end in itertools.pairwise(cu_k)]
        used, first = values.get("seqused_k", lengths), values.get("leftpad_k", [0] * len(lengths))
        begins, ends = ([b + n for b, n in zip(cu_k, some, strict=False)] for some in (first, used))
        for name in "kv":
            poisoned(self.arena, name, outside(len(self.k), begins, ends, self.k.device).all(0))

    def results(self, got):
        cu = self.call.values["cu_seqlens_q"]
        out, *lse = super().results(got)
        return [out[cu[0] : cu[-1]], *(x[:, cu[0] : cu[-1]] for x in lse)]

    def expected(self):
        names = "cu_seqlens_q", "cu_seqlens_k", "seqused_k"
        lengths = {name: self.arena[name] for name in names if name in self.call.layouts}
        return expect_packed(self.q, self.k, self.v, **lengths, **scores(self.call, self.arena))


def gradient_arguments(problem):
    """`fmha_backward`, its keywords, and among them what `fmha` gives, by whichever kernel."""
    call, arena = problem.call, problem.arena
    arguments = call.options | {name: arena[name] for name in call.layouts}
    forward = {name: x for name, x in arguments.items() if name not in ("dout", "dlse")}
    forward["backend"] = "torch" if call.options["backend"] == "torch" else "auto"
    out, lse = ce.fmha(**forward, return_lse=True)
    return ce.fmha_backward, arguments | {"out": out, "lse": lse}


class PaddedGradients(Padded):
    """dq, dk, dv, dsink where there is a sink, and dbias where there is a bias."""

    arguments = gradient_arguments

    def plant(self):
        super().plant()
        used, first = (self.call.values.get(name) for name in ("seqused_k", "leftpad_k"))
        B, n = self.k.shape[:2]
        empty = [u <= f for u, f in zip(used or [n] * B, first or [0] * B, strict=True)]
        for name in ("q", "dout"):
            poisoned(self.arena, name, torch.tensor(empty, dtype=torch.bool, device=self.q.device))

    def results(self, got):
        return list(got)

    def expected(self):
        used = {"seqused_k": self.arena["seqused_k"]} if "seqused_k" in self.call.layouts else {}
        return expect_gradients(*self.tensors(), **scores(self.call, self.arena), **used)

    def tensors(self):
        dlse = self.arena["dlse"] if "dlse" in self.call.layouts else None
        return self.q, self.k, self.v, self.arena["dout"], dlse

    def check(self, results):
        self.expected().check(results, small=True)


class PackedGradients(PaddedGradients):
    def plant(self):
        Packed.plant(self)
        cu_q = self.call.values["cu_seqlens_q"]
        poisoned(self.arena, "dout", outside(len(self.q), [cu_q[0]], [cu_q[-1]], self.q.device)[0])

    def expected(self):
        names = "cu_seqlens_q", "cu_seqlens_k", "seqused_k"
        lengths = {name: self.arena[name] for name in names if name in self.call.layouts}
        return expect_gradients_packed(*self.tensors(), **lengths, **scores(self.call, self.arena))


class Paged(Packed):
    """Of `draw_paged`. Nothing is written, so what several sequences read is poison where none of them does."""

    def __init__(self, call, arena):
        super().__init__(call, arena)
        facts = call.facts
        i = torch.arange(facts["capacity"], device=self.q.device)
        table = torch.tensor(facts["table"], dtype=torch.int64, device=self.q.device)
        table = table.view(len(facts["table"]), facts["capacity"] // facts["page"])
        self.places = table[:, i // facts["page"]], (i % facts["page"]).expand(len(table), -1)  # [B, capacity] each

    def plant(self):
        values = self.call.values
        used = values["seqused_k"]
        kept = ~outside(self.call.facts["capacity"], values.get("leftpad_k", [0] * len(used)), used, self.q.device)
        unused = torch.ones(self.k.shape[:2], dtype=torch.bool, device=self.q.device)
        unused[self.places[0][kept], self.places[1][kept]] = False
        for name in "kv":
            poisoned(self.arena, name, unused)
        if self.call.facts["ragged"]:
            cu_q = values["cu_seqlens_q"]
            poisoned(self.arena, "q", outside(len(self.q), [cu_q[0]], [cu_q[-1]], self.q.device)[0])

    def results(self, got):
        return super().results(got) if self.call.facts["ragged"] else Padded.results(self, got)

    def expected(self):
        k, v = self.k[self.places], self.v[self.places]
        options = scores(self.call, self.arena) | {"seqused_k": self.arena["seqused_k"]}
        if not self.call.facts["ragged"]:
            return expect(self.q, k, v, **options)
        room = torch.arange(len(k) + 1, dtype=torch.int32) * self.call.facts["capacity"]
        ends = {"cu_seqlens_q": self.arena["cu_seqlens_q"], "cu_seqlens_k": room}
        return expect_packed(self.q, k.flatten(0, 1), v.flatten(0, 1), **ends, **options)


class Cached(Padded):
    """A contiguous cache is pages of its whole length, one to a sequence."""

    def __init__(self, call, arena):
        self.call, self.arena, self.q = call, arena, arena["q"]
        facts = call.facts
        self.page, self.capacity, self.device = facts["page"], facts["capacity"], self.q.device
        self.n_new = call.layouts["k"].shape[1] if "k" in call.layouts else 0
        self.cached = torch.tensor(facts["cached"], dtype=torch.int64, device=self.device)
        self.idle = torch.tensor(facts["idle"], dtype=torch.bool, device=self.device)
        self.length = (self.cached + self.n_new).clamp(max=self.capacity).to(torch.int32)
        table = torch.tensor(facts["table"], dtype=torch.int64, device=self.device)
        i = torch.arange(self.capacity, device=self.device)
        of_sequence = table.view(len(self.cached), self.capacity // self.page)
        self.places = of_sequence[:, i // self.page], i % self.page  # page [B, capacity] and row of each key
        self.positions = self.cached[:, None] + torch.arange(self.n_new, device=self.device)  # of the new tokens
        self.fitting = (self.positions < self.capacity) & ~self.idle[:, None]
        mask = torch.zeros(arena["k_cache"].shape[:2], dtype=torch.bool, device=self.device)
        mask[self.new_places()] = True
        self.written = {name: mask[..., None, None] for name in ("k_cache", "v_cache") if self.n_new}

    def new_places(self):
        """Page and row of the new tokens that there is room for."""
        sequence = torch.arange(len(self.cached), device=self.device)[:, None].expand_as(self.positions)[self.fitting]
        position = self.positions[self.fitting]
        return self.places[0][sequence, position], self.places[1][position]

    def plant(self):
        values, B = self.call.values, len(self.cached)
        first = values.get("cache_leftpad", [0] * B)
        kept = ~outside(self.capacity, first, self.call.facts["cached"], self.device)
        unused = torch.ones(self.arena["k_cache"].shape[:2], dtype=torch.bool, device=self.device)
        unused[self.places[0][kept], self.places[1].expand_as(kept)[kept]] = False
        for name in ("k_cache", "v_cache"):
            poisoned(self.arena, name, unused)
        for name in "kv" if self.n_new else "":
            poisoned(self.arena, name, ~self.fitting)

    def turned(self, x, steps):
        """Rows `x` rotated at `cached + steps`."""
        if "rotary_cos" not in self.call.layouts:
            return x
        tables = self.arena["rotary_cos"], self.arena["rotary_sin"]
        return rotate(x, self.cached[:, None] + steps, *tables, self.call.options["rotary_interleaved"])

    def results(self, got):
        return [x[~self.idle] for x in super().results(got)]

    def check(self, results):
        call, arena = self.call, self.arena
        rotated = "rotary_cos" in call.layouts
        if self.n_new:
            new = self.turned(arena["k"], torch.arange(self.n_new, device=self.device)), arena["v"]
            for name, want in zip(("k_cache", "v_cache"), new, strict=True):
                got, exact = arena[name][self.new_places()], not (rotated and name == "k_cache")
                tolerance = {"atol": 0, "rtol": 0} if exact else peer_tolerance(got.dtype)
                torch.testing.assert_close(got, want[self.fitting], **tolerance, msg=lambda m, n=name: f"{n}: {m}")
        window = call.options.get("window", (-1, -1))
        masked = call.options["causal"] or any(0 <= side < UNBOUNDED for side in window)
        q = self.turned(self.q, torch.arange(self.q.shape[1], device=self.device) * masked)
        # the keys as they were written, so that one rounding more or less of a rotated one is not counted
        k, v = (arena[name][self.places] for name in ("k_cache", "v_cache"))
        options, some = scores(call, arena), ~self.idle
        for name, x in options.items():
            if isinstance(x, torch.Tensor) and (name == "start_pos" or x.dim() == 2):
                options[name] = x[some]
        if "cache_leftpad" in call.layouts:
            options["leftpad_k"] = arena["cache_leftpad"][some]
        expected = expect(q[some], k[some], v[some], seqused_k=self.length[some], **options)
        expected.check(*results, small=True, rotated=rotated)


def same_bits(got, want, what, fixed):
    names = ("out", "lse") if len(got) < 3 else ("dq", "dk", "dv", "dsink or dbias", "dbias")
    for a, b, name in zip(got[fixed], want[fixed], names[: len(got)][fixed], strict=True):
        different = bits(a.contiguous()) != bits(b.contiguous())
        assert not different.any(), (
            f"{what}: {different.sum().item()} of {a.numel()} elements of {name} have other bits"
        )


def perform(call) -> str:
    """Runs a call and raises what is wrong with it; "refused" where a backend that was asked for does not take it."""
    device = torch.device(call.device)
    arena = Arena(call.layouts, call.values, device, call.seed, call.facts["poison"])
    kinds = {draw_padded: Padded, draw_training: Padded, draw_packed: Packed, draw_cache: Cached, draw_paged: Paged}
    kind = kinds[FUNCTIONS[call.function][0]]
    if call.function.startswith("fmha_backward"):
        kind = PackedGradients if kind is Packed else PaddedGradients
    problem = kind(call, arena)
    problem.plant()
    arena.keep()
    stream = contextlib.nullcontext()
    try:
        function, arguments = problem.arguments()
        if call.way == "stream":
            stream = torch.cuda.stream(torch.cuda.Stream())
            torch.cuda.synchronize()
        with stream:
            got = function(**arguments)
    except NotImplementedError as refused:
        # What no kernel takes yet is refused by the argument's name, and "auto" has none to choose.
        new = device.type == "cuda" and str(refused).split(":")[0] in ("bias", "mask", "dropout_p")
        if call.options.get("backend", "auto") in ("auto", "torch") and not new:
            raise
        return "refused"
    if device.type == "cuda":
        torch.cuda.synchronize()
    results = [x.clone() for x in problem.results(got)]
    arena.check_unwritten(problem.written)
    problem.check(results)
    written = [arena[name].clone() for name in problem.written]
    # Results whose bits are the same each time: all but a dq that tiles of keys add to in memory.
    is_gradient = call.function.startswith("fmha_backward")
    fixed = slice(1 if is_gradient and "all_gradients" in ce.explain(function, **arguments).kernel else 0, None)

    def check_again(got, what):
        same_bits(problem.results(got), results, what, fixed)
        for before, name in zip(written, problem.written, strict=True):
            assert torch.equal(bits(before), bits(arena[name].clone())), f"{what}: {name} has other bits"

    arena.restore()
    check_again(function(**arguments), "the same call again")
    if call.way == "graph" and (graph := graph_if_there_are_any()) is not None:
        with torch.cuda.graph(graph):
            captured = function(**arguments)
        for replay in range(3):
            arena.restore()
            graph.replay()
            check_again(captured, f"replay {replay} of a graph")
        arena.check_unwritten(problem.written)
    return "ok"


# ------------------------------------------------------------------------------------------------ workers
def say(**fact):
    print(json.dumps(fact), flush=True)


def set_up():
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as deterministic algorithms want it of the oracle's products
    torch.use_deterministic_algorithms(True)  # then torch.empty gives NaN: a result that nobody wrote shows
    torch.are_deterministic_algorithms_enabled = lambda: False  # gradients are to be so only where a call asks for it
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


def work(seeds, device, until):
    """Performs the calls of `seeds`, and says on stdout which it is at and how it went."""
    set_up()
    for seed in seeds:
        if time.time() > until:
            break
        say(at=seed)
        try:
            say(done=perform(draw(seed, device)))
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            say(done="failed", text=f"{type(error).__name__}: {' '.join(lines)[:500]}")


class Worker(threading.Thread):
    """One process after another that performs calls; their failures and their deaths go to `soak`."""

    def __init__(self, soak, first):
        super().__init__(daemon=True)
        self.soak, self.first, self.next, self.at = soak, first, first, None
        self.since, self.limit, self.process, self.hung = time.monotonic(), START_S, None, False

    def run(self):
        while not self.soak.over():
            self.at, self.since, self.limit, self.hung = None, time.monotonic(), START_S, False
            self.first, options = self.next, self.soak.options
            command = [sys.executable, __file__, "--seed", self.next, "--step", options.processes]
            command += ["--device", options.device, "--until", self.soak.end]
            with tempfile.TemporaryFile("w+") as stderr:
                self.process = subprocess.Popen(
                    [*map(str, command)], stdout=subprocess.PIPE, stderr=stderr, stdin=subprocess.DEVNULL, text=True
                )
                for line in self.process.stdout:
                    self.heard(json.loads(line))
                code = self.process.wait()
                if code == 0 or (self.soak.over() and not self.hung):
                    continue
                stderr.seek(0)
                self.soak.died(self, code, stderr.read()[-2000:])

    def heard(self, fact):
        self.since = time.monotonic()
        if "at" in fact:
            self.at, self.next, self.limit = fact["at"], fact["at"] + self.soak.options.processes, CALL_S
        else:
            self.soak.done(self, **fact)
            self.at = None

    def watch(self):
        """Ends a process that takes too long over a call, or whose soak has seen enough."""
        if self.process and self.process.poll() is None:
            self.hung = time.monotonic() - self.since > self.limit
            if self.hung or self.soak.failures >= MOST_FAILURES:
                self.process.kill()


class Soak:
    def __init__(self, options):
        self.options, self.end = options, time.time() + options.seconds
        self.counts, self.failures, self.lock = collections.Counter(), 0, threading.Lock()

    def over(self):
        return time.time() > self.end or self.failures >= MOST_FAILURES

    def done(self, worker, done, text=""):
        with self.lock:
            self.counts[done] += 1
        if done == "failed":
            self.failed(worker, text)

    def died(self, worker, code, stderr):
        how = f"hung for {worker.limit} s" if worker.hung else f"ended with {code}"
        if code < 0 and not worker.hung:
            how = f"died of {signal.Signals(-code).name}"
        if worker.at is None:  # before its first call
            worker.next += self.options.processes
        else:
            with self.lock:
                self.counts["failed"] += 1
        self.failed(worker, f"the worker {how} {stderr}".rstrip())

    def failed(self, worker, text):
        with self.lock:
            self.failures += 1
            print(f"FAILED {text}")
            step, command = self.options.processes, "python tests/soak.py --seed"
            if worker.at is not None:
                print(f"    {draw(worker.at, self.options.device)}\n    {command} {worker.at}")
            print(f"    or, with the calls of its worker before it, {command} {worker.first} --step {step}", flush=True)

    def run(self):
        first = self.options.first if self.options.first is not None else random.randrange(10**9)
        print(f"soak: seeds from {first} on, on {self.options.device}", flush=True)
        begin = time.monotonic()
        workers = [Worker(self, first + i) for i in range(self.options.processes)]
        for worker in workers:
            worker.start()
        with progress() as show:
            while any(worker.is_alive() for worker in workers):
                time.sleep(0.2)
                for worker in workers:
                    worker.watch()
                show(f"{self.counts.total():,} calls, {self.failures} failures, {time.monotonic() - begin:.0f} s")
        calls, refused = self.counts.total(), self.counts["refused"]
        print(f"{refused:,} of the calls asked for a backend that does not take them, and were refused")
        print(
            f"soak: {calls:,} calls in {time.monotonic() - begin:.0f} s, {len(workers)} processes, "
            f"{self.failures} failures"
        )
        return 1 if self.failures or calls == 0 else 0


@contextlib.contextmanager
def progress():
    """A function that shows a line; on a terminal alone."""
    if not sys.stdout.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console().status("") as status:
        yield status.update


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--processes", type=int, default=8 if torch.cuda.is_available() else 2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--first", type=int, metavar="SEED", help="of the first call; by default any")
    parser.add_argument("--seed", type=int, help="perform one call, print it, and say what is wrong with it")
    parser.add_argument("--step", type=int, help="with --seed: what a worker does, that call and each so much further")
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seed is None:
        return Soak(options).run()
    if options.step is not None:
        return work(itertools.count(options.seed, options.step), options.device, options.until)
    call = draw(options.seed, options.device)
    print(call, flush=True)
    set_up()
    print(perform(call))


if __name__ == "__main__":
    sys.exit(main())
