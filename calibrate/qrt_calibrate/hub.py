"""Upload a finished checkpoint to the Hugging Face Hub."""

from __future__ import annotations

import sys
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from qrt.errors import ConfigError, QrtError


def check(repository: str) -> None:
    """Check a repository's name and that there is a token, before the work that is to be uploaded.

    Raises ConfigError. The Hub itself is not asked.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub {repository}: {error}".partition("\n")[0]) from None
    if get_token() is None:
        raise ConfigError(
            f"--push-to-hub {repository}: no token of the Hub here; run `hf auth login`, or set HF_TOKEN"
        )


def push(folder: Path, repository: str) -> None:
    """Make `repository` ("ORG/NAME", private if new) and upload `folder`; QrtError if the Hub refuses."""
    api = HfApi()
    try:
        url = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Quantized with qrt-calibrate"
        )
    except (HfHubHTTPError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise QrtError(
            f"--push-to-hub {repository}: {reason}; the checkpoint is in {folder}, upload it with `hf upload`"
        ) from None
    print(f"uploaded to {url}", file=sys.stderr)
