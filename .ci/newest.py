"""Makes an environment with the newest releases of what may break us, if the registry has newer ones than are pinned.

python .ci/newest.py FOLDER

Without newer ones there is no such folder afterwards.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WATCHED = ("torch", "transformers", "accelerate", "peft", "trl")


def newer_releases() -> list[str]:
    """`name==version` of what pip would upgrade in this environment, which has the pinned versions."""
    asked = ["--dry-run", "--quiet", "--upgrade", "--no-deps", "--report", "-", *WATCHED]
    command = [sys.executable, "-m", "pip", "install", *asked]
    report = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return ["{name}=={version}".format(**each["metadata"]) for each in json.loads(report)["install"]]


def install(folder: Path, releases: list[str]) -> None:
    """Make the environment of constraints.txt with these releases in place of the pinned ones."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    newer = {release.partition("==")[0] for release in releases}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = folder / "constraints.txt"
    pinned.write_text("\n".join(line for line in lines if line.partition("==")[0] not in newer), encoding="utf-8")
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    torch = next((release for release in releases if release.startswith("torch==")), "torch")
    for what in ([torch], ["setuptools"], ["--no-build-isolation", "--editable", f"{ROOT}[dev]"]):
        subprocess.run([*pip, "--constraint", pinned, *what], check=True)
    # also beyond the bounds of pyproject.toml, of which pip warns, and with whatever they need
    subprocess.run([*pip, *releases], check=True)


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    done, releases = folder / ".releases", newer_releases()
    if done.is_file() and done.read_text(encoding="utf-8").split() == releases:
        return
    shutil.rmtree(folder, ignore_errors=True)
    if releases:
        print("Newer than constraints.txt:", *releases, flush=True)
        install(folder, releases)
        done.write_text(" ".join(releases), encoding="utf-8")
    else:
        print(f"The registry has no newer release of {', '.join(WATCHED)} than constraints.txt: nothing to test.")


if __name__ == "__main__":
    main()
