"""Runs code where this package cannot be imported.

Importing torch and Transformers takes many seconds, so one process imports them, and forks one for each block of code.
"""

import atexit
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

# Before other code of a process: any import of our package is an error.
REFUSING = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hf_recurrent_lengthgen", "trainers"):
            raise ImportError("this process must not import " + name)
sys.meta_path.insert(0, Refuse())
"""
# Each line of its input is a request, and is answered by the exit status of the child that runs it.
PARENT = """
import json, os, traceback
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import transformers
import transformers.dynamic_module_utils, transformers.modeling_layers, transformers.models.mamba.modeling_mamba
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

def run(folder, code, arguments, threads):
    torch.set_num_threads(threads)
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name + ".txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    transformers.dynamic_module_utils.HF_MODULES_CACHE = folder + "/modules"
    sys.argv = ["-c", *arguments]
    names = {name: value for name, value in globals().items() if name.startswith("Auto")}
    checkpoint, data = (*arguments, None, None)[:2]
    exec(compile(code, "code", "exec"), names | dict(__name__="__main__", torch=torch, sys=sys, os=os, json=json,
         checkpoint=checkpoint, data=data))

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(**json.loads(line))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Done(NamedTuple):
    """How a process ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


@cache
def _parent() -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-c", REFUSING + PARENT]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    return process


def clean_process(folder: Path, code: str, *arguments: Path, check: bool = True) -> Done:
    """Run code in a folder, with torch, the Auto classes, and the first two arguments as `checkpoint` and `data`."""
    folder.mkdir(exist_ok=True)
    process = _parent()
    assert process.stdin is not None
    assert process.stdout is not None
    request = {"folder": str(folder), "code": code, "arguments": [str(argument) for argument in arguments]}
    request["threads"] = torch.get_num_threads()
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    status = int(process.stdout.readline())
    done = Done(status, *((folder / f"{name}.txt").read_text() for name in ("stdout", "stderr")))
    assert done.returncode == 0 or not check, done.stderr
    return done
