"""Folders with a model as repositories on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from skyrl_train.errors import ConfigError
from skyrl_train.storage.places import explained


def refuse_taken(name: str, overwrite: bool) -> None:
    """Raises ConfigError without a token, and for a repository that exists unless `overwrite`; StorageError.

    To be called before the work that `upload_model` is the end of.
    """
    from huggingface_hub import HfApi, get_token  # half a second, and only for those who upload

    if get_token() is None:
        raise ConfigError(
            f"hub:{name}: there is no token to upload with: set HF_TOKEN, or log in once with `hf auth login`."
        )
    with explained(f"hub:{name}"):
        exists = HfApi().repo_exists(name)
    if exists and not overwrite:
        raise ConfigError(f"hub:{name} exists: give another name, or --overwrite for a commit that replaces its files.")


def upload_model(folder: Path, name: str, *, public: bool, overwrite: bool, message: str) -> str:
    """Make one commit of all files of `folder`, in a repository that is private unless `public`; returns its address.

    With `overwrite` the files of a repository that exists are replaced; who may see it stays as it is. The token is
    that of huggingface_hub: HF_TOKEN, or a login's. Raises StorageError if the hub refuses or does not answer.
    """
    from huggingface_hub import HfApi

    with explained(f"hub:{name} cannot be written"):
        hub = HfApi()
        url = hub.create_repo(name, private=not public, exist_ok=overwrite)
        replaced = ["*"] if overwrite else None
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns=replaced)
    return str(url)
