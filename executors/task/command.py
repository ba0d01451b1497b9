"""A command as the task of a run: a program with its arguments, which each replica runs as it is, without a shell."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executors.errors import EntrypointImportError

MAX_WORDS = 10_000


@dataclass(frozen=True)
class Command:
    """A program and its arguments. A launch takes it in the place of a function.

    Example:
        Command.of(["torchrun", "--nproc-per-node", "2", "train.py"])
    """

    words: tuple[str, ...]

    @classmethod
    def of(cls, words: Sequence[str]) -> Command:
        """Return the command of a list of words.

        Args:
            words: the program, and then its arguments, as in `["torchrun", "train.py"]`.

        Raises:
            TypeError: this is not a list of texts.
            ValueError: there is no word, or a word has a null character.
            EntrypointImportError: the first word cannot be a program.

        Example:
            Command.of(["python", "train.py"])
        """
        if isinstance(words, str) or not all(isinstance(word, str) for word in words):
            raise TypeError(f"command must be a list of strings, as in ['torchrun', 'train.py'], got {words!r}.")
        if not words or not words[0] or len(words) > MAX_WORDS or any("\0" in word for word in words):
            raise ValueError(
                "command must be a program and its arguments, as in ['torchrun', 'train.py'], "
                f"got {list(words[:20])!r}."
            )
        first = words[0]
        if first.endswith(".py"):
            raise EntrypointImportError(
                f"{first!r} is not a program. Run it as a script: replicas launch {first} --n 4 -- …, or: -- python "
                f"{first} …"
            )
        if first.startswith("-"):
            raise EntrypointImportError(
                f"{first!r} is not a program. Name the script before its options: replicas launch train.py --n 4 -- "
                f"{first} …"
            )
        return cls(tuple(words))

    def __str__(self) -> str:
        return shlex.join(self.words)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raise an error: a worker runs the command as a child process, and calls no function.

        Args:
            args: ignored.
            kwargs: ignored.
        """
        raise TypeError(f"The command {str(self)!r} is not a function. Launch it.")


def search_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return the folders in which the program of a command is looked for, separated as in PATH.

    The folder of this Python is the first, so that `torchrun` and `python` belong to the environment that launches.

    Args:
        environ: the environment with PATH. Default: the environment of this process.

    Example:
        shutil.which("torchrun", path=search_path())
    """
    return os.pathsep.join([os.path.dirname(sys.executable), environ.get("PATH", os.defpath)])


def check_program(command: Command, environ: Mapping[str, str] = os.environ) -> None:
    """Check that the program of a command exists on this machine.

    Args:
        command: the command.
        environ: the environment of the replicas. Default: the environment of this process.

    Raises:
        EntrypointImportError: there is no such program.

    Example:
        check_program(Command.of(["torchrun", "train.py"]))
    """
    first = command.words[0]
    if "${" not in first and shutil.which(first, path=search_path(environ)) is None:
        advice = "Install it, or give its path"
        if len(command.words) == 1 and " " in first.strip():
            advice = f"Give each word by itself, or let a shell run it: -- sh -c {shlex.quote(first)}"
        raise EntrypointImportError(
            f"The program {first!r} of the command is not found, or is not executable. {advice}."
        )
