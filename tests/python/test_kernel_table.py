"""The table of kernels: who takes which features. What no kernel takes is refused, by the name of its argument."""

import re

import pytest
import torch

from cutlass_ext import _ops  # noqa: F401  (loads the operators)

kernels_taking = torch.ops.cutlass_ext.kernels_taking.default
HEADER = "csrc/fmha/features.hpp"


@pytest.fixture(scope="module")
def bits(pytestconfig):
    """Feature to bit, in the order in which features.hpp lists them."""
    text = (pytestconfig.rootpath / HEADER).read_text()
    names = re.findall(r"^  FEATURE\((\w+), \"", text, re.MULTILINE)
    assert len(names) > 10
    return {name: 1 << i for i, name in enumerate(names)}


def kinds(features):
    return {line.split()[1] for line in kernels_taking(features).splitlines()}


def test_every_kind_is_there():
    gradients = {"key_gradients", "query_gradients", "all_gradients", "head_gradients"}
    forward = {"persistent", "tiles", "short", "heads", "decode", "narrow", "cluster"}
    assert kinds(0) == forward | gradients | {"bias_gradients"}
    rows = kernels_taking(0).splitlines()
    assert len(rows) > 80
    families = {row.split()[0] for row in rows}
    assert families == {"simt", "sm80", "sm90"}


def test_a_new_feature_is_refused_by_every_kernel(bits):
    new = 1 << len(bits)
    assert kernels_taking(new) == ""
    assert kernels_taking(new | bits["Sink"]) == ""


def test_who_takes_what(bits):
    """What a kernel must not be given in silence; a kernel that learns a feature is entered here."""
    tiles, cache = {"persistent", "tiles"}, {"decode", "narrow", "cluster"}
    tiles_and_heads = tiles | {"heads"}
    of_both = {"key_gradients", "query_gradients"}
    gradients, of_bias = of_both | {"all_gradients", "head_gradients"}, {"bias_gradients"}
    expected = {
        "Softcap": tiles_and_heads | {"decode"} | gradients,
        "Alibi": tiles_and_heads | {"decode"} | gradients | of_bias,
        "Sink": tiles_and_heads | {"short", "decode"} | gradients | of_bias,
        "Packed": tiles_and_heads | {"short", "decode", "narrow"} | gradients,
        "KeyLengths": tiles_and_heads | {"short"} | cache | gradients | of_bias,
        "LeftPadding": tiles_and_heads | {"short", "decode"} | gradients | of_bias,
        "StartPositions": tiles_and_heads | {"short"} | cache | gradients | of_bias,
        "FewerKeys": tiles | cache,
        "Pages": tiles | cache,
        "BatchIndex": {"decode"},
        "NewKeys": {"decode", "cluster"},
        "RotaryEmbedding": {"decode", "cluster"},
        "FixedSplits": tiles | {"decode"},
        **dict.fromkeys(("Bias", "Mask", "Dropout"), tiles_and_heads | {"short"} | gradients | of_bias),
        "Float32Results": tiles | {"decode"},
        "UnalignedRows": {"tiles", "decode"} | of_both | {"all_gradients"},
        "ScatteredBias": tiles_and_heads | gradients | of_bias,
    }
    assert expected.keys() == bits.keys()
    assert {name: kinds(bit) for name, bit in bits.items()} == expected
