"""A server with the few endpoints of the Hugging Face hub that an upload of a model needs."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.web_server import Request, Response, WebServer, web_server

TOKEN = "hf_testOnlyNeverShown0123456789"


@dataclass
class HubServer:
    """A running server and the files uploaded to it."""

    web: WebServer | None = None
    private: dict[str, bool] = field(default_factory=dict)
    """Maps a repository to True if it is private."""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Maps a repository to its files (path to content) after the last commit."""
    commits: list[str] = field(default_factory=list)
    """Commit messages."""
    refuses_commits: bool = False
    large: dict[str, bytes] = field(default_factory=dict)

    def answer(self, request: Request) -> Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        if headers.get("authorization") != f"Bearer {TOKEN}" and not request.path.startswith("/large/"):
            return _json({"error": "Invalid username or password."}, 401)
        path = request.path.partition("?")[0]
        if request.method == "PUT":
            self.large[path.rpartition("/")[2]] = request.body
            return Response()
        body: Any = None if not request.body or path.endswith("/commit/main") else json.loads(request.body)
        if path == "/api/repos/create":
            return self._create(body)
        if path == "/api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        if path.endswith(".git/info/lfs/objects/batch"):
            return _json({"transfer": "basic", "objects": [self._upload(one) for one in body["objects"]]})
        name, _, action = path.removeprefix("/api/models/").partition("/")
        owner_action = action.split("/")
        name, action = f"{name}/{owner_action[0]}", "/".join(owner_action[1:])
        if name not in self.private:
            return _json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        return self._of_repository(name, action, body, request.body)

    def _create(self, asked: dict[str, Any]) -> Response:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = f"{self.url}/{name}"
        if name in self.private:
            return _json({"error": "You already created this model repo", "url": url}, 409)
        self.private[name], self.files[name] = asked["visibility"] == "private", {}
        return _json({"url": url, "name": name, "id": name})

    def _of_repository(self, name: str, action: str, body: Any, raw: bytes) -> Response:
        if action == "preupload/main":
            modes = [
                {"path": one["path"], "shouldIgnore": False, "uploadMode": _mode(one["path"])} for one in body["files"]
            ]
            return _json({"files": modes})
        if action == "tree/main":
            return _json([_entry(path, content) for path, content in self.files[name].items()])
        if action == "commit/main":
            if self.refuses_commits:
                return _json({"error": "no room"}, 507)
            self._commit(name, [json.loads(line) for line in raw.splitlines()])
            return _json({"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/{name}/commit/{'0' * 40}"})
        return _json({"id": name, "sha": "0" * 40, "private": self.private[name], "siblings": [], "tags": []})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[name][value["path"]] = self.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.files[name][value["path"]]

    def _upload(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {**asked, "actions": {"upload": {"href": f"{self.url}/large/{asked['oid']}"}}}

    @property
    def url(self) -> str:
        assert self.web is not None
        return self.web.url


@contextmanager
def hub_server(patch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serve a hub for this process's huggingface_hub, with a token in the environment."""
    from huggingface_hub import constants

    server = HubServer()
    with web_server(server.answer) as server.web:
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".png")) else "regular"


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content).encode(), status, {"Content-Type": "application/json", **(headers or {})})
