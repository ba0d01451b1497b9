"""`Masker` hides each kind of credential that the product knows, and keeps what a reader of a run needs."""

from __future__ import annotations

import base64
import json
import pickle
from urllib.parse import quote

import pytest

from executors.masking import MASK, Masker, is_secret_name, looks_secret, masked, secrets_in

SECRET = "pLanted9Value"
RANDOM = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
HEX = "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c"
PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtz\nc2g0\n"
LINES: dict[str, tuple[str, str]] = {
    "a modal token id": ("MODAL_TOKEN_ID=ak-1a2B3c4D5e6F7g8H9i0J1k", "ak-1a2B3c4D5e6F7g8H9i0J1k"),
    "a modal token secret in a sentence": ("uses as-ZyXwVuTsRqPoNmLkJiHgFe now", "as-ZyXwVuTsRqPoNmLkJiHgFe"),
    "an HF token": ("with hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345", "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345"),
    "an AWS key id": ("key AKIAIOSFODNN7EXAMPLE was refused", "AKIAIOSFODNN7EXAMPLE"),
    "an AWS secret by its name": (f"AWS_SECRET_ACCESS_KEY={RANDOM}", RANDOM),
    "an AWS secret alone": (f"credentials {RANDOM} failed", RANDOM),
    "an AWS session token": ('{"SessionToken": "FwoGZXIvYXdzEBYaDNplanted+/0="}', "FwoGZXIvYXdzEBYaDNplanted+/0="),
    "a store URL with a login": (f"s3://me:{SECRET}@bucket/runs", SECRET),
    "a login with a slash in the password": ("s3://me:pla/nted+9@bucket/runs", "pla/nted+9"),
    "a presigned URL": (f"https://b.s3.amazonaws.com/k?X-Amz-Credential=AB{SECRET}&X-Amz-Signature={HEX}&x=1", HEX),
    "the credential of a presigned URL": (f"https://b.example/k?X-Amz-Credential={SECRET}%2F2026&x=1", SECRET),
    "a token in a URL": (f"GET https://api.example.org/v1?access_token={SECRET}&n=3", SECRET),
    "a Slack webhook": (f"https://hooks.slack.com/services/T00AA/B00BB/{SECRET}", SECRET),
    "a Discord webhook": (f"https://discord.com/api/webhooks/123456/{SECRET}", SECRET),
    "an ntfy topic": (f"https://ntfy.sh/{SECRET}", SECRET),
    "an ntfy topic of apprise": (f"sent to ntfy://{SECRET}", SECRET),
    "a Slack URL of apprise": (f"slack://TokenA/TokenB/{SECRET}", SECRET),
    "a Telegram URL of apprise": (f"tgram://123456:{SECRET}/chat", SECRET),
    "a mail URL of apprise": (f"mailtos://me:{SECRET}@example.org", SECRET),
    "a generic webhook": (f"https://example.org/hooks/{SECRET}", SECRET),
    "REPLICAS_NOTIFY": (f"REPLICAS_NOTIFY=https://example.org/a/{SECRET}", SECRET),
    "a run key by its name": (f"REPLICAS_RUN_KEY={HEX}{HEX}", HEX),
    "a run key alone": (f"resume with {HEX}{HEX}", HEX),
    "a Kubernetes token": ("token: eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrOHMifQ.c2lnbmF0", "c2lnbmF0"),
    "a bearer header": (f"Authorization: Bearer {SECRET}", SECRET),
    "a header in a command": (f"curl -H 'Authorization: Token {SECRET}' https://x.org", SECRET),
    "a login of curl": (f"curl -u admin:{SECRET} https://x.org", SECRET),
    "a cookie": (f"Cookie: a=b; session={SECRET}", SECRET),
    "a key header": (f"x-api-key: {SECRET}", SECRET),
    "a wandb key by its name": (f"WANDB_API_KEY: {HEX}", HEX),
    "a wandb key alone": (f"wandb login {HEX}", HEX),
    "an mlflow password": (f"export MLFLOW_TRACKING_PASSWORD='{SECRET}'", SECRET),
    "a trackio token": (f"TRACKIO_WRITE_TOKEN={SECRET}", SECRET),
    "a GitHub token": ("git uses ghp_plantedplantedplanted0123", "ghp_plantedplantedplanted0123"),
    "a fine GitHub token": ("github_pat_11PLANTED0abc_defgh", "github_pat_11PLANTED0abc_defgh"),
    "a token in a git URL": (f"git+https://x-access-token:{SECRET}@github.com/a/b", SECRET),
    "a private key": (f"{PEM}-----END OPENSSH PRIVATE KEY-----", "b3BlbnNzaC1rZXk"),
    "the last line of a private key": (f"{PEM}-----END OPENSSH PRIVATE KEY-----", "c2g0"),
    "a private key without its end": (PEM, "b3BlbnNzaC1rZXk"),
    "a private key on one line": (json.dumps({"x": f"{PEM}-----END OPENSSH PRIVATE KEY-----"}), "c2g0"),
    "a pickle in base64": (base64.b64encode(pickle.dumps({"a": [1, 2] * 30})).decode(), "gASV"),
    "a password in JSON": (json.dumps({"db": {"password": f'a"{SECRET}'}}), SECRET),
    "a password in JSON in JSON": (json.dumps(json.dumps({"password": SECRET})), SECRET),
    "a password in a dict of Python": (str({"password": SECRET, "n": 1}), SECRET),
    "a password in YAML": (f"  db_password: correct {SECRET}", SECRET),
    "a password in an environment file": (f"DB_PASSWORD=ab,cd;{SECRET}", SECRET),
    "a password after a time": (f"2026-11-27 INFO password: correct {SECRET}", SECRET),
    "a password in a call": (f"connect(host='db', password='{SECRET}', port=1)", SECRET),
    "a password in a sentence": (f"my password is {SECRET}", SECRET),
    "a password in netrc": (f"machine example.org login me password {SECRET}", SECRET),
    "a token in a message": (f"ValueError: invalid token '{SECRET}'", SECRET),
    "a pair of a user and a password": (f"get(url, auth=('me', '{SECRET}'))", SECRET),
    "a login of docker": (f"docker login -u me -p {SECRET}", SECRET),
    "a password in XML": (f"<password>{SECRET}</password>", SECRET),
    "an environment of a container": (f"- name: DB_PASSWORD\n  value: {SECRET}", SECRET),
    "a flag with a value": (f"train.py --token {SECRET} --lr 3", SECRET),
    "a flag with an equals sign": (f"train.py --api-key={SECRET} --lr 3", SECRET),
    "a flag in a list": (str(["--password", SECRET, "--lr", "1"]), SECRET),
    "a user and a password in base64": (f"sent {base64.b64encode(b'user:' + SECRET.encode()).decode()}", "dXNlcjp"),
    "a percent-encoded URL": (quote(f"https://me:{SECRET}@host/x", safe=""), SECRET),
    "a percent-encoded assignment": (f"q=password%3D{SECRET}%26x%3D1", SECRET),
    "a URL that is encoded twice": (quote(quote(f"https://me:{SECRET}@host/x", safe=""), safe=""), SECRET),
    "a token in colors": (f"\x1b[31mghp_planted\x1b[0mplanted{SECRET}\x1b[0m", SECRET),
    "a home on Linux": ("/home/alice/train.py", "alice"),
    "a home on macOS": ("file:///Users/alice/runs", "alice"),
    "a home that is encoded": ("path=%2Fhome%2Falice%2Fx", "alice"),
    "a home with a tilde": ("cd ~alice/x", "alice"),
}
KEPT = (
    "run brave-otter-7f3a rank 0 step 300 loss=5.848 tokens=1234 tok/s: 123.4 max_tokens=2048 pad_token_id=0",
    '"task_digest": "67895659c34d2b9b67d66d604b665e888078adbd69fcaec58292d45dd1c1a107"',
    "sha256:67895659c34d2b9b67d66d604b665e888078adbd69fcaec58292d45dd1c1a107",
    "commit b803838fae876eca3fd71551f23ce68e4b5dc174",
    '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1553, in _call_impl',
    "CorruptObjectError: 'otter/replicas/0000/0/outcome.json' in file:///data/runs is damaged",
    "GPU-8f6e1c9a-1b2c-3d4e-5f6a-7b8c9d0e1f2a tcp://10.0.0.1:29500",
    "s3://bucket/runs/brave-otter-7f3a?endpoint_url=https%3A%2F%2Fs3.example.com&region=eu-west-1",
    "model-00001-of-00030.safetensors Qwen2ForCausalLM meta-llama/Llama-3.1-8B-Instruct 2026-11-27T21:31:24.069Z",
    "replicas-brave-otter-7f3a-0-xk2lp MixedPrecisionFSDP2Strategy manylinux1_x86_64.whl",
    "KeyError: 'step' time per token: 0.02 NCCL_SOCKET_IFNAME=eth0 notify_on=end,given_up key: outcome.json",
    "token 3/5 of 9, secret.py, access key is missing",
    "Basic understanding of token embeddings is fine; git@github.com PWD=/data/x",
)


@pytest.mark.parametrize("kind", LINES)
def test_a_credential_is_masked(kind: str) -> None:
    text, secret = LINES[kind]
    hidden = Masker(users=["alice"]).text(f"before\n{text}\nafter 1")
    assert secret not in hidden
    assert MASK in hidden
    assert hidden.endswith("after 1"), "the text behind the secret is lost"


@pytest.mark.parametrize("text", KEPT)
def test_a_text_without_a_secret_stays(text: str) -> None:
    assert Masker(users=["alice"]).text(text) == text


@pytest.mark.parametrize("value", ["correct horse!", "pa$$w0rd/é", "MyPlainWord"])
def test_a_known_value_is_masked_in_each_encoding(value: str) -> None:
    data = value.encode()
    masker = Masker([value])
    for form in (value, quote(value), quote(value, safe=""), data.hex(), json.dumps(value), repr(value)):
        assert form.strip("\"'") not in masker.text(f"x {form} y")
    for before in (b"", b"u:", b"us:"):
        coded = base64.b64encode(before + data + b"?").decode()
        assert MASK in masker.text(f"x {coded} y")
        assert coded[4:-4] not in masker.text(f"x {coded} y")


def test_a_short_known_value_is_masked_as_a_word_only() -> None:
    assert Masker(["abcd", "1", "true"]).text("abcd abcde 1 true") == "*** abcde 1 true"


def test_fields_of_json_are_masked_by_their_names() -> None:
    value = {
        "password": "x", "n": 4, "secrets": ["WANDB"], "list": ["--token", "y", "--lr", "1"], "env": {"DB_PASS": "z"},
        "credential": {"a": ["u", 5]}, "token": None, "pairs": [["argument api_key", "v"], ["n", "4"]],
    }  # fmt: skip
    assert Masker().json(value) == {
        "password": MASK, "n": 4, "secrets": ["WANDB"], "list": ["--token", MASK, "--lr", "1"],
        "env": {"DB_PASS": MASK}, "credential": {"a": [MASK, MASK]}, "token": None,
        "pairs": [["argument api_key", MASK], ["n", "4"]],
    }  # fmt: skip
    kubernetes = {"name": "API_TOKEN", "value": SECRET}
    assert Masker().json([kubernetes]) == [{"name": "API_TOKEN", "value": MASK}]


def test_a_digest_that_a_record_names_is_kept_in_later_texts() -> None:
    masker = Masker()
    assert masker.text(f"see {HEX}") == f"see {MASK}"
    masker.json({"callable_sha256": HEX})
    assert masker.text(f"see {HEX}") == f"see {HEX}"


@pytest.mark.parametrize("name", ["../../etc/passwd", "/abs", "a/./b", "a\0b\n", "..", f"x/ghp_{SECRET}.json"])
def test_the_name_of_a_file_stays_in_its_folder_and_has_no_secret(name: str) -> None:
    made = Masker().name(name)
    assert not {"", ".", ".."} & {*made.lstrip("/").split("/")}
    assert SECRET not in made
    assert made.isprintable()


def test_the_secrets_of_an_environment_are_values_of_secret_names_and_of_given_names() -> None:
    environ = {"WANDB_API_KEY": "k1k1k1k1", "MODE": "quiet-one", "PATH": "/bin", "REPLICAS_NOTIFY": f"a://b/{SECRET}"}
    found = secrets_in(environ, ["MODE"])
    assert {"k1k1k1k1", "quiet-one", SECRET} <= {*found}
    assert "/bin" not in found


def test_names_say_whether_their_values_are_secrets() -> None:
    secret = ("password", "DB_PASS", "clientSecret", "HF_TOKEN", "api-key", "Set-Cookie", "REPLICAS_RUN_KEY", "FOO_KEY")
    plain = ("key", "tokens", "pad_token", "max_tokens", "sort_key", "notify_on", "secrets", "digest", "compass")
    assert [name for name in secret if not is_secret_name(name)] == []
    assert [name for name in plain if is_secret_name(name)] == []
    assert looks_secret("hf_is_0123456789abcdefghijk")
    assert not looks_secret("wandb-of-the-team")


def test_values_of_variables_are_masked_except_those_of_the_project() -> None:
    assert masked({"API_KEY": "secret", "REPLICA_RANK": "0"}) == {"API_KEY": MASK, "REPLICA_RANK": "0"}
