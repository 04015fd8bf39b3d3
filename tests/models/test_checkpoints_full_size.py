"""The full-size networks: every key of every published structure is used, in bounded time and memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from checkpoint_files import full_size_networks
from optcov.checkpoints import heads
from optcov.checkpoints.architecture import unet_config
from optcov.checkpoints.layout import check_keys
from optcov.checkpoints.sources import SOURCES, find_family
from optcov.networks.paper_unet import PaperUNet

SOURCE_OF = {
    "cifar10_iddpm": "cifar10-ls",
    "celeba64_ddpm": "celeba64",
    "imagenet64_iddpm": "imagenet64",
    "lsun_ddpm": "lsun-bedroom",
    "cifar10_vpsde_ncsnpp": "cifar10-vp-sde",
}


def source_of(network):
    return SOURCES[SOURCE_OF[network.rsplit("_", 1)[0]]]


@pytest.mark.parametrize("network", full_size_networks())
def test_every_key_of_the_full_size_networks_is_used(network):
    golden = full_size_networks()[network]
    state = {key: torch.empty(shape, device="meta") for key, shape, *_ in golden["keys"] if key != "sigmas"}
    family, source = find_family(state), source_of(network)
    trunk, head = heads.split(family, state)
    plan = family.infer(trunk)
    assert source.fits(family, plan)
    kwargs = golden["kwargs"]
    assert plan.image_size == kwargs.get("resolution", 64 if "imagenet" in network else plan.image_size)
    assert plan.image_size == {"cifar10": 32, "celeba64": 64, "imagenet64": 64, "lsun": 256}[network.split("_")[0]]
    with torch.device("meta"):
        unet = PaperUNet(**unet_config(family, plan, plan.image_size))
    check_keys(family.table(plan), trunk, unet.state_dict())
    mode = network.rsplit("_", 1)[1]
    if mode == "plain":
        assert not head
        assert sum(p.numel() for p in unet.parameters()) == golden["n_params"]
    else:
        kind = heads.structure(family, head)
        assert kind == {"simple": "conv", "complex": "residual"}[mode]
        table = {"conv": family.conv_head, "residual": family.residual_head}[kind]
        check_keys(table, head, heads.empty_head(family, kind, unet.config, 3).state_dict())


IMPORT_ONE = """
import json, resource, sys, time
from pathlib import Path
from optcov.checkpoints import import_checkpoint
import diffusers
path, name, head = sys.argv[1:]
start = time.monotonic()
model = import_checkpoint(Path(path), name, head=head or None)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
weights = sum(p.numel() for m in (model.unet, *model.heads.values()) for p in m.parameters())
print(json.dumps({"seconds": time.monotonic() - start, "peak": peak, "weights": weights, "heads": list(model.heads)}))
"""


@pytest.mark.long
@pytest.mark.parametrize("network", full_size_networks())
def test_full_size_networks_import_within_a_minute_and_6_gigabytes(tmp_path, network):
    golden = full_size_networks()[network]
    generator = torch.Generator().manual_seed(0)
    state = {key: 0.02 * torch.randn(shape, generator=generator) for key, shape, *_ in golden["keys"]}
    torch.save(state, tmp_path / "model.pth")
    head = "" if network.endswith("plain") else "sn"
    command = [sys.executable, "-c", IMPORT_ONE, str(tmp_path / "model.pth"), source_of(network).name, head]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["weights"] == golden["n_params"]
    assert result["heads"] == ([head] if head else [])
    assert result["peak"] < 6e9
    assert result["seconds"] < 60
