"""Peak memory of a closed-form fit over that of a bare forward pass, by the room for its features.

    python benchmarks/fit_memory.py        prints; python benchmarks/page.py keeps it as a line

A U-Net whose heads read 64 channels at 64 x 64 pixels: 1 MB of features an image, 270 MB for the 256 images of the fit.
Each case runs in a process of its own; memory is the largest resident size that the system saw.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

ROOMS = (16, 64, 512)  # MB
IMAGES, BATCH, SIDE = 256, 16, 64
REPEATS = 2  # peaks differ from run to run, by what the allocator keeps


def run(room: int) -> None:
    """One case: a fit with room for so many MB of features, or with none a forward pass alone."""
    import torch
    from diffusers import UNet2DModel

    from optcov import Schedule
    from optcov.data import ImageSet
    from optcov.experiments.timing import peak_memory
    from optcov.fitting import fit_closed_form, new_heads, stage2
    from optcov.fitting.batches import Batches
    from optcov.networks import Backbone, HeadedNetwork

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=SIDE,
        in_channels=1,
        out_channels=1,
        block_out_channels=(64,),
        layers_per_block=1,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        norm_num_groups=8,
        add_attention=False,
    )
    network = HeadedNetwork(Backbone.of(unet), Schedule.linear()).eval()
    images = ImageSet(torch.randint(0, 256, (IMAGES, 1, SIDE, SIDE), dtype=torch.uint8))
    with torch.no_grad():
        network(torch.zeros(BATCH, 1, SIDE, SIDE), 500)
    if room:
        stage2.CACHE_BYTES = room * 2**20
        tasks = new_heads(network, images.x_0(torch.arange(1)), ("sn", "npr"))
        fit_closed_form(network, tasks, Batches(images, network.schedule, BATCH), images=IMAGES)
    print(peak_memory())


def measure() -> dict[str, Any]:
    """The peak of a forward pass in MB, and how much more a fit takes, least and most, by the room in MB."""
    found: dict[int, list[float]] = {}
    for room in (0, *ROOMS):
        for _ in range(REPEATS):
            done = subprocess.run([sys.executable, __file__, str(room)], capture_output=True, text=True, check=True)
            found.setdefault(room, []).append(float(done.stdout.split()[-1]))
    forward = sum(found[0]) / REPEATS
    more = {str(room): [round(end(found[room]) - forward, 1) for end in (min, max)] for room in ROOMS}
    return {"batch": BATCH, "forward_megabytes": round(forward, 1), "more_megabytes": more}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(int(sys.argv[1]))
    else:
        print(json.dumps(measure()))
