"""The Makefile and the scripts hold to the tools that macOS has: GNU make 3.81, bash 3.2, and BSD's other programs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MISSING = {
    r"(^|[\s|;&(@])timeout\s": "macOS has no timeout(1)",
    r"\breadlink -f\b|\brealpath\b": "readlink and realpath of macOS 12 lack this",
    r"\bsed\s+(-\w*\s+)*-i\s*['\"s]": "sed -i of BSD needs an argument",
    r"\bdate\s+(-d|--date)": "date of BSD has -v and -j instead",
    r"\bgrep\s+-\w*P": "grep of BSD knows no Perl expressions",
    r"\b(mapfile|readarray)\b|declare -A|\$\{\w+(,,|\^\^)": "bash 3.2 has no arrays by name, and no change of case",
    r"\bxargs\s+(-\w*\s+)*-r\b|\bcp\s+--|\bmktemp\s+--|\bstat\s+-c": "an option of GNU",
    r"\bnproc\b|\bsetsid\b": "a program of GNU",
    r"\$\(file |\$\(shell .*\)|\.ONESHELL|::=|!=\s": "GNU make 3.81 lacks it, or runs it before each rule",
}


def scripts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    found = [ROOT / "Makefile"]
    for name in listed:
        path = ROOT / name
        if name and not name.startswith("tests/support/as_mac/") and path.is_file():
            with open(path, "rb") as file:
                if re.match(rb"#!.*\b(ba)?sh\b", file.readline(200)):
                    found.append(path)
    return found


def test_the_makefile_and_the_scripts_use_what_a_mac_has() -> None:
    wrong = [
        f"{path.name}:{number}: {reason}"
        for path in scripts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for pattern, reason in MISSING.items()
        if re.search(pattern, line)
    ]
    assert wrong == []


def test_the_search_finds_what_a_mac_lacks() -> None:
    for line in ("\ttimeout 60 make", "cd $(readlink -f .)", "sed -i 's/a/b/' x", "date -d now", "declare -A found"):
        assert any(re.search(pattern, line) for pattern in MISSING), line
