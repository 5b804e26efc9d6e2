"""Download the files of a model that qrt reads from the Hugging Face Hub into the Hub's cache.

This is the only module that asks the Hub for models. Names come from command lines and Python, never from
requests.
"""

from __future__ import annotations

import errno
import glob
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

Check = Callable[[Path], object]

DESCRIBING = (CONFIG, *SEPARATE_CONFIGS, *COPIED)
GB = 1e9
SPARE_BYTES = 64 << 20  # disk space left free, for the cache's own files
MAKE_ROOM = "free some, or keep models elsewhere with --download-dir, HF_HOME or HF_HUB_CACHE"
UNASKED = "%s: the Hub could not be asked (%s); going on with %s"
GATED_DATASET = "is a gated dataset"  # in the words of `datasets`, which hides the client's error


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
        return self._found(DESCRIBING, weights, check)

    def tokenizer(self) -> Path:
        """Return a folder with the tokenizer's files."""
        return self._found((CONFIG, *TOKENIZER_FILES), False, None)

    def _found(self, patterns: tuple[str, ...], weights: bool, check: Check | None) -> Path:
        with _explained(self.id, self.revision, self.cache):
            folder = self._fetch(patterns, weights, check)
        logger.info("%s: commit %s, in %s", self.id, folder.name, folder)
        return folder

    def _fetch(self, patterns: tuple[str, ...], weights: bool, check: Check | None) -> Path:
        """Download the files of `patterns`, and the weights; without the Hub use the cache."""
        asked = self._listing()
        commit, sizes = asked or self._cached(patterns)
        folder = self.cache / f"models--{self.id.replace('/', '--')}" / "snapshots" / commit
        if check is not None:
            if CONFIG not in sizes:
                raise CheckpointError(f"{self.id}: no {CONFIG}; {no_config(sizes)}")
            self._file(CONFIG, commit)
            check(folder)
        needed = [name for name in sizes if _matches(name, patterns)]
        if weights:
            place = f"in the cache, {folder}; {_offline_remedy(self.id)}" if asked is None else None
            needed += self._weights(commit, sizes, place)
        if not needed:
            raise CheckpointError(f"{self.id}: no tokenizer; expected tokenizer.json")
        if coming := [name for name in needed if not (folder / name).exists()]:
            self._expect_room(sum(sizes[name] for name in coming))
            self._snapshot(commit, coming)
        if asked and self.revision != commit:
            self._file(needed[0], self.revision)  # the client notes the branch's commit, for use offline
        return folder

    def _weights(self, commit: str, names: Collection[str], cache: str | None) -> list[str]:
        """Return the weight files among `names`; CheckpointError where one is missing."""
        single, index = weight_files(names)
        if single is not None:
            return [single]
        if index is None and cache:
            raise CheckpointError(f"{self.id}: a weight file is not {cache}")
        if index is None:
            raise no_weights(self.id, names)
        listed = read_json(self._file(index, commit)).get("weight_map")
        values = listed.values() if isinstance(listed, dict) else ()  # a damaged index is reported later
        shards = sorted({name for name in values if isinstance(name, str)})
        if lacking := next((name for name in shards if name not in names or "/" in name), None):
            place = cache or "beside it on the Hub"
            raise CheckpointError(f"{self.id}: {index} names {lacking!r}, which is not {place}")
        return [index, *shards]

    def _listing(self) -> tuple[str, dict[str, int]] | None:
        """Ask the Hub for the commit and its files' sizes; None where only the cache can be used."""
        if ENV.hub_offline:
            return None
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            found = _api().model_info(self.id, revision=self.revision, files_metadata=True)
        except RevisionNotFoundError:
            raise
        except Exception as error:
            try:
                commit, _ = self._cached(())
            except OSError:
                raise error from None
            logger.warning(UNASKED, self.id, _first_line(error), f"{commit}, which is cached")
            return None
        return str(found.sha), {file.rfilename: file.size or 0 for file in found.siblings or ()}

    def _cached(self, patterns: tuple[str, ...]) -> tuple[str, dict[str, int]]:
        """Return the cached commit and its files; the client's LocalEntryNotFoundError where some miss."""
        from huggingface_hub import snapshot_download

        options = {"ignore_patterns": "*/*", "local_files_only": True, **self._options()}
        folder = Path(
            snapshot_download(self.id, revision=self.revision, allow_patterns=list(patterns), **options)
        )
        return folder.name, {str(path.relative_to(folder)): 0 for path in folder.rglob("*") if path.is_file()}

    def _file(self, name: str, revision: str) -> Path:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(self.id, name, revision=revision, **self._options()))

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

    def _options(self) -> dict[str, Any]:
        """Return the options of every call, which replace what the client read from the environment."""
        endpoint, token = ENV.hub_endpoint, ENV.hub_token
        return {"cache_dir": self.cache, "endpoint": endpoint, "token": token, "library_name": "qrt"}

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


def _api() -> HfApi:
    """Return the client that asks the Hub about repositories."""
    from huggingface_hub import HfApi

    if not ENV.hub_endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"HF_ENDPOINT: expected a URL such as https://HOST, got {ENV.hub_endpoint!r}")
    return HfApi(ENV.hub_endpoint, token=ENV.hub_token, library_name="qrt")


@contextmanager
def dataset(id: str, revision: str | None = None) -> Iterator[None]:
    """Ask the Hub once whether `datasets` may load the dataset `id` in the block.

    Where the Hub does not answer, the block uses the cache; otherwise `datasets` retries for a minute.
    CheckpointError for a dataset that does not exist or is not granted.
    """
    import datasets
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    where = id, revision or "main", ENV.hub_cache, "dataset"
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    offline = ENV.hub_offline
    api = None if offline else _api()
    try:
        if api is not None:
            api.dataset_info(id, revision=revision, timeout=10)
    except Exception as error:
        fails = isinstance(error, HfHubHTTPError) and error.response.status_code >= 500
        if not fails and not isinstance(error, httpx.TransportError):
            raise CheckpointError(_explanation(error, *where)) from error
        logger.warning(UNASKED, id, _first_line(error), "what is cached")
        offline = True
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline
    try:
        yield
    except datasets.exceptions.DatasetNotFoundError as error:
        if GATED_DATASET not in str(error):
            raise
        raise CheckpointError(_explanation(error, *where)) from error  # its page was shown, its files are not
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@contextmanager
def _explained(*where: Any) -> Iterator[None]:
    """Turn the client's errors into one line that names the model and the remedy."""
    try:
        yield
    except QrtError:
        raise
    except Exception as error:  # from the client, its HTTP and download libraries, and the system
        raise CheckpointError(_explanation(error, *where)) from error


def _explanation(error: BaseException, id: str, revision: str, cache: object, kind: str = "model") -> str:
    """Say in one line what went wrong with a repository of the Hub, and what to do."""
    from huggingface_hub import errors

    page = f"{ENV.hub_endpoint}/{id}" if kind == "model" else f"{ENV.hub_endpoint}/datasets/{id}"
    login = "run `hf auth login` or set HF_TOKEN"
    response = error.response if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError) or GATED_DATASET in str(error):
        return f"{id}: its owners grant access; ask for it at {page}, then {login}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{id}: no revision {revision!r}; give a branch, a tag or a commit of {page}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        if error.__cause__ is not None:
            return _explanation(error.__cause__, id, revision, cache, kind)
        part = getattr(error, "snapshot_path", None)  # only recent clients have it
        place = f"only a part of it is in the cache, {part}" if part else f"not in {cache}"
        return f"{id}: no such folder here, and {place}; {_offline_remedy(id)}"
    if response is not None and "Invalid credentials" in response.headers.get("X-Error-Message", ""):
        return f"{id}: {ENV.hub_endpoint} does not accept the token; {login}, or unset HF_TOKEN"
    if response is not None and response.status_code in (401, 404):
        missing = f"no such folder here, and {ENV.hub_endpoint} shows no such {kind}"
        return f"{id}: {missing}; check the name, and for a private one {login}"
    match error:
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return f"{id}: no space left in {cache}; {MAKE_ROOM}"
        case OSError(errno=int()):
            file = error.filename or cache
            return f"{id}: {file} cannot be used ({error.strerror}); name another --download-dir"
    reason = f"{type(error).__name__}: {_first_line(error)}"
    remedy = "check the network, HF_ENDPOINT and the proxy, and run it again to get the rest"
    return f"{id}: no such folder here, and {ENV.hub_endpoint} does not send it ({reason}); {remedy}"


def _offline_remedy(id: str) -> str:
    """Say what to do where the cache lacks files and the Hub is not asked."""
    where = "unset HF_HUB_OFFLINE" if ENV.hub_offline else "try again with the network up"
    return f"{where}, or bring the files from another machine (hf download {id} --local-dir FOLDER)"


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
