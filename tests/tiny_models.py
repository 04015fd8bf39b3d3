"""Tiny random models of every family, as diffusers' own tests make them: pipelines of some thousand weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

WORDS = ["<|startoftext|>", "<|endoftext|>", "a</w>", "red</w>", "blue</w>", "shirt</w>", "shoe</w>", "bag</w>"]
CAPTIONS = ["a red shirt", "a blue shoe", "a bag", "a red shoe"]


def seeded(build: Any) -> Any:
    """What a function builds, with the same random weights every time and the caller's noise left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    letters = [chr(code) + end for code in range(97, 123) for end in ("", "</w>")]
    vocabulary = {word: number for number, word in enumerate([*WORDS, *letters])}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=12)


def t5_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", "a", "red", "blue", "shirt", "shoe", "bag"]
    plain = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=12
    )


def clip_text(width: int = 8, projection: int | None = None) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        bos_token_id=0, eos_token_id=1, pad_token_id=1, hidden_size=width, intermediate_size=16, num_attention_heads=2,
        num_hidden_layers=2, vocab_size=64, max_position_embeddings=12, projection_dim=projection or width,
    )  # fmt: skip
    return (CLIPTextModel if projection is None else CLIPTextModelWithProjection)(config).eval()


def t5_text(width: int = 8) -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        d_model=width, d_ff=16, d_kv=4, num_heads=2, num_layers=1, vocab_size=16, tie_word_embeddings=False
    )
    return T5EncoderModel(config).eval()


def vae(latent_channels: int = 4, **options: Any) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(4, 8), norm_num_groups=2, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=latent_channels, sample_size=16, **options,
    ).eval()  # fmt: skip


def ddpm() -> Any:
    from diffusers import DDPMPipeline, DDPMScheduler

    from small_bundles import small_unet

    return DDPMPipeline(small_unet(in_channels=3, out_channels=3), DDPMScheduler())


def labelled_unet() -> Any:
    from small_bundles import small_unet

    return small_unet(in_channels=3, out_channels=3, num_class_embeds=4)


def ldm() -> Any:
    from diffusers import DDIMScheduler, LDMPipeline, VQModel

    from small_bundles import small_unet

    vqvae = VQModel(
        block_out_channels=(4, 8), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=3, num_vq_embeddings=16, layers_per_block=1,
    ).eval()  # fmt: skip
    return LDMPipeline(vqvae, small_unet(in_channels=3, out_channels=3), DDIMScheduler(clip_sample=False))


def dit(out_channels: int = 8) -> Any:
    from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    transformer = DiTTransformer2DModel(
        sample_size=8, num_layers=1, patch_size=2, attention_head_dim=4, num_attention_heads=2, in_channels=4,
        out_channels=out_channels, attention_bias=True, activation_fn="gelu-approximate", num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero", norm_elementwise_affine=False,
    )  # fmt: skip
    return DiTPipeline(transformer.eval(), vae(), DDIMScheduler(clip_sample=False))


def stable_diffusion(**scheduler: Any) -> Any:
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    unet = UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8, norm_num_groups=4, attention_head_dim=4,
    )  # fmt: skip
    settings = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
    settings |= {"set_alpha_to_one": True, "steps_offset": 1} | scheduler
    return StableDiffusionPipeline(
        vae=vae(), text_encoder=clip_text(), tokenizer=clip_tokenizer(), unet=unet.eval(),
        scheduler=DDIMScheduler(**settings), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip


def stable_diffusion_xl() -> Any:
    from diffusers import DDIMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    unet = UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time", norm_num_groups=4,
        addition_time_embed_dim=8, transformer_layers_per_block=(1, 2), projection_class_embeddings_input_dim=56,
        cross_attention_dim=16,
    )  # fmt: skip
    return StableDiffusionXLPipeline(
        vae=vae(), text_encoder=clip_text(), tokenizer=clip_tokenizer(), text_encoder_2=clip_text(8, 8),
        tokenizer_2=clip_tokenizer(), unet=unet.eval(), scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        add_watermarker=False,
    )  # fmt: skip


def pixart() -> Any:
    from diffusers import DDIMScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel

    transformer = PixArtTransformer2DModel(
        sample_size=8, num_layers=1, patch_size=2, attention_head_dim=4, num_attention_heads=2, caption_channels=8,
        in_channels=4, cross_attention_dim=8, out_channels=8, attention_bias=True, activation_fn="gelu-approximate",
        norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6,
    )  # fmt: skip
    return PixArtAlphaPipeline(t5_tokenizer(), t5_text(), vae(), transformer.eval(), DDIMScheduler(clip_sample=False))


def sd3(**scheduler: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    return StableDiffusion3Pipeline(
        transformer=transformer.eval(), scheduler=FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **scheduler}),
        vae=vae(4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=clip_text(8, 8), tokenizer=clip_tokenizer(), text_encoder_2=clip_text(8, 8),
        tokenizer_2=clip_tokenizer(), text_encoder_3=t5_text(16), tokenizer_3=t5_tokenizer(),
    )  # fmt: skip


def flux(guidance_embeds: bool = True) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8), guidance_embeds=guidance_embeds,
    )  # fmt: skip
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0), text_encoder=clip_text(),
        vae=vae(4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5),
        tokenizer=clip_tokenizer(), text_encoder_2=t5_text(), tokenizer_2=t5_tokenizer(),
        transformer=transformer.eval(),
    )  # fmt: skip


PIPELINES = {
    "ddpm": ddpm, "ldm": ldm, "dit": dit, "sd": stable_diffusion, "sdxl": stable_diffusion_xl, "pixart": pixart,
    "sd3": sd3, "flux": flux,
}  # fmt: skip


def pipeline(name: str) -> Any:
    """A tiny pipeline, quiet."""
    found = seeded(PIPELINES[name])
    found.set_progress_bar_config(disable=True)
    return found


def images(count: int = 8, side: int = 16) -> torch.Tensor:
    """8-bit colour images."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def write_folder(directory: Path, captions: list[str] | None = None, count: int = 8) -> Path:
    """Images as files, with a metadata.jsonl if there are captions."""
    from PIL import Image

    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, image in enumerate(images(count)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(directory / f"{number}.png")
        if captions:
            lines.append(json.dumps({"file_name": f"{number}.png", "text": captions[number % len(captions)]}))
    if captions:
        (directory / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return directory
