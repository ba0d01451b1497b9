"""Masks secrets in texts: the only file that decides which part of a text may be shown or given to another person.

`Masker` masks a text, a JSON value or the name of a file. A value is a secret if this process knows it as one, or if
its name shows it (`password=…`). A value is also a secret if it has the form of a credential (`hf_…`, a webhook), or is
a long random text. A random text may also be a digest, which helps a reader. So digests of runs are kept if their name
or a record shows that they are digests.

`masked` masks the values of environment variables in a request that is shown.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

MASK = "***"
"""The replacement for a value that must not be shown."""
MAX_LEARNED = 200  # values that fields of records name as secrets
MAX_ROUNDS = 3  # layers of percent encoding that are undone
MAX_TOKEN = 8192  # characters of one encoded text
SHORT, LEAST = 8, 4  # characters: shorter known values are masked as whole words only, and the shortest not at all

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?)")
"""Colors, cursor movements and titles. They may be within a secret, so they are removed first."""
_HARMLESS_WORDS = (
    "none null true false yes no on off auto local env file default unset undefined empty debug info warning "
    "error warn cuda cpu gpu online offline disabled enabled required optional missing invalid"
)
HARMLESS = frozenset(_HARMLESS_WORDS.split())
"""Values that are not secrets, whatever their name is."""

# --- names

# The end of a name whose value is a secret, in lower case and without "-", "_", "." and blanks.
_NAME_END = re.compile(
    r"(?:passwords?|passwd|passphrase|passcode|pwd|secret|secretvalue|token|tokenid|tokensecret|bearer|credentials?|"
    r"(?:api|access|secret|private|signing|sign|ssh|encryption|auth|run|account|storage|license|master|service|deploy|"
    r"shared|wandb|hf|app|user|webhook|server|client|consumer|integration|write|ingest|project|session|host)key"
    r"(?:id|secret|base64|pem)?|signature|authorization|proxyauthorization|setcookie|cookies?|webhook(?:url)?|"
    r"connectionstring|dsn|jwt|otp|totp|mfa|sessionid|csrf|xsrf|notify|replicasnotify|securitytoken|kubeconfig|"
    r"clientsecret|refresh|pat|netrc)"
)
_SHORT_NAMES_WORDS = "pass pw auth sig sas pin creds key apikey passw salt"
_SHORT_NAMES = frozenset(_SHORT_NAMES_WORDS.split())
"""Names that are secret as whole words, or after a separator, as in `db_pass`."""
_NOT_SECRET = re.compile(
    r"(?:(?<![A-Za-z])(?:pad|eos|bos|unk|sep|cls|mask|special|next|last|image|video|audio|per|each|stop|begin|end|decoder_start|"
    r"forced_bos|forced_eos|n|num|max|min|sort|group|primary|foreign|cache|dict|state|partition|lookup|object|"
    r"index|column|param|public|task|digest|count)[_.-]?)(?:token|key|tokenid|token_id)$|^key$|notify_?on$|"
    r"^OLDPWD$",
    re.IGNORECASE,
)
_COUNTED = re.compile(r"(?:token|tokenid|refresh|pat|otp|pin|pass|key|auth|sig|salt|sessionid|signature)$")
"""Names that numbers may have, too, as in "time per token"."""
_ENV_KEY = re.compile(r"[A-Z][A-Z0-9_]*_KEY")
_SEPARATORS = re.compile(r"[\s_.\-]+")


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return True if a name says that its value is a secret, as `WANDB_API_KEY` and `clientSecret` do.

    Args:
        name: the name of a variable, an option, a field or a header.

    Example:
        is_secret_name("AWS_SECRET_ACCESS_KEY")  # True
    """
    name = name.strip()
    if not name or _NOT_SECRET.search(name):
        return False
    parts = _SEPARATORS.split(name.lstrip("-$"))
    joined = "".join(parts).lower()
    if parts[-1].lower() in _SHORT_NAMES and (len(parts) > 1 or joined != "key"):
        return parts[-1].lower() != "key" or _ENV_KEY.fullmatch(name) is not None or is_secret_name("".join(parts))
    found = [match.end() for match in _NAME_END.finditer(joined)]
    return bool(found) and found[-1] == len(joined)


def is_credential_name(name: str) -> bool:
    """Return True if a word in a name belongs to credentials. `is_secret_name` looks at the end of a name only.

    Args:
        name: the name of an option.

    Example:
        is_credential_name("aws_access_key_id")  # True
    """
    words = ("key", "secret", "token", "password", "credential", "signature")
    return any(word in name.lower() for word in words)


# --- forms of credentials

_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,60}-----")
MAX_PEM = 1 << 16  # characters of a key between its begin and its end
_PEM_REST = re.compile(r"(?:(?:\r?\n|\\n| )(?:\[\d{1,4}\] )?[A-Za-z0-9+/=]{1,100}+(?=\r?\n|\\n|[ \"']|$))*+")
_PEM_END = re.compile(
    r"(?:^(?:\[\d{1,4}\] )?[A-Za-z0-9+/=]{1,80}[ \t\r]*\n){1,2000}(?=(?:\[\d{1,4}\] )?-----END )", re.MULTILINE
)
_BLOCK = re.compile(
    r"(?m)^(?:(?:\[\d{1,4}\] )?[A-Za-z0-9+/_-]{60,100}\r?\n)+(?:\[\d{1,4}\] )?[A-Za-z0-9+/_-]{1,100}={0,2}[ \t\r]*$"
)
"""A value in base64 over several lines. Its last line may be too short to be known as random."""

_SAFE_SCHEMES_WORDS = (
    "http https ws wss file s3 s3a gs gcs az abfs abfss wasbs hf hdfs memory tcp tcp4 tcp6 udp grpc grpcs ray "
    "redis rediss postgres postgresql mysql mariadb mssql oracle mongodb mongodb+srv amqp amqps kafka nats mqtt "
    "mqtts ldap ldaps ssh sftp ftp ftps git git+https git+http git+ssh git+file hg+https svn sqlite ipc unix "
    "inproc zmq env mlflow-artifacts models runs dbfs wandb-artifact docker oci k8s about chrome data clickhouse "
    "elasticsearch jdbc dask nccl ucx slurm modal vscode torch pkg socks5 socks5h socks4"
)
_SAFE_SCHEMES = frozenset(_SAFE_SCHEMES_WORDS.split())
"""Schemes whose URLs are addresses. All of a URL with another scheme is a password, as the package apprise has it."""
_URL = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]{1,30})(://|:\\/\\/)([^\s\"'<>`|\\]{1,8192})")
_LOGIN_WITH_SLASH = re.compile(r"[^/:@]+:(?!\d{1,5}(?:[/?#]|$))[^@]*@")
_PARAMETER = re.compile(r"([?&;#]|&amp;)([A-Za-z0-9_.\[\]%-]{1,80})=([^&#\s;]*)")
_SIGNED_PARAMETER = re.compile(
    r"x-(?:amz|goog|oss|cos|obs|ms)-.*|sig|signature|awsaccesskeyid|googleaccessid|policy|key-pair-id|expires|se|sp|"
    r"sv|sr|spr|skoid|sktid|code|state|key|k|t|auth|ticket|otp|hmac|hash|nonce|login|user|username",
    re.IGNORECASE,
)
_HOOK = re.compile(
    r"(?i)^[^/]*(?:hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks|"
    r"ntfy\.[a-z.]+|api\.telegram\.org|hc-ping\.com|[a-z0-9.-]*webhook\.office\.com|[a-z0-9.-]*logic\.azure\.com|"
    r"chat\.googleapis\.com/v1/spaces|hooks\.zapier\.com|maker\.ifttt\.com|api\.pushover\.net|api\.pushbullet\.com|"
    r"open\.(?:feishu|larksuite)\.[a-z]+|oapi\.dingtalk\.com|qyapi\.weixin\.qq\.com|webhook\.site|"
    r"[a-z0-9.-]*ingest\.[a-z.]*sentry\.io|hooks?\.[a-z0-9.-]+)"
)
_HOOK_IN_PATH = re.compile(r"(?i)/(?:[a-z0-9_-]*hooks?|services/T[A-Z0-9]{6,}|bot(?=\d))(?=[/:\d])/?")

_PREFIXED = re.compile(
    r"gh[pousr]_[A-Za-z0-9_]{6,}|github_pat_\w{6,}|glpat-[\w-]{6,}|gl[a-z]{2,5}-[\w-]{20,}|xox[a-z]{1,2}-[\w.-]{6,}|"
    r"xapp-[\w-]{6,}|A(?:KIA|SIA|ROA|IDA|GPA|NPA|BIA|CCA)[A-Z0-9]{12,}|AIza[\w-]{20,}|ya29\.[\w-]{10,}|"
    r"eyJ[\w-]{8,}(?:\.[\w-]*){0,4}|npm_\w{20,}|pypi-[\w-]{16,}|dop_v1_\w{10,}|SG\.[\w-]{10,}(?:\.[\w-]*)?|"
    r"nvapi-[\w-]{10,}|hv[sbr]\.[\w-]{10,}|dckr_(?:pat|oat)_[\w-]{6,}|shp(?:at|ca|pa|ss)_\w{10,}|sq0[a-z]{3}-[\w-]{10,}|"
    r"PMAK-[\w-]{10,}|glsa_\w{10,}|sntry[su]_[\w=+/-]{10,}|pcsk_\w{10,}|tgp_v1_[\w-]{10,}|lin_api_\w{10,}|"
    r"AGE-SECRET-KEY-\w{10,}|wandb_v\d_\w{10,}|local-[0-9a-f]{32,}|(?:sk|rk|pk)_(?:live|test)_\w{6,}|"
    r"whsec_[\w+/=]{6,}|EAAC\w{10,}|\d{6,12}:AA[\w-]{20,}|[MNO][\w-]{22,28}\.[\w-]{5,7}\.[\w-]{25,}|"
    r"AQo[A-Za-z]{2,4}[\w+/=]{16,}|(?:Fwo|IQo)[A-Za-z]{2,4}[\w+/=]{16,}|gAS?[WV]\w{2}[\w+/=]{8,}|"
    r"\$(?:2[aby]|5|6|argon2\w{0,2}|y)\$[\w./$=,+-]{10,}"
)
_WORD_PREFIXED = re.compile(
    r"(?<![A-Za-z0-9_-])(?:hf_[A-Za-z0-9]{8,}|api_org_[A-Za-z0-9]{8,}|(?:ak|as|wk|ws)-[A-Za-z0-9]{8,}|"
    r"(?:sk|rk|xai|gsk|fw|r8|rpa|tvly|jina|secret|ntn|key|tok|pat|ops|hvb)[-_](?=[\w-]*\d)[A-Za-z0-9_-]{12,}|"
    r"sk-(?:ant|proj|or|svcacct)-[\w-]{6,}|s\.[A-Za-z0-9]{24,})"
)
_SCHEME_WORD = re.compile(
    r"(?i)\b(bearer|basic|negotiate|digest|apikey|token|bot|key|aws4-hmac-sha256)[ \t]+((?:credential=)?"
    r"[A-Za-z0-9._~+/:=-]{4,}(?:,[ \t]*[A-Za-z]+=[^\s,\"']+)*)"
)
_SPOKEN = re.compile(
    r"(?i)\b(passwords?|passphrase|secrets?|tokens?|api[ _-]?keys?|credentials?|pin|key)[ \t]+(?:is|was|are|set to|=>?)"
    r"[ \t]+([\"'`]?)([^\s\"'`]{4,})"
)
_BESIDE = re.compile(
    r"(?i)(?:\b|_)(passwords?|passwd|passphrase|secret|token|api[ _-]?key|access[ _-]?key)[ \t]+"
    r"(\\*[\"'`]?)([^\s\"'`\\]{5,})"
)
"""A secret behind its name, as in netrc and in messages of errors. The value shows whether it is a word."""
_ODD = re.compile(r"(?=.*[A-Za-z])(?:.*\d|.*[a-z][A-Z]|.*[!#$%^&*+?~])")
_SPACED_NAME = re.compile(
    r"(?i)\b(?:api|access|secret|private|signing|auth|run|account)[ \t](?:key|token|secret)(?:[ \t]id)?[\"']?[ \t]*[:=]"
    r"[ \t]*"
)
_PAIR = re.compile(
    r"(?<![A-Za-z0-9_.\-])([A-Za-z0-9_.\-]{2,120}+)(\\*[\"'`]?[\])]?[ \t]{0,16}(?:=>|:=|[:=])[ \t]{0,16})"
)
_FLAG = re.compile(r"(?<![A-Za-z0-9])(--?[A-Za-z][A-Za-z0-9_.-]{1,80}+)(\\*[\"']?(?:,[ \t\r\n]*|[ \t]+)\\*(?=[^\s-]))")
_LOGIN_FLAG = re.compile(r"((?<![\w-])(?:-u|--user|--proxy-user)(?:[ \t]+|=)[\"']?[^\s:\"']{1,80}:)([^\s\"']+)")
_SSHPASS = re.compile(
    r"(\bsshpass[ \t]+-p[ \t]*|\b(?:docker|podman|skopeo|az)[ \t]+login\b[^\n]{0,200}?[ \t]-p[ \t]+|"
    r"\bmysql[^\n]{0,80}?[ \t]-p(?=\S))(\S+)"
)
_NAME_AND_VALUE = re.compile(
    r"\b(?:name|key)\\*[\"']?[ \t]*[:=][ \t]*\\*[\"']?([A-Za-z0-9_.\-]{2,120}+)\\*[\"']?[ \t]*,?\s{0,40}"
    r"\\*[\"']?value\\*[\"']?[ \t]*[:=][ \t]*"
)
_ELEMENT = re.compile(r"<([A-Za-z0-9_.:-]{2,80})((?:[ \t][^<>]{0,200})?)>([^<\n]{1,4096})<")
_BARE_LOGIN = re.compile(r"(?<=[\w.+-]):([^\s@/:\"'<>,;()]{3,256})@(?=[A-Za-z0-9][\w.-]*)")
_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}")
_ENCODED_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~!*()/:?#[]@&=+$,;%")
_RUN = re.compile(r"[A-Za-z0-9+/=_-]{12,}+")
_RUN_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=_-")
_HEX = re.compile(r"(?<![0-9A-Za-z])(?:0x)?([0-9a-fA-F]{32,})(?![0-9A-Za-z])")
_UUID = re.compile(r"(?:[A-Za-z]{2,8}-)?[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
_OF_DIGEST = re.compile(
    r"(?i)(?:sha-?\d*|md5|blake2\w*|digest|commit|revision|rev|hash|nonce|proof|machine|uuid|fingerprint|etag|checksum|"
    r"anchor|object|blob|tree|HEAD is now at)(?:\\*[\"'])?[ \t]*(?:is|of|at|[:=@-])?[ \t]*(?:\\*[\"'(])?$"
)
_DIGEST_NAME = re.compile(r"(?i)(?:sha-?\d*|md5|digest|commit|nonce|proof|own_task|key_id|machine|launcher|by|anchor)$")
_CHUNK = re.compile(r"[A-Z]*[a-z]+|[A-Z]+|[0-9]+")
_PART = re.compile(r"[/=_+-]+")
_OBJECT_OF_MODAL = re.compile(r"(?:ap|fc|fu|im|sb|ta|vo|en|cl)-[A-Za-z0-9]{22,26}")
LEAST_RANDOM = 20  # characters of a random text without a name
LEAST_DIGITS = 6  # different digits of a random number in hexadecimal
LARGEST_CHUNK = 3.4  # the mean length of the words in a random text; names in code have longer words
_HOME = re.compile(
    r"((?:[/\\]{1,4}|%2[fF])(?:home|Users|usr/home|u)(?:[/\\]{1,4}|%2[fF]))([^/\\\s\"'`:;,<>|)\]}&?#%*]+)"
)
_TILDE = re.compile(r"(?<![\w~/.-])~([A-Za-z_][\w.-]*)(?=/)")
_SHARED_HOMES = frozenset(("shared", "public", "linuxbrew", "guest"))
_COMMON_USERS_WORDS = (
    "root user users admin ubuntu debian ec2-user centos fedora runner nobody daemon app dev test train trainer "
    "main data model models run runs replica replicas rank worker docker jovyan vscode python torch home base "
    "default ray slurm modal local host build work me you"
)
COMMON_USERS = frozenset(_COMMON_USERS_WORDS.split())
"""Names of accounts that identify no person. They are masked in paths of homes only."""


class Masker:
    """Masks secrets in texts, in JSON values and in names of files.

    Args:
        values: secrets that this process knows, such as the values of variables. They are masked also in base64, in
            hexadecimal, and as a part of a URL. Values of fewer than 4 characters are ignored. Default: none.
        users: names of users, which are masked as whole words. Names of accounts that many machines have are masked in
            paths only. Default: none.

    Example:
        Masker(["hunter2!"]).text("login with hunter2! failed")  # "login with *** failed"
    """

    def __init__(self, values: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        self._whole: dict[str, None] = {}
        """The forms of known values that are masked wherever they occur."""
        self._words: dict[str, re.Pattern[str]] = {}
        """Short known values, each with the expression that finds it as a whole word."""
        self._cores: dict[str, None] = {}
        """The parts of base64 that a known value has at each of three positions."""
        self._digests: set[str] = set()
        self._n_learned = 0
        for value in sorted({*values}, key=lambda each: (-len(each), each)):
            self._learn(value)
        names = {name for name in users if len(name) >= 3 and name.lower() not in COMMON_USERS}
        self._users = {
            name: re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", re.IGNORECASE) for name in names
        }

    def _learn(self, value: str) -> None:
        for line in {value.strip(), *(line.strip() for line in value.splitlines() if len(line.strip()) >= 2 * SHORT)}:
            if len(line) < LEAST or line.lower() in HARMLESS:
                continue
            if len(line) < SHORT or line.isdecimal():
                self._words[line] = re.compile(rf"(?<![A-Za-z0-9]){re.escape(line)}(?![A-Za-z0-9])")
                if len(line) < 6:
                    continue
            else:
                self._whole[line] = None
            data = line.encode(errors="replace")
            quoted = (quote(line, safe=""), quote(line), quote_plus(line), quote(quote(line, safe=""), safe=""))
            for form in (*quoted, data.hex(), data.hex().upper(), json.dumps(line)[1:-1], repr(line)[1:-1]):
                if form != line:
                    self._whole[form] = None
            for skipped in range(3):
                # The first characters mix with the bytes before the value, and the last ones with those behind it.
                coded = base64.b64encode(b"\0" * skipped + data).decode().rstrip("=")
                core = coded[-(-8 * skipped // 6) : (8 * (skipped + len(data))) // 6]
                if len(core) >= SHORT:
                    self._cores[core] = None
                    self._cores[core.replace("+", "-").replace("/", "_")] = None

    def keep(self, digests: Iterable[str]) -> None:
        """Keep these digests where they occur in a text, because a record has named them as digests.

        Args:
            digests: the digests, in hexadecimal.
        """
        self._digests.update(each.lower() for each in digests)

    def name(self, text: str) -> str:
        """Return a text that can be a part of the name of a file: masked, and without unusual characters.

        Args:
            text: the text, such as a key of a bucket. Its slashes separate folders.

        Example:
            Masker().name("../a b")  # "_/a_b"
        """
        parts = []
        for part in self.text(text).replace(MASK, "masked").split("/"):
            plain = re.sub(r"[^A-Za-z0-9._-]", "_", part)[:80]
            parts.append(plain if plain.strip(".") else "_")
        return "/".join(parts)

    def json(self, value: Any, *, name: str = "") -> Any:
        """Return a JSON value in which each secret is masked, also if only the name of its field shows that.

        Args:
            value: the value.
            name: the name of the field that has the value. Default: it has none.

        Example:
            Masker().json({"password": "x", "n": 4})  # {"password": "***", "n": 4}
        """
        if isinstance(value, str):
            if name and _DIGEST_NAME.search(name) and len(value) <= 200:
                self.keep(re.findall(r"[0-9a-f]{32,}", value))
            if name and is_secret_name(name) and not _is_harmless(value, name):
                # The value may occur in later texts without its name, such as an argument in a traceback.
                if SHORT <= len(value) <= MAX_TOKEN and self._n_learned < MAX_LEARNED and value not in self._whole:
                    self._n_learned += 1
                    self._learn(value)
                return MASK
            return self.text(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, dict):
            return self._object(value, name)
        if isinstance(value, list | tuple):
            return self._list(value, name)
        return MASK if name and is_secret_name(name) and not _COUNTED.search(_plain(name)) else value

    def _object(self, value: Mapping[Any, Any], name: str) -> dict[str, Any]:
        named = next((value[key] for key in ("name", "key", "Name", "Key") if isinstance(value.get(key), str)), "")
        inherited = name if is_secret_name(name) else ""
        found: dict[str, Any] = {}
        for key, each in value.items():
            key = str(key)
            of = named if key.lower() == "value" and is_secret_name(named) else key
            of = inherited if inherited and not is_secret_name(of) else of
            # A name in a foreign record may be a secret itself.
            found[_masked_key(self, key)] = self.json(each, name=of)
        return found

    def _list(self, value: Sequence[Any], name: str) -> list[Any]:
        if name and is_secret_name(name) and not isinstance(value, str):
            return [self.json(each, name=name) for each in value]
        found: list[Any] = []
        is_pair = len(value) == 2 and isinstance(value[0], str) and not value[0].startswith("-")
        for number, each in enumerate(value):
            before = value[number - 1] if number else ""
            is_after = isinstance(before, str) and (before.startswith("-") or (is_pair and number == 1))
            of = before.split()[-1] if is_after and before.split() and is_secret_name(before.split()[-1]) else ""
            found.append(self.json(each, name="" if isinstance(each, str) and each.startswith("--") else of))
        return found

    def text(self, text: str) -> str:
        """Return a text in which each secret is replaced by `***`, and each user name in the path of a home as well.

        Args:
            text: the text. Give whole lines, because a part of a secret may not be known as one.

        Example:
            Masker().text("curl -H 'Authorization: Bearer abc' https://me:pw@example.org/home/me")
        """
        if len(text) < LEAST:
            return text
        if "\x1b" in text:
            text = ESCAPES.sub("", text)
        text = self._known(text)
        if "-----" in text:
            text = _PEM_END.sub(MASK + "\n", _without_pem(text))
        # A line of dashes or of equal letters looks like base64, too.
        text = _BLOCK.sub(lambda found: MASK if _is_random(found[0][:120].split("\n")[0]) else found[0], text)
        text = self._forms(text)
        text = self._encoded(text)
        text = _RUN.sub(self._run, text)
        return self._people(text)

    def _known(self, text: str) -> str:
        for value in self._whole:
            if value in text:
                text = text.replace(value, MASK)
        for word, expression in self._words.items():
            if word in text:
                text = expression.sub(MASK, text)
        for core in self._cores:
            start = text.find(core)
            while start >= 0:
                begin, end = _expand(text, start, start + len(core), _RUN_CHARACTERS)
                text = text[:begin] + MASK + text[end:]
                start = text.find(core, begin)
        return text

    def _forms(self, text: str) -> str:
        """Mask the credentials that have a name or a form of their own."""
        if "://" in text or ":\\/\\/" in text:
            text = _URL.sub(self._url, text)
        text = _with_named_values(text)
        text = _named(text)
        if "<" in text:
            text = _ELEMENT.sub(
                lambda found: f"<{found[1]}{found[2]}>{MASK}<" if is_secret_name(found[1]) else found[0], text
            )
        text = _SCHEME_WORD.sub(_after_word, text)
        text = _SPOKEN.sub(_spoken, text)
        text = _BESIDE.sub(_beside, text)
        text = _PREFIXED.sub(MASK, text)
        text = _WORD_PREFIXED.sub(MASK, text)
        text = _LOGIN_FLAG.sub(rf"\1{MASK}", text)
        text = _SSHPASS.sub(rf"\1{MASK}", text)
        return _BARE_LOGIN.sub(f":{MASK}@", text) if "@" in text else text

    def _url(self, found: re.Match[str]) -> str:
        scheme, slashes, rest = found[1], found[2], found[3]
        if scheme.lower() not in _SAFE_SCHEMES:
            # In front of a shorter scheme, there may be other characters, as in "jdbc:postgresql://".
            return f"{scheme}{slashes}{MASK}"
        head, mark, tail = rest, "", ""
        if (cut := min((at for at in (rest.find("?"), rest.find("#"), rest.find(";")) if at >= 0), default=-1)) >= 0:
            head, mark, tail = rest[:cut], rest[cut], rest[cut:]
        place, slash, path = head.partition("/")
        if "@" in place:
            place = f"{MASK}@{place.rpartition('@')[2]}"
        elif "@" in rest and _LOGIN_WITH_SLASH.match(rest):
            place, slash, path, mark, tail = f"{MASK}@{rest.rpartition('@')[2]}", "", "", "", ""
        if mark:
            tail = _PARAMETER.sub(self._parameter, tail)
        where = f"{place}{slash}{path}"
        if hook := _HOOK.match(where):
            where, tail = f"{hook[0].rstrip('/')}/{MASK}" if len(where) > len(hook[0]) + 1 else where, ""
        elif hook := _HOOK_IN_PATH.search(where):
            where, tail = f"{where[: hook.end()].rstrip('/')}/{MASK}", ""
        return f"{scheme}{slashes}{where}{tail}"

    def _parameter(self, found: re.Match[str]) -> str:
        name, value = found[2], found[3]
        if value and (is_secret_name(unquote(name)) or _SIGNED_PARAMETER.fullmatch(name)):
            return f"{found[1]}{name}={MASK}"
        return found[0]

    def _encoded(self, text: str) -> str:
        """Mask secrets in texts that are percent-encoded, up to three times."""
        at, found = 0, list[str]()
        for match in _ENCODED.finditer(text):
            if match.start() < at:
                continue
            begin, end = _expand(text, match.start(), match.end(), _ENCODED_CHARACTERS, least=at)
            token = plain = text[begin:end]
            for _ in range(MAX_ROUNDS):
                if (decoded := unquote(plain)) == plain:
                    break
                plain = decoded
                hidden = self._people(_RUN.sub(self._run, self._forms(self._known(plain))))
                if hidden != plain:
                    token = hidden
                    break
            found += [text[at:begin], token]
            at = end
        return "".join([*found, text[at:]]) if found else text

    def _run(self, found: re.Match[str]) -> str:
        run = found[0]
        # Words, names and paths in small letters are the most frequent runs by far.
        if run.islower() and not any(char.isdigit() for char in run) and len(run) < LEAST_RANDOM:
            return run
        if _UUID.fullmatch(run) or _OBJECT_OF_MODAL.fullmatch(run):
            return run
        before = found.string[max(0, found.start() - 40) : found.start()]
        if "/" not in run or run.count("/") < 8:
            text = _decoded(run)
            if text is not None:
                return MASK
        parts = run.split("/")
        if len(parts) > 1:
            parts = [MASK if _decoded(part) is not None else part for part in parts]
        if len(run) == 40 and _looks_like_key(run) and run[0] != "/" and len(parts) <= 4:
            return MASK
        made = [self._part(part, before if number == 0 else parts[number - 1]) for number, part in enumerate(parts)]
        if made == parts and len(parts) <= 6 and _is_random(run.replace("/", "").replace("+", "")) and "+" in run:
            return MASK
        if made == parts and 1 < len(parts) <= 6 and _is_random(run.replace("/", "")) and _looks_like_key(run):
            return MASK
        return "/".join(made)

    def _part(self, part: str, before: str) -> str:
        if len(part) < LEAST_RANDOM or part == MASK:
            return part
        if _UUID.fullmatch(part) or _OBJECT_OF_MODAL.fullmatch(part):
            return part

        def hide(found: re.Match[str]) -> str:
            digits = found[1].lower()
            ahead = part[max(0, found.start() - 20) : found.start()] or before
            is_digest = digits in self._digests or _OF_DIGEST.search(ahead) is not None
            is_digest = is_digest or len({*digits}) < LEAST_DIGITS  # a line of equal letters
            return found[0] if is_digest else MASK

        hidden = _HEX.sub(hide, part)
        if hidden != part or _HEX.search(part):
            return hidden
        pieces = [piece for piece in _PART.split(part) if piece]
        # A random text in base64 has few separators, and a name of words has many.
        if len(pieces) * 10 <= len(part) and _is_random(part):
            return MASK
        for each in pieces:
            if len(each) >= LEAST_RANDOM and _is_random(each):
                part = part.replace(each, MASK)
        return part

    def _people(self, text: str) -> str:
        text = _HOME.sub(lambda found: found[0] if found[2] in _SHARED_HOMES else f"{found[1]}{MASK}", text)
        if "~" in text:
            text = _TILDE.sub(f"~{MASK}", text)
        lowered = text.lower() if self._users else ""
        for name, expression in self._users.items():
            if name.lower() in lowered:
                text = expression.sub(MASK, text)
        return text


def _without_pem(text: str) -> str:
    """Mask each key in PEM, also if its end is missing."""
    pieces, at = list[str](), 0
    while (found := _PEM.search(text, at)) is not None:
        end = text.find("-----END ", found.end(), found.end() + MAX_PEM)
        stop = text.find("-----", end + 9, end + 80) + 5 if end >= 0 else 0
        rest = _PEM_REST.match(text, found.end())
        pieces += [text[at : found.start()], MASK]
        # Without an end, the key has all following lines without a blank.
        at = stop if stop > 5 else found.end() if rest is None else rest.end()
    return "".join([*pieces, text[at:]]) if pieces else text


def _masked_key(masker: Masker, key: str) -> str:
    return key if len(key) <= 40 and key.isidentifier() and len(key) < LEAST_RANDOM else masker.text(key)


def _plain(name: str) -> str:
    return "".join(_SEPARATORS.split(name)).lower()


def _is_harmless(value: str, name: str) -> bool:
    """Return True if a value cannot be a secret, although its name says so."""
    text = value.strip().strip("\"'")
    if not text or text == MASK or text.lower() in HARMLESS:
        return True
    if re.fullmatch(r"\$\{?\{?[ ]?[A-Za-z_][\w. ]*\}?\}", text) or re.fullmatch(r"\$[A-Z_][A-Z0-9_]*", text):
        return True
    if _plain(name) == "pwd" and text.startswith(("/", "~")):  # the folder of a shell
        return True
    if re.fullmatch(r"(?:env|file):[\w./~-]+", text) or re.fullmatch(r"<[\w ./|-]{0,40}>", text):
        return True
    is_number = re.fullmatch(r"[-+]?\d{1,9}(?:\.\d+)?(?:[eE][-+]?\d+)?(?:[a-z%/]{0,6})", text) is not None
    return is_number and _COUNTED.search(_plain(name)) is not None


def _value_end(text: str, at: int, name: str, sep: str) -> tuple[int, int]:
    """Return the begin and the end of the value of a name. Both are equal if there is none."""
    start, limit = at, min(len(text), at + (1 << 16))
    while start < limit and text[start] in "\\":
        start += 1
    if start < limit and text[start] in "bBrRuUfF" and text[start + 1 : start + 2] in ("'", '"'):
        start += 1
    if start < limit and text[start] in "\"'`":
        delimiter = text[at:start].lstrip("bBrRuUfF") + text[start]
        n = 3 if text.startswith(text[start] * 3, start) and len(delimiter) == 1 else 1
        delimiter *= n
        begin = start + n
        end = begin
        while end < limit:
            if text.startswith(delimiter, end) and (len(delimiter) > 1 or text[end - 1] != "\\" or end == begin):
                return begin, end
            if text[end] == "\n" and n == 1:
                break
            end += 2 if text[end] == "\\" and len(delimiter) == 1 and text[end + 1 : end + 2] != "\n" else 1
        return begin, min(end, limit)
    line_end = text.find("\n", at, limit)
    line_end = limit if line_end < 0 else line_end
    rest = text[at:line_end]
    plain = _plain(name)
    if plain.endswith(("authorization", "cookie", "cookies")):
        closing = re.search(r"[\"'`]", rest)
        return at, at + (closing.start() if closing else len(rest))
    if rest[:1] == "[" and not plain.endswith(("token", "key")):
        return at, at + (rest.find("]") + 1 or len(rest))
    if rest[:1] == "(" and plain.endswith("auth"):  # a pair of a user and a password
        return at, at + (rest.find(")") + 1 or len(rest))
    if rest[:1] in "{[(":
        return at, at
    # A line of YAML or of an environment file is the value up to its end. So is a password behind a colon.
    line_begin = text.rfind("\n", max(0, at - 200), at) + 1
    led = text[line_begin : at - len(sep) - len(name)]
    is_own_line = re.fullmatch(r"\s*(?:\[\d{1,4}\] ?)*\s*(?:- )?(?:export |set |ENV |env )?[\"']?", led) is not None
    is_strong = re.search(r"pass|secret|phrase|pwd", plain) is not None and sep != "="
    if is_own_line or is_strong:
        found = re.match(r"[^\r\n]*?(?=[ \t]+#|[ \t]*\\n|[\"'][,}\])]|[ \t]*\r?$)", rest)
        return at, at + (len(found[0]) if found else len(rest))
    found = re.match(r"[^\s\"'`<>]+", rest)
    if found is None:
        return at, at
    word = found[0]
    if "\\n" in word:
        word = word.partition("\\n")[0]
    if sep == "=" and "&" in word:
        word = word.partition("&")[0]
    return at, at + len(word.rstrip(",;)]}"))


def _named(text: str) -> str:
    """Mask the values whose names say that they are secrets: in JSON, YAML, environments, code and command lines."""
    pieces, done = list[str](), 0
    matches = [
        (match.end(), match[1], match[2].strip(" \t\"'`\\])") or "=")
        for match in _PAIR.finditer(text)
        if is_secret_name(match[1])
    ]
    matches += [(match.end(), match[1], "=") for match in _FLAG.finditer(text) if is_secret_name(match[1].lstrip("-"))]
    matches += [(match.end(), "api_key", "=") for match in _SPACED_NAME.finditer(text)]
    for at, name, sep in sorted(matches):
        if at < done:
            continue
        begin, end = _value_end(text, at, name, sep)
        if begin >= end or _is_harmless(text[begin:end], name):
            continue
        pieces += [text[done:begin], MASK]
        done = end
    return "".join([*pieces, text[done:]]) if pieces else text


def _with_named_values(text: str) -> str:
    """Mask values that are beside their name, as in the environment of a container: `name: X`, `value: Y`."""
    pieces, done = list[str](), 0
    if "value" not in text:
        return text
    for match in _NAME_AND_VALUE.finditer(text):
        if match.end() < done or not is_secret_name(match[1]):
            continue
        begin, end = _value_end(text, match.end(), "password", ":")
        if begin < end:
            pieces += [text[done:begin], MASK]
            done = end
    return "".join([*pieces, text[done:]]) if pieces else text


def _after_word(found: re.Match[str]) -> str:
    word, value = found[1], found[2]
    if value.startswith(MASK):
        return found[0]
    is_certain = word.lower() in ("bearer", "negotiate", "aws4-hmac-sha256")
    is_odd = len(value) >= 8 and (any(char.isdigit() for char in value) or value.endswith("="))
    is_odd = is_odd and word.lower() in ("basic", "digest", "apikey", "token", "bot")
    if (is_certain and value.lower().rstrip("s.:,") not in ("token", "auth", "authentication")) or is_odd:
        return found[0][: found.start(2) - found.start()] + MASK
    return found[0]


def _spoken(found: re.Match[str]) -> str:
    value = found[3].rstrip(".,;:")
    if found[2] or not value.isalpha():
        return found[0].replace(found[3], MASK) if value != MASK else found[0]
    return found[0]


def _beside(found: re.Match[str]) -> str:
    value = found[3].rstrip(".,;:)")
    # Code and paths are not values, and "token 3/5" is a count.
    if not _ODD.match(value) or re.search(r"[/(\[=]|\.\w+$", value) or value.startswith("%"):
        return found[0]
    return f"{found[0][: found.start(3) - found.start()]}{MASK}{found[3][len(value) :]}"


def _expand(text: str, begin: int, end: int, characters: frozenset[str], *, least: int = 0) -> tuple[int, int]:
    """Return the borders of the longest piece of the text around a place that has only the given characters."""
    least, most = max(least, begin - MAX_TOKEN), min(len(text), end + MAX_TOKEN)
    while begin > least and text[begin - 1] in characters:
        begin -= 1
    while end < most and text[end] in characters:
        end += 1
    return begin, end


def _decoded(run: str) -> str | None:
    """Return the text that a run of characters is in base64. None: it is not a text in base64."""
    core = run.rstrip("=")
    if len(core) < 11 or len(core) % 4 == 1 or not core[0].isalpha():
        return None
    if "=" in core or ("-" in core and "+" in core):
        return None
    try:
        data = base64.b64decode(core.replace("-", "+").replace("_", "/") + "=" * (-len(core) % 4), validate=True)
        text = data.decode("ascii")
    except (binascii.Error, ValueError):
        return None
    if not all(" " <= char <= "~" or char in "\r\n\t" for char in text):
        return None
    return text if len(core) >= 16 or ":" in text or run.endswith("=") else None


def _is_random(text: str) -> bool:
    """Return True if a text is long and has the short words of a random one."""
    chunks = _CHUNK.findall(text)
    letters = sum(map(len, chunks))
    if letters < LEAST_RANDOM or not chunks:
        return False
    kinds = any(char.islower() for char in text) + any(char.isupper() for char in text)
    n_digits = sum(char.isdigit() for char in text)
    if kinds + (n_digits > 0) < 2 or (kinds == 1 and n_digits < 3):
        return False
    if n_digits > 0.8 * letters:
        return False
    return letters / len(chunks) <= LARGEST_CHUNK


def _looks_like_key(text: str) -> bool:
    return all(any(map(test, text)) for test in (str.isdigit, str.isupper, str.islower)) and not {*"-_"} & {*text}


def looks_secret(text: str) -> bool:
    """Return True if a text has the form of a secret: a known prefix, or at least 20 letters and digits in a row.

    Args:
        text: the text, such as the name of a secret, in whose place a user may have written the value.

    Example:
        looks_secret("wandb")  # False
    """
    return re.search(r"(?=[A-Za-z]*[0-9])[A-Za-z0-9]{20}", text) is not None or _PREFIXED.search(text) is not None


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with masked values. Variables of this project are not secret, so they stay.

    Args:
        env: the environment, by the names of its variables.

    Example:
        masked({"API_KEY": "secret", "REPLICA_RANK": "0"})
    """
    return {name: value if name.startswith("REPLICA_") else MASK for name, value in env.items()}


def mask_values(text: str, values: Iterable[str]) -> str:
    """Return a text in which known secrets are replaced by `***`, and everything else is unchanged.

    Args:
        text: the text, such as the message of an error.
        values: the secrets.

    Example:
        mask_values("key AKIA1 is unknown", ["AKIA1"])
    """
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK) if value else text
    return text


def secrets_in(environ: Mapping[str, str], names: Iterable[str] = ()) -> list[str]:
    """Return the values of an environment that are secrets, with the secret parts of URLs among them.

    Args:
        environ: the variables.
        names: the names of further variables whose values are secrets. Default: only names such as `API_KEY` count.

    Example:
        secrets_in(os.environ, record.placements[0].env)
    """
    chosen = {*names}
    found: list[str] = []
    for name, value in environ.items():
        is_given = name in chosen
        if not is_given and (not is_secret_name(name) or _is_harmless(value, name)):
            continue
        found += [value]
        for word in value.split():
            if "://" in word:
                found += [word, *_secret_parts(word)]
            elif len(word) >= SHORT and is_secret_name(name):
                found.append(word)
    return list(dict.fromkeys(found))


def _secret_parts(url: str) -> list[str]:
    """Return the parts of a URL that may occur without it: its password, and long parts of its path and query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return []
    pieces = [parts.netloc.rpartition("@")[0].partition(":")[2], *parts.path.split("/"), *re.split("[&=]", parts.query)]
    return [unquote(piece) for piece in pieces if len(piece) >= SHORT and (any(map(str.isdigit, piece)) or "@" in url)]
