"""`replicas plan`: which settings hide the rounds at a link, and what they cost."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any
from urllib.parse import urlsplit

from typer import Option

from executors.cli.options import parse_duration
from executors.cli.output import JsonOption, Output, UsageProblem, name_age, refuse, usage_errors
from executors.cli.plan_check import MeasuredLink, describe_link, find_link, load_planner, save_link
from executors.report.words import name_number, name_share, name_size
from executors.store.url import check_scheme, directory_of, is_near

COUNT = re.compile(r"(\d+(?:[_,]\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kmbgt]?)", re.IGNORECASE)
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
RATE = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kMGT]?)(i?)(B|bit|b)?(/s|ps)?", re.IGNORECASE)
POWERS = ("", "k", "m", "g", "t")
SECONDS = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(us|ms|s)?")
SLOWEST = 1000.0  # bytes a second: a number without its unit is less
UNITS_S = {None: 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
ASSUMED_NEAR, ASSUMED_FAR = (1e9, 1e9, 0.001), (100e6, 100e6, 0.05)
"""Bytes a second up and down, and the seconds of a request: of a disk, which all share, and of a bucket, of each."""
GPU_COPY = 160e9  # bytes a second from and to the memory of a small GPU; others have more
DEFAULT_OUTER = (0.7, 0.9)
"""The outer learning rate and momentum that `DiLoCo` has without arguments, and so without `total_steps`.

The call that is printed has no `total_steps`, so it names the numbers that are the default of short plans only.
"""
STEPS_SHOWN = 1000  # when nobody says how many there are

PARAMS = "Parameters that are trained: 1.3e9, 100M, 7B."
STEP = "How long an inner step takes: 0.9, 900ms."
STORE = "Where the replicas meet: a directory, or a url. Its speed is measured with --probe, else assumed."
PROBE = "Write, read and delete 23 small objects there (24 MB; at a directory N processes do), and plan with that."
UP = "Bytes a second that one replica sends: 20MB, 160Mbit. Wins over what was measured; likewise the next two."
STEPS = "Inner steps in all, for the sums."
PRICE = "Prices instead of the table's: put=5,get=0.4 (dollars for a million), egress=0.09 (for a GB)."
GPU = "Replicas have a GPU (any name): copies of the live parameters are as fast as its memory."
WIRE = "Plan with this wire: fp32, bf16, int8 or int4. Default: int8, or int4 where it at least halves inner_steps."
GIVEN = "Plan with this many"
COPY_IT = "replicas plan --params 1.3e9 --n 8 --step 0.9 --store s3://BUCKET/runs --probe"


def _count(text: str) -> int:
    """Return the number of `1.3e9`, `100M`, `7B` or `1,000,000`."""
    found = COUNT.fullmatch(text.strip())
    value = float(re.sub("[_,]", "", found[1])) * COUNTS[found[2].lower()] if found else math.nan
    if not 1 <= value <= 1e15:
        raise UsageProblem(f"{text!r} is not a number. Give one such as 20000, 1.3e9, 100M or 7B.")
    return round(value)


def _rate(text: str) -> float:
    """Return the bytes a second of `20MB`, `20e6`, `160Mbit/s`, `160Mbps` or `20MiB/s`."""
    found = RATE.fullmatch(text.strip())
    if found and found[4] == "b" and not found[5]:
        number = "".join(found.group(1, 2, 3))
        raise UsageProblem(f"{text!r} may mean bits or bytes. Give {number}bit or {number}B.")
    value = 0.0
    if found:
        is_of_bits = found[4] == "b" or (found[4] or "").lower() == "bit"
        base, bits = 1024 if found[3] else 1000, 8 if is_of_bits else 1
        value = float(found[1]) * base ** POWERS.index(found[2].lower()) / bits
    if found and value < SLOWEST:
        raise UsageProblem(
            f"{text!r} is {value:g} bytes a second, slower than any link. Give a unit: {found[1]}MB, or Mbit."
        )
    if not value <= 1e15 or not found:
        raise UsageProblem(f"{text!r} is not a speed. Give bytes or bits a second, such as 20MB, 20e6 or 160Mbit.")
    return value


def _seconds(text: str) -> float:
    """Return the seconds of `0.9`, `900ms`, or another duration."""
    found = SECONDS.fullmatch(text.strip())
    return float(found[1]) * UNITS_S[found[2]] if found else parse_duration(text)


def _prices(text: str) -> dict[str, float]:
    """Return the prices of `put=5,get=0.4,egress=0.09`, by name, of one request or byte."""
    units = {"put": 1e6, "get": 1e6, "egress": 1e9}
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            found[name] = float(value) / units[name]
        except (KeyError, ValueError):
            found[name] = math.nan
        if not 0 <= found[name] < math.inf:
            raise UsageProblem(f"{part.strip()!r} is not a price. The form is put=5,get=0.4,egress=0.09.")
    return found


def plan(
    params: Annotated[Any, Option("--params", metavar="P", parser=_count, help=PARAMS)],
    n: Annotated[int, Option("--n", metavar="N", help="How many replicas.")],
    step: Annotated[Any, Option("--step", metavar="SECONDS", parser=_seconds, help=STEP)],
    store: Annotated[
        str | None,
        Option("--store", "--rendezvous", metavar="URL", envvar="REPLICAS_RENDEZVOUS", show_envvar=False, help=STORE),
    ] = None,
    probe: Annotated[bool, Option("--probe", help=PROBE)] = False,
    up: Annotated[Any, Option("--up", metavar="RATE", parser=_rate, help=UP)] = None,
    down: Annotated[
        Any, Option("--down", metavar="RATE", parser=_rate, help="Bytes a second that one replica receives.")
    ] = None,
    latency: Annotated[
        Any, Option("--latency", metavar="SECONDS", parser=_seconds, help="How long a request takes: 0.05, 50ms.")
    ] = None,
    steps: Annotated[Any, Option("--steps", metavar="S", parser=_count, help=STEPS)] = None,
    wire: Annotated[str | None, Option("--wire", metavar="NAME", help=WIRE)] = None,
    mean_wire: Annotated[
        str | None, Option("--mean-wire", metavar="NAME", help="Plan with means of this wire.")
    ] = None,
    inner_steps: Annotated[
        int | None, Option("--inner-steps", metavar="H", help=f"{GIVEN} steps between two rounds.")
    ] = None,
    fragments: Annotated[int | None, Option("--fragments", metavar="P", help=f"{GIVEN} fragments.")] = None,
    overlap_steps: Annotated[
        int | None, Option("--overlap-steps", metavar="T", help=f"{GIVEN} steps beside a round.")
    ] = None,
    gpu: Annotated[str | None, Option("--gpu", metavar="GPU", help=GPU)] = None,
    price: Annotated[Any, Option("--price", metavar="K=V,…", parser=_prices, help=PRICE)] = None,
    as_json: JsonOption = False,
) -> int:
    """Plan the rounds: which settings let no step wait at a link, and what they move and cost.

    Nothing is launched. This machine keeps the measurements of --probe for later plans. `replicas status` compares the
    rounds of runs there with the plan.
    """
    output = Output(as_json)
    planner = load_planner()
    if n < 1:
        refuse(f"--n must be at least 1, got {n}.")
    with usage_errors():
        place = _StoreTraits.of(store)
        link, source = _link(output, place.url, n, probe, up, down, latency)
        job = planner.Workload(
            params=params,
            n=n,
            step_s=step,
            steps=steps,
            link=planner.Link(up=link.up, down=link.down, latency_s=link.latency_s),
            processor=planner.Processor(**link.processor, **({"copy": GPU_COPY} if gpu else {})),
            most_bytes=place.most_bytes,
        )
        fixed = {"inner_steps": inner_steps, "fragments": fragments, "overlap_steps": overlap_steps}
        found = planner.choose(job, wires=planner.WIRES if wire is None else (wire,), mean_wire=mean_wire, **fixed)
        free = None
        if found.late_s:
            with contextlib.suppress(ValueError):  # the run is shorter than any round that is usual
                free = planner.choose(job)
    prices = None
    if place.kind in planner.PRICES or price is not None:
        prices = replace(planner.PRICES.get(place.kind, planner.Prices()), **(price or {}))
    document = _document(found, prices, place.url, source, planner.PRICED_ON)
    if as_json:
        output.document(document)
        return 0
    where = "" if place.url is None else f", {place.url}"
    output.print(f"{_short(params)} parameters, {n} replica{'s' * (n > 1)}, {step:g} s a step{where} "
               f"({source}: {describe_link(link)})", "bold", wrap=True)  # fmt: skip
    for line in (*_lines(found), _sums(found, document["sums"], place)):
        output.print(line, wrap=True)
    for line in _advice(found, free, source):
        output.print(line, "yellow", wrap=True)
    output.print(f"pass it on:  DiLoCo(model, {_settings(found)})")
    if n > 1:
        output.print(f"machines of unlike speeds:  DiLoCo(model, {_settings(found, by_clock=True)})")
    return 0


plan.epilog = (  # type: ignore[attr-defined]
    f"[bold]Examples[/bold]\n\n{COPY_IT}"
    "\n\nreplicas plan --params 100M --n 4 --step 300ms --up 20MB --down 20MB --latency 50ms --steps 20000"
    "\n\nreplicas plan --params 7B --n 16 --step 4 --store s3://BUCKET/runs --gpu H100 --wire int4 --inner-steps 100"
)


@dataclass(frozen=True)
class _StoreTraits:
    """Where the replicas meet, as far as sizes and prices go."""

    url: str | None = None
    kind: str = ""
    """What the table of prices calls it."""
    region: str | None = None
    most_bytes: float = math.inf
    """Of an object that it takes."""

    @classmethod
    def of(cls, store: str | None) -> _StoreTraits:
        """Return what is known of a store without opening it."""
        if store is None:
            return cls()
        if (directory := directory_of(store)) is not None:
            return cls(directory.absolute().as_uri(), "directory")
        check_scheme(store)
        if not store.startswith("s3:"):
            return cls(store, "directory")
        from executors.store.s3.address import S3Address
        from executors.store.s3.client import located
        from executors.store.s3.store import MAX_PUT_BYTES

        address = S3Address.parse(store)
        there = located(address)
        host = urlsplit(there.endpoint_url or "https://amazonaws.com").hostname or ""
        kind = "r2" if host.endswith(".r2.cloudflarestorage.com") else "s3" if host.endswith("amazonaws.com") else host
        return cls(address.url, kind, there.region, MAX_PUT_BYTES)


def _link(
    output: Output, url: str | None, n: int, probe: bool, up: float | None, down: float | None, latency: float | None
) -> tuple[MeasuredLink, str]:
    """Return what one replica has of the way to the store and of its processor, and how that is known."""
    values: dict[str, Any] = {"up": up, "down": down, "latency_s": latency}
    given = {name: value for name, value in values.items() if value is not None}
    if url is None and (up is None or down is None):
        refuse(
            "Where do the replicas meet? Give --store URL (and --probe to measure it), or --up, --down and --latency. "
            f"For example: {COPY_IT}"
        )
    if probe and url is None:
        refuse("--probe measures the way to a rendezvous: give --store URL, too.")
    if probe:
        link, source = _probe(output, str(url), n), "measured"
    elif url is not None and (noted := find_link(url, n)) is not None:
        link, source = noted, f"measured {name_age(time.time() - noted.at)} ago"
    else:
        is_at_hand = url is not None and is_near(url)
        (up_, down_, latency_s), sharing = (ASSUMED_NEAR, n) if is_at_hand else (ASSUMED_FAR, 1)
        link = MeasuredLink(url=url or "", n=n, at=0.0, up=up_ / sharing, down=down_ / sharing, latency_s=latency_s)
        source = "assumed"
    if given:
        source = "given" if len(given) == 3 else f"{source}, and given"
    return replace(link, **given), source


def _probe(output: Output, url: str, n: int) -> MeasuredLink:
    from executors.cli.live import Interrupts
    from executors.store.link import measure_link

    with Interrupts(), output.busy(f"Measuring {url}"):
        speed = measure_link(url, n)
        processor = load_planner("processor")()
    measured = MeasuredLink(url=url, n=n, at=time.time(), processor=processor, **speed)
    save_link(measured)
    return measured.shared_by(n)


def _short(count: float) -> str:
    """Write a large number as people say it: `1.3 B`, `100 M`, `137,216`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return name_number(count)


def _settings(plan: Any, *, by_clock: bool = False) -> str:
    choice, step_s = plan.choice, plan.workload.step_s
    when, overlap = f"inner_steps={choice.inner_steps}", f"overlap_steps={choice.overlap_steps}"
    if by_clock:
        when = f"round_seconds={choice.inner_steps * step_s:g}"
        overlap = f"overlap_seconds={choice.overlap_steps * step_s:g}"
    settings = [when]
    settings += [f"fragments={choice.fragments}"] if choice.fragments > 1 else []
    settings += [overlap, 'merge="carry"'] if choice.overlap_steps else []
    settings += [f'wire="{choice.wire}"']
    settings += [f'mean_wire="{choice.mean_wire}"'] if choice.mean_wire else []
    outer_lr, outer_momentum = plan.outer
    settings += [f"outer_lr={outer_lr}"] if outer_lr != DEFAULT_OUTER[0] else []
    settings += [f"outer_momentum={outer_momentum}"] if outer_momentum != DEFAULT_OUTER[1] else []
    return ", ".join(settings)


def _span(seconds: float) -> str:
    """Write seconds: `14.3 s`, `3.2 ms`."""
    return f"{seconds:.1f} s" if seconds >= 0.95 else f"{seconds * 1e3:.3g} ms"


def _lines(plan: Any) -> list[str]:
    cost, lost = plan.round, f"{name_share(plan.share)} of the time lost"
    unit, name = (1, "s") if cost.seconds >= 0.95 else (1e3, "ms")
    parts = ", ".join(
        f"{what} {getattr(cost, f'{what}_s') * unit:.1f}" for what in ("link", "requests", "processor", "noticing")
    )
    if plan.late_s and plan.hidden_s:
        hidden = f"{_span(plan.hidden_s)} of it hidden, {_span(plan.late_s)} waited for; {lost}"
    elif plan.late_s:
        hidden = f"waited for; {lost}"
    else:
        hidden = f"hidden behind {_span(plan.hidden_s)}; {lost}"
    which = "a round of a fragment" if plan.choice.fragments > 1 else "a round"
    return [_settings(plan), f"{which}: {cost.seconds * unit:.1f} {name} ({parts}), {hidden}"]


def _sums(plan: Any, sums: Mapping[str, Any], place: _StoreTraits) -> str:
    """Say what is moved, and what that costs."""
    moved = f"{name_size(plan.up)} up, {name_size(plan.down)} down"
    over = f"{STEPS_SHOWN} steps" if plan.rounds is None else f"{plan.rounds} rounds"
    line = f"per replica and {plan.choice.inner_steps} steps: {moved}; {over}: {name_size(sums['bytes'])} in all"
    if sums["requests_usd"] is None:
        return f"{line} (what {place.kind} costs is not known here: --price)" if place.kind else line
    if sums["requests_usd"]:
        line += f", ${_dollars(sums['requests_usd'])} of requests"
    if sums["egress_usd"]:
        where = place.region or "the bucket's region"
        line += f", ${_dollars(sums['egress_usd'])} of egress unless the replicas run in {where}"
    return line


def _dollars(usd: float) -> str:
    return f"{usd:,.2f}" if usd < 100 else f"{usd:,.0f}"


def _advice(plan: Any, free: Any, source: str) -> list[str]:
    """Return what a person should know of a plan; `free` is one that nobody bound, where steps wait."""
    lines = []
    if free is not None and free.share < plan.share:
        lines.append(f"{name_share(free.share)} of the time would be lost with: {_settings(free)}")
    elif free is not None:
        lines.append("Nothing hides the rounds at this link; this loses least.")
    if 2 * plan.choice.overlap_steps > plan.choice.inner_steps:
        lines.append(
            f"A round misses the last {plan.choice.overlap_steps} of {plan.choice.inner_steps} steps, which costs loss "
            "beyond a half: a longer --inner-steps leaves room for fragments."
        )
    if "assumed" in source:
        lines.append("The link is assumed: --probe measures it, or give --up, --down and --latency.")
    return lines


def _document(plan: Any, prices: Any, url: str | None, source: str, priced_on: str) -> dict[str, Any]:
    rounds = plan.rounds if plan.rounds is not None else STEPS_SHOWN / plan.choice.inner_steps
    choice = plan.choice
    return {
        **{name: getattr(plan.workload, name) for name in ("params", "n", "step_s", "steps")},
        "store": url,
        "link": {**asdict(plan.workload.link), "source": source},
        "processor": asdict(plan.workload.processor),
        "settings": {
            **asdict(choice),
            "mean_wire": choice.resolved_mean_wire,
            "merge": "carry" if choice.overlap_steps else "anchor",
            "outer_lr": plan.outer[0],
            "outer_momentum": plan.outer[1],
        },
        "call": f"DiLoCo(model, {_settings(plan)})",
        "round": {**asdict(plan.round), "seconds": plan.round.seconds},
        "hidden_s": plan.hidden_s,
        "late_s": plan.late_s,
        "share_lost": plan.share,
        "has_room": plan.has_room,
        "rounds": plan.rounds,
        "per_round": {"up": plan.up, "down": plan.down},
        "sums": {
            "steps": plan.workload.steps if plan.workload.steps is not None else STEPS_SHOWN,
            "bytes": plan.workload.n * rounds * (plan.up + plan.down),
            "requests_usd": None if prices is None else plan.requests_usd(prices, rounds),
            "egress_usd": None if prices is None else plan.egress_usd(prices, rounds),
        },
        "prices": None if prices is None else {**asdict(prices), "of": priced_on},
    }
