"""Languages in Latin letters of Central and Eastern Europe, told from those of Western Europe by the letters of a word.

The bytes of `Dvořák` in Windows-1250 are `Dvoøák` in Windows-1252: no Western language has both ø and á in a word.
"""

from __future__ import annotations

import re

_WESTERN = (
    "áàâãçéêíóôõúü",  # Portuguese
    "áéíóúüñçàèòï",  # Spanish, Catalan
    "àâçéèêëîïôùûüÿœñ",  # French
    "àèéìîòóùáíú",  # Italian, Irish
    "äöüßéèáàç",  # German
    "åäöéüàšž",  # Swedish, Finnish
    "åæøéöäüóòôê",  # Danish, Norwegian
    "áéíóúýþðæö",  # Icelandic
    "áéëïóöüèêíúçô",  # Dutch
)
_CENTRAL = "áčďéěíňóřšťúůýž", "áäčďéíľĺňóôŕšťúýž", "ąćęłńóśźż", "áéíóöőúüű", "ăâîşţ", "čćđšž", "äöüßé"
_ALPHABETS = {
    ("windows-1250", "cp1250"): _CENTRAL,
    ("iso-8859-2", "iso8859_2"): _CENTRAL,
    ("windows-1257", "cp1257"): ("ąčęėįšųūž", "āčēģīķļņšūž", "äõöüšž"),
    ("windows-1254", "cp1254"): ("çğıöşüâîû\u0307",),
}
"""(Name, codec of Python) of a set → alphabets of the languages that are written in it, beyond ASCII."""
_LEAST, _SURE = 2, 4
"""Letters beyond ASCII that show a language, and how many different ones do where each word could be a Western one."""
_WORD = re.compile(r"[^\W\d_]+")
_ODD = re.compile(
    r"[^\W\d_][¡-©«¬®-±²³¶¸¹»-¿ˆ‰†‡‚„“”‹›•˜™ˇ˘˛˙˝][^\W\d_]|[\x80-\x9f]|[ª©®£¯][a-zà-ÿ»]|[^\W\d_¼-¾][±¶¼¾¿]|[a-zß-öø-ÿ](?![A-Z])[^\W\d_a-zß-ſ²³¹¼-¾ªº]"
)
"""A sign in or before a word, or a capital beyond ASCII behind a small letter. Python takes `²` for a letter."""
_NO_PORTUGUESE = re.compile(r"õ(?!e)")
_FOREIGN_SHARE = 0.4


def is_western(text: str) -> bool:
    """Whether text that was decoded as Windows-1252 looks like a language that is written in it.

    Words in Latin letters have few accents, and no signs inside. Anything else would be words that nobody wrote.
    """
    letters = sum(map(str.isalpha, text))
    foreign = letters - sum(map(str.isascii, filter(str.isalpha, text)))
    if foreign > _FOREIGN_SHARE * letters or "\ufffd" in text or "¤" in text:
        return False
    # Signs inside a word, and accents on letter after letter, which no Western language has.
    foreign_words = (
        re.search(r"[^\W\d_][¡-©«¬®-±²³¶¸¹»-¿ˆ‰†‡‚„“”‹›•˜™][^\W\d_]", text),
        re.search(r"[a-zß-öø-ÿ][Ÿ¿¡À-ÖØ-Þ]|Ÿ[a-z]|(?<![aeouAEOU])ÿ|[À-ÖØ-öø-ÿŠšŒœŽžŸ]{4}", text),
    )
    return not any(foreign_words)


def eastern(data: bytes) -> tuple[str, str]:
    """Return the one set whose languages have all letters of a text, where those of Western Europe have not.

    Returns:
        Its name and its codec of Python. Empty where the words may be Western ones, or where no set or two would do.
    """
    data = b" ".join([word for word in data.split() if not word.isascii()])
    western = data.decode("cp1252", errors="replace")
    words = _words(western)
    is_odd = "\ufffd" in western or _ODD.search(western) or _NO_PORTUGUESE.search(western)
    if not is_odd and _fits("".join(words), _WESTERN):
        return "", ""
    least = _LEAST if is_odd or not all(_fits(word, _WESTERN) for word in words) else _SURE
    found = dict[str, tuple[str, str]]()
    for (name, codec), alphabets in _ALPHABETS.items():
        try:
            text = data.decode(codec)
        except UnicodeDecodeError:
            continue
        letters = "".join(filter(str.isalpha, "".join(_words(text)).lower()))
        foreign = [letter for letter in letters if not letter.isascii()]
        count = len(set(foreign)) if least == _SURE else len(foreign)
        if count >= least and not _ODD.search(text) and _fits(letters, alphabets):
            found.setdefault(text, (name, codec))
    return next(iter(found.values())) if len(found) == 1 else ("", "")


def _words(text: str) -> list[str]:
    """Return the words of a text that have letters beyond ASCII."""
    return [word for word in _WORD.findall(text) if not word.isascii()]


def _fits(letters: str, alphabets: tuple[str, ...]) -> bool:
    """Whether one of the alphabets has all letters that are not in ASCII."""
    foreign = {letter for letter in letters.lower() if letter.isalpha() and not letter.isascii()}
    return any(foreign.issubset(alphabet) for alphabet in alphabets)
