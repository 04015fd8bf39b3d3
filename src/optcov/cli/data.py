"""`optcov data`: fetch a published data set and verify it."""

from __future__ import annotations

from pathlib import Path

import typer

from optcov.console import announce, errors, finish, print_json, print_table


def command(
    name: str = typer.Argument(help="cifar10 or fashion-mnist."),
    directory: Path = typer.Argument(help="Where to put the files."),
    source: str = typer.Option(
        None, "--from", help="A local directory or a mirror's URL that holds the published files."
    ),
    json: bool = typer.Option(False, "--json", help="Print what was fetched as JSON."),
) -> None:
    """Fetch CIFAR-10 or Fashion-MNIST, verified by checksum."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from optcov import data
    from optcov.data.fetch import fetch, find_data_set

    data_set = find_data_set(name)
    megabytes = sum(file.size for file in data_set.files) / 1e6
    announce(
        f"fetches {name} ({megabytes:.0f} MB) from {source or 'its publisher'} to {directory}; keeps what is there"
    )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors) as bars:
        tasks = {file.name: bars.add_task(file.name, total=file.size) for file in data_set.files}
        for path in fetch(name, directory, source, lambda file, done, _: bars.update(tasks[file], completed=done)):
            announce(f"verified {path}")
    sets = [data.load(directory, split) for split in ("train", "test")]
    header = ("set", "images", "shape", "checksum")
    rows = [(images.name, len(images), " x ".join(map(str, images.shape)), images.checksum[:16]) for images in sets]
    if json:
        found = [dict(zip(header, row, strict=True)) for row in rows]
        print_json({"directory": str(directory), "licence": data_set.licence, "sets": found})
        return
    print_table(f"{name}; licence: {data_set.licence}", header, rows)
    finish(directory, "optcov", "train", str(directory), "--out", f"runs/{directory.name}")
