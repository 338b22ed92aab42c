"""The command of this package as it can be typed here: the console script is not on everybody's PATH."""

import shlex
import shutil
import sys


def command(arguments: str) -> str:
    """`dejakv ARGUMENTS`; without a console script on the PATH, the same by the module, with this interpreter."""
    if shutil.which("dejakv"):
        return f"dejakv {arguments}"
    return f"{shlex.quote(sys.executable or 'python')} -m dejakv {arguments}"
