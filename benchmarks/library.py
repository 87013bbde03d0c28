"""Models of the transformers library in small random configurations; none without it, and nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from made_up.parts import Subject

__all__ = ["LIBRARY", "switch_checkpointing"]

WORDS = 300


def switch_checkpointing(model: Any, is_on: bool) -> None:
    """Switches a model's own checkpointing of every layer, which transformers has renamed in 5.23."""
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if is_on:
        getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(model, f"{kind}_checkpointing_disable")()


def words(scale: int, batch: int = 4, length: int = 64) -> torch.Tensor:
    return torch.randint(3, WORDS, (batch * scale, length))


def causal(scale: int) -> dict[str, Any]:
    tokens = words(scale)
    return {"input_ids": tokens, "labels": tokens}


def padded(scale: int) -> dict[str, Any]:
    batch = causal(scale)
    mask = torch.ones_like(batch["input_ids"])
    mask[::2, 40:] = 0
    return {**batch, "attention_mask": mask}


def classified(scale: int) -> dict[str, Any]:
    tokens = words(scale)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.zeros(len(tokens)).long(),
    }


def sequences(scale: int) -> dict[str, Any]:
    return {"input_ids": words(scale), "labels": words(scale, length=48)}


def pictures(size: int, batch: int = 4) -> Callable[[int], dict[str, Any]]:
    return lambda scale: {
        "pixel_values": torch.randn(batch * scale, 3, size, size),
        "labels": torch.zeros(batch * scale).long(),
    }


def segmented(scale: int) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(2 * scale, 3, 64, 64),
        "labels": torch.zeros(2 * scale, 64, 64).long(),
    }


def paired(scale: int) -> dict[str, Any]:
    return {
        "input_ids": words(scale, length=32),
        "pixel_values": torch.randn(4 * scale, 3, 32, 32),
        "return_loss": True,
    }


def heard(scale: int) -> dict[str, Any]:
    return {"input_features": torch.randn(2 * scale, 16, 200), "labels": words(scale, 2, 24)}


def spoken(scale: int) -> dict[str, Any]:
    return {"input_values": torch.randn(2 * scale, 4000), "labels": words(scale, 2, 6)}


DECODER = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 130,
}  # fmt: skip
VIT = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 4, "num_labels": 5,
}  # fmt: skip
T5 = {
    "vocab_size": WORDS, "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 3, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": WORDS, "d_model": 48, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 64,
}  # fmt: skip
WHISPER = {
    **BART, "num_mel_bins": 16, "max_source_positions": 100, "max_target_positions": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
GPT2 = {"vocab_size": WORDS, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
CONVNEXT = {"hidden_sizes": [16, 24, 32, 48], "depths": [2, 2, 3, 2], "num_labels": 5}
RESNET = {"embedding_size": 16, "hidden_sizes": [32, 48, 64, 96], "depths": [2, 2, 2, 2], "num_labels": 5}
SEGFORMER = {
    "hidden_sizes": [16, 24, 32, 48],
    "depths": [2, 2, 2, 2],
    "decoder_hidden_size": 32,
    "num_labels": 5,
}
CLIP = {
    "projection_dim": 32,
    "text_config": {
        **ENCODER,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "vision_config": {**VIT},
}
WAV2VEC2 = {
    "vocab_size": WORDS, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "conv_dim": [16] * 4, "conv_kernel": [10, 3, 3, 3], "conv_stride": [5, 2, 2, 2], "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 4, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
DISTIL = {
    "vocab_size": WORDS,
    "dim": 64,
    "n_layers": 4,
    "n_heads": 4,
    "hidden_dim": 128,
    "max_position_embeddings": 64,
}


def _of(
    name: str, config: str, sample: Callable[[int], Any], figures: dict[str, Any]
) -> Callable[[int], Subject]:
    def make(scale: int) -> Subject:
        import transformers

        model = getattr(transformers, name)(getattr(transformers, config)(**figures))
        return Subject(model.train(), sample(scale))

    return make


LIBRARY: dict[str, Callable[[int], Subject]] = {
    name: _of(name, config, sample, figures)
    for name, config, sample, figures in (
        ("GPT2LMHeadModel", "GPT2Config", causal, GPT2),
        ("LlamaForCausalLM", "LlamaConfig", causal, DECODER),
        ("MistralForCausalLM", "MistralConfig", padded, {**DECODER, "sliding_window": 32}),
        ("Qwen2ForCausalLM", "Qwen2Config", padded, DECODER),
        ("Gemma2ForCausalLM", "Gemma2Config", causal, {**DECODER, "head_dim": 16, "sliding_window": 32}),
        ("MixtralForCausalLM", "MixtralConfig", causal, {**DECODER, "num_local_experts": 4}),
        ("T5ForConditionalGeneration", "T5Config", sequences, T5),
        ("BartForConditionalGeneration", "BartConfig", sequences, BART),
        ("BertForSequenceClassification", "BertConfig", classified, ENCODER),
        ("RobertaForMaskedLM", "RobertaConfig", causal, ENCODER),
        ("DistilBertForSequenceClassification", "DistilBertConfig", classified, DISTIL),
        ("AlbertForMaskedLM", "AlbertConfig", causal, {**ENCODER, "embedding_size": 32}),
        ("ViTForImageClassification", "ViTConfig", pictures(32), VIT),
        ("SwinForImageClassification", "SwinConfig", pictures(32), {**SWIN, "num_labels": 5}),
        ("ConvNextForImageClassification", "ConvNextConfig", pictures(64), CONVNEXT),
        ("ResNetForImageClassification", "ResNetConfig", pictures(64), RESNET),
        ("SegformerForSemanticSegmentation", "SegformerConfig", segmented, SEGFORMER),
        ("CLIPModel", "CLIPConfig", paired, CLIP),
        ("WhisperForConditionalGeneration", "WhisperConfig", heard, WHISPER),
        ("Wav2Vec2ForCTC", "Wav2Vec2Config", spoken, WAV2VEC2),
    )
    if find_spec("transformers") is not None
}
