"""The answers of the server, and who gets them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from rl_lab.ui.dream import hub
from rl_lab.ui.server import make_app

RUN = "demo/20260101-000000-s0"
ACTION = {"X-RL-Lab": "1"}
SOCKET = "ws://127.0.0.1:8600/api/dream"


@pytest.fixture
def client(make_run, tmp_path: Path) -> TestClient:
    make_run()
    return TestClient(make_app(tmp_path / "runs"), base_url="http://127.0.0.1:8600")


def test_a_run_is_described(client: TestClient) -> None:
    detail = client.get("/api/run", params={"run": RUN}).json()
    assert detail["row"]["eval_return"] == 20.0
    assert any(entry["command"].startswith("rl-lab dream ") for entry in detail["commands"])
    assert not detail["has_report"]
    curves = client.get("/api/curves", params={"run": RUN}).json()
    assert curves["columns"]["eval/return_mean"] == [0.0, 10.0, 20.0]


def test_comparison_groups_seeds(client: TestClient, make_run) -> None:
    runs = [RUN, *(f"demo/{make_run(seed=seed).name}" for seed in (1, 2))]
    answer = client.get("/api/compare", params={"run": runs, "metric": "eval/return_mean", "x": "updates"}).json()
    assert len(answer["groups"]) == 1
    group = answer["groups"][0]
    assert [run["seed"] for run in group["runs"]] == [0, 1, 2]
    assert group["ci95"][0] <= group["iqm"] <= group["ci95"][1]
    assert group["middle"]["y"][-1] == pytest.approx(21.0)


def test_a_comparison_by_minutes_leaves_out_what_a_run_compiled(client: TestClient, tmp_path: Path) -> None:
    """As the page of `rl-lab compare` does: a minute before the first row moves no curve."""
    metrics = tmp_path / "runs" / RUN / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row | {"wall_s": row["wall_s"] + 60.0}) + "\n" for row in rows))
    answer = client.get("/api/compare", params={"run": RUN, "metric": "eval/return_mean", "x": "minutes"}).json()
    assert answer["groups"][0]["runs"][0]["x"] == pytest.approx([1 / 60, 2 / 60, 3 / 60])


@pytest.mark.parametrize("path", ["videos/../config.yaml", "../config.yaml", "videos/%2e%2e/config.yaml", "/etc/passwd",
                                  "videos/link.mp4", "imagination/..\\config.yaml", "config.yaml", ""])  # fmt: skip
def test_nothing_but_media_of_the_run_is_served(client: TestClient, tmp_path: Path, path: str) -> None:
    folder = tmp_path / "runs" / RUN / "videos"
    folder.mkdir()
    (folder / "film.mp4").write_bytes(b"film")
    os.symlink("/etc/passwd", folder / "link.mp4")
    assert client.get("/api/media", params={"run": RUN, "path": "videos/film.mp4"}).content == b"film"
    assert client.get("/api/media", params={"run": RUN, "path": path}).status_code == 404
    assert client.get(f"/static/{path}").status_code in (307, 404, 405)


@pytest.mark.parametrize("path", ["../server.py", "%2e%2e/server.py", "..%2fserver.py", "%2e%2e%2fserver.py",
                                  "..%5cserver.py", "%252e%252e/server.py", "%2fetc%2fpasswd", "app.js/../../server.py",
                                  "%00", "..%00/server.py"])  # fmt: skip
def test_encoded_paths_lead_nowhere(client: TestClient, path: str) -> None:
    for answer in (client.get(f"/static/{path}"), client.get(f"/api/run?run={path}"),
                   client.get(f"/api/run?run=demo%2f{path}"), client.get(f"/api/media?run={RUN}&path=videos%2f{path}"),
                   client.get(f"/{path}")):  # fmt: skip
        assert answer.status_code in (400, 404), answer.url
        assert "make_app" not in answer.text
        assert "root:" not in answer.text


def test_deleted_runs_are_one_clear_line(client: TestClient) -> None:
    answer = client.get("/api/run", params={"run": "demo/none"})
    assert answer.status_code == 404
    assert "deleted or renamed" in answer.json()["error"]


def test_pages_are_confined(client: TestClient, tmp_path: Path) -> None:
    policy = client.get("/").headers["content-security-policy"]
    assert "script-src 'self'" in policy
    (tmp_path / "runs" / RUN / "report.html").write_text("<script>alert(1)</script>")
    assert client.get("/api/run", params={"run": RUN}).json()["has_report"]
    report = client.get("/api/report", params={"run": RUN}).headers["content-security-policy"]
    assert report.startswith("sandbox;")
    assert "script" not in report


def test_other_sites_cannot_act_or_read(client: TestClient) -> None:
    foreign = {"Origin": "http://evil.example"}
    assert client.post("/api/stop", params={"run": RUN}).status_code == 403  # a form has no header of ours
    assert client.post("/api/stop", params={"run": RUN}, headers=foreign | ACTION).status_code == 403
    assert client.get("/api/runs", headers=foreign).status_code == 403
    assert client.get("/api/runs", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert client.get("/api/runs", headers={"Host": "evil.example"}).status_code == 421
    assert client.post("/api/stop", params={"run": RUN}, headers=ACTION).status_code == 409


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", f"/api/run?run={RUN}", "/api/stop"])
def test_off_loopback_nothing_is_answered_without_the_token(make_run, tmp_path: Path, path: str) -> None:
    make_run()
    client = TestClient(make_app(tmp_path / "runs", token="secret"), base_url="http://10.0.0.5:8600")
    refused = client.get(path)
    assert refused.status_code == 401
    assert RUN not in refused.text
    assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get(path, headers={"Authorization": "Bearer secret"}).status_code in (200, 405)


def test_the_token_in_the_address_becomes_a_cookie(make_run, tmp_path: Path) -> None:
    make_run()
    client = TestClient(make_app(tmp_path / "runs", token="secret"), base_url="http://10.0.0.5:8600")
    opened = client.get("/", params={"token": "secret"}, follow_redirects=False)
    assert opened.status_code == 303
    assert "httponly" in opened.headers["set-cookie"].lower()
    assert "samesite=strict" in opened.headers["set-cookie"].lower()
    assert client.get("/api/runs").status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Origin": "http://evil.example"}, {"Origin": "null"}])
def test_sockets_of_other_sites_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    with pytest.raises(WebSocketDisconnect), client.websocket_connect(f"{SOCKET}?run={RUN}", headers=headers):
        pass


def test_a_socket_without_the_token_is_refused(make_run, tmp_path: Path) -> None:
    make_run()
    client = TestClient(make_app(tmp_path / "runs", token="secret"), base_url="http://10.0.0.5:8600")
    origin = {"Origin": "http://10.0.0.5:8600"}
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect(f"ws://10.0.0.5:8600/api/dream?run={RUN}", headers=origin),
    ):
        pass


def test_a_run_that_cannot_dream_is_one_clear_line(client: TestClient) -> None:
    """Of a run that is not there, and of one whose process cannot open it; the server lives on."""
    origin = {"Origin": "http://127.0.0.1:8600"}
    for run, text in (("demo/none", "deleted or renamed"), (RUN, "config.yaml")):
        with client.websocket_connect(f"{SOCKET}?run={run}", headers=origin) as socket:
            answer = socket.receive_json()
        assert answer["type"] == "fatal"
        assert "\n" not in answer["text"]
        assert text in answer["text"] or run == RUN
    assert client.get("/api/runs").status_code == 200


class Listening:
    """Stands in for the process of a dream: keeps what it is told, and has a defect that one command shows."""

    ended = last_left = None

    def __init__(self, folder: Path, *, trust: bool) -> None:
        self.process, self.told, self.clients = self, [], {}

    def is_alive(self) -> bool:
        return True

    def join(self) -> hub.Client:
        return self.clients.setdefault(1, hub.Client(1))

    def send(self, command: dict[str, object]) -> None:
        if command["type"] == "defect":
            raise KeyError("defect")
        self.told.append(command["type"])

    def close(self) -> None: ...


def test_odd_messages_are_passed_over_and_defects_are_not(
    make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes, a broken text and no mapping mean nothing; an error of the server's own is not taken for a farewell."""
    monkeypatch.setattr(hub, "Dream", Listening)
    make_run()
    dreams = hub.Dreams()
    client = TestClient(make_app(tmp_path / "runs", dreams=dreams), base_url="http://127.0.0.1:8600")
    origin = {"Origin": "http://127.0.0.1:8600"}
    with client.websocket_connect(f"{SOCKET}?run={RUN}", headers=origin) as socket:
        socket.send_bytes(b"bytes")
        for text in ("{", "[1]", '{"type": "step"}'):
            socket.send_text(text)
    (dream,) = dreams._dreams.values()
    assert dream.told == ["step", "play"]  # it stops playing when the last one has left
    with (
        pytest.raises(KeyError, match="defect"),
        client.websocket_connect(f"{SOCKET}?run={RUN}", headers=origin) as socket,
    ):
        socket.send_text('{"type": "defect"}')


def test_only_the_process_that_writes_the_run_is_stopped(client: TestClient, tmp_path: Path) -> None:
    """A lock may name any process: the signal goes to one that has a file of this run open, and to no other."""
    folder = tmp_path / "runs" / RUN
    code = "import sys, time; files = [open(name) for name in sys.argv[1:]]; print('up', flush=True); time.sleep(60)"
    processes = [subprocess.Popen([sys.executable, "-c", code, *files], stdout=subprocess.PIPE)
                 for files in ([], [str(folder / "metrics.jsonl")])]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        stranger, writer = processes
        for process, status in ((stranger, 409), (writer, 200)):
            (folder / "lock.json").write_text(json.dumps({"pid": process.pid}))
            assert client.post("/api/stop", params={"run": RUN}, headers=ACTION).status_code == status
        assert writer.wait(10) == -signal.SIGTERM
        assert stranger.poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()
