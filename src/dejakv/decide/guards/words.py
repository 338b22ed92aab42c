"""Words that the lexical guard knows, as data, all of them English.

Texts in other languages get only those comparisons that need no words. Whatever is not listed here
is a content word and must be equal in both texts, so a gap costs a hit and never an answer.
"""


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


SHAPES = _pairs("sphere=ball box=cube pyramid=cone hoop=ring plus=cross object=thing")
"""Nouns of the shapes data set.

In geometry a box is no cube: see `LexicalGuard(vocabulary=...)`.
"""

GENERAL = _pairs(
    "little=small tiny=small big=large grey=gray violet=purple colour=color "
    "photo=picture photograph=picture image=picture "
    "automobile=car bicycle=bike television=tv couch=sofa whom=who which=what "
    "begin=start purchase=buy select=choose "
    "kilogram=kg kilogramme=kg gram=g gramme=g milligram=mg kilometer=km "
    "kilometre=km meter=m metre=m centimeter=cm "
    "centimetre=cm millimeter=mm millimetre=mm liter=l litre=l milliliter=ml "
    "millilitre=ml hour=h minute=min second=sec "
    "percent=% dollar=$ euro=€ pound=£"
)
SYNONYMS = {**GENERAL, **SHAPES}
"""Word and its standard word, both singular. Plurals follow: "boxes" is "cubes"."""

ATTRIBUTES = frozenset("color size shape material height width length weight age".split())
"""Attributes that a question may ask for, anywhere in it: "the ball is what color"."""

VALUES: dict[str, frozenset[str]] = {"size": frozenset({"small", "large"})}
"""Attribute and all its values, where "is it A or B" asks for the attribute."""

MEASURES = _pairs("large=size small=size tall=height high=height wide=width heavy=weight old=age")
"""Adjective behind "how", and the attribute behind "what" that asks the same."""

NEGATIONS = frozenset(
    "not no never none nobody nothing nowhere neither nor without cannot hardly "
    "barely except".split()
)

PHRASES: tuple[tuple[str, str], ...] = (
    (r"\b(?:to|on|at) the (left|right)(?: hand)?(?: side)? of\b", r"\1 of"),
    (r"\b(?:further|more) (left|right) than\b", r"\1 of"),
    (r"\b(?:higher up|further up|higher) than\b", "above"),
    (r"\b(?:lower down|further down|lower) than\b", "below"),
    (r"\bon top of\b", "above"),
    (r"\b(?:underneath|beneath)\b", "below"),
    (r"\bshares? (?:a|an|one|the|the same|the one) (color|size|shape)\b", r"have the same \1"),
    (r"\bhave one (color|size|shape)\b", r"have the same \1"),
    (r"\bof (?:the same|one) (color|size|shape)\b", r"the same \1"),
    (r"\bwhat number of\b", "how many"),
    (r"\bwhat is the number of (?!the |this |that |an? |my |your )", "how many "),
    (r"^(?:the )?number of (?!the |this |that |an? |my |your )", "how many "),
    (r"^count(?: all)?(?: of)?(?: the)? ", "how many "),
    (r"\bin the (?:picture|image|photo|photograph|scene)\b", " "),
    (r"^(?:is|are) there\b", "exist"),
    (r"^(?:do|can|could) you (?:see|find|spot)\b", "exist"),
    (
        r"^(?:does|can) (?:the|this) (?:picture|image|photo|photograph|scene) "
        r"(?:contain|show|include|have)\b",
        "exist",
    ),
    (r"^can (.+) be seen$", r"exist \1"),
    (r"\b(?:are|is) there$", " "),
    (r"\bthere (?:are|is)$", " "),
    (r"\b(?:do|can) you see$", " "),
    (
        r"\b(?:does|do) (?:the|this) (?:picture|image|photo|photograph|scene) "
        r"(?:contain|show|include|have)$",
        " ",
    ),
)
"""Wordings that ask the same.

They are regular expressions over the lower-case text, applied in order.
"""

FRAMES = (
    r"^(?:please |kindly )+",
    r"^(?:can|could|would|will) you (?:please |kindly )?(?=(?:tell me|say|name|count)\b)",
    r"^(?:i want to know|i would like to know|i'd like to know|do you know)\b",
    r"^(?:tell me|let me know|say)\b(?! about)",
    r"^name(?= the\b)",
    r" please$",
)
"""Wrapping of a question, removed in order."""

NUMBERS = {
    word: str(value)
    for value, word in [
        *enumerate(
            "zero one two three four five six seven eight nine ten eleven twelve "
            "thirteen fourteen fifteen sixteen seventeen "
            "eighteen nineteen".split()
        ),
        *zip(
            range(20, 100, 10),
            "twenty thirty forty fifty sixty seventy eighty ninety".split(),
            strict=True,
        ),
    ]
}
