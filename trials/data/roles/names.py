"""Hints from the name of a column on what it is, if its values leave it open."""

from __future__ import annotations

import re

LABELS = (
    *("label", "click", "clicked", "is_click", "is_clicked", "clk", "target", "y"),
    *("conversion", "converted", "is_conversion", "conversion_label", "click_label"),
)
"""Names of label columns, the surest first."""
WEIGHTS = ("example_weight", "sample_weight")
"""Names of the weight of an example; `weight` alone may be a person's."""
ORACLE = "oracle_probability"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CODE_WORDS = _words(
    """
    id ids uid guid uuid code codes recode zip zipcode postal postcode hash key type category cat class kind
    user member customer visitor session item product article sku brand shop store seller merchant movie genre
    ad ads campaign advertiser creative publisher site domain page app device browser os model country city
    region state area locale language channel ip slot position pos placement segment group cluster version
    """
)
_ROW_WORDS = _words("request impression event row log session transaction uuid guid record index trace")
_AMOUNT_WORDS = _words(
    """
    age count counts cnt num total sum avg mean median min max weeks days hours minutes mins seconds secs months
    years amount price cost fee wage wages income salary revenue balance gain gains loss losses dividend
    dividends score rate ratio percent pct share size length width height depth duration elapsed distance
    frequency freq clicks impressions views visits purchases orders sales quantity qty stock discount bid
    rating latency number nights
    """
)
_TIME_WORDS = _words("time timestamp ts date datetime dt hour day created at epoch")
_EVENT_WORDS = _words("event click clicked impression request visit served shown")
_MOMENT_WORDS = _words("time timestamp ts datetime hour epoch")
_OTHER_MOMENT_WORDS = _words(
    """
    expire expires expiry expiration due deadline until end ends valid created creation registered registration
    signup joined birth birthday dob updated modified login first last install installed release released published
    start
    """
)
_OUTCOME_WORDS = _words(
    """
    conversion converted conversions purchase purchased bought buy order ordered install installed attributed like
    liked share shared comment commented follow followed favorite fav hate dwell watch watched play played finish
    finished complete completed landing cart signup subscribed booked paid revenue view click clicked clk target
    """
)
_INDEX_NAME = re.compile(
    r"(?:unnamed: ?\d+|column_\d+|index|idx|(?:__index_)?level_\d+_*|row_?(?:id|num|number|nr|no|index)?|x)?",
    re.IGNORECASE,
)
_SPLIT_WORDS = _words("split splits fold folds kfold partition partitions subset subsets")
_BESIDE_FOLDS = _words(
    "cv k id idx index no nr num number data dataset train test valid val validation cross"
)
_SPLIT_NAMES = ("set", "dataset", "data_set", "usage", "phase", "stage")
_NO_IDS = _words(
    "bid paid prepaid unpaid valid invalid void grid hybrid solid covid fluid liquid rapid avid acid mid said"
)


def words_of(name: str) -> frozenset[str]:
    """Returns the words of snake_case, camelCase, kebab-case and spaced names, in lower case."""
    return frozenset(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))


def suggests_amount(name: str) -> bool:
    """Tells whether the name is that of a count, an amount, a duration: numeric even if it takes few values."""
    words = words_of(name)
    return bool(words & _AMOUNT_WORDS) or words >= {"no", "of"}


def suggests_code(name: str) -> bool:
    """Tells whether the name is that of an id or a code: categorical even if it is a number with many
    values."""
    words = words_of(name)
    return bool(words & _CODE_WORDS) or any(word.endswith("id") and word not in _NO_IDS for word in words)


def suggests_row_id(name: str) -> bool:
    """Tells whether the name is that of an id of the row itself rather than of a user, an item or another thing
    that comes back."""
    words = words_of(name)
    return bool(words & _ROW_WORDS) or words <= {"id"}


def suggests_index(name: str) -> bool:
    """Tells whether a column has no name, or one that data frames give to the index of their rows."""
    return _INDEX_NAME.fullmatch(name.strip()) is not None


def says_nothing(name: str) -> bool:
    """Tells whether a name is a letter or two and a number, as columns without names are called."""
    return re.fullmatch(r"[A-Za-z]{1,2}_?\d+|(?:col|column|var|feature|feat)_?\d+", name) is not None


def suggests_event(name: str) -> int:
    """Returns how surely the name is that of the moment of the event itself: 2, 1, 0 for no hint, or -1 for
    another moment's, such as an account's creation."""
    words = words_of(name)
    if words & _OTHER_MOMENT_WORDS:
        return -1
    return 2 if words & _EVENT_WORDS else 1 if words and words <= _MOMENT_WORDS else 0


def suggests_outcome(name: str) -> bool:
    """Tells whether the name is that of something that happens after a click: a conversion, a like, dwell time."""
    return bool(words_of(name) & _OUTCOME_WORDS) or plain(name) in LABELS


def suggests_time(name: str) -> bool:
    """Tells whether the name is that of a time stamp, if the values could be one."""
    words = words_of(name)
    return bool(words & _TIME_WORDS) or any(word.endswith(("time", "date", "timestamp")) for word in words)


def suggests_split(name: str) -> bool:
    """Whether a row is for training or test, if the values could say it."""
    return bool(words_of(name) & _SPLIT_WORDS) or plain(name) in _SPLIT_NAMES


def suggests_folds(name: str) -> bool:
    """A number of a fold; `split_count` is a count."""
    words = words_of(name)
    return bool(words & _SPLIT_WORDS) and words <= _SPLIT_WORDS | _BESIDE_FOLDS


def plain(name: str) -> str:
    """Returns the name in lower case, its words with underscores between them: `is_clicked` for `isClicked`,
    `Is Clicked?` and `is-clicked`. Signs that mean something stay: `click %` is no click."""
    apart = re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", name)
    return re.sub(r"""[\s_.?!:;,'"/|()\[\]-]+""", "_", apart).strip("_").lower()
