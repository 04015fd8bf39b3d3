"""A diffusers pipeline that samples by NPR-DDIM in ten steps, beside plain DDIM from the same noise.

The pipeline is made of the embedded model's network; put your own in its place (DDPMPipeline.from_pretrained), with the
bundle that `optcov fit my-pipeline images --out my-bundle` makes for it.
"""

from __future__ import annotations

import torch
from diffusers import DDIMScheduler, DDPMPipeline
from PIL import Image

import optcov
from optcov.integrations.diffusers import attach

COUNT, STEPS = 4, 10
SNEAKERS = 7  # the class to draw; a model without classes needs none


def row(pipeline: DDPMPipeline) -> list[Image.Image]:
    """Images of the pipeline, always from the same noise."""
    generator = torch.Generator().manual_seed(0)
    return pipeline(batch_size=COUNT, num_inference_steps=STEPS, generator=generator).images


def main() -> None:
    """Draw both rows into one picture."""
    bundle = optcov.load("fashion")
    pipeline = DDPMPipeline(bundle.unet, DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    rows = [row(attach(pipeline, bundle, method, label=SNEAKERS)) for method in ("DDIM", "NPR-DDIM")]

    width, height = rows[0][0].size
    picture = Image.new("L", (COUNT * width, 2 * height))
    for y, images in enumerate(rows):
        for x, image in enumerate(images):
            picture.paste(image, (x * width, y * height))
    picture.resize((4 * picture.width, 4 * picture.height), Image.Resampling.NEAREST).save("npr-ddim.png")
    print("above DDIM, below NPR-DDIM, the same noise: npr-ddim.png")


if __name__ == "__main__":
    main()
