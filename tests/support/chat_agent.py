"""An agent of the tests: a program of the standard library that calls a chat API.

Usage: chat_agent.py MODEL CALLS [last], where `last` says what happens after the calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def call(messages: list[dict[str, str]], model: str) -> str:
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def main() -> None:
    model, calls, last = sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
    messages = [{"role": "user", "content": "1 + 2?"}]
    for _ in range(calls):
        messages.append({"role": "assistant", "content": call(messages, model)})
        messages.append({"role": "user", "content": "Again?"})
    Path("answer.txt").write_text(messages[-2]["content"] if calls else "")
    match last:
        case "crash":
            sys.exit("the agent is broken")
        case "hang":
            pid = os.environ["PID_FILE"]
            subprocess.Popen(["setsid", "sh", "-c", f"echo $$ > {pid}; exec sleep 60"])
            time.sleep(60)
        case "report":
            url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/reward"
            body = json.dumps({"reward": 0.25}).encode()
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request).close()


if __name__ == "__main__":
    main()
