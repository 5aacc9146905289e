"""Measure the seconds that a call takes on the device at hand, those that its kernels take of them,
and the clocks and power of the card meanwhile.
"""

import contextlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax


def seconds_of(run: Callable[[], Any], wait: Callable[[Any], Any], dry: bool) -> float:
    """Return the median seconds of a run. A sample holds as many runs as take 20 ms together."""
    wait(run())
    began = time.perf_counter()
    wait(run())
    repeat = 1 if dry else max(1, int(0.02 / max(time.perf_counter() - began, 1e-6)))
    samples, last = [], None
    for _ in range(1 if dry else 7):
        began = time.perf_counter()
        for _ in range(repeat):
            last = run()
        wait(last)
        samples.append((time.perf_counter() - began) / repeat)
    return statistics.median(samples)


def kernel_seconds(run: Callable[[], Any], names: tuple[str, ...]) -> float | None:
    """Return the seconds that kernels with any of these in their names take in a run; None where
    the profiler sees no such kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        files = list(Path(folder).glob("**/*.xplane.pb"))
        planes = jax.profiler.ProfileData.from_file(str(files[0])).planes if files else ()
        return device_seconds(planes, names)


def device_seconds(planes: Any, names: tuple[str, ...]) -> float | None:
    total = 0.0
    for plane in planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                events = (e for e in line.events if any(name in e.name for name in names))
                total += sum(event.duration_ns for event in events)
    return total / 1e9 or None


COLUMNS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
SAMPLES_MS = 100


@contextlib.contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """Yield a record that has, after the block, what nvidia-smi saw of the first card meanwhile:
    the least clocks in MHz, the most watts and degrees. It stays empty where there is no such tool.
    """
    seen: dict[str, float] = {}
    if shutil.which("nvidia-smi") is None:
        yield seen
        return
    query = f"--query-gpu={','.join(COLUMNS)}"
    with tempfile.TemporaryFile("w+") as file:
        flags = ["--id=0", query, "--format=csv,noheader,nounits", f"--loop-ms={SAMPLES_MS}"]
        process = subprocess.Popen(["nvidia-smi", *flags], stdout=file)
        try:
            yield seen
        finally:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the driver
                process.wait(10)
            file.seek(0)
            seen |= summary(file.read())


def summary(lines: str) -> dict[str, float]:
    """Return the least clocks, and the most of the rest, of nvidia-smi's lines; a column that the
    card does not have is left out.
    """
    rows = [line.split(",") for line in lines.splitlines()]
    extremes: dict[str, float] = {}
    for i, name in enumerate(COLUMNS):
        texts = [row[i].strip() for row in rows if len(row) == len(COLUMNS)]
        values = [float(text) for text in texts if text.replace(".", "", 1).isdigit()]
        if values:
            least_or_most = min if name.startswith("clocks") else max
            extremes[name] = least_or_most(values)
    return extremes
