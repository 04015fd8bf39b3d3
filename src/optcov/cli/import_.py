"""`optcov import`: make a bundle from a checkpoint of the paper or a diffusers model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from optcov.console import announce, finish, print_json, print_table, suggest, tell_left_out

if TYPE_CHECKING:
    from optcov.bundle import Bundle


def command(
    file: str = typer.Argument(
        help="A checkpoint of one of the paper's six networks, a diffusers directory, or a name on the hub."
    ),
    name: str | None = typer.Option(
        None,
        "--as",
        help="Which network it is, if the file does not tell: cifar10-ls, cifar10-cs, cifar10-vp-sde, celeba64, "
        "imagenet64, lsun-bedroom.",
    ),
    out: Path = typer.Option(..., help="Where to write the bundle."),
    head: str | None = typer.Option(None, help="The head that the file holds besides the network: npr or sn."),
    npr: Path | None = typer.Option(None, help="Another file of the same network, with the NPR head."),
    sn: Path | None = typer.Option(None, help="Another file of the same network, with the SN head."),
    gamma: Path | None = typer.Option(None, help="The authors' Gamma file, for Analytic-DPM."),
    image_size: int | None = typer.Option(None, help="Height and width, if the file does not tell.", min=1),
    empty_class: int | None = typer.Option(
        None, min=0, help='Number of the class that means "no class", if the network has one.'
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace another bundle that is there."),
    json: bool = typer.Option(False, "--json", help="Print the bundle's description as JSON, as optcov info does."),
) -> None:
    """Import a pretrained network, with its heads and the paper's settings."""
    from optcov.bundle import Bundle
    from optcov.bundle.description import describe
    from optcov.bundle.loading import bundle_of
    from optcov.checkpoints import import_model
    from optcov.text_table import printable

    if printable(str(out)) != str(out):
        raise ValueError(f"--out {printable(str(out))} has characters that weights cannot be read under; rename it")
    Bundle.check_target(out)
    model = import_model(file, name, head=head, npr=npr, sn=sn, gamma=gamma, image_size=image_size)
    bundle = bundle_of(model)
    if empty_class is not None:
        bundle = bundle.with_empty_class(empty_class)
    bundle.check_loadable()
    tell_left_out(bundle)
    there = not overwrite and _is_there(bundle, out)
    if there:
        announce(f"{out} is this very bundle already: nothing to do (--overwrite writes it again)")
    else:
        announce(f"{printable(model.source)} can be imported: writes it as a bundle to {out}")
        bundle.save(out)
    weights = sum(parameter.numel() for parameter in bundle.unet.parameters())
    found = {
        "network": printable(model.source),
        "weights": f"{weights:,}",
        "images": "x".join(map(str, bundle.image_shape)),
        "schedule": repr(model.schedule),
        "predicts": model.parameterisation,
        "time argument": f"(t - {model.time_argument.shift:g}) * {model.time_argument.scale:g}",
        **({} if bundle.classes is None else {"classes": f"{bundle.classes}"}),
        "heads": ", ".join([*model.heads, *["range"] * model.learned_range]) or "none",
        "Gamma": "yes" if model.mean_square_noise is not None else "no",
    }
    if json:
        print_json(describe(str(out)))
        return
    print_table("imported", ("", "found"), list(found.items()))
    sample = ("optcov", "sample", str(out), "--steps", "10")
    suggest(*sample) if there else finish(out, *sample)


def _is_there(bundle: Bundle, out: Path) -> bool:
    """Whether a directory holds this very bundle; an error if it holds another one."""
    from optcov.bundle import load
    from optcov.bundle.saving import CONFIG

    if not (out / CONFIG).exists():
        return False
    try:
        same = load(out.absolute()).digest() == bundle.digest()
    except ValueError:  # damaged
        same = False
    if not same:
        raise ValueError(
            f"{out} holds another bundle already; give --overwrite to replace it, or another directory by --out"
        )
    return True
