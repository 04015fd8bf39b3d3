"""Fetch published data sets, and verify what came by checksums before it gets its name.

Files come from their publishers, from a mirror of the same names, or from a local directory. What is verified is the
content: Fashion-MNIST by the SHA-256 of the unpacked files, CIFAR-10 by the MD5 that its authors publish.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import shutil
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, final

from optcov import storage
from optcov.data.cifar import BATCHES, FOLDERS
from optcov.data.images import DataError

CHUNK = 2**20
TIMEOUT = 60  # seconds without a byte
BATCH_BYTES = 10_000 * 3073

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if known


@final
@dataclass(frozen=True)
class RemoteFile:
    """A published file."""

    name: str
    size: int  # no more is read
    checksum: str  # hexadecimal: SHA-256 of the unpacked content, or MD5 of the file as it is

    def verify(self, stream: IO[bytes], where: str) -> None:
        """Raise a DataError if the content is not the published one."""
        packed = len(self.checksum) == 64
        digest = hashlib.new("sha256" if packed else "md5", usedforsecurity=False)
        try:
            content = gzip.GzipFile(fileobj=stream) if packed else stream
            while chunk := content.read(CHUNK):
                digest.update(chunk)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{where} is not a whole file: {error}; fetch it again") from error
        if digest.hexdigest() != self.checksum:
            raise DataError(
                f"{where} is not the published {self.name}: its {digest.name} is {digest.hexdigest()}, expected "
                f"{self.checksum}; fetch it again"
            )


@final
@dataclass(frozen=True)
class DataSet:
    """A published data set."""

    name: str
    url: str  # of the directory that holds the files
    licence: str
    files: tuple[RemoteFile, ...]


DATA_SETS = {
    "fashion-mnist": DataSet(
        "fashion-mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "MIT, (c) 2017 Zalando SE",
        tuple(
            RemoteFile(f"{name}-ubyte.gz", size, checksum)
            for name, size, checksum in (
                ("train-images-idx3", 26_421_880, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
                ("train-labels-idx1", 29_515, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
                ("t10k-images-idx3", 4_422_102, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
                ("t10k-labels-idx1", 5_148, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
            )
        ),
    ),
    "cifar10": DataSet(
        "cifar10",
        "https://www.cs.toronto.edu/~kriz",
        "none stated: use it, do not pass it on",
        (RemoteFile("cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),),
    ),
}


def fetch(
    name: str, directory: Path, source: str | Path | None = None, progress: Progress | None = None
) -> Iterator[Path]:
    """Bring a data set's files to a directory, one after the other; files that are there and whole are kept.

    source: a local directory or the URL of a mirror, instead of the publisher.
    """
    data_set = find_data_set(name)
    base = str(source) if source is not None else data_set.url
    for file in data_set.files:
        target = Path(directory) / file.name
        if not _is_whole(target, file):
            _bring(base, file, target, progress)
        if file.name.endswith(".tar.gz"):
            yield from _unpack_cifar(target, Path(directory))
        else:
            yield target


def find_data_set(name: str) -> DataSet:
    """Look a data set up by its name."""
    if name not in DATA_SETS:
        raise DataError(f"unknown data set {name!r}; choose one of {', '.join(DATA_SETS)}")
    return DATA_SETS[name]


def _is_whole(path: Path, file: RemoteFile) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open("rb") as stream:
            file.verify(stream, str(path))
    except DataError:
        return False  # an interrupted or foreign file; it is replaced by a whole one
    return True


def _bring(base: str, file: RemoteFile, target: Path, progress: Progress | None) -> None:
    """Read from a directory or a URL, verify, and only then write."""
    try:
        with _open(base, file.name) as stream:
            content = _read(stream, file, progress)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise DataError(
            f"cannot fetch {file.name} from {base}: {reason}; fetch it by other means and pass its directory (--from)"
        ) from error
    file.verify(io.BytesIO(content), f"{base}/{file.name}")
    storage.write_bytes(target, content)


def _open(base: str, name: str) -> IO[bytes]:
    if "://" not in base:
        return (Path(base) / name).open("rb")
    if not base.startswith(("http://", "https://", "file://")):
        raise DataError(f"{base} is no address of a mirror; use http, https, file or a local directory")
    stream: IO[bytes] = urllib.request.urlopen(f"{base.rstrip('/')}/{name}", timeout=TIMEOUT)
    return stream


def _read(stream: IO[bytes], file: RemoteFile, progress: Progress | None) -> bytes:
    chunks, done = [], 0
    while chunk := stream.read(CHUNK):
        done += len(chunk)
        if done > file.size:
            raise DataError(f"{file.name} is longer than the published {file.size} bytes")
        chunks.append(chunk)
        if progress is not None:
            progress(file.name, done, file.size)
    return b"".join(chunks)


def _unpack_cifar(archive: Path, directory: Path) -> Iterator[Path]:
    """Take the six binary batches out of the archive, which is verified, and nothing else.

    Batches that are there already are written again: only those of the archive are known to be whole.
    """
    folder = FOLDERS[".bin"]
    names = [f"{name}.bin" for split in BATCHES.values() for name in split]
    try:
        with tarfile.open(archive) as tar:
            for name in names:
                member = tar.getmember(f"{folder}/{name}")
                stream = tar.extractfile(member)
                if stream is None or member.size != BATCH_BYTES:
                    raise DataError(f"{archive}: {name} is not a batch of {BATCH_BYTES} bytes")
                with storage.atomic_writer(directory / folder / name) as out:
                    shutil.copyfileobj(stream, out)
                yield directory / folder / name
    except (tarfile.TarError, KeyError, EOFError, zlib.error) as error:
        raise DataError(f"{archive} is not the archive of CIFAR-10: {error}") from error
