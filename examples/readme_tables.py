"""Tables and figures between the markers of a README, written by the command that makes them."""

import re
from collections.abc import Mapping
from pathlib import Path

from hf_recurrent_lengthgen.models.state_on_disk import replacing


def fill(readme: Path, parts: Mapping[str, str]) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- end -->` for each name.

    Raises:
        ValueError: unless the README has each pair of markers once.
    """
    text = readme.read_text(encoding="utf-8")
    for name, part in parts.items():
        marked = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->\n)"
        escaped = part.replace("\\", r"\\")  # a replacement reads backslashes
        text, places = re.subn(marked, rf"\g<1>{escaped}\g<2>", text, flags=re.DOTALL)
        if places != 1:
            raise ValueError(
                f"{readme} has {places} places for {name!r}, but must have one: a line <!-- {name} --> and a line "
                "<!-- end -->."
            )
    with replacing(readme) as file:
        file.write_text(text, encoding="utf-8")
