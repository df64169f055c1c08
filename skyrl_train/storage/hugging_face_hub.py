"""Folders with a model as repositories on the Hugging Face hub."""

from __future__ import annotations

import threading
from pathlib import Path

from skyrl_train.config.problems import Problem
from skyrl_train.errors import ConfigError
from skyrl_train.storage.uris import wrap_storage_errors

REQUEST_TIMEOUT_S = 3.0
"""Time for the hub to say whether it has a model."""


def hub_model_problem(key: str, name: str) -> Problem | None:
    """Return the problem if a named model cannot be loaded from the hub; with HF_HUB_OFFLINE from this machine's cache.

    Makes at most one request, which is given up after REQUEST_S. A model in the cache is asked for, too: every process
    of a run would ask for each of its files, and give up only after minutes.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    files = ("model.safetensors", "model.safetensors.index.json")
    has_config, *has_weights = [isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", *files)]
    is_cached = has_config and any(has_weights)
    allowed = "a model's folder or the name of a model that can be loaded"
    if constants.HF_HUB_OFFLINE:
        advice = "HF_HUB_OFFLINE is set and the model is not in this machine's cache."
        return None if is_cached else Problem(key, name, allowed, advice)
    error = _request(f"{constants.ENDPOINT}/{name}/resolve/main/config.json")
    if error is None:
        return None
    if isinstance(error, GatedRepoError):  # a kind of RepositoryNotFoundError
        advice = "The hub asks for its terms to be accepted: accept them on the model's page and set HF_TOKEN."
    elif isinstance(error, RepositoryNotFoundError):
        advice = "The hub has no such model, or it is private: check the name, or set HF_TOKEN to a token that sees it."
    elif isinstance(error, EntryNotFoundError):
        advice = "It has no config.json, which every model has."
    else:
        todo = "Give the model's folder, or set HF_ENDPOINT or a proxy."
        if is_cached:
            todo = "Set HF_HUB_OFFLINE=1: the model is in this machine's cache."
        advice = f"The hub does not answer within {REQUEST_TIMEOUT_S:g} s ({type(error).__name__}). {todo}"
    return Problem(key, name, allowed, advice)


def _request(url: str) -> Exception | None:
    """Ask the hub for a file's metadata; return what that raises, or TimeoutError after REQUEST_S."""
    from huggingface_hub import get_hf_file_metadata

    raised: list[Exception | None] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(url, timeout=REQUEST_TIMEOUT_S)
            raised.append(None)
        except Exception as error:  # the hub's client raises what its HTTP library does
            raised.append(error)

    # In a thread, because resolving a host's name has no deadline of its own.
    thread = threading.Thread(target=ask, name="hub request", daemon=True)
    thread.start()
    thread.join(REQUEST_TIMEOUT_S)
    return raised[0] if raised else TimeoutError()


def check_repo_name_free(name: str, overwrite: bool) -> None:
    """Raise ConfigError without a token, and for a repository that exists unless `overwrite`.

    Call it before the work whose result `upload_model` uploads. Raises StorageError if the hub does not answer.
    """
    from huggingface_hub import HfApi, get_token  # takes half a second

    if get_token() is None:
        raise ConfigError(
            f"hub:{name}: there is no token to upload with: set HF_TOKEN, or log in once with `hf auth login`."
        )
    with wrap_storage_errors(f"hub:{name}"):
        exists = HfApi().repo_exists(name)
    if exists and not overwrite:
        raise ConfigError(f"hub:{name} exists: give another name, or --overwrite for a commit that replaces its files.")


def upload_model(folder: Path, name: str, *, public: bool, overwrite: bool, message: str) -> str:
    """Commit all files of `folder` to a repository, and return its address.

    Args:
        folder: Folder with the model.
        name: Name of the repository.
        public: Make a new repository visible to everybody.
        overwrite: Replace the files of a repository that exists; its visibility stays.
        message: Message of the commit.

    Raises:
        StorageError: The hub refuses or does not answer.
    """
    from huggingface_hub import HfApi

    with wrap_storage_errors(f"hub:{name} cannot be written"):
        hub = HfApi()
        url = hub.create_repo(name, private=not public, exist_ok=overwrite)
        replaced = ["*"] if overwrite else None
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns=replaced)
    return str(url)
