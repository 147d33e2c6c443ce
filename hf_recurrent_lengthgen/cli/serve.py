"""`lengthgen serve`: the server of Transformers with a checkpoint of this package, and from a reading."""

from collections.abc import Sequence
from typing import Any

from transformers.utils.import_utils import is_serve_available

from hf_recurrent_lengthgen.cli.measuring import on_device
from hf_recurrent_lengthgen.cli.parsing import CommandParser, positive
from hf_recurrent_lengthgen.cli.shared_options import DTYPES, MODEL, add_shared
from hf_recurrent_lengthgen.loading import load_model, load_tokenizer, read_config
from hf_recurrent_lengthgen.readings import load_reading
from hf_recurrent_lengthgen.serving import served

DESCRIPTION = """\
Start `transformers serve`, an OpenAI-compatible server, with one model. It loads checkpoints of this package, whose
code it cannot load by itself. With --reading, every request continues the text that was read (lengthgen state read):
requests hold the question only. Needs pip install "transformers[serving]".

Stock hybrids and what `lengthgen export --format transformers` writes need no more than `transformers serve`.
"""
EXAMPLES = """\
lengthgen serve demo-output/cured --port 8000
lengthgen serve demo-output/cured --reading book
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen serve", DESCRIPTION, EXAMPLES, method="server")
    parser.model.add_argument("model", **MODEL)
    what = "file or folder of a reading that every request continues"
    parser.data.add_argument("--reading", metavar="READING", help=what)
    what = "in a folder, the reading at this position, or the nearest one before it (default: the last)"
    parser.data.add_argument("--position", type=positive, metavar="N", help=what)
    what = "address to listen at (default: %(default)s, this machine only)"
    parser.method.add_argument("--host", default="localhost", metavar="NAME", help=what)
    what = "port to listen at (default: %(default)s)"
    parser.method.add_argument("--port", type=positive, default=8000, metavar="N", help=what)
    add_shared(parser, "--device", "--dtype", "--trust-remote-code")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    if options.position and not options.reading:
        raise ValueError("--position chooses among the readings of a folder: give --reading, too.")
    if not is_serve_available():
        raise ValueError('The server of Transformers is not installed: pip install "transformers[serving]".')
    from transformers.cli.serve import Serve  # needs the extra

    trust = options.trust_remote_code
    tokenizer = load_tokenizer(options.model, trust)
    model = load_model(options.model, trust, DTYPES[options.dtype], merge=True).eval()
    model = on_device(model, options.device)
    reading: Any = None
    if options.reading:
        reading = load_reading(options.reading, model, tokenizer, position=options.position)
        print(f"Requests continue a text of {reading.position:,} tokens.")
    settings, _ = read_config(options.model, trust)
    with served(model, settings["architectures"][0], reading):
        Serve(options.model, host=options.host, port=options.port, trust_remote_code=trust)
    return 0
