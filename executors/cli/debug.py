"""The verb `debug`, which writes everything that helps to find the cause of a problem into one file."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from executors.cli.documents import DebugDocument, DebugFile
from executors.cli.options import (
    BackendOptions,
    ExecutorOption,
    RendezvousOption,
    RunArgument,
    find_run,
    parse_path,
    parse_texts,
)
from executors.cli.output import JsonOption, Output, one_line, raise_write_error, refuse
from executors.cli.verb_help import describe
from executors.errors import BackendError, ReplicasError, RunNotFoundError, StoreError
from executors.settings.declaration import WHERE

if TYPE_CHECKING:
    from executors.cli.debug_archive import Part
    from executors.cli.debug_parts import RunParts
    from executors.masking import Masker
    from executors.run.run import Run
    from executors.view.run_view import RunView

OUT = "The archive to write, as in run.tar.gz. Default: only list what it would contain."
CODE = "Add the text files of your code, with secrets masked."
ISSUE = "Also print a summary in Markdown, to paste into an issue."
FORCE = "Replace the file if it exists."
ENV = "A variable of the launch with its value, which is masked. Values are not recorded. Repeatable."
DOCUMENT_S = 90.0  # seconds that the state of the run may take for the summary
FENCE, MAX_TRACE = "`" * 4, 30  # lines of a traceback in the summary
MAX_SHOWN = 12  # problems that are printed; the archive has all


@describe(
    examples=[
        "replicas debug RUN --out run.tar.gz",
        "replicas debug RUN --issue",
        "replicas debug s3://BUCKET/runs/RUN --out run.tar.gz --code",
    ]
)
def debug(
    run: RunArgument,
    out: Annotated[Path | None, Option("--out", "-o", metavar="FILE", parser=parse_path, help=OUT)] = None,
    code: Annotated[bool, Option("--code", help=CODE)] = False,
    issue: Annotated[bool, Option("--issue", help=ISSUE)] = False,
    force: Annotated[bool, Option("--force", help=FORCE)] = False,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    env: Annotated[list[str] | None, Option("--env", "-e", metavar="K=V", help=ENV, rich_help_panel=WHERE)] = None,
    as_json: JsonOption = False,
) -> int:
    """Write records, logs, events and versions of a run into one archive, without secrets.

    The command first lists the content with its size. It also works for a run that is damaged, and without the
    backend of the run. A part that cannot be read is named in manifest.json of the archive.
    """
    from executors.cli.debug_archive import ArchiveWriter
    from executors.cli.debug_parts import LEFT_OUT, WITHOUT_CODE, RunParts, machine_parts, masker_of
    from executors.cli.live import Interrupts
    from executors.run.run import view_of
    from executors.view.report.text import name_size

    output, values = Output(as_json or issue), parse_texts("--env", env)
    if out is not None and os.path.lexists(out) and not force:
        refuse(f"{str(out)!r} exists. Add --force to replace it, or name another file.")
    if out is not None and not out.absolute().parent.is_dir():
        raise_write_error(out, FileNotFoundError(errno.ENOENT, "There is no such folder"))
    view, problems = view_of(_find(run, rendezvous, backend, option)), list[str]()
    left_out = [*LEFT_OUT, *(() if code else (WITHOUT_CODE,))]
    reader = RunParts(view, code, problems)
    with Interrupts(), output.busy(f"Reading {view.run_id}") as on_progress:
        reader.find_objects()
        record = reader.record()
        masker = masker_of(view, record, values)
        parts = [*reader.parts(), *machine_parts("local" if record is None else record.backend)]
    files: Sequence[DebugFile] = [{"name": masker.name(part.name), "size_bytes": part.size_bytes} for part in parts]
    if not as_json:
        _print_plan(output, view.run_id, parts)
    text = size_bytes = None
    if issue:
        with Interrupts(), output.busy(f"Reading {view.run_id}"):
            text = _issue(view, reader, masker)
    if out is not None:
        writer = ArchiveWriter(f"replicas-debug-{view.run_id}", masker, view.store.url)
        writer.problems = problems
        try:
            with Interrupts(), output.busy(f"Writing {out.name}") as on_progress:
                about = {"run_id": view.run_id, "url": view.url, "left_out": left_out}
                written = writer.write(out, parts, about, on_progress)
        except OSError as error:
            if isinstance(error, ReplicasError):
                raise
            raise_write_error(out, error)
        files, problems, size_bytes = written.files, written.problems, written.size_bytes
        output.print(f"Wrote {out}: {len(files)} files, {name_size(size_bytes)}. Only you can read it.")
    else:
        output.print(f"Nothing was written. To write it: replicas debug {run} --out {view.run_id}.tar.gz", "dim")
    problems = [masker.text(one_line(each, 600)) for each in dict.fromkeys(problems)]
    for problem in problems[:MAX_SHOWN]:
        output.print(one_line(problem), "yellow")
    if len(problems) > MAX_SHOWN:
        output.print(f"… and {len(problems) - MAX_SHOWN} more problems, which manifest.json names", "yellow")
    for line in left_out:
        output.print(line, "dim")
    if as_json:
        document: DebugDocument = {
            "run_id": view.run_id,
            "out": None if out is None else str(out.absolute()),
            "size_bytes": size_bytes,
            "files": files,
            "left_out": left_out,
            "problems": problems,
            "issue": text,
        }
        output.document(document)
    elif text is not None:
        print(text)
    return 0


def _find(run: str, rendezvous: str | None, backend: str | None, option: Sequence[str] | None) -> Run:
    """Return a run, also if its record is missing, or its store or backend does not answer.

    Raises:
        RunNotFoundError: the store has no object of the run.
    """
    from executors.registry.run_index import locate
    from executors.run.run import Run
    from executors.store.state_folder import state_path
    from executors.store.url import check_run_id, existing_store, split_address

    try:
        return find_run(run, rendezvous, backend, option)
    except (StoreError, BackendError, RunNotFoundError) as error:
        named = run.rstrip("/")
        url, run_id = split_address(named) if rendezvous is None and "/" in named else (rendezvous or "", named)
        check_run_id(run_id)
        if not url and (url := locate(run_id) or "") == "":
            # A folder without the record of its run is here, too.
            if not (state_path() / run_id).is_dir():
                raise
            url = str(state_path())
        store = existing_store(url)
        if isinstance(error, RunNotFoundError) and next(iter(store.list(f"{run_id}/")), None) is None:
            raise
        return Run(store, run_id)


def _print_plan(output: Output, run_id: str, parts: Sequence[Part]) -> None:
    """Print the content of the archive by folder, with the largest size of each."""
    from executors.view.report.text import name_size

    rows: dict[str, list[Part]] = {}
    for part in parts:
        folder, slash, _ = part.name.partition("/")
        rows.setdefault(f"{folder}{slash}", []).append(part)
    output.print(f"The archive of {run_id} contains:", "bold")
    for name, some in rows.items():
        sizes = [part.size_bytes for part in some]
        size = "" if None in sizes else f"at most {name_size(sum(each or 0 for each in sizes))}"
        count = f"{len(some)} files" if len(some) > 1 else ""
        output.print(f"  {name:<18} {count:>10}  {size}".rstrip())


def _issue(view: RunView, reader: RunParts, masker: Masker) -> str:
    """Return the summary of a run in Markdown. Parts that cannot be read are named."""
    from executors.store.parallel import within
    from executors.worker.probe import describe_environment

    lines = [f"### Run `{view.run_id}`", ""]
    document: dict[str, Any] = {}
    try:
        document = masker.json(within(DOCUMENT_S, reader.document, view.store.url))
    except Exception as error:  # noqa: BLE001 - a broken run is the reason for this command
        lines += [f"- The state cannot be read: {masker.text(one_line(str(error), 600))}"]
    if document:
        lines += [f"- state: {document['counts']}"]
        lines += [f"- {name}: {one_line(text)}" for name, text in document["launched"]]
        lines += [f"- {one_line(each['text'])}" for each in document["in_short"]]
    for failure in list(document.get("failures", ()))[:3]:
        lines += ["", f"**{one_line(failure['words'])}**"]
        if trace := (failure["stack"] or failure["output"]).strip():
            lines += ["", f"{FENCE}text", *trace.replace(FENCE, "'" * 4).splitlines()[-MAX_TRACE:], FENCE]
    lines += ["", "| machine | |", "|---|---|"]
    facts: dict[str, str] = masker.json(describe_environment())
    lines += [f"| {name} | {one_line(value).replace('|', '/')} |" for name, value in facts.items()]
    return "\n".join(lines)
