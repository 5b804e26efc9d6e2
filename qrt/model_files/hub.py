"""Download the files of a model that qrt reads from the Hugging Face Hub into the Hub's cache.

This is the only module that asks the Hub for models. Names come from command lines and Python, never from
requests.
"""

from __future__ import annotations

import glob
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from qrt.config import ENV
from qrt.errors import CheckpointError, ConfigError, QrtError
from qrt.model_files.folder import (
    CONFIG,
    COPIED,
    SEPARATE_CONFIGS,
    TOKENIZER_FILES,
    no_config,
    no_weights,
    read_json,
    weight_files,
)
from qrt.model_files.hub_errors import GATED_DATASET, MAKE_ROOM, explain, first_line, offline_remedy

logger = logging.getLogger(__name__)

Check = Callable[[Path], object]

DESCRIBING = (CONFIG, *SEPARATE_CONFIGS, *COPIED)
GB = 1e9
SPARE_BYTES = 64 << 20  # disk space left free, for the cache's own files
UNASKED = "the Hub could not be asked"


@dataclass(frozen=True)
class Repository:
    """A model on the Hub: its id ORG/NAME; a branch, tag or commit; and the folder of the cache."""

    id: str
    revision: str
    cache: Path

    @classmethod
    def of(cls, id: str, revision: str | None, cache: str | Path | None) -> Repository:
        """Make one; defaults are the branch main and the cache that the environment names."""
        return cls(id, revision or "main", Path(cache or ENV.hub_cache).expanduser().absolute())

    def model(self, *, weights: bool = True, check: Check | None = None) -> Path:
        """Return the model's folder; `check` sees it with config.json alone before weights are downloaded."""
        return self._found(DESCRIBING, weights, check or (lambda folder: None))

    def tokenizer(self) -> Path:
        """Return a folder with the tokenizer's files."""
        return self._found((CONFIG, *TOKENIZER_FILES), False, None)

    def _found(self, patterns: tuple[str, ...], weights: bool, check: Check | None) -> Path:
        with _explained(self):
            folder = self._fetch(patterns, weights, check)
        logger.info("%s: commit %s, in %s", self.id, folder.name, folder)
        return folder

    def _fetch(  # noqa: C901 -- one step after the other
        self, patterns: tuple[str, ...], weights: bool, check: Check | None
    ) -> Path:
        """Download the files of `patterns`, and the weights; without the Hub use the cache."""
        listing = self._listing()
        if listing is None:
            folder = self._cached(patterns)
            if check is not None:
                check(folder)
            if weights and (missing := _missing_weight(folder)):
                raise CheckpointError(
                    f"{self.id}: {missing} is not in the cache, {folder}; {offline_remedy(self.id)}"
                )
            return folder
        commit, sizes = listing
        if check is not None:
            if CONFIG not in sizes:
                raise CheckpointError(f"{self.id}: no {CONFIG}; {no_config(sizes)}")
            check(self._file(CONFIG, commit).parent)
        needed = [name for name in sizes if _matches(name, patterns)]
        if weights:
            single, index = weight_files(sizes)
            if single is None and index is None:
                raise no_weights(self.id, sizes)
            needed += [single] if single else [str(index), *self._shards(str(index), commit, sizes)]
        if not needed:
            raise CheckpointError(f"{self.id}: no tokenizer; expected tokenizer.json")
        folder = self._folder(commit)
        coming = {name: sizes[name] for name in needed if not (folder / name).exists()}
        if coming:
            self._expect_room(sum(coming.values()))
            self._snapshot(commit, coming)
        if self.revision != commit:
            self._file(needed[0], self.revision)  # the client notes the branch's commit, for use offline
        return folder

    def _shards(self, index: str, commit: str, sizes: Collection[str]) -> list[str]:
        """Return the weight files that the index names; CheckpointError where one is missing."""
        shards = _named_in(self._file(index, commit))
        if lacking := next((name for name in shards if name not in sizes or "/" in name), None):
            raise CheckpointError(f"{self.id}: {index} names {lacking!r}, which is not beside it on the Hub")
        return shards

    def _listing(self) -> tuple[str, dict[str, int]] | None:
        """Ask the Hub for the commit and its files' sizes; None where only the cache can be used."""
        if ENV.hub_offline:
            return None
        if not ENV.hub_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"HF_ENDPOINT: expected a URL such as https://HOST, got {ENV.hub_endpoint!r}")
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RevisionNotFoundError

        api = HfApi(ENV.hub_endpoint, token=ENV.hub_token, library_name="qrt")
        try:
            found = api.model_info(self.id, revision=self.revision, files_metadata=True)
        except RevisionNotFoundError:
            raise
        except Exception as error:
            try:
                commit = self._cached(()).name
            except OSError:
                raise error from None
            reason = first_line(error)
            logger.warning("%s: %s (%s); going on with %s, which is cached", self.id, UNASKED, reason, commit)
            return None
        return str(found.sha), {file.rfilename: file.size or 0 for file in found.siblings or ()}

    def _file(self, name: str, commit: str) -> Path:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(self.id, name, revision=commit, **self._options()))

    def _snapshot(self, commit: str, names: Iterable[str]) -> None:
        """Download files. Ctrl-C ends the download; the client alone would first finish its files."""
        from huggingface_hub import close_session, snapshot_download

        options: Any = {"allow_patterns": [glob.escape(name) for name in names], **self._options()}
        with ThreadPoolExecutor(1) as thread:
            download = thread.submit(lambda: snapshot_download(self.id, revision=commit, **options))
            try:
                download.result()
            except KeyboardInterrupt:
                close_session()
                raise

    def _cached(self, patterns: tuple[str, ...]) -> Path:
        """Return the cached folder; the client's LocalEntryNotFoundError where it is incomplete."""
        from huggingface_hub import snapshot_download

        options = {**self._options(), "local_files_only": True, "ignore_patterns": "*/*"}
        return Path(
            snapshot_download(self.id, revision=self.revision, allow_patterns=list(patterns), **options)
        )

    def _options(self) -> dict[str, Any]:
        """Return the options of every call, which replace what the client read from the environment."""
        endpoint, token = ENV.hub_endpoint, ENV.hub_token
        return {"cache_dir": self.cache, "endpoint": endpoint, "token": token, "library_name": "qrt"}

    def _folder(self, commit: str) -> Path:
        return self.cache / f"models--{self.id.replace('/', '--')}" / "snapshots" / commit

    def _expect_room(self, coming: int) -> None:
        """Raise CheckpointError where the disk has no room for `coming` bytes."""
        disk = next(path for path in (self.cache, *self.cache.parents) if path.exists())
        free = shutil.disk_usage(disk).free
        if coming + SPARE_BYTES > free:
            raise CheckpointError(
                f"{self.id}: {coming / GB:.2f} GB are left to download, and {self.cache} has "
                f"{free / GB:.2f} GB free; {MAKE_ROOM}"
            )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern matches; unlike in fnmatch, `*` does not match a slash."""
    return any(fnmatchcase(name, each) and name.count("/") == each.count("/") for each in patterns)


def _named_in(index: Path) -> list[str]:
    """Return the files that an index names, none if it is damaged: the reader reports that later."""
    listed = read_json(index).get("weight_map")
    values = listed.values() if isinstance(listed, dict) else ()
    return sorted({name for name in values if isinstance(name, str)})


def _missing_weight(folder: Path) -> str | None:
    """Return the first weight file that a cached folder lacks; None where it has all."""
    single, index = weight_files([path.name for path in folder.iterdir()])
    if single is None and index is None:
        return "a weight file"
    shards = [] if index is None else _named_in(folder / index)
    return next((name for name in shards if not (folder / name).exists()), None)


@contextmanager
def _explained(repository: Repository) -> Iterator[None]:
    """Turn the client's errors into one line that names the model and the remedy."""
    try:
        yield
    except QrtError:
        raise
    except Exception as error:  # from the client, its HTTP and download libraries, and the system
        raise CheckpointError(explain(repository.id, repository.revision, repository.cache, error)) from error


@contextmanager
def dataset(id: str, revision: str | None = None) -> Iterator[None]:
    """Ask the Hub once whether `datasets` may load the dataset `id` in the block.

    Where the Hub does not answer, the block uses the cache; otherwise `datasets` retries for a minute.
    CheckpointError for a dataset that does not exist or is not granted.
    """
    import datasets
    import httpx
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    def explained(error: BaseException) -> str:
        return explain(id, revision or "main", ENV.hub_cache, error, "dataset")

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    offline = ENV.hub_offline
    if not offline:
        try:
            api = HfApi(ENV.hub_endpoint, token=ENV.hub_token, library_name="qrt")
            api.dataset_info(id, revision=revision, timeout=10)
        except Exception as error:
            fails = isinstance(error, HfHubHTTPError) and error.response.status_code >= 500
            if not fails and not isinstance(error, httpx.TransportError):
                raise CheckpointError(explained(error)) from error
            logger.warning("%s: %s (%s); going on with what is cached", id, UNASKED, first_line(error))
            offline = True
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline
    try:
        yield
    except datasets.exceptions.DatasetNotFoundError as error:
        if GATED_DATASET not in str(error):
            raise
        raise CheckpointError(explained(error)) from error  # its page was shown, its files are not
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
