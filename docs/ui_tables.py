"""The table of what benchmarks/ui.py measured."""

from __future__ import annotations

import json
from pathlib import Path


def ui_table(path: Path) -> str:
    """Figures of the pages, and the load of the machine while they were taken."""
    if not path.is_file():
        return "Not measured yet."
    result = json.loads(path.read_text(encoding="utf-8"))
    table, export = result["table"], result["export"]
    lines = [
        "| Dream | First frame | Frames a second | Processor time of a frame | Key to picture |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, own in result["dreams"].items():
        lines.append(
            f"| {name} | {own['first_frame_s']:.1f} s | {own['frames_per_s']:.0f} | {own['cpu_ms_per_frame']:.0f} ms "
            f"| {own['key_to_picture_ms']:.0f} ms |"
        )
    sentences = (
        f"The table of {table['runs']:,} runs stands after {table['table_s']:.2f} s, the server takes",
        f"{table['memory_mb']:.0f} MB, and one changed run costs {1000 * table['one_changed_s']:.0f} ms.",
        f"The exported page of CartPole ({export['megabytes']:.1f} MB) shows {export['frames_per_s']:.0f} frames",
        f"a second; one step takes {export['ms_per_step']:.1f} ms, and its first 20 steps differ from PyTorch's by",
        f"{export['difference']:.0e} at most. Measured on {result['cores']} cores with a load of",
        f"{result['load_average']:.0f} by other work.",
    )
    return "\n".join([*lines, "", " ".join(sentences)])
