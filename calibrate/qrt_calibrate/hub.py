"""Upload a finished checkpoint to the Hugging Face Hub."""

from __future__ import annotations

import sys
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from qrt.errors import QrtError


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
