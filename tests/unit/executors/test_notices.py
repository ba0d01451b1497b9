"""Notifications: the URLs that are accepted, the events that are notices, and one message for each event."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.webhooks import Webhook, webhook

from executors.attempt import Attempt
from executors.errors import MissingDependencyError, StoreError
from executors.notices.notifier import Notifier, NotifierSpec
from executors.notices.outbox import DEAD_S, MINUTE_S, Outbox
from executors.notices.reader import NoticeReader, wanted
from executors.notices.sender import SendError, send_once, send_to_all
from executors.notices.targets import resolve_targets
from executors.protocol import ReplicaStatus
from executors.restarts.decision_log import Decision, DecisionLog
from executors.settings import Settings
from executors.settings.notify import KINDS, parse_kinds
from executors.settings.rule_finding import BROKEN, UNJUDGED, RuleFinding
from executors.settings.run_spec import RunSpec
from executors.store import MemoryStore, open_store
from executors.supervisor.round_watch import RoundWatch
from executors.task.create import create_run
from executors.task.launch_request import LaunchRequest
from executors.task.notice_record import Notice, NoticeClaim, notice_key, parse_name, read_failures
from executors.task.record import Placement, RunRecord
from executors.testing import eventually

SECRET = "s3cret-Token-4711"
GIVEN_UP = Notice(id="given_up-3", kind="given_up", text="rank 3 given up: why", rank=3, at=1000.0)


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as found:
        yield found


# The URLs


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"http://example.org/{SECRET}", "unencrypted"),
        (f"example.org/{SECRET}", "is not a URL"),
        ("", "is not a URL"),
        (f"htps://example.org/{SECRET}", "Did you mean 'https'"),
        (f"https:///{SECRET}", "names no host"),
        (f"https://example.org:{SECRET}/", "no valid host or port"),
        (f"http://127.0.0.1.example.org/{SECRET}", "unencrypted"),
        (f"http://localhost.example.org/{SECRET}", "unencrypted"),
        ("env:NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE"),
        ("file:/no/such/file", "/no/such/file"),
    ],
)
def test_a_url_to_which_nothing_can_be_sent_is_refused_and_not_repeated(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        resolve_targets([url])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080/x", "http://localhost/x", "http://[::1]/x", "https://a.b/c"])
def test_https_and_this_machine_are_accepted(url: str) -> None:
    assert resolve_targets([url, url]) == (url,)


def test_urls_come_from_variables_and_files(tmp_path: Path) -> None:
    (tmp_path / "urls").write_text("# mine\nhttps://a.b/1\n\n https://a.b/2\n")
    given = ["env:HOOKS", f"file:{tmp_path}/urls"]
    assert resolve_targets(given, {"HOOKS": "https://a.b/0 https://a.b/1"}) == (
        *("https://a.b/0", "https://a.b/1"),
        "https://a.b/2",
    )


def test_other_urls_are_refused_with_the_install_line_without_apprise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "executors.notices.with_apprise", raising=False)
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(
        MissingDependencyError, match=r"need the package apprise .*Install it with: pip install"
    ) as caught:
        resolve_targets([f"slack://{SECRET}/x"])
    assert SECRET not in str(caught.value)


def test_apprise_checks_its_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("apprise")
    assert resolve_targets(["json://127.0.0.1:1/x"]) == ("json://127.0.0.1:1/x",)
    for url, words in ((f"slak://{SECRET}", "Did you mean 'slack'"), (f"slack://{SECRET}", "lacks a part")):
        with pytest.raises(ValueError, match=words) as caught:
            resolve_targets([url])
        assert SECRET not in str(caught.value)


def test_an_unknown_event_is_refused_with_the_nearest_name() -> None:
    assert parse_kinds("end, given-up,end") == ("end", "given_up")
    with pytest.raises(ValueError, match=r"No event 'hng'\. Did you mean 'hang'\?"):
        Settings.of(n=1, notify_on="end,hng")
    assert Settings.of(n=1, notify_on=["end", "hang"]).notify_on == "end,hang"


def test_a_spec_shows_no_url() -> None:
    spec = RunSpec("otter", "memory:", "0" * 64, Settings(n=1), (0,), notify=(f"https://a.b/{SECRET}",))
    assert SECRET not in repr(spec)
    assert RunSpec.from_json(spec.to_json()) == spec
    assert spec.without_notify().notify == ()
    assert spec.credentials == {}
    assert spec.container_secrets == {"REPLICAS_NOTIFY": f"https://a.b/{SECRET}"}


# Sending


def test_a_name_and_a_password_in_a_url_are_a_login_with_their_reserved_characters(hook: Webhook) -> None:
    send_once(hook.url.replace("://", "://ada:p%40ss%3Aw@"), {"kind": "end"})
    assert [base64.b64decode(login.removeprefix("Basic ")) for login in hook.logins] == [b"ada:p@ss:w"]


def test_a_message_is_json_by_post(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a proxy never gets a message for this machine
    assert send_to_all([hook.url], {"kind": "end", "text": "ü"}) == []
    assert hook.messages == [{"kind": "end", "text": "ü"}]
    assert hook.requests == [("POST", "/hooks/s3cret-path")]


@pytest.mark.parametrize(
    ("answer", "words"),
    [("500", "it answers HTTP 500"), ("close", "disconnected"), ("hang", "no answer in 0.2 s"), ("404", "HTTP 404")],
)
def test_a_service_that_misbehaves_is_described_without_the_url(hook: Webhook, answer: str, words: str) -> None:
    hook.always = answer
    with pytest.raises(SendError, match=words) as caught:
        send_once(hook.url, {}, timeout_s=0.2)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_a_redirect_is_not_followed(hook: Webhook) -> None:
    with webhook() as other:
        hook.always = f"redirect {other.url}"
        (failure,) = send_to_all([hook.url], {})
        assert "redirect (HTTP 307), which is not followed" in failure
        assert (len(hook.requests), other.requests) == (1, [])


def test_a_service_that_recovers_gets_the_message(hook: Webhook) -> None:
    hook.answers = ["500", "close"]
    assert send_to_all([hook.url], {"kind": "end"}) == []
    assert hook.kinds() == ["end"]


def test_a_message_goes_through_apprise() -> None:
    pytest.importorskip("apprise")
    with webhook() as hook:
        url = hook.url.replace("http://", "json://")
        with contextlib.suppress(KeyError):  # the server expects our own document
            assert send_to_all([url], {"title": "otter: end", "text": "The run has succeeded."}) == []
        assert hook.messages[0]["title"] == "otter: end"


# One message for each event


class Box:
    """An outbox with a clock of the test, whose messages arrive in a list."""

    def __init__(self, store: MemoryStore) -> None:
        self.sent: list[dict[str, Any]] = []
        self.fails = False
        self.at = 10_000.0
        self.outbox = Outbox(store, "otter", self._send, clock=lambda: self.at, now=lambda: self.at)

    def _send(self, document: Any) -> list[str]:
        self.sent.append(dict(document))
        return ["notification URL 1 of 1 (https): it answers HTTP 500"] if self.fails else []

    def advance(self, *notices: Notice, is_last: bool = False) -> Sequence[str]:
        """Offer notices, and work until nothing is being sent. Return the events of all messages so far."""
        self.outbox.offer(notices)

        def is_done() -> bool:
            self.outbox.advance(is_last=is_last)
            return not self.outbox._sending

        eventually(is_done, "all messages are sent")
        return [each["event"] for each in self.sent]


def test_of_two_processes_that_see_an_event_one_sends_it() -> None:
    store = MemoryStore()
    first, second = Box(store), Box(store)
    assert first.advance(GIVEN_UP) == ["given_up-3"]
    assert second.advance(GIVEN_UP) == []
    assert first.advance(GIVEN_UP) == ["given_up-3"]
    assert first.outbox.is_idle
    assert second.outbox.is_idle


def claim_by(process: str) -> NoticeClaim:
    about: Any = {"id": GIVEN_UP.id, "kind": "given_up", "text": GIVEN_UP.text, "rank": 3, "at": 1000.0}
    return NoticeClaim(**about, claimed_at=9_000.0, by="elsewhere:1", process=process)


def test_a_claim_of_another_machine_without_a_result_is_sent_again_after_a_minute() -> None:
    store, elsewhere = MemoryStore(), "another-machine boot pid:[1] 17 4711"
    store.put_if_absent(notice_key(store.url, "otter", GIVEN_UP.id), claim_by(elsewhere).to_bytes())
    box = Box(store)
    assert box.advance(GIVEN_UP) == []
    box.at += DEAD_S - 1
    assert box.advance() == []
    box.at += 2
    assert box.advance() == ["given_up-3"]
    assert box.sent[0]["text"] == GIVEN_UP.text


def test_a_claim_whose_sender_is_known_to_have_ended_is_sent_again_at_once() -> None:
    from executors.process import identify_process, this_machine

    store = MemoryStore()
    gone = f"{this_machine()} {os.getpid()} 1"  # another start time: an earlier process of this number
    assert gone != identify_process()
    store.put_if_absent(notice_key(store.url, "otter", GIVEN_UP.id), claim_by(gone).to_bytes())
    first, second = Box(store), Box(store)
    assert [first.advance(GIVEN_UP), second.advance(GIVEN_UP)] == [["given_up-3"], []]


def test_a_rank_gets_one_message_a_minute_and_the_next_one_counts_the_others() -> None:
    box = Box(MemoryStore())
    hangs = [
        Notice(id=f"hang-3-{number}", kind="hang", text=f"hang {number}", rank=3, attempt=number, at=1000.0 + number)
        for number in range(3)
    ]
    other = Notice(id="hang-4-0", kind="hang", text="hang of rank 4", rank=4, at=1000.0)
    assert box.advance(hangs[0], other) == ["hang-3-0", "hang-4-0"]
    box.at += 10
    assert box.advance(*hangs[1:]) == ["hang-3-0", "hang-4-0"]
    box.at += MINUTE_S
    assert box.advance() == ["hang-3-0", "hang-4-0", "hang-3-2"]
    assert (box.sent[-1]["left_out"], box.sent[-1]["text"]) == (
        *(1, "hang 2 And 1 more event since the last message: 1 hang."),
    )
    assert box.outbox.is_idle


def test_the_end_of_the_run_waits_for_no_minute_and_counts_what_waits() -> None:
    store = MemoryStore()
    box = Box(store)
    end = Notice(id="end-0", kind="end", text="The run has failed.", at=1002.0)
    hang = Notice(id="hang-3-0", kind="hang", text="a hang", rank=3, at=1001.0)
    assert box.advance(GIVEN_UP) == ["given_up-3"]
    assert box.advance(hang, end) == ["given_up-3", "end-0"]
    assert box.sent[-1]["left_out"] == 1
    assert Box(store).advance(GIVEN_UP, hang, end) == []


class Overtaking(MemoryStore):
    """A store in which another process claims a notice just before the claim of the end is created."""

    def put_if_absent(self, key: str, data: Any) -> bool:
        if key == notice_key(self.url, "otter", "end-0"):
            claim = claim_by("another-machine boot pid:[1] 17 4711")
            super().put_if_absent(notice_key(self.url, "otter", GIVEN_UP.id), claim.to_bytes())
        return super().put_if_absent(key, data)


def test_the_end_does_not_count_a_notice_for_which_another_process_just_sends_a_message() -> None:
    box = Box(Overtaking())
    hang = Notice(id="hang-3-0", kind="hang", text="a hang", rank=3, at=1001.0)
    assert box.advance(hang) == ["hang-3-0"]
    end = Notice(id="end-0", kind="end", text="The run has failed.", at=1002.0)
    assert box.advance(end, GIVEN_UP) == ["hang-3-0", "end-0"]
    assert (box.sent[-1]["left_out"], box.sent[-1]["text"]) == (0, "The run has failed.")


def test_a_notification_that_fails_is_a_warning_and_is_not_sent_again() -> None:
    store = MemoryStore()
    box = Box(store)
    box.fails = True
    assert box.advance(GIVEN_UP) == ["given_up-3"]
    ((notice_id, result),) = read_failures(store, "otter")
    assert (notice_id, result.failures) == ("given_up-3", ("notification URL 1 of 1 (https): it answers HTTP 500",))
    assert Box(store).advance(GIVEN_UP) == []


def test_a_notice_whose_senders_all_died_is_a_warning_after_two_minutes() -> None:
    store = MemoryStore()
    store.put_if_absent(
        notice_key(store.url, "otter", GIVEN_UP.id), claim_by("another boot pid:[1] 17 4711").to_bytes()
    )
    assert read_failures(store, "otter", now=9_100.0) == []
    ((notice_id, result),) = read_failures(store, "otter", now=9_200.0)
    assert (notice_id, result.failures) == (
        *("given_up-3", ("Its sender elsewhere:1 ended before the service confirmed it",)),
    )


class LosesReplies(MemoryStore):
    """Creates the object, and then fails as if the reply was lost."""

    n_lost = 1

    def put_if_absent(self, key: str, data: Any) -> bool:
        created = super().put_if_absent(key, data)
        if self.n_lost:
            self.n_lost -= 1
            raise StoreError("the reply was lost")
        return created


def test_a_claim_whose_reply_was_lost_is_sent_by_its_own_process() -> None:
    box = Box(LosesReplies())
    with pytest.raises(StoreError):
        box.advance(GIVEN_UP)
    assert box.advance(GIVEN_UP) == ["given_up-3"]


@given(st.from_regex(r"[a-z0-9_-]{1,60}", fullmatch=True), st.integers(0, 99), st.booleans())
def test_a_key_has_one_meaning(notice_id: str, number: int, is_result: bool) -> None:
    number = 0 if is_result else number
    key = notice_key("memory:", "otter", notice_id, number, sent=is_result)
    assert parse_name("memory:", "otter", key) == (notice_id, number, is_result)


# The events that are notices


def record_of(n: int = 2, **settings: Any) -> RunRecord:
    return RunRecord(
        entrypoint="train.py:main",
        settings=Settings.of(n=n, **settings),
        placements=(Placement(backend="local", ranks=tuple(range(n))),),
        task_digest="0" * 64,
        created_at=1000.0,
        created_by="me",
        python="3.11",
    )


def end(store: MemoryStore, rank: int, reason: Any = None, attempt: int = 0, **more: Any) -> None:
    status = ReplicaStatus.SUCCEEDED if reason is None else ReplicaStatus.FAILED
    its = Attempt(store, "otter", rank, attempt)
    its.record(its.new_outcome(status, reason, finished_at=1100.0, started_at=1050.0, **more))


def found(store: MemoryStore, record: RunRecord, now: float = 1200.0) -> dict[str, Notice]:
    return {each.id: each for each in NoticeReader(store, "otter", record, now=lambda: now).look()}


def test_a_run_has_ended_when_nothing_leads_to_a_further_attempt() -> None:
    store, record = MemoryStore(), record_of(restarts="1")
    assert found(store, record) == {}
    end(store, 0, reported={"loss": 2.5})
    end(store, 1, "signal")
    assert found(store, record) == {}, "the policy restarts rank 1"
    log = DecisionLog(store, "otter")
    log.append(lambda _: Decision(kind="restart", rank=1, ended=0, start={1: 1}, charged=True, at=1101.0))
    assert [*found(store, record)] == ["budget-restarts-1-0"]
    end(store, 1, "signal", attempt=1, error="it was killed")
    log.append(lambda _: Decision(kind="give_up", rank=1, ended=1, why="budget", words="signal", at=1102.0))
    notices = found(store, record)
    assert [*notices] == ["end-0", "budget-restarts-1-0", "given_up-1"]
    text = notices["end-0"].text
    assert "The run has failed after 1:40: 1 failed, 1 succeeded." in text
    assert "Last loss: 2.5." in text
    assert "Rank 1: it was killed" in text
    log.append(lambda _: Decision(kind="resume", start={1: 2}, at=1110.0))
    assert "end-1" not in found(store, record), "the resumed attempt has not ended"
    end(store, 1, attempt=2)
    assert "The run has succeeded" in found(store, record)["end-1"].text


def test_a_hang_that_was_ended_is_a_notice() -> None:
    store = MemoryStore()
    end(store, 1, "hang", error="Replica 1 of 2 was idle for 61 s after step 8 (limit 60 s).")
    notice = found(store, record_of())["hang-1-0"]
    assert (notice.kind, notice.rank, notice.attempt) == ("hang", 1, 0)
    assert "was idle for 61 s" in notice.text


def test_a_broken_rule_is_a_notice_of_its_attempt_and_an_unjudged_one_is_one_notice_of_the_run() -> None:
    store = MemoryStore()

    def put(verdict: str, rank: int, attempt: int = 0, **more: Any) -> None:
        fields: Any = {"rule": "loss > 8", "evidence": "loss is 9 in report 3", "action": "stop", "at": 1100.0, **more}
        found = RuleFinding(rank=rank, attempt=attempt, index=4, verdict=verdict, **fields)
        store.put(Attempt(store, "otter", rank, attempt).key(found.name), found.to_bytes())

    for rank in range(2):
        put(BROKEN, rank)
        put(BROKEN, rank, 1)
        put(UNJUDGED, rank, rule="los > 8", evidence="'los' was not reported \x1b[31m")
    put(UNJUDGED, 0, 1, rule="lost > 8", evidence="'lost' was not reported")  # a resume gave other rules
    store.put("otter/replicas/0000/2/rules/4.json", b"[]")
    notices = found(store, record_of())
    assert sorted(notices)[:4] == ["rule-0-0-4", "rule-0-1-4", "rule-1-0-4", "rule-1-1-4"]
    assert {each.kind for each in notices.values()} == {"rule"}
    assert notices["rule-1-0-4"].text == "Rank 1: The rule 'loss > 8' is broken: loss is 9 in report 3."
    assert sorted(each.text for name, each in notices.items() if name.startswith("rule-unjudged-")) == [
        "Rank 0: The rule 'los > 8' cannot be judged: 'los' was not reported  [31m.",
        "Rank 0: The rule 'lost > 8' cannot be judged: 'lost' was not reported.",
    ]


def test_eighty_percent_of_each_budget_is_a_notice() -> None:
    store = MemoryStore()
    record = record_of(restarts="5,run=10,within=1000s")
    assert found(store, record, now=1799.0) == {}
    assert [*found(store, record, now=1801.0)] == ["budget-within"]
    paid = record_of(max_cost=10.0, timeout=100.0)
    end(store, 0)
    assert found(store, paid) == {}, "50 of 200 paid seconds"
    its = Attempt(store, "otter", 1)
    its.record(its.new_outcome(ReplicaStatus.SUCCEEDED, finished_at=1200.0, started_at=1070.0))
    assert found(store, paid)["budget-cost"].text == "About 9.00 of at most 10.00 US dollars are used."


def test_the_cost_counts_an_attempt_whose_claim_the_store_did_not_return_at_first() -> None:
    class FailsOnce(MemoryStore):
        has_failed = False

        def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
            if key.endswith("started.json") and not self.has_failed:
                self.has_failed = True
                raise StoreError("The store does not answer.", key=key, url=self.url)
            return super().get(key, start=start, size=size)

    store, paid = FailsOnce(), record_of(max_cost=10.0, timeout=100.0)
    store.put(Attempt(store, "otter", 0).key("started.json"), b'{"nonce": "n", "at": 1000.0, "host": "h"}')
    reader = NoticeReader(store, "otter", paid, now=lambda: 1180.0)
    assert [[each.id for each in reader.look()], [each.id for each in reader.look()]] == [[], ["budget-cost"]]


def test_a_run_without_a_restart_policy_ends_with_its_last_rank() -> None:
    store = MemoryStore()
    end(store, 0, "exception", error="ValueError: boom")
    assert found(store, record_of()) == {}
    end(store, 1, "exception", error="ValueError: boom")
    assert [*found(store, record_of())] == ["end-0"]


def test_only_the_wanted_kinds_are_sent() -> None:
    assert wanted([GIVEN_UP], ["end"]) == []
    assert wanted([GIVEN_UP], ["given_up"]) == [GIVEN_UP] == wanted([GIVEN_UP], [*KINDS])


def test_no_round_for_five_times_the_usual_time_is_one_notice() -> None:
    watch, nan = RoundWatch(least_s=10.0), float("nan")
    told = [watch.note([float(second // 10), nan], second, 0.0) for second in range(60)]
    assert told == [None] * 60
    assert watch.note([5.0, nan], 99, 0.0) is None
    notice = watch.note([5.0, nan], 101, 0.0)
    assert notice is not None
    assert (notice.id, notice.text) == (
        "no_round-5",
        "No round has come for 51 s after round 5. The usual time is 10 s.",
    )
    assert watch.note([5.0, nan], 500, 0.0) is None, "it was reported"
    assert watch.note([], 600, 0.0) is None


def notifier_of_an_ended_run(hook: Webhook, folder: Path) -> Notifier:
    """Return a notifier whose process has started, of a run that has ended."""
    store = open_store(folder / "runs")
    create_run(LaunchRequest.of("train.py:main", n=1), "otter", store, {"backend": "local"})
    attempt = Attempt(store, "otter", 0)
    attempt.record(attempt.new_outcome(ReplicaStatus.SUCCEEDED, finished_at=1000.0))
    notifier = Notifier(NotifierSpec(store.url, "otter", (hook.url,)))
    notifier.start()
    return notifier


def test_a_sender_that_is_killed_while_its_starter_waits_for_it_is_started_again(hook: Webhook, tmp_path: Path) -> None:
    notifier = notifier_of_an_ended_run(hook, tmp_path)
    notifier.close()
    assert notifier.pid is not None
    os.kill(notifier.pid, signal.SIGKILL)
    notifier.wait(60)
    assert hook.of("end")["event"] == "end-0"


def test_the_last_line_starts_a_sender_again_that_has_just_died(hook: Webhook, tmp_path: Path) -> None:
    notifier = notifier_of_an_ended_run(hook, tmp_path)
    assert notifier.pid is not None
    os.kill(notifier.pid, signal.SIGKILL)
    os.waitpid(notifier.pid, 0)
    notifier.close()
    assert hook.of("end")["event"] == "end-0"
    notifier.wait(60)
