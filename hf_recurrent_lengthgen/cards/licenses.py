"""How the Hub names licences."""

import difflib
import re
from typing import Any

# https://huggingface.co/docs/hub/repositories-licenses, August 2026
_IDENTIFIERS = """\
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl openmdw-1.0
openmdw-1.1 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown
other
"""
LICENSES = frozenset(_IDENTIFIERS.split())


def check_license(given: str) -> None:
    """Raise a `ValueError` for what the Hub does not know."""
    if given not in LICENSES:
        near = difflib.get_close_matches(given.lower().replace(" ", "-"), sorted(LICENSES), n=3)
        meant = f"did you mean {' or '.join(near)}" if near else "give one of its identifiers"
        raise ValueError(
            f"The Hub knows no license {given!r}: {meant}, or other. "
            "They are listed at huggingface.co/docs/hub/repositories-licenses."
        )


def license_data(license: str | None, source: str | None) -> dict[str, Any]:
    """The metadata of a licence; one without identifier is "other", with its name and where it is from.

    Args:
        license: Identifier or name; None for no metadata.
        source: Name on the Hub of the model that has it.
    """
    if license is None:
        return {}
    if license in LICENSES:
        return {"license": license}
    name = re.sub(r"[^a-z0-9.+-]+", "-", license.lower()).strip("-") or "unnamed"
    where = {"license_link": f"https://huggingface.co/{source}"} if source else {}
    return {"license": "other", "license_name": name, **where}
