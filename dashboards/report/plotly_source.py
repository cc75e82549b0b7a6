"""plotly.js as the page carries it: packed, since it is three times as large as all that is drawn with it."""

from __future__ import annotations

import base64
import gzip
from functools import cache

from plotly.offline import get_plotlyjs


@cache
def packed_plotly() -> str:
    """Returns plotly.js, gzipped, in base64; the page's script unpacks it when the first figure is to be drawn."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
