"""Checks and uploads of models on the Hugging Face hub."""

from __future__ import annotations

import threading
from pathlib import Path

from skyrl_train.config.problems import Problem
from skyrl_train.errors import ConfigError
from skyrl_train.storage.uris import wrap_storage_errors

REQUEST_TIMEOUT_S = 3.0
"""Limit for the hub to respond whether it has a model."""


def hub_model_problem(key: str, name: str) -> Problem | None:
    """Check that a model can be loaded from the hub, or from this machine's cache if HF_HUB_OFFLINE is set.

    This makes at most one request, which ends after REQUEST_TIMEOUT_S. A cached model is checked, too, because every
    process of a run would request each of its files and give up only after minutes.

    Args:
        key: Configuration key of the name, for the message.
        name: The model's name on the hub.

    Returns:
        The problem, or None.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    files = ("model.safetensors", "model.safetensors.index.json")
    has_config, *has_weights = [isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", *files)]
    is_cached = has_config and any(has_weights)
    allowed = "a model's folder or the name of a model that can be loaded"
    if constants.HF_HUB_OFFLINE:
        advice = "HF_HUB_OFFLINE is set, and the model is not in this machine's cache. Unset it or download the model."
        return None if is_cached else Problem(key, name, allowed, advice)
    error = _request(f"{constants.ENDPOINT}/{name}/resolve/main/config.json")
    if error is None:
        return None
    if isinstance(error, GatedRepoError):  # a subclass of RepositoryNotFoundError
        advice = "The model is gated: accept its terms on the model's page and set HF_TOKEN."
    elif isinstance(error, RepositoryNotFoundError):
        advice = (
            "The hub has no such model, or it is private: check the name, or set HF_TOKEN to a token with access to it."
        )
    elif isinstance(error, EntryNotFoundError):
        advice = "It has no config.json, which every model has."
    else:
        fix = "Use a local folder of the model, or set HF_ENDPOINT or a proxy."
        if is_cached:
            fix = "Set HF_HUB_OFFLINE=1: the model is in this machine's cache."
        advice = f"The hub does not respond within {REQUEST_TIMEOUT_S:g} s ({type(error).__name__}). {fix}"
    return Problem(key, name, allowed, advice)


def hub_responds(name: str) -> bool:
    """True if the hub responds within REQUEST_TIMEOUT_S, also if it has no such dataset or needs a token for it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    error = _request(f"{constants.ENDPOINT}/datasets/{name}/resolve/main/README.md")
    return error is None or isinstance(error, HfHubHTTPError)


def _request(url: str) -> Exception | None:
    """Request a file's metadata; return the exception, a TimeoutError after REQUEST_TIMEOUT_S, or None on success."""
    from huggingface_hub import get_hf_file_metadata

    outcomes: list[Exception | None] = []

    def request() -> None:
        try:
            get_hf_file_metadata(url, timeout=REQUEST_TIMEOUT_S)
            outcomes.append(None)
        except Exception as error:  # The hub's client raises the exceptions of its HTTP library.
            outcomes.append(error)

    # This runs in a thread, because resolving a host name has no timeout.
    thread = threading.Thread(target=request, name="hub request", daemon=True)
    thread.start()
    thread.join(REQUEST_TIMEOUT_S)
    return outcomes[0] if outcomes else TimeoutError()


def check_repo_name_free(name: str, overwrite: bool) -> None:
    """Check that `upload_model` can write a repository, before the work that produces the model.

    Args:
        name: Name of the repository.
        overwrite: True to allow a repository that exists.

    Raises:
        ConfigError: There is no token, or the repository exists and `overwrite` is False.
        StorageError: The hub rejects the request or does not respond.
    """
    from huggingface_hub import HfApi, get_token  # This import takes half a second.

    if get_token() is None:
        raise ConfigError(
            f"hub:{name}: there is no token for the upload. Set HF_TOKEN, or log in once with `hf auth login`."
        )
    with wrap_storage_errors(f"hub:{name}"):
        exists = HfApi().repo_exists(name)
    if exists and not overwrite:
        raise ConfigError(
            f"hub:{name} exists: choose another name, or pass --overwrite for a commit that replaces its files."
        )


def upload_model(folder: Path, name: str, *, public: bool, overwrite: bool, message: str) -> str:
    """Commit all files of a folder to a repository on the hub, and return the repository's URL.

    Args:
        folder: Folder with the model.
        name: Name of the repository, which is created if it does not exist.
        public: True to make a new repository public.
        overwrite: True to replace all files of a repository that exists. Its visibility does not change.
        message: Message of the commit.

    Raises:
        StorageError: The hub rejects a request or does not respond, or the repository exists and `overwrite` is False.
    """
    from huggingface_hub import HfApi

    with wrap_storage_errors(f"hub:{name} cannot be written"):
        hub = HfApi()
        url = hub.create_repo(name, private=not public, exist_ok=overwrite)
        replaced = ["*"] if overwrite else None
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns=replaced)
    return str(url)
