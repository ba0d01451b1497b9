"""`replicas plan`: which settings hide the rounds at a link, and what they cost."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from typer import Option

from executors.cli.options import parse_duration
from executors.cli.output import JsonOption, Output, UsageProblem, name_age, refuse, usage_errors
from executors.cli.planned import MeasuredLink, describe_link, find_link, load_planner, note_link
from executors.report.words import name_number, name_share, name_size
from executors.store.url import check_scheme, directory_of, is_near, located_url

if TYPE_CHECKING:
    from executors.store.link import LinkSpeed

COUNT = re.compile(r"(\d+(?:[_,]\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kmbgt]?)", re.IGNORECASE)
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
RATE = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kMGT]?)(i?)(B|bit|b)?(/s|ps)?", re.IGNORECASE)
POWERS = ("", "k", "m", "g", "t")
SECONDS = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(us|ms|s)?")
UNITS_S = {None: 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
ASSUMED_NEAR, ASSUMED_FAR = (1e9, 1e9, 0.001), (100e6, 100e6, 0.05)
"""Bytes a second up and down, and the seconds of a request: of a disk, which all share, and of a bucket, of each."""
GPU_COPY = 160e9  # bytes a second from and to the memory of a small GPU; others have more
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
    if not 1 <= value <= 1e15:
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
        Any, Option("--latency", metavar="SECONDS", parser=_seconds, help="Of a request: 0.05, 50ms.")
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

    Nothing is launched. What --probe measured is kept on this machine, for later plans and for `replicas status`, which
    compares the rounds of runs there with the plan.
    """
    output = Output(as_json)
    planner = load_planner()
    if n < 1:
        refuse(f"--n must be at least 1, got {n}.")
    with usage_errors():
        url = None if store is None else _checked(store)
        speed, source, processor = _link(output, url, n, probe, up, down, latency)
        job = planner.Job(
            params=params,
            n=n,
            step_s=step,
            steps=steps,
            link=planner.Link(up=speed.up, down=speed.down, latency_s=speed.latency_s),
            processor=planner.Processor(**processor, **({"copy": GPU_COPY} if gpu else {})),
            most_bytes=_most_bytes(url),
        )
        fixed = {"inner_steps": inner_steps, "fragments": fragments, "overlap_steps": overlap_steps}
        found = planner.choose(job, wires=planner.WIRES if wire is None else (wire,), mean_wire=mean_wire, **fixed)
        free = None
        if found.late_s:
            with contextlib.suppress(ValueError):  # the run is shorter than any round that is usual
                free = planner.choose(job)
    place = None if url is None else located_url(url)
    kind = _kind_of(place)
    prices = planner.PRICES.get(kind, planner.Prices())
    prices = replace(prices, **(price or {}))
    is_priced = kind in planner.PRICES or price is not None
    if as_json:
        output.document(_document(found, prices if is_priced else None, url, source, planner.PRICED_ON))
        return 0
    where = "" if url is None else f", {url}"
    output.say(f"{_short(params)} parameters, {n} replica{'s' * (n > 1)}, {step:g} s a step{where} "
               f"({source}: {describe_link(speed)})", "bold", wrap=True)  # fmt: skip
    for line in (*_lines(found), _sums(found, prices, is_priced, kind, place)):
        output.say(line, wrap=True)
    for line in _advice(found, free, source):
        output.say(line, "yellow", wrap=True)
    output.say(f"pass it on:  DiLoCo(model, {_settings(found)})")
    if n > 1:
        output.say(f"machines of unlike speeds:  DiLoCo(model, {_settings(found, by_clock=True)})")
    return 0


plan.epilog = (  # type: ignore[attr-defined]
    f"[bold]Examples[/bold]\n\n{COPY_IT}"
    "\n\nreplicas plan --params 100M --n 4 --step 300ms --up 20MB --down 20MB --latency 50ms --steps 20000"
    "\n\nreplicas plan --params 7B --n 16 --step 4 --store s3://BUCKET/runs --gpu H100 --wire int4 --inner-steps 100"
)


def _checked(store: str) -> str:
    """Return the url of a store, without opening it."""
    directory = directory_of(store)
    if directory is not None:
        return directory.absolute().as_uri()
    check_scheme(store)
    if store.startswith("s3:"):
        from executors.store.s3.address import S3Address

        return S3Address.parse(store).url
    return store


def _link(
    output: Output, url: str | None, n: int, probe: bool, up: float | None, down: float | None, latency: float | None
) -> tuple[LinkSpeed, str, Mapping[str, float]]:
    """Return what one replica has of the way to the store, how that is known, and what is known of its processor."""
    from executors.store.link import LinkSpeed

    given = {name: value for name, value in (("up", up), ("down", down), ("latency_s", latency)) if value is not None}
    if url is None and (up is None or down is None):
        refuse(
            "Where do the replicas meet? Give --store URL (and --probe to measure it), or --up, --down and --latency. "
            f"For example: {COPY_IT}"
        )
    if probe and url is None:
        refuse("--probe measures the way to a rendezvous: give --store URL, too.")
    if probe:
        measured = _probe(output, str(url), n)
        source = "measured"
    elif url is not None and (noted := find_link(url, n)) is not None:
        measured, source = noted, f"measured {name_age(time.time() - noted.at)} ago"
    else:
        measured, source = None, "assumed"
    if measured is not None:
        speed = LinkSpeed(up=measured.up, down=measured.down, latency_s=measured.latency_s)
    else:
        is_at_hand = url is not None and is_near(url)
        up_, down_, latency_s = ASSUMED_NEAR if is_at_hand else ASSUMED_FAR
        speed = LinkSpeed(up=up_ / (n if is_at_hand else 1), down=down_ / (n if is_at_hand else 1), latency_s=latency_s)
    if given:
        source = "given" if len(given) == 3 else f"{source}, and given"
    return replace(speed, **given), source, {} if measured is None else measured.processor


def _probe(output: Output, url: str, n: int) -> MeasuredLink:
    from executors.cli.live import Interrupts
    from executors.store.link import measure_link

    with Interrupts(), output.busy(f"Measuring {url}"):
        speed = measure_link(url, n)
        processor = load_planner("processor")()
    measured = MeasuredLink(url=url, n=n, at=time.time(), processor=processor, **asdict(speed))
    note_link(measured)
    return measured.shared_by(n)


def _kind_of(url: str | None) -> str:
    """Return what the table of prices calls a store."""
    if url is None or not url.startswith("s3:"):
        return "" if url is None else "directory"
    from executors.store.s3.address import S3Address

    host = urlsplit(S3Address.parse(url).endpoint_url or "https://amazonaws.com").hostname or ""
    return "r2" if host.endswith(".r2.cloudflarestorage.com") else "s3" if host.endswith("amazonaws.com") else host


def _most_bytes(url: str | None) -> float:
    """Return how large an object may be that a store takes."""
    if url is None or not url.startswith("s3:"):
        return math.inf
    from executors.store.s3.store import MAX_PUT_BYTES

    return MAX_PUT_BYTES


def _short(count: float) -> str:
    """Write a large number as people say it: `1.3 B`, `100 M`, `137,216`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return name_number(count)


def _settings(plan: Any, *, by_clock: bool = False) -> str:
    choice, step_s = plan.choice, plan.job.step_s
    when, overlap = f"inner_steps={choice.inner_steps}", f"overlap_steps={choice.overlap_steps}"
    if by_clock:
        when = f"round_seconds={choice.inner_steps * step_s:g}"
        overlap = f"overlap_seconds={choice.overlap_steps * step_s:g}"
    settings = [when]
    settings += [f"fragments={choice.fragments}"] if choice.fragments > 1 else []
    settings += [overlap, 'merge="carry"'] if choice.overlap_steps else []
    settings += [f'wire="{choice.wire}"']
    settings += [f'mean_wire="{choice.mean_wire}"'] if choice.mean_wire else []
    if plan.has_few_rounds:
        settings += ["outer_lr=1.0", "outer_momentum=0.0"]
    elif choice.outer_momentum != 0.9:
        settings += [f"outer_momentum={choice.outer_momentum}"]
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


def _sums(plan: Any, prices: Any, is_priced: bool, kind: str, url: str | None) -> str:
    """Say what is moved, and what that costs."""
    n, rounds = plan.job.n, plan.rounds
    line = f"per replica and {plan.choice.inner_steps} steps: {name_size(plan.up)} up, {name_size(plan.down)} down; "
    if rounds is None:
        rounds = STEPS_SHOWN / plan.choice.inner_steps
        line += f"{STEPS_SHOWN} steps: "
    else:
        line += f"{rounds} rounds: "
    line += f"{name_size(n * rounds * (plan.up + plan.down))} in all"
    if not is_priced:
        return f"{line} (what {kind} costs is not known here: --price)" if kind else line
    requests, egress = plan.requests_usd(prices, rounds), plan.egress_usd(prices, rounds)
    if requests:
        line += f", ${_dollars(requests)} of requests"
    if egress:
        line += f", ${_dollars(egress)} of egress unless the replicas run in {_region(url)}"
    return line


def _dollars(usd: float) -> str:
    return f"{usd:,.2f}" if usd < 100 else f"{usd:,.0f}"


def _region(url: str | None) -> str:
    from executors.store.s3.address import S3Address

    found = S3Address.parse(url).region if url is not None and url.startswith("s3:") else None
    return found or "the bucket's region"


def _advice(plan: Any, free: Any, source: str) -> list[str]:
    """Return what a person should know of a plan; `free` is one that nobody bound, where steps wait."""
    lines = []
    if plan.has_few_rounds:
        lines.append(
            f"Only {plan.rounds} round{'s' * (plan.rounds != 1)} of each fragment: below 30 the outer momentum does "
            "more harm than good, so this is plain averaging. Train longer, or with shorter rounds."
        )
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
        **{name: getattr(plan.job, name) for name in ("params", "n", "step_s", "steps")},
        "store": url,
        "link": {**asdict(plan.job.link), "source": source},
        "processor": asdict(plan.job.processor),
        "settings": {
            **asdict(choice),
            "mean_wire": choice.resolved_mean_wire,
            "merge": "carry" if choice.overlap_steps else "anchor",
            "outer_momentum": 0.0 if plan.has_few_rounds else choice.outer_momentum,
        },
        "call": f"DiLoCo(model, {_settings(plan)})",
        "round": {**asdict(plan.round), "seconds": plan.round.seconds},
        "hidden_s": plan.hidden_s,
        "late_s": plan.late_s,
        "share_lost": plan.share,
        "has_room": plan.has_room,
        "rounds": plan.rounds,
        "few_rounds": plan.has_few_rounds,
        "per_round": {"up": plan.up, "down": plan.down},
        "sums": {
            "steps": plan.job.steps if plan.job.steps is not None else STEPS_SHOWN,
            "bytes": plan.job.n * rounds * (plan.up + plan.down),
            "requests_usd": None if prices is None else plan.requests_usd(prices, rounds),
            "egress_usd": None if prices is None else plan.egress_usd(prices, rounds),
        },
        "prices": None if prices is None else {**asdict(prices), "of": priced_on},
    }
