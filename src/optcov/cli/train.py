"""`optcov train`: train a noise predictor on images, resumable."""

from __future__ import annotations

from pathlib import Path

import typer

from optcov.console import announce, check_out, check_seed, finish, names, numbers, print_json, resumable, settings_of

FIRST_SCREEN = ("out", "steps", "batch_size", "learning_rate", "channels", "layers", "labels", "flip", "seed", "json")


def command(
    context: typer.Context,
    data: str = typer.Argument(help="Images: a directory, an npz/npy file, idx files, CIFAR-10, ..."),
    out: Path = typer.Option(
        ..., callback=check_out, help="Run directory. An interrupted run resumes from its last checkpoint."
    ),
    steps: int = typer.Option(100_000, help="Training steps."),
    batch_size: int = typer.Option(128, help="Images per step, over all processes."),
    learning_rate: float = typer.Option(2e-4, help="Peak learning rate of AdamW."),
    warmup: int = typer.Option(500, help="Steps of linear warm-up."),
    decay: str = typer.Option("cosine", help="Learning rate after the warm-up: cosine or constant."),
    ema: float = typer.Option(0.9999, help="Decay of the moving average of the weights."),
    clip: float = typer.Option(1.0, help="Largest norm of the gradient."),
    schedule: str = typer.Option("vp_sde", help="Noise schedule: vp_sde, linear, cosine or flow."),
    network: str = typer.Option("unet", help="unet, or dit: a transformer on patches, which needs --labels."),
    patch_size: int | None = typer.Option(
        None, help="Side in pixels of the patches that the network sees: 1 for the U-Net, 4 for the DiT."
    ),
    width: int = typer.Option(128, help="Width of the DiT."),
    channels: str = typer.Option("32,64,96", help="Channels per level of the U-Net."),
    layers: int | None = typer.Option(
        None, help="Residual blocks per level (default 1), or blocks of the DiT (default 6)."
    ),
    attention_levels: int = typer.Option(1, help="How many of the lowest levels have attention."),
    groups: int = typer.Option(8, help="Groups of the group normalisation."),
    head_dim: int = typer.Option(32, help="Channels per attention head."),
    dropout: float = typer.Option(0.0, help="Dropout in the blocks."),
    flip: bool = typer.Option(True, help="Mirror images at random."),
    labels: int = typer.Option(0, help="Number of classes to condition on. 0: no labels."),
    empty_share: float = typer.Option(0.1, help="Share of labels left out, so that guidance works later."),
    prediction: str = typer.Option("epsilon", help="Network output: epsilon, sample, v_prediction or flow_prediction."),
    levels: str = typer.Option(
        "uniform", help="Times: uniform, or normal (log of noise over signal is normal, as in EDM)."
    ),
    start: Path | None = typer.Option(None, help="Begin with the weights of this network, run or bundle."),
    split: str = typer.Option("train", help="Split of the data to train on."),
    seed: int = typer.Option(0, callback=check_seed, help="Seed of weights, order, times and noise."),
    checkpoint_every: int = typer.Option(1000, help="Steps between checkpoints."),
    keep: int = typer.Option(2, help="How many of the latest checkpoints stay."),
    keep_every: int = typer.Option(0, help="Checkpoints at multiples of this step stay too; 0 for none."),
    joint_heads: str = typer.Option("", help="Residual heads to train together with the mean, such as sn,npr."),
    score_samples: int = typer.Option(
        0,
        help="Score each checkpoint by the Frechet distance of this many samples, and end with the best. 0: the last.",
    ),
    score_steps: int = typer.Option(50, help="Reverse steps of the samples for the score."),
    score_features: str = typer.Option(
        "fashion", help="Features for the score: fashion, lite0, inception, inception:pytorch-fid or inception:FILE."
    ),
    json: bool = typer.Option(False, "--json", help="Print the run's settings and where its weights are as JSON."),
) -> None:
    """Train a noise predictor (stage 1)."""
    from optcov import data as image_data
    from optcov import storage
    from optcov.fitting.batches import NoiseLevels
    from optcov.fitting.config import TrainingConfig
    from optcov.fitting.loop import track_training
    from optcov.fitting.score import ScoreSettings
    from optcov.fitting.stage1 import DiTShape, UNetShape, train_noise_predictor

    if network not in ("unet", "dit"):
        raise ValueError(f"--network {network!r} is neither unet nor dit")
    shape: UNetShape | DiTShape
    if network == "dit":
        shape = DiTShape(
            4 if patch_size is None else patch_size, width, 6 if layers is None else layers, head_dim, dropout, labels
        )
    else:
        levels_of_channels = tuple(numbers(channels, "--channels", "32,64,96"))
        blocks = 1 if layers is None else layers
        patch = 1 if patch_size is None else patch_size
        shape = UNetShape(levels_of_channels, blocks, attention_levels, groups, head_dim, dropout, labels, patch)
    if levels not in ("uniform", "normal"):
        raise ValueError(f"--levels {levels!r} is neither uniform nor normal")
    images = image_data.load(data, split)
    score = ScoreSettings(score_samples, score_steps, features=score_features, seed=seed) if score_samples else None
    heads = names(joint_heads)
    announce(f"trains a noise predictor on {len(images)} images of {images.name}, {schedule}, {steps} steps, to {out}")
    with resumable(out):
        records = train_noise_predictor(
            images,
            out,
            settings_of(TrainingConfig, context),
            shape,
            schedule,
            flip,
            score,
            heads,
            prediction_type=prediction,
            levels=NoiseLevels() if levels == "normal" else None,
            empty_share=empty_share,
            start=start,
        )
        for _ in track_training(records, steps, "stage 1"):
            pass
    if json:
        print_json({"unet": str(out / "unet"), "run": storage.read_json(out / "run.json")})
        return
    finish(out / "unet", "optcov", "fit", str(out), data, "--out", f"{out}-bundle")
