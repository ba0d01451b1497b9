"""`replicas dashboard`: who gets an answer, what the pages show, and what they cost the store."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.cli import COMMAND, FAST, HereInstead
from support.dashboards import NAVIGATION, Client, running_dashboard

from executors import LocalProcessExecutor, launch
from executors.attempt import Attempt
from executors.dashboard.access import Access
from executors.dashboard.board import Board
from executors.dashboard.changes import Versions, patch_of
from executors.dashboard.log_feed import MAX_CHARACTERS, LogFeed, page_line
from executors.dashboard.run_feed import RunFeed
from executors.dashboard.run_store import RunStore
from executors.dashboard.server import Dashboard, Options
from executors.errors import KeyNotFoundError, ReplicasError, RunNotFoundError
from executors.run.run import view_of
from executors.store import MemoryStore
from executors.store.records import to_bytes
from executors.task.create import create_run
from executors.task.launch_request import LaunchRequest
from executors.testing import eventually
from executors.view.run_events import open_events
from executors.view.run_logs import RunLogs
from executors.view.run_page import report_document
from executors.view.run_view import RunView

PATHS = ("/", "/changes", "/runs/00000000/mine", "/runs/00000000/mine/changes", "/no/such/page", "/favicon.ico")


@pytest.fixture
def client(state_home: Path) -> Iterator[Client]:
    with running_dashboard() as made:
        yield made


def key_in(client: Client) -> str:
    """Return the key of the only run in the list."""
    found = client.changes_until("/changes", lambda changes: len(changes.get("parts", ())) == 1)
    return str(found["order"][0])


# --- who gets an answer


def test_without_the_token_each_path_is_403_and_tells_nothing(client: Client) -> None:
    right = client.cookie
    name = client.dashboard.access.cookie_name
    for cookie in (
        "",
        f"{name}=",
        f"replicas_dashboard={right.partition('=')[2]}",
        f"{right[:-1]}0"[: len(right)] + "x",
        "other=1",
        "\xff=\xfe",
    ):
        client.cookie = cookie
        answers = [client.get(path) for path in PATHS]
        answers += [client.ask(method, "/") for method in ("POST", "PUT", "HEAD", "OPTIONS", "TRACE")]
        assert {answer.status for answer in answers} == {403}
        assert {answer.body for answer in answers} <= {b"Forbidden\n", b""}
        assert {frozenset(answer.headers) - {"content-length"} for answer in answers} == {
            frozenset(answers[0].headers) - {"content-length"}
        }


def test_many_parameters_are_no_reason_to_answer_without_access(client: Client) -> None:
    client.cookie = ""
    assert client.get("/?" + "&".join(f"a{n}=1" for n in range(100))).status == 403


def test_two_dashboards_of_one_machine_have_cookies_of_their_own(client: Client) -> None:
    other = Access("127.0.0.1")
    own = client.dashboard.access
    assert own.has_cookie(f"{own.cookie_name}={own.cookie}; {other.cookie_name}={other.cookie}")


def test_the_token_becomes_a_cookie_that_scripts_cannot_read_and_leaves_the_address(client: Client) -> None:
    client.cookie = ""
    answer = client.enter()
    assert (answer.status, answer.headers["location"], answer.body) == (303, "/", b"")
    assert answer.headers["set-cookie"].endswith("; Path=/; HttpOnly; SameSite=Strict")
    token = client.dashboard.access.token
    assert token not in answer.headers["set-cookie"]
    page = client.get("/")
    assert page.status == 200
    assert token not in page.text
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["cache-control"] == "no-store"


def test_the_address_with_the_token_leads_to_no_other_site(client: Client) -> None:
    token = client.dashboard.access.token
    for path in ("//evil.example/", "/%2F%2Fevil.example/", "/\\evil.example/"):
        location = client.get(f"{path}?token={token}&x=1").headers["location"]
        assert urlsplit(location).netloc == ""
        assert not location.startswith(("//", "/\\"))
        assert "token" not in location
    assert client.get(f"/?token={token}&token={token}", Cookie=None).status == 403
    assert client.get(f"/?token={token[:-1]}", Cookie=None).status == 403


def test_a_forged_host_gets_nothing_although_the_browser_has_the_cookie(client: Client) -> None:
    port = client.dashboard.port
    for host in (
        *("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "", "127.0.0.1@evil.example"),
        *(f"192.168.1.2:{port}", f"localhost:{port}/x", f"localhost:{port}#", "localhost:x", "[::1", "0.0.0.0"),
    ):
        assert client.get("/", Host=host).status == 403, host
        token = client.dashboard.access.token
        assert client.get(f"/?token={token}", Host=host, Cookie=None).status == 403, host
    assert client.get("/", Host=None).status in (400, 403)
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "localhost:9000"):
        assert client.get("/", Host=host).status == 200, host


def test_on_all_interfaces_addresses_and_names_of_this_machine_are_right_and_other_names_are_not() -> None:
    access = Access("0.0.0.0")
    for host in ("10.0.0.7:8265", "[fe80::1]:8265", f"{socket.gethostname().lower()}:8265", "localhost"):
        assert access.is_own_host(host), host
    for host in ("evil.example:8265", "10.0.0.7.evil.example", "0x7f.1.evil", ""):
        assert not access.is_own_host(host), host
    named = Access("box.lan")
    assert named.is_own_host("box.lan:8265")
    assert not named.is_own_host("10.0.0.7:8265")


def test_a_script_of_another_site_gets_nothing(client: Client) -> None:
    own = client.origin
    assert client.get("/changes", Origin=own).status == 200
    for origin in ("http://evil.example", "null", "", own.replace("http", "https"), "http://127.0.0.1:1", f"{own}.x"):
        assert client.get("/changes", Origin=origin).status == 403, origin
    other: dict[str, str | None] = {"Sec-Fetch-Mode": "no-cors"}
    for site in ("cross-site", "same-site", "none"):
        assert client.ask("GET", "/changes", {**other, "Sec-Fetch-Site": site}).status == 403, site
    assert client.ask("GET", "/changes", {**other, "Sec-Fetch-Site": "same-origin"}).status == 200
    assert client.ask("GET", "/", NAVIGATION).status == 200


def test_the_policy_of_a_page_allows_its_own_scripts_alone_and_no_other_host(client: Client) -> None:
    text = client.get("/").text
    policy = text.partition('http-equiv="Content-Security-Policy" content="')[2].partition('"')[0]
    assert policy.startswith("default-src &#39;none&#39;")
    assert "unsafe" not in policy
    assert "connect-src &#39;self&#39;" in policy
    assert "https:" not in policy
    assert client.get("/").headers["x-frame-options"] == "DENY"


# --- what the pages show


def test_the_list_has_each_run_and_the_page_is_that_of_report(
    client: Client, here: HereInstead, local: LocalProcessExecutor
) -> None:
    assert "No runs." in client.get("/").text
    run = launch(local, "job:report", 2, run_id="mine")
    assert run.wait(60)
    key = key_in(client)
    row = client.changes_until("/changes", lambda changes: "succeeded" in changes["parts"][key])["parts"][key]
    assert 'class="status succeeded"' in row
    assert "0.5" in row
    changes = client.changes_until(f"/runs/{key}/changes", lambda changes: "parts" in changes)
    shown, made = changes["charts"]["="], report_document(view_of(run))
    assert (shown["curves"], shown["timeline"]["end_s"]) == (made["curves"], made["timeline"]["end_s"])
    page = client.get(f"/runs/{key}").text
    assert "<h1>mine" in page
    assert changes["parts"]["replicas"] in page
    assert client.get(f"/runs/{key}/changes?since={changes['version']}").json.keys() == {"version", "controls"}
    assert client.get("/runs/00000000/other").status == 404
    assert client.get("/runs/%2E%2E/mine").status == 404


def test_a_page_of_a_running_run_gets_what_is_new_and_then_its_end(
    client: Client, here: HereInstead, local: LocalProcessExecutor
) -> None:
    with launch(local, "job:hang", 2, run_id="live") as run:
        key = key_in(client)
        first = client.changes_until(f"/runs/{key}/changes", lambda changes: "2 running" in str(changes.get("parts")))
        run.cancel(rank=1)
        path = f"/runs/{key}/changes?since={first['version']}"
        new = eventually(lambda: (found := client.get(path).json).get("parts") and found, "a change")
        assert "configuration" not in new["parts"]
        assert "order" not in new
        run.cancel()
        client.changes_until("/changes", lambda changes: "cancelled" in str(changes["parts"]))
        client.changes_until(f"/runs/{key}/changes", lambda changes: "2 cancelled" in str(changes["parts"]))


def test_nothing_is_read_while_no_page_asks(here: HereInstead, local: LocalProcessExecutor) -> None:
    with launch(local, "job:hang", 1, run_id="live"):
        now = [100.0]
        board = Board(clock=lambda: now[0])
        board.find_runs()
        assert board._next() == (None, False, None), "no page has asked yet"
        board.want_list()
        assert board._next()[1], "the runs are searched"
        key, _, _ = board._next()
        assert key is not None
        now[0] += 60
        assert board._next() == (None, False, None), "no page has asked for a minute"


def test_a_store_that_does_not_exist_is_an_error_before_anything_is_served(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="no such directory"):
        Dashboard(Options(store=tmp_path / "no", port=0))


def test_a_port_that_is_taken_is_an_error_with_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ReplicasError, match=rf"Port {port} .* --port"):
            Dashboard(Options(port=port))
        other = Dashboard(Options(port=port, takes_other_port=True))
        assert other.port != port
        other._socket.close()
    with pytest.raises(ReplicasError, match="--host"):
        Dashboard(Options(host="203.0.113.7", port=0))


# --- logs


def test_a_problem_with_a_log_is_shown_until_the_log_can_be_read_again(
    local: LocalProcessExecutor, here: HereInstead, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launch(local, "job:main", 1, args={"say": "word", "times": 1}, run_id="mine")
    assert run.wait(60)
    now = iter(range(0, 1000, 100))
    feed = LogFeed(view_of(run), 0, clock=lambda: next(now))

    def fails(*_: object) -> None:
        raise ReplicasError("The bucket is away.")

    with monkeypatch.context() as patched:
        patched.setattr(RunLogs, "look", fails)
        assert feed.lines_after(0)["note"] == "The log cannot be read: The bucket is away."
    assert feed.lines_after(0)["note"] == ""


def test_a_log_is_followed_by_the_number_of_its_last_line_and_shared_by_all_tabs(
    client: Client, here: HereInstead, local: LocalProcessExecutor
) -> None:
    run = launch(local, "job:main", 2, args={"say": "a \x1b[31mred\x1b[0m <b>word</b>", "times": 3}, run_id="mine")
    assert run.wait(60)
    key = key_in(client)
    first = client.get(f"/runs/{key}/log?rank=1&after=0").json
    assert first["lines"] == [f"a red <b>word</b> {number} of rank 1" for number in range(3)]
    assert (first["last"], first["note"]) == (3, "")
    assert client.get(f"/runs/{key}/log?rank=1&after=2").json["lines"] == first["lines"][2:]
    assert client.get(f"/runs/{key}/log?rank=1&after=3").json["lines"] == []
    assert client.get(f"/runs/{key}/log?rank=1&after=99").json["lines"] == first["lines"]
    assert "has no rank 7" in client.get(f"/runs/{key}/log?rank=7&after=0").json["note"]
    assert client.get(f"/runs/{key}/log?rank=x&after=-1").json["lines"][0].endswith("of rank 0")
    found = client.get(f"/runs/{key}/log?rank=1&search=RED+%3Cb%3E").json
    assert found["lines"] == first["lines"]
    assert client.get(f"/runs/{key}/log?rank=1&search=(a%2B)%2B%24").json["lines"] == []
    assert client.get(f"/runs/{key}/stacks?rank=0").json == {"lines": [], "note": ""}


def test_lines_are_cut_and_few() -> None:
    assert len(page_line("x" * 10_000)) == MAX_CHARACTERS
    assert page_line("10 %\r20 %\r\n") == "20 %"
    assert page_line("\x1b]0;title\x07a\u202eb\n") == "a b"


# --- buttons


def test_a_button_needs_the_proof_of_a_page_the_own_origin_and_post(
    client: Client, here: HereInstead, local: LocalProcessExecutor
) -> None:
    with launch(local, "job:hang", 1, run_id="live") as run:
        key = key_in(client)
        wrong: list[dict[str, str | None]] = [
            {"X-Replicas-Proof": None}, {"X-Replicas-Proof": client.dashboard.access.cookie}, {"Origin": None},
            {"Origin": "null"}, {"Origin": "http://evil.example"}, {"Cookie": None}, {"Host": "evil.example"},
            {"Content-Length": "999999"}, {"Transfer-Encoding": "chunked"},
        ]  # fmt: skip
        for headers in wrong:
            assert client.press(key, "cancel", headers).status in (400, 403), headers
        assert client.get(f"/runs/{key}/cancel").status == 405
        assert client.press(key, "rm").status == 404
        assert not run.status().is_terminal
        assert client.press(key, "cancel").status == 202
        assert run.wait(60)
        client.changes_until(f"/runs/{key}/changes", lambda changes: "was cancelled" in changes["controls"]["state"])


def test_a_dashboard_that_is_read_only_has_no_buttons_and_refuses_them(
    here: HereInstead, local: LocalProcessExecutor
) -> None:
    with (
        launch(local, "job:hang", 1, run_id="live") as run,
        running_dashboard(Options(port=0, is_read_only=True)) as client,
    ):
        key = key_in(client)
        text = client.get(f"/runs/{key}").text
        assert 'data-verb="' not in text
        assert client.proof not in text
        assert client.press(key, "cancel").status == 403
        assert not run.status().is_terminal


def test_resume_starts_the_replicas_again_and_an_error_of_the_command_is_shown(
    client: Client, here: HereInstead, local: LocalProcessExecutor
) -> None:
    run = launch(local, "job:fail", 1, args={"ranks": [0]}, run_id="mine")
    assert run.wait(60)
    key = key_in(client)
    path = f"/runs/{key}/changes"
    client.changes_until(path, lambda changes: 'data-verb="resume"' in changes["controls"]["buttons"])
    assert client.press(key, "resume").status == 202
    client.changes_until(path, lambda changes: "start again" in changes["controls"]["state"])
    eventually(lambda: (states := run.status()).is_terminal and states.replicas[0].attempt == 1, "attempt 1 ends")
    (here.folder.path / "job.py").unlink()
    store = view_of(run).store
    store.put("mine/run.json", bytes(store.get("mine/run.json")).replace(b'"backend": "local"', b'"backend": "ghost"'))
    assert client.press(key, "resume").status == 202
    found = client.changes_until(path, lambda changes: "bad action" in changes["controls"]["state"])
    assert "ghost" in found["controls"]["state"]


# --- parts of it


def patched(old: object, patch: dict[str, object]) -> object:
    """Apply a patch as the script of the page does."""
    if "=" in patch:
        return patch["="]
    if "+" in patch:
        return [*old, *patch["+"]]  # type: ignore[misc]
    made = dict(enumerate(old)) if isinstance(old, list) else dict(old)  # type: ignore[call-overload]
    for key in patch.get("-", ()):  # type: ignore[attr-defined]
        del made[key]
    for name, each in patch.get(".", {}).items():  # type: ignore[attr-defined]
        key = int(name) if isinstance(old, list) else name
        made[key] = patched(made.get(key), each)
    return [*made.values()] if isinstance(old, list) else made


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"x": [1, 2], "y": 1}, {"x": [1, 2, 3], "z": None}),
        ({"lines": [{"y": [1]}, {"y": [2]}]}, {"lines": [{"y": [1, 5]}, {"y": [2, 6]}]}),
        ({"lines": [{"y": [1]}]}, {"lines": [{"y": [1]}, {"y": []}]}),
        ({"x": [1, 2, 3]}, {"x": [1]}),
        ({"x": []}, {"x": {"a": 1}}),
        ({"x": 1}, {"x": 1}),
    ],
)
def test_a_patch_gives_the_new_value(old: object, new: object) -> None:
    assert patched(old, patch_of(old, new)) == new


def test_a_patch_of_a_curve_that_grew_has_its_new_points_alone() -> None:
    old = {"x": [*range(1000)], "lines": [{"rank": 0, "y": [0.5] * 1000}]}
    new = {"x": [*range(1001)], "lines": [{"rank": 0, "y": [0.5] * 1001}]}
    assert patch_of(old, new) == {".": {"x": {"+": [1000]}, "lines": {".": {"0": {".": {"y": {"+": [0.5]}}}}}}}


def test_a_page_with_an_unknown_version_gets_everything() -> None:
    versions = Versions()
    assert versions.since(7) == {"version": 7}
    versions.add({"a": "1", "b": "2"}, {"x": [1]})
    whole = versions.since(0)
    assert (whole["parts"], whole["charts"], whole["order"]) == ({"a": "1", "b": "2"}, {"=": {"x": [1]}}, ["a", "b"])
    versions.add({"a": "1", "b": "3"}, {"x": [1, 2]})
    new = versions.since(whole["version"])
    assert (new["parts"], new["charts"], "order" in new) == ({"b": "3"}, {".": {"x": {"+": [2]}}}, False)
    assert versions.since(new["version"]) == {"version": new["version"]}
    assert versions.since(12345)["parts"] == {"a": "1", "b": "3"}
    versions.add({"a": "1", "b": "3"}, {"x": [1, 2]})
    assert versions.since(new["version"]) == {"version": new["version"]}, "nothing has changed"


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(
    client: Client, here: HereInstead, local: LocalProcessExecutor
) -> None:
    run = launch(local, "job:report", 1, run_id="mine")
    assert run.wait(60)
    view_of(run).store.put("mine/run.json", b"{")
    key = key_in(client)
    row = client.changes_until("/changes", lambda changes: "unreadable" in changes["parts"][key])["parts"][key]
    assert "run.json" in row
    assert client.get(f"/runs/{key}").status == 200


def test_one_look_lists_the_records_of_a_run_once_and_reads_each_final_record_once(
    here: HereInstead, local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.dashboard.run_store.AGAIN_S", math.inf)
    run = launch(local, "job:report", 3, run_id="mine")
    assert run.wait(60)
    feed = RunFeed(view_of(run).store, "mine")
    feed.look(with_page=True)
    feed.look(with_page=False)  # whether the run is being removed is asked again after the first list
    n = feed.store.n_requests
    feed.look(with_page=False)
    assert feed.store.n_requests - n == 1
    assert feed.row.losses != ()


# --- the command


def test_a_warning_that_follows_soon_after_another_one_is_an_event_of_the_page() -> None:
    store = MemoryStore()
    create_run(LaunchRequest.of("train.py:main", n=1), "otter", store, {"backend": "local"})

    def warn(*texts: str) -> None:
        rows = [{"text": text, "at": 1012.0, "last_at": 1013.0, "count": 1} for text in texts]
        store.put(Attempt(store, "otter", 0).key("warnings.json"), to_bytes({"warnings": rows, "left_out": 0}))

    cached = RunStore(store)
    view = RunView(cached, "otter")
    events, found = open_events(view), list[str]()
    for texts in (("a",), ("a", "b"), ("a", "b", "c")):
        warn(*texts)
        cached.begin_look()
        now = view.status(reports=False)
        found += [each.why for each in events.new(view.reader.records.inventory, now) if each.kind == "warning"]
    assert found == ["a", "b", "c"]


def test_an_object_that_a_list_shows_is_read_although_it_did_not_exist_a_moment_ago() -> None:
    store = MemoryStore()
    cached, key = RunStore(store), "otter/metrics/0000/0/000000.jsonl"
    with pytest.raises(KeyNotFoundError):
        cached.get(key)
    store.put(key, b"{}")
    cached.begin_look()
    assert [entry.key for entry in cached.list("otter/metrics/")] == [key]
    assert bytes(cached.get(key)) == b"{}"


def test_ctrl_c_ends_the_command_and_the_address_is_a_json_document(here: HereInstead) -> None:
    command = [*COMMAND, "dashboard", "--port", "0", "--json", "--read-only"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = "".join(iter(process.stdout.readline, "}\n")) + "}"
        made = json.loads(text)
        assert (made["read_only"], f":{made['port']}/?token=" in made["url"]) == (True, True)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "Traceback" not in said
        assert "Ctrl-C ends the dashboard" in said


def test_launch_serves_the_page_of_the_run_until_the_command_ends(here: HereInstead) -> None:
    asked = ("launch", "job:main", "--n", 1, "--run-id", "mine", "--dashboard", *FAST)
    done = here.folder.replicas(*map(str, asked))
    assert done.code == 0, done
    address = next(line for line in done.stdout.splitlines() if line.startswith("Dashboard: ")).split()[1]
    assert "/mine?token=" in address
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", urlsplit(address).port), timeout=5)
    refused = here.replicas("launch", "job:main", "--n", 1, "--dashboard", "--detach")
    assert (refused.code, "Remove --dashboard or --detach" in refused.stderr) == (2, True)
