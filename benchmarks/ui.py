"""How fast the pages are in headless Chromium: the table of a thousand runs, the first frame of a dream, frames a
second, from a key to the picture that answers it, and an exported dream.

    python benchmarks/ui.py --write ui

The models are untrained: their speed is the same. Needs Chromium and playwright (`bash scripts/setup_browser.sh`). The
processor time of a frame is that of the server and the dream's process together, which other work beside it hardly
changes; all other figures are wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from measuring import add_writing, write_record
from playwright.sync_api import Browser, Page, sync_playwright

RUNS, SEEDS, ROWS = 1000, 20, 300
SHORT = ["training.total_timesteps=40", "environment.num_envs=2", "data_sources.replay.start_after=1000",
         "evaluation.episodes=1", "evaluation.num_envs=1", "evaluation.final_episodes=1", "evaluation.video=false",
         "evaluation.imagination=false", "logging.tensorboard=false", "logging.console=off"]  # fmt: skip
DREAMS = {  # Pendulum's episodes are long, whoever acts
    "vector, tiny": ["environment.id=Pendulum-v1", "size=tiny"],
    "images, tiny": ["environment.id=Pendulum-v1", "environment.observation=pixels", "size=tiny"],
    "images, 12m": ["environment.id=Pendulum-v1", "environment.observation=pixels", "size=12m"],
}
PAINTED = """() => { const canvas = document.querySelector(".panes .dreaming canvas");
  const picture = canvas && canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return picture && picture.data.some((value) => value); }"""
SECONDS, PRESSES = 4.0, 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_writing(parser)
    parser.add_argument("--runs", type=Path, help="keep the runs here, and take the ones that are here already")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        place = Path(folder)
        kept = (options.runs or place / "runs").resolve()
        runs = {name: trained(kept / str(index), own) for index, (name, own) in enumerate(DREAMS.items())}
        cartpole = trained(kept / "export", ["environment.id=CartPole-v1", "size=tiny"])
        record: dict[str, Any] = {"table": table(browser, place / "many", cartpole)}
        print(record, flush=True)
        record["dreams"] = {}
        for name, run in runs.items():
            record["dreams"][name] = dream(browser, run)
            print(name, record["dreams"][name], flush=True)
        record["export"] = exported(browser, cartpole, place / "dream.html")
        browser.close()
    record |= {"device": "cpu", "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1)}
    print(json.dumps(record, indent=1))
    if options.write:
        write_record(options.write, record, options.note)


def trained(root: Path, settings: list[str]) -> Path:
    """A run directory with an untrained model below `root`, made where there is none."""
    if not root.is_dir():
        command = ["train", "+experiment=dreamer_v3", *settings, *SHORT, f"run_root={root}"]
        subprocess.run([sys.executable, "-m", "rl_lab", *command], check=True, stdout=subprocess.DEVNULL)
    return next(path.parent for path in root.glob("*/*/run.json"))


# The table of runs ----------------------------------------------------------------------------------------------------


def many_runs(root: Path, example: Path) -> Path:
    """A thousand run directories like `example`, with metrics; the last one."""
    config = (example / "config.yaml").read_text(encoding="utf-8")
    rows = "".join(json.dumps({"env_steps": 100 * row, "updates": row, "wall_s": float(row), "phase": "train",
                               "train/loss/total": 1.0 / (row + 1), "eval/return_mean": float(row)}) + "\n"
                   for row in range(ROWS))  # fmt: skip
    for number in range(RUNS):
        folder = root / f"experiment_{number // SEEDS}" / f"20260101-000000-s{number % SEEDS}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(config, encoding="utf-8")
        (folder / "metrics.jsonl").write_text(rows, encoding="utf-8")
        shutil.copy(example / "run.json", folder / "run.json")
    return folder


def table(browser: Browser, root: Path, example: Path) -> dict[str, float]:
    """Seconds until the table of a thousand runs stands, the server's memory, and what one changed run costs."""
    last = many_runs(root, example)
    with served(["ui", str(root)]) as (address, process), opened(browser) as page:
        start = time.perf_counter()
        page.goto(address)
        page.get_by_text(f"{RUNS} of {RUNS} runs").wait_for()
        page.locator("tr[data-run]").first.wait_for()
        found = {"runs": RUNS, "table_s": time.perf_counter() - start}
        script = "(since) => fetch(`/api/runs?since=${since}`).then((answer) => answer.json())"
        version = page.evaluate(script, 0)["version"]
        with open(last / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"env_steps": 99_999, "wall_s": 1e6, "phase": "train"}) + "\n")
        start = time.perf_counter()
        changed = page.evaluate(script, version)
        found["one_changed_s"] = time.perf_counter() - start
        assert len(changed["rows"]) == 1, changed
        found["memory_mb"] = psutil.Process(process.pid).memory_info().rss / 1e6
    return found


# Dreams ---------------------------------------------------------------------------------------------------------------


def dream(browser: Browser, run: Path) -> dict[str, float]:
    """First frame, frames a second at the highest speed with both worlds, and from a key to its picture."""
    start = time.perf_counter()
    with (
        served(["dream", str(run), "--run-root", str(run.parents[1])]) as (address, process),
        opened(browser) as page,
    ):
        page.goto(f"{address}#/dream?id={quote(f'{run.parent.name}/{run.name}', safe='')}")
        waited(lambda: page.evaluate(PAINTED), 120)
        found = {"first_frame_s": time.perf_counter() - start}
        page.locator(".settings label", has_text="steps/s").locator("input").fill("60")
        found |= frames(page, process.pid)
        page.get_by_role("button", name="New episode").click()
        for _ in range(PRESSES):
            page.keyboard.press("ArrowLeft", delay=60)
            page.wait_for_timeout(40)
        found["key_to_picture_ms"] = float(page.locator("[data-latency]").get_attribute("data-latency") or "nan")
    return found


def frames(page: Page, pid: int) -> dict[str, float]:
    """Frames a second as the page shows them, and the processor time of each."""
    page.get_by_role("button", name="▶ Play").click()
    page.wait_for_timeout(1000)
    meter, moment = page.locator(".meters b").first, page.get_by_label("Moment")
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    before, first, shown = cpu(processes), int(moment.input_value()), []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end and page.get_by_role("button", name="Pause").count():
        page.wait_for_timeout(250)
        shown.append(float(meter.inner_text()))
    used, count = cpu(processes) - before, int(moment.input_value()) - first
    page.keyboard.press("Space")
    return {"frames_per_s": statistics.median(shown), "cpu_ms_per_frame": 1000 * used / count}


def cpu(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes if process.is_running())


def exported(browser: Browser, run: Path, path: Path) -> dict[str, float]:
    """Frames a second of the page from disk without a network, and how far its first steps are from PyTorch's."""
    subprocess.run([sys.executable, "-m", "rl_lab", "export", str(run), "--web", "--out", str(path)], check=True)
    with opened(browser, offline=True) as page:
        page.goto(path.as_uri())
        check = page.locator("#check")
        page.wait_for_timeout(2000)
        shown = []
        for _ in range(12):
            again = page.get_by_role("button", name="Dream again")
            if again.count():
                again.click()
            page.wait_for_timeout(250)
            shown.append(float(page.locator("#fps").inner_text()))
        found = {name: float(check.get_attribute(f"data-{name}") or "nan") for name in ("difference", "milliseconds")}
    megabytes = path.stat().st_size / 1e6
    return {"frames_per_s": statistics.median(shown), "difference": found["difference"],
            "ms_per_step": found["milliseconds"], "megabytes": megabytes}  # fmt: skip


# Processes and pages --------------------------------------------------------------------------------------------------


@contextmanager
def served(arguments: list[str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server, and its process."""
    command = [sys.executable, "-m", "rl_lab", *arguments, "--no-browser", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = next(match for text in process.stdout if (match := re.search(r"http://[^\s#?]+", text)))
        yield line[0], process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


@contextmanager
def opened(browser: Browser, **options: Any) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 860}, **options)
    yield context.new_page()
    context.close()


def waited(check: Callable[[], Any], seconds: float) -> None:
    end = time.perf_counter() + seconds
    while not check():
        if time.perf_counter() > end:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
