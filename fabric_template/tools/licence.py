"""Licence: its text, which goes with each copy, and the line on top of each copied file that says where it is from."""

from __future__ import annotations

import re

LICENCE = """\
MIT License

Copyright (c) 2026 the fabric_template authors

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
"""

HEADER = re.compile(rb"# From fabric_template (\S+): (\S+) \(MIT licence: see [^\n]*\)\n")


def header(version: str, name: str, licence: str = "LICENSE") -> bytes:
    r"""The first line of a copied file.

    Example:
        >>> header("0.1.0", "core/train.py")
        b'# From fabric_template 0.1.0: core/train.py (MIT licence: see LICENSE)\n'
    """
    return f"# From fabric_template {version}: {name} (MIT licence: see {licence})\n".encode()


def split_header(data: bytes) -> tuple[bytes, bytes]:
    r"""The first line, if it is ours, and the rest; line ends are "\n" in both."""
    data = data.replace(b"\r\n", b"\n")
    found = HEADER.match(data)
    end = found.end() if found else 0
    return data[:end], data[end:]


def body(data: bytes | None) -> bytes | None:
    """A file without our first line; None for one that is not there."""
    return None if data is None else split_header(data)[1]


def origin(data: bytes) -> tuple[str, str] | None:
    r"""The version and the name that a file's first line says; None where it says nothing.

    Example:
        >>> origin(header("0.1.0", "core/train.py") + b"x = 1\n")
        ('0.1.0', 'core/train.py')
    """
    found = HEADER.match(split_header(data)[0])
    return (found[1].decode(errors="replace"), found[2].decode(errors="replace")) if found else None


def notice() -> bytes:
    """The licence as comments, for the end of a file that goes on alone."""
    return ("\n\n" + "".join(f"# {line}".rstrip() + "\n" for line in LICENCE.splitlines())).encode()
