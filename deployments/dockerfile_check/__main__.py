"""Run the Dockerfile's own instructions in plain root folders, where there is no Docker engine.

    sudo python3 deployments/dockerfile_check [--build-arg NAME=VALUE] [--mount FOLDER]

Obeys ARG, COPY, RUN and the others in turn, as root or as the USER, in a chroot. In the base image's stead
stands a Debian root of debootstrap's with Python and the compilers of CANN's image: it has no CANN and no
driver, so nothing here touches a card. Then it starts what the image starts, with a configuration for the
CPU, as PID 1 and without a network, and checks that

- the configurations are valid, the compilers are gone and the user is not root,
- the health check fails before the server is up and passes afterwards, and a request is answered,
- ended processes are collected, and SIGTERM ends the server in time with status 0.

--base takes the root folder of an exported image instead, and --env what that image sets in the environment.
--mount binds a folder of the host read-only into the roots, for pip to find wheels in (PIP_* of the
environment is handed on). Needs root, debootstrap, unshare and nsenter; 6 GB in the temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from builder import REPOSITORY, Builder
from image import check_image
from root import Stage, become
from saying import say

BASE_PACKAGES = "python3,python3-venv,ca-certificates,gcc,g++,make,cmake,build-essential,libsqlite3-dev"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--base", type=Path, help="the root folder of an image, exported, instead of Debian's"
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="of that image")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--mount", action="append", default=[], metavar="FOLDER")
    parser.add_argument("--keep", action="store_true", help="leave the roots for a look")
    parser.add_argument("--enter", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.enter:
        become(json.loads(options.enter))
    if os.geteuid() != 0:
        raise SystemExit("needs root: it makes root folders and mounts in them")
    if "CHECK_DOCKERFILE_ALONE" not in os.environ:
        os.environ["CHECK_DOCKERFILE_ALONE"] = "1"
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv])
    work = Path(tempfile.mkdtemp(prefix="dockerfile-"))
    base = options.base or work / "base"
    try:
        if not options.base:
            packages = f"--include={BASE_PACKAGES}"
            debootstrap = ["debootstrap", "--variant=minbase", packages, "bookworm", str(base)]
            subprocess.run(debootstrap, check=True, stdout=subprocess.DEVNULL)
        environment = {"PATH": PATH} | dict(setting.split("=", 1) for setting in options.env)
        build_args = dict(argument.split("=", 1) for argument in options.build_arg)
        image = Builder(Stage(base, environment=environment), work, build_args, options.mount).build(
            (REPOSITORY / "Dockerfile").read_text()
        )
        for folder in (base, image.root, image.root / "opt/halftone"):
            subprocess.run(["du", "-shx", str(folder)], check=True)
        check_image(image)
        say("all of it holds")
    finally:
        if not options.keep:
            subprocess.run(["umount", "--recursive", "--lazy", *map(str, work.glob("stage*"))], check=False)
            subprocess.run(["rm", "-rf", "--one-file-system", str(work)], check=False)


if __name__ == "__main__":
    main()
