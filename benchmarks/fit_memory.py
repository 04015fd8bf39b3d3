"""Peak memory of a closed-form fit over that of a bare forward pass, by the room for its features.

    python benchmarks/fit_memory.py

A U-Net whose heads read 64 channels at 64 x 64 pixels: 1 MB of features an image, 270 MB for the 256 images of the fit.
Each case runs in a process of its own; memory is the largest resident size that the system saw.
"""

from __future__ import annotations

import resource
import subprocess
import sys

ROOMS = (16, 64, 512)  # MB
IMAGES, BATCH, SIDE = 256, 16, 64


def peak() -> float:
    """Largest resident size of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(room: int) -> None:
    """One case: a fit with room for so many MB of features, or with none a forward pass alone."""
    import torch
    from diffusers import UNet2DModel

    from optcov import Schedule
    from optcov.data import ImageSet
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
    print(peak())


def main() -> None:
    """Print a row per room."""
    if len(sys.argv) > 1:
        return run(int(sys.argv[1]))
    found = {}
    for room in (0, *ROOMS):
        result = subprocess.run([sys.executable, __file__, str(room)], capture_output=True, text=True, check=True)
        found[room] = float(result.stdout)
    print(f"a forward pass: {found[0]:,.0f} MB")
    for room in ROOMS:
        print(f"a fit with room for {room:,} MB of features: {found[room] - found[0]:,.0f} MB more")
    return None


if __name__ == "__main__":
    main()
