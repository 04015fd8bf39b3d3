"""The files that the commands of the model zoo import, of networks of reduced width."""

from __future__ import annotations

import torch

from checkpoint_files import filled, full_size_networks, golden_state
from optcov.checkpoints import SOURCES

NETWORKS = {
    "cifar10-ls": ("cifar10_iddpm", "w32_plain"),
    "cifar10-cs": ("cifar10_iddpm", "w32_plain"),
    "cifar10-vp-sde": ("cifar10_vpsde_ncsnpp", "nf32_plain"),
    "celeba64": ("celeba64_ddpm", "w32_plain"),
    "imagenet64": ("imagenet64_iddpm", "w32_plain_out6"),
    "lsun-bedroom": ("lsun_ddpm", "w32_res64_plain"),
}
HEAD_PREFIXES = ("out2", "norm_out2", "conv_out2", "before_out", "gn_out2")


def write_files(directory, name):
    network, reduced = NETWORKS[name]
    structures = {"npr": "simple", "sn": "complex" if SOURCES[name].sn_head == "residual" else "simple"}
    for head, mode in structures.items():
        state = golden_state(f"{network}_{reduced}")
        for key, shape, *_ in full_size_networks()[f"{network}_{mode}"]["keys"]:
            if key.startswith(HEAD_PREFIXES):
                state[key] = filled(key, [length // 4 if length >= 128 else length for length in shape])
        torch.save(state, directory / f"{head}.pth")
    steps = SOURCES[name].schedule().steps or 1000
    torch.save(torch.linspace(0, 1, steps + 1).numpy(), directory / "ms_eps.pth")
