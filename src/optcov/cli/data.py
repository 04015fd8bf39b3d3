"""`optcov data`: fetch a published data set and verify it."""

from __future__ import annotations

from pathlib import Path

import typer

from optcov.cli.console import errors, finish, print_table


def command(
    name: str = typer.Argument(help="cifar10 or fashion-mnist."),
    directory: Path = typer.Argument(help="Where to put the files."),
    source: str = typer.Option(
        None, "--from", help="A local directory or a mirror's URL that holds the published files."
    ),
) -> None:
    """Fetch CIFAR-10 or Fashion-MNIST, verified by checksum."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from optcov import data
    from optcov.data.fetch import fetch, find_data_set

    data_set = find_data_set(name)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors) as bars:
        tasks = {file.name: bars.add_task(file.name, total=file.size) for file in data_set.files}
        for path in fetch(name, directory, source, lambda file, done, _: bars.update(tasks[file], completed=done)):
            errors.print(f"verified {path}", markup=False, highlight=False, soft_wrap=True)
    sets = [data.load(directory, split) for split in ("train", "test")]
    rows = [(images.name, len(images), " x ".join(map(str, images.shape)), images.checksum[:16]) for images in sets]
    print_table(f"{name}; licence: {data_set.licence}", ("set", "images", "shape", "checksum"), rows)
    finish(directory, f"optcov train {directory} --out runs/{directory.name}")
