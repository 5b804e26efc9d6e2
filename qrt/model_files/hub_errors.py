"""Explain errors of the Hugging Face Hub in one line with the remedy."""

from __future__ import annotations

import errno

from qrt.config import ENV

MESSAGE = "X-Error-Message"  # header with the Hub's reason for a refusal
GATED_DATASET = "is a gated dataset"  # in the words of `datasets`, which hides the client's error
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
MAKE_ROOM = "free some, or keep models elsewhere with --download-dir, HF_HOME or HF_HUB_CACHE"


def offline_remedy(id: str) -> str:
    """Say what to do where the cache lacks files and the Hub is not asked."""
    where = "unset HF_HUB_OFFLINE" if ENV.hub_offline else "try again with the network up"
    return f"{where}, or bring the files from another machine (hf download {id} --local-dir FOLDER)"


def explain(id: str, revision: str, cache: object, error: BaseException, kind: str = "model") -> str:  # noqa: C901 -- one case per error
    """Say in one line what went wrong with a repository of the Hub, and what to do."""
    import httpx
    from huggingface_hub import errors

    endpoint = ENV.hub_endpoint
    page = f"{endpoint}/{id}" if kind == "model" else f"{endpoint}/datasets/{id}"
    login = "run `hf auth login` or set HF_TOKEN"
    match error:
        case _ if isinstance(error, errors.GatedRepoError) or GATED_DATASET in str(error):
            return f"{id}: its owners grant access; ask for it at {page}, then {login}"
        case errors.RevisionNotFoundError():
            return f"{id}: no revision {revision!r}; give a branch, a tag or a commit of {page}"
        case errors.HfHubHTTPError() if "Invalid credentials" in error.response.headers.get(MESSAGE, ""):
            return f"{id}: {endpoint} does not accept the token; {login}, or unset HF_TOKEN"
        case errors.HfHubHTTPError() if error.response.status_code in (401, 404):
            return (
                f"{id}: no such folder here, and {endpoint} shows no such {kind}; check the name, and for a "
                f"private one {login}"
            )
        case errors.HfHubHTTPError():
            code = error.response.status_code
            return f"{id}: {endpoint} answers {code} ({first_line(error)}); try again later"
        case errors.LocalEntryNotFoundError():
            if error.__cause__ is not None:
                return explain(id, revision, cache, error.__cause__, kind)
            part = getattr(error, "snapshot_path", None)  # only recent clients have it
            place = f"only a part of it is in the cache, {part}" if part else f"not in {cache}"
            return f"{id}: no such folder here, and {place}; {offline_remedy(id)}"
        case errors.FileMetadataError():
            reason = first_line(error)
            return f"{id}: {endpoint} does not answer as the Hub does ({reason}); check HF_ENDPOINT"
        case httpx.RemoteProtocolError() | httpx.ReadError() | httpx.ReadTimeout():
            return f"{id}: {endpoint} broke off ({first_line(error)}); run it again to get the rest"
        case httpx.HTTPError() | errors.OfflineModeIsEnabled():
            return (
                f"{id}: no such folder here, and {endpoint} cannot be reached ({first_line(error)}); check "
                "the network, HF_ENDPOINT and the proxy, or give a folder"
            )
        case OSError() if error.errno in NO_ROOM:
            return f"{id}: no space left in {cache}; {MAKE_ROOM}"
        case OSError() if error.errno is not None:
            file = error.filename or cache
            return f"{id}: {file} cannot be used ({error.strerror}); name another --download-dir"
    return f"{id}: cannot be downloaded ({type(error).__name__}: {first_line(error)}); try again"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
