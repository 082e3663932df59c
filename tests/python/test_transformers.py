"""transformers with attn_implementation="cutlass_ext", against its "eager": tiny models with random weights."""

import copy
import inspect

import pytest
import torch
from conftest import targets
from torch._dynamo.testing import CompileCounterWithBackend

transformers = pytest.importorskip("transformers", minversion="5.0")

import cutlass_ext  # noqa: E402
from cutlass_ext import support  # noqa: E402
from cutlass_ext.adapters import transformers as adapter  # noqa: E402

adapter.register()

SIZES = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
WINDOW = 6
DECODERS = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16,
                          "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16,
                          "layer_types": ["sliding_attention", "full_attention"]}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "gpt_oss": ("GptOss", {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1,
                           "layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek_v3": ("DeepseekV3", {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
                                   "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                                   "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
                                   "moe_intermediate_size": 16, "first_k_dense_replace": 1}),
    "phi": ("Phi", {"num_key_value_heads": 4}),
}  # fmt: skip
# DeepSeek's own head dims, 192 of q and k beside 128 of v.
OF_DEEPSEEK = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DECODERS["deepseek_v3_192_128"] = ("DeepseekV3", DECODERS["deepseek_v3"][1] | OF_DEEPSEEK)


@pytest.fixture(scope="session", params=targets(("cpu", "auto"), ("cuda", "auto")))
def device(request):
    return request.param.device


def pair(cls, config, device, **tokens):
    """Two models of the same weights: ours, and eager's."""
    torch.manual_seed(0)
    eager = cls._from_config(config, attn_implementation="eager").eval().to(device)
    for parameter in eager.parameters():
        if parameter.dim() == 1:  # sinks and norms, which begin as constants
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    ours = cls._from_config(copy.deepcopy(config), attn_implementation="cutlass_ext").eval().to(device)
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == "cutlass_ext" and eager.config._attn_implementation == "eager"
    return ours, eager


def decoder(name, device):
    prefix, more = DECODERS[name]
    config = (getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config"))(
        **SIZES | more
    )
    return pair(getattr(transformers, f"{prefix}ForCausalLM"), config, device)


def tokens(device, *shape):
    return torch.randint(2, 99, shape, device=device)


def padding(device, side):
    """Three sequences of 17, two of them shorter."""
    mask = torch.ones(3, 17, dtype=torch.long, device=device)
    for b, n in enumerate((0, 5, 11)):
        mask[b, slice(0, n) if side == "left" else slice(17 - n, 17)] = 0
    return mask


def assert_alike(got, want, where=None):
    if where is not None:
        got, want = got[where], want[where]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def assert_like_eager(models, run, where=slice(None)):
    """What `run` makes of each model, where that counts, and the gradients of all weights while it trains."""
    results = []
    for model in models:
        got = run(model.train())[where]
        got.float().log_softmax(-1)[..., 7].mean().backward()
        results.append((got.detach(), [p.grad for p in model.eval().parameters()]))
    assert_alike(results[0][0], results[1][0])
    for got, want in zip(*(gradients for _, gradients in results), strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert_alike(got, want)


@pytest.fixture
def alone(monkeypatch):
    """Nothing is handed on to PyTorch."""

    def refuse(who, reason):
        raise AssertionError(f"{who} falls back: {reason}")

    monkeypatch.setattr(adapter, "warn_once", refuse)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_gradients(name, side, device, alone):
    ids = tokens(device, 3, 17)
    mask = None if side is None else padding(device, side)
    positions = None if side is None else (mask.cumsum(-1) - 1).clamp(min=0)
    where = slice(None) if mask is None else mask.bool()
    assert_like_eager(
        decoder(name, device), lambda model: model(ids, attention_mask=mask, position_ids=positions).logits, where
    )


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate_gives_the_same_tokens(name, cache, device, alone):
    """Past the window; padded on the left, as prompts of several lengths are."""
    models = decoder(name, device)
    ids, mask = tokens(device, 3, 17), padding(device, "left")
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    got, want = (model.generate(ids, attention_mask=mask, **options) for model in models)
    assert torch.equal(got, want)


@pytest.mark.parametrize("prompt", [1, 5])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_from_a_short_prompt(name, cache, prompt, device, alone):
    """A token alone, in a cache that has room for more."""
    models, ids = decoder(name, device), tokens(device, 2, prompt)
    options = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    got, want = (model.generate(ids, attention_mask=torch.ones_like(ids), **options) for model in models)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_with_beams(name, device, alone):
    models = decoder(name, device)
    ids, mask = tokens(device, 3, 17), padding(device, "left")
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3}
    got, want = (model.generate(ids, attention_mask=mask, **options) for model in models)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_several_rows_after_a_cache(name, device, alone):
    """As speculative decoding and chunked prompts have them."""
    ids, mask = tokens(device, 3, 17), padding(device, "left")
    results = []
    for model in decoder(name, device):
        with torch.no_grad():
            first = model(ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
            results.append(model(ids[:, 9:], attention_mask=mask, past_key_values=first.past_key_values).logits)
    assert_alike(*results, mask[:, 9:].bool())


PACKED = [(name, given) for name in ("llama", "mistral", "gemma2") for given in ("position_ids", "cu_seq_lens")]


@pytest.mark.parametrize("name,given", [*PACKED, ("gpt_oss", "cu_seq_lens")])  # which makes its masks without positions
def test_packed_sequences(name, given, device, alone):
    """Each as if it were alone."""
    ours, eager = decoder(name, device)
    parts = [tokens(device, 1, n) for n in (9, 1, 14)]
    ends = torch.tensor([0, 9, 10, 24], dtype=torch.int32, device=device)
    options = {"position_ids": torch.cat([torch.arange(p.shape[1], device=device) for p in parts])[None]}
    if given == "cu_seq_lens":
        options |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 14, "max_length_k": 14}
    with torch.no_grad():
        got = ours(torch.cat(parts, 1), use_cache=False, **options).logits
        want = torch.cat([eager(part).logits for part in parts], 1)
    assert_alike(got, want)


@pytest.mark.skipif(
    "page_size" not in inspect.signature(transformers.ContinuousBatchingConfig).parameters,
    reason="the paged cache of transformers 5.23",
)
@pytest.mark.parametrize(
    "name,page_size,more",
    [("llama", 16, {}), ("llama", 32, {"max_blocks_per_request": 0}), ("qwen3", 32, {}), ("mistral", 32, {}),
     ("gpt_oss", 32, {})],
    ids=str,
)  # fmt: skip
def test_continuous_batching(name, page_size, more, device, alone, monkeypatch):
    """Prompts of several lengths in one paged cache, two at a time. Steps of one row each read its pages, unless they
    have windows, or no room for tables."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs["block_table"].shape)
        return cutlass_ext.flash_attn_with_kvcache(*args, **kwargs)

    monkeypatch.setattr(adapter, "flash_attn_with_kvcache", counted)
    ours, eager = decoder(name, device)
    prompts = [tokens("cpu", n).tolist() for n in (9, 3, 14, 1)]
    config = transformers.GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(
        num_blocks=16, page_size=page_size, max_batch_tokens=64, max_requests_per_batch=2, **more
    )
    results = ours.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
    assert ours.config._attn_implementation == "cutlass_ext"
    assert bool(calls) == (name in ("llama", "qwen3") and not more)
    got = [result.generated_tokens for result in results.values()]
    ids = [torch.tensor([prompt], device=device) for prompt in prompts]
    want = [eager.generate(x, attention_mask=torch.ones_like(x), generation_config=config)[0] for x in ids]
    assert got == [w[len(p) :].tolist() for w, p in zip(want, prompts, strict=True)]


ENCODER = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


@pytest.mark.parametrize("padded", [False, True])
def test_bert(padded, device, alone):
    config = transformers.BertConfig(vocab_size=99, **ENCODER, **NO_DROPOUT)
    ids, mask = tokens(device, 3, 17), padding(device, "right") if padded else None
    models = pair(transformers.BertModel, config, device)
    where = slice(None) if mask is None else mask.bool()
    assert_like_eager(models, lambda model: model(ids, attention_mask=mask).last_hidden_state, where)


def test_vit(device, alone):
    config = transformers.ViTConfig(image_size=16, patch_size=4, **ENCODER)
    images = torch.randn(2, 3, 16, 16, device=device)
    models = pair(transformers.ViTModel, config, device)
    assert_like_eager(models, lambda model: model(images).last_hidden_state)


def test_whisper(device, alone):
    config = transformers.WhisperConfig(
        vocab_size=99, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, num_mel_bins=8,
        decoder_attention_heads=4, encoder_ffn_dim=80, decoder_ffn_dim=80, max_source_positions=30, pad_token_id=0,
        max_target_positions=40, bos_token_id=1, eos_token_id=98, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    models = pair(transformers.WhisperForConditionalGeneration, config, device)
    sound, ids = torch.randn(2, 8, 60, device=device), tokens(device, 2, 11)
    assert_like_eager(models, lambda model: model(sound, decoder_input_ids=ids).logits)
    options = {"max_new_tokens": 8, "do_sample": False, "decoder_input_ids": ids[:, :3]}
    got, want = (model.generate(sound, **options) for model in models)
    assert torch.equal(got, want)


def test_t5(device, alone):
    config = transformers.T5Config(
        vocab_size=99, d_model=64, d_kv=16, d_ff=80, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=98,
    )  # fmt: skip
    models = pair(transformers.T5ForConditionalGeneration, config, device)
    ids, mask, target = tokens(device, 3, 17), padding(device, "right"), tokens(device, 3, 8)
    assert_like_eager(models, lambda model: model(ids, attention_mask=mask, labels=target).logits)
    got, want = (model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False) for model in models)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_any_mask_of_its_own(name, device):
    """A hole in the padding, and a mask of four dimensions; with softcap and sinks it is eager that computes."""
    ours, eager = decoder(name, device)
    ids, mask = tokens(device, 2, 12), torch.ones(2, 12, dtype=torch.long, device=device)
    mask[0, 4:6] = 0
    with torch.no_grad():
        assert_alike(*(model(ids, attention_mask=mask).logits for model in (ours, eager)), mask.bool())
        if name == "llama":
            four = torch.ones(12, 12, dtype=torch.bool, device=device).tril()
            four[7, :5] = False
            four = torch.zeros(2, 1, 12, 12, device=device).masked_fill(~four, torch.finfo(torch.float32).min)
            assert_alike(*(model(ids, attention_mask=four).logits for model in (ours, eager)))


def test_dropout(device):
    """Of 0 where a model does not train; what falls back is said once."""
    config = transformers.LlamaConfig(**SIZES, attention_dropout=0.5)
    ours, eager = pair(transformers.LlamaForCausalLM, config, device)
    ids, mask = tokens(device, 3, 17), padding(device, "right")
    with torch.no_grad():
        assert_alike(*(model(ids, attention_mask=mask).logits for model in (ours, eager)), mask.bool())
        one, other = (ours.train()(ids, attention_mask=mask).logits for _ in range(2))
    assert not torch.equal(one, other)


def test_output_attentions(device):
    config = transformers.BertConfig(vocab_size=99, **ENCODER, **NO_DROPOUT)
    ours, eager = pair(transformers.BertModel, config, device)
    layer, x = ours.encoder.layer[0].attention.self, torch.randn(2, 9, 64, device=device)
    want = eager.encoder.layer[0].attention.self(x, output_attentions=True)
    for got, expected in zip(layer(x, output_attentions=True), want, strict=True):
        assert_alike(got, expected)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name,side", [("llama", "left"), ("llama", "right"), ("mistral", "left"), ("gemma3", "right")])
def test_compile(name, side, device, alone):
    """The whole model in one graph."""
    ours, eager = decoder(name, device)
    torch._dynamo.reset()
    fast = torch.compile(ours, backend="aot_eager", fullgraph=True)
    ids, mask = tokens(device, 3, 17), padding(device, side)
    with torch.no_grad():
        got, want = (model(ids, attention_mask=mask, use_cache=False).logits for model in (fast, eager))
    assert_alike(got, want, mask.bool())


@pytest.mark.timeout(300)
def test_compile_of_what_is_not_known_while_tracing(device):
    """Positions that may be those of packed sequences, and holes."""
    ours, eager = decoder("llama", device)
    torch._dynamo.reset()
    fast = torch.compile(ours, backend="aot_eager", fullgraph=True)
    ids, mask = tokens(device, 2, 12), torch.ones(2, 12, dtype=torch.long, device=device)
    with torch.no_grad():
        assert_alike(fast(ids, use_cache=False).logits, eager(ids).logits)
        mask[0, 4:6] = 0
        if device == "cpu":  # on a GPU a failed assertion ends the process
            with pytest.raises(RuntimeError, match="attention_mask: has holes"):
                fast(ids, attention_mask=mask, use_cache=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name,compilations", [("llama", 1), ("gpt_oss", 2)])  # a sliding cache counts in ints
def test_compiled_steps_after_a_static_cache(name, compilations, device, alone):
    """As `generate` compiles them: it makes the masks before; nothing is compiled again as the cache fills."""
    ours, eager = decoder(name, device)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(ours.forward, backend=counter, fullgraph=True)
    ids, mask = tokens(device, 3, 14), padding(device, "left")[:, :14]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = transformers.StaticCache(config=ours.config, max_cache_len=20)
    with torch.no_grad():
        ours(ids[:, :9], attention_mask=mask[:, :9], past_key_values=cache, position_ids=positions[:, :9])
        for n in range(9, 14):
            step = {"attention_mask": mask[:, : n + 1], "past_key_values": cache}
            made = transformers.masking_utils.create_masks_for_generate(
                ours.config, torch.empty(3, 1, 64, device=device), position_ids=None, **step
            )
            step["attention_mask"] = made
            got = fast(ids[:, n : n + 1], position_ids=positions[:, n : n + 1], **step).logits
            whole = {"attention_mask": mask[:, : n + 1], "position_ids": positions[:, : n + 1]}
            want = eager(ids[:, : n + 1], **whole).logits[:, -1:]
            assert_alike(got, want, mask[:, n : n + 1].bool())
    assert counter.frame_count == compilations


def test_a_mask_of_no_known_kind():
    ours, _ = decoder("llama", "cpu")
    with pytest.raises(ValueError, match="attention_mask"):
        ours(tokens("cpu", 2, 12), attention_mask=torch.ones(2, 1, 12, 5))


def test_fallback_is_said_once(recwarn):
    support._warned.clear()
    for _ in range(2):
        support.warn_once("who", "why")
    assert len(recwarn) == 1 and "why" in str(recwarn[0].message)


SMALL_SEQ2SEQ = {
    "vocab_size": 99, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 80, "decoder_ffn_dim": 80, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize("name, more", [("BigBirdPegasus", {"attention_type": "original_full"}), ("PegasusX", {})])
def test_decoders_whose_layers_do_not_say_that_they_are_causal(name, more, device):
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    ours, eager = pair(cls, getattr(transformers, f"{name}Config")(**SMALL_SEQ2SEQ | more), device)
    inputs = {"input_ids": tokens(device, 3, 17), "decoder_input_ids": tokens(device, 3, 6)}
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).logits, eager(**inputs).logits, atol=2e-5, rtol=2e-5)


def test_a_mask_of_floats_for_all_rows(device):
    """As the layers of SwitchTransformers have it where nothing is padded."""
    config = transformers.SwitchTransformersConfig(
        vocab_size=99, d_model=64, d_kv=16, num_heads=4, d_ff=80, num_layers=2, num_experts=2, decoder_start_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    ours, eager = pair(transformers.SwitchTransformersForConditionalGeneration, config, device)
    inputs = {"input_ids": tokens(device, 3, 17), "decoder_input_ids": tokens(device, 3, 6)}
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).logits, eager(**inputs).logits, atol=2e-5, rtol=2e-5)


def test_models_with_a_table_of_layers_refuse():
    """Their modules have the interface, too, for another part of the model."""
    with pytest.raises(ValueError, match=r"attn_implementation: .*SamModel"):
        transformers.SamModel._from_config(transformers.SamConfig(), attn_implementation="cutlass_ext")
    with pytest.raises(ValueError, match=r"attn_implementation: .*GitModel"):
        transformers.GitModel._from_config(transformers.GitConfig(), attn_implementation="cutlass_ext")


@pytest.mark.parametrize("name", ["Bloom", "CodeGen", "GPTJ", "GPTNeo"])
def test_models_that_ask_no_interface_refuse(name):
    """They would take what `mask` gives for a mask of their own kind, or for none."""
    adapter.register()
    config = getattr(transformers, f"{name}Config")()
    with pytest.raises(ValueError, match=f"attn_implementation: .*{name}"):
        getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="cutlass_ext")


def test_models_that_refuse_stay_with_what_they_had_when_asked_later():
    """transformers says so in its log, and raises nothing."""
    adapter.register()
    config = transformers.BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=16)
    model = transformers.BloomForCausalLM._from_config(config)
    before = model.config._attn_implementation
    model.set_attn_implementation("cutlass_ext")
    assert model.config._attn_implementation == before != "cutlass_ext"


@pytest.mark.parametrize("name", ["Bart", "T5", "Whisper", "Llava", "EncoderDecoder", "Qwen2VL", "ViT", "GPT2"])
def test_models_that_ask_the_interface_do_not(name):
    model = getattr(transformers, f"{name}Model")
    assert adapter._asks_interface(model)
