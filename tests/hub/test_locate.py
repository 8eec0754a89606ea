"""Where a model is: here, or on a hub, for which a server of this machine stands."""

from collections.abc import Iterator
from contextlib import contextmanager
import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
import os
from pathlib import Path
import subprocess
import sys
import threading

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.locate import locate
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"template",
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"code",
    "consolidated.safetensors": b"the same again",
    "onnx/model.safetensors": b"another's",
}


def test_what_is_here_is_taken(tmp_path):
    assert locate(tmp_path) == tmp_path
    assert locate(str(tmp_path)) == tmp_path
    with pytest.raises(HubError, match=r"a revision must be left out for what is here but got 'main'\.$"):
        locate(tmp_path, revision="main")


def test_a_folder_here_goes_before_the_hub(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("owner/name") == Path("owner/name")


@pytest.mark.parametrize(
    "name", ["./nothing", "/nothing/here", "~/nothing", "a/b/c", "two words", "model.gguf", "a/model.safetensors", ""]
)
def test_a_path_that_does_not_exist_has_both_readings(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if not name:
        # The empty path is the folder that one is in.
        assert locate(name) == Path()
        return
    with pytest.raises(HubError) as caught:
        locate(name)
    assert str(caught.value) == (
        f"{name}: there is no such file or folder, and it is no OWNER/NAME of a model on the hub."
    )


@contextmanager
def hub() -> Iterator[str]:
    """A hub with one model, `owner/name`, and one whose owner must admit its readers, `owner/gated`."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            path = self.path.split("?")[0]
            headers, content, status = {}, b"", 200
            if path.startswith("/api/models/owner/name/revision/"):
                if path.endswith("/other"):
                    status, headers = 404, {"X-Error-Code": "RevisionNotFound"}
                else:
                    siblings = [{"rfilename": name} for name in FILES]
                    content = json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode()
            elif path.startswith("/api/models/owner/name/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in FILES.items()
                ]
                content = json.dumps(tree).encode()
            elif path.startswith("/owner/name/resolve/"):
                content = FILES[path.split(f"{COMMIT}/")[1]]
                headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            elif "gated" in path:
                status, headers = 403, {"X-Error-Code": "GatedRepo"}
            else:
                status, headers = 404, {"X-Error-Code": "RepoNotFound"}
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(tmp_path, endpoint, *arguments, **environment):
    """What `locate` says in a process of its own, which reads the environment anew."""
    code = "import sys; from forge_mlx.hub.locate import locate; print(locate(sys.argv[1], **eval(sys.argv[2])))"
    variables = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": endpoint, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, *(["{}"] if len(arguments) < 2 else [])],
        capture_output=True,
        text=True,
        env=variables,
        cwd=tmp_path,
        check=False,
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_only_safe_files_are_downloaded_and_found_again_offline(tmp_path):
    with hub() as endpoint:
        found = Path(ask(tmp_path, endpoint, "owner/name"))
    assert sorted(file.name for file in found.rglob("*")) == [
        *("chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json")
    ]
    assert (found / "model.safetensors").read_bytes() == b"weights"
    assert ask(tmp_path, endpoint, "owner/name", HF_HUB_OFFLINE="1") == str(found)


@pytest.mark.slow
def test_part_of_a_model_and_then_the_rest(tmp_path):
    parts = {"config": [], "tokenizer": ["chat_template.jinja", "tokenizer.json"], "all": ["model.safetensors"]}
    expected = ["config.json"]
    with hub() as endpoint:
        for part, more in parts.items():
            found = Path(ask(tmp_path, endpoint, "owner/name", f"{{'part': {part!r}}}"))
            expected = sorted([*expected, *more])
            assert sorted(file.name for file in found.iterdir()) == expected


@pytest.mark.slow
def test_what_the_hub_refuses(tmp_path):
    start = "forge_mlx.hub.errors.HubError: {}: there is no such folder here, and"
    with hub() as endpoint:
        assert ask(tmp_path, endpoint, "owner/other") == (
            f"{start.format('owner/other')} the hub has no model of this name that you may read. Check it, or log in."
        )
        assert ask(tmp_path, endpoint, "owner/name", "{'revision': 'other'}") == (
            f"{start.format('owner/name')} on the hub it has no revision 'other'."
        )
        assert "on the hub its owner must admit you first: ask at" in ask(tmp_path, endpoint, "owner/gated")
    assert ask(tmp_path, endpoint, "owner/name") == (
        f"{start.format('owner/name')} it is not in the cache of the hub while the hub cannot be reached."
    )
    assert ask(tmp_path, endpoint, "owner/name", HF_HUB_OFFLINE="1") == (
        f"{start.format('owner/name')} it is not in the cache of the hub while HF_HUB_OFFLINE is 1."
    )


def test_a_name_that_is_too_long_for_a_file():
    with pytest.raises(HubError, match=r"a+: there is no such file or folder: File name too long\."):
        locate("a" * 5000)
