"""Feeds random input to all that reads foreign bytes: messages, cloud files, weights, bags.

`make fuzz SECONDS=600`. Each reader runs in a process of its own under atheris, which mutates valid examples towards
new branches of our code. Anything but a result or an InputError is a failure; its input is kept in .build/fuzz/.
"""

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".build" / "fuzz"
SCRATCH = Path(tempfile.gettempdir())


def read_message(data: bytes) -> None:
    """A PointCloud2 whose every number is random."""
    from lepard_ros.cloud.pointcloud2 import decode_points

    random = provider(data)
    count = random.ConsumeIntInRange(0, 6)
    fields = [
        SimpleNamespace(
            name=random.PickValueInList(["x", "y", "z", "rgb", ""]),
            offset=small_or_any(random),
            datatype=random.ConsumeIntInRange(0, 10),
            count=small_or_any(random),
        )
        for _ in range(count)
    ]
    numbers = {name: small_or_any(random) for name in ("height", "width", "point_step", "row_step")}
    rest = random.ConsumeBytes(random.remaining_bytes())
    decode_points(SimpleNamespace(fields=fields, is_bigendian=random.ConsumeBool(), data=rest, **numbers))


def read_depth(data: bytes) -> None:
    """A depth Image whose every number is random."""
    from lepard_ros.cloud.depth_image import decode_depth

    random = provider(data)
    encoding = random.PickValueInList(["16UC1", "32FC1", "mono16", "64FC1", "rgb8", ""])
    numbers = {name: small_or_any(random) for name in ("height", "width", "step")}
    rest = random.ConsumeBytes(random.remaining_bytes())
    decode_depth(SimpleNamespace(encoding=encoding, is_bigendian=random.ConsumeBool(), data=rest, **numbers))


def read_cloud_file(data: bytes) -> None:
    """A cloud file of each format; the first byte chooses it."""
    from lepard_ros.cloud.files import read_cloud

    suffix = (".npy", ".npz", ".xyz", ".ply", ".pcd")[data[0] % 5] if data else ".npy"
    with scratch_file(data[1:], suffix) as path:
        read_cloud(path)


def read_weights(data: bytes) -> None:
    """A file of weights."""
    from lepard_ros.network.weights import load

    with scratch_file(data, ".safetensors") as path:
        load(path)


def read_bag(data: bytes) -> None:
    """A bag in one .mcap file, opened and all its clouds decoded."""
    from lepard_ros.evaluation.bag_reader import open_bag

    with scratch_file(data, ".mcap") as path, open_bag(path) as bag:
        for _ in bag.frames(bag.cloud_topic()):
            pass


TARGETS: dict[str, Callable[[bytes], None]] = {
    "message": read_message,
    "depth": read_depth,
    "cloud_file": read_cloud_file,
    "weights": read_weights,
    "bag": read_bag,
}


def provider(data: bytes) -> Any:
    """atheris's splitter of random bytes into numbers and choices."""
    import atheris

    return atheris.FuzzedDataProvider(data)


def small_or_any(random: Any) -> int:
    """Mostly a plausible size, now and then any unsigned 32-bit number."""
    return (
        random.ConsumeIntInRange(0, 2**32 - 1)
        if random.ConsumeIntInRange(0, 7) == 0
        else random.ConsumeIntInRange(0, 64)
    )


@contextlib.contextmanager
def scratch_file(data: bytes, suffix: str) -> Any:
    """A file with these bytes, which is gone afterwards."""
    with tempfile.NamedTemporaryFile(suffix=suffix, dir=SCRATCH) as file:
        file.write(data)
        file.flush()
        yield Path(file.name)


def write_examples(target: str, folder: Path) -> None:
    """Valid inputs that the mutations start from."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    points = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    (folder / "bytes").write_bytes(points.tobytes())
    if target == "cloud_file":
        from lepard_ros.cloud.files import write_cloud

        for number, suffix in enumerate((".npy", ".npz", ".xyz", ".ply", ".pcd")):
            with scratch_file(b"", suffix) as path:
                write_cloud(path, points)
                (folder / f"cloud{suffix}").write_bytes(bytes([number]) + path.read_bytes())
    if target == "weights":
        import torch
        from safetensors.torch import save

        (folder / "weights").write_bytes(save({"layer": torch.zeros(3)}, {"card": "{}"}))
    if target == "bag":
        write_bag(folder / "bag")


def write_bag(example: Path) -> None:
    """The .mcap file of a bag with two small clouds."""
    import numpy as np

    from lepard_ros.cloud.depth import Camera
    from lepard_ros.evaluation.bag_writer import BagWriter

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bag"
        with contextlib.closing(BagWriter(path, Camera(8, 6, 7.0, 7.0, 3.5, 2.5))) as bag:
            for stamp in (10**9, 2 * 10**9):
                bag.write(stamp, np.ones((6, 8), np.float32), np.eye(4))
        example.write_bytes(next(path.glob("*.mcap")).read_bytes())


def fuzz(target: str, seconds: int) -> None:
    """Mutate inputs of one target until the time is over or a failure is found; never returns."""
    import atheris

    from lepard_ros.errors import InputError

    run = TARGETS[target]
    with atheris.instrument_imports(include=["lepard_ros"]), contextlib.suppress(InputError):
        run(b"\0" * 64)  # Imports what the target uses.

    def once(data: bytes) -> None:
        with contextlib.suppress(InputError):
            run(data)

    examples = WORK / target
    write_examples(target, examples)
    options = [f"-max_total_time={seconds}", f"-artifact_prefix={WORK}/{target}-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], str(examples), *options, "-rss_limit_mb=4096", "-max_len=65536", "-timeout=20"], once)
    atheris.Fuzz()


def run_target(target: str, seconds: int) -> bool:
    """Fuzz one target in a process of its own and print its line; whether it passed."""
    command = [sys.executable, __file__, "--target", target, "--seconds", str(seconds)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=ROOT)
    output = result.stdout + result.stderr
    tried = re.search(r"number_of_executed_units:\s*(\d+)", output)
    passed = result.returncode == 0
    print(f"{target:<12}{int(tried[1]) if tried else 0:>12,} inputs   {'passed' if passed else 'FAILED'}", flush=True)
    if not passed:
        print(output[-3000:])
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together (default: %(default)s)")
    parser.add_argument("--target", choices=TARGETS, help="only this one, in this process")
    args = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    if args.target:
        fuzz(args.target, args.seconds)
    each = max(1, args.seconds // len(TARGETS))
    passed = [run_target(target, each) for target in TARGETS]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
