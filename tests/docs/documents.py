"""Reads the documentation: pages, code blocks, commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PLUGIN = ROOT / "examples" / "my_lab"
CONFIG_FILE = re.compile(r"my_configs/experiment/(\w+)\.yaml")


@dataclass(frozen=True)
class Block:
    """One fenced block and the page that it stands on."""

    page: str
    language: str
    text: str
    config_name: str | None  # the experiment file that the page calls it, for YAML


def pages() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES}


def blocks(language: str) -> list[Block]:
    found = []
    for page, text in pages().items():
        for match in re.finditer(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            if match[1] == language:
                names = CONFIG_FILE.findall(text[: match.end()])
                found.append(Block(page, match[1], match[2], names[-1] if names else None))
    return found


def shell_lines() -> list[tuple[str, list[str]]]:
    """(page, words) of every line of every shell block; comments, `cd … &&` and variables before it are left out."""
    lines = []
    for block in blocks("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.rpartition("&& ")[2], comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words:
                lines.append((block.page, words))
    return lines


def commands() -> list[list[str]]:
    """The arguments of every `rl-lab …` line, each once."""
    found = {tuple(words[1:]) for _, words in shell_lines() if words[0] == "rl-lab"}
    return [list(words) for words in sorted(found)]


def prose() -> dict[str, str]:
    """The pages without their code blocks."""
    return {page: re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL) for page, text in pages().items()}
