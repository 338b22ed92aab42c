"""The closed world of the documents: people, their attributes, and every wording of a statement.

In every statement the name comes before the value, and so does the cue of the attribute wherever
two attributes share their values (home and birthplace), so a reader that only looks back knows the
owner of a value when it reads it. Wordings under `held_out` never occur in training; all their
words occur in other wordings.
"""

from dataclasses import dataclass

NAMES: tuple[str, ...] = tuple(
    """ann bob carl dana eve finn gina hugo iris jack kate liam mona nick olga paul quin rosa sam \
tina uma vera walt xena
    yuri zoe alan beth cody dora eric fay glen hope ian jane kurt lena max nora otto pia ralph \
sara tom ursula vic wendy
    abel cleo dean elsa fred greta hank ivy joel kira leo mara ned opal pete ruth seth thea uri \
violet ward yara zack
    amos""".split()
)

_CITIES = tuple(
    "paris rome tokyo cairo lima oslo delhi quito seoul perth madrid dublin hanoi athens boston"
    " geneva".split()
)


@dataclass(frozen=True)
class Attribute:
    """One thing that a document may say about a person: its values and its wordings.

    In a wording {n} stands for the name and {v} for the value.
    """

    name: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    held_out_statements: tuple[str, ...]
    held_out_questions: tuple[str, ...]


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


_ALL = (
    Attribute(
        "home",
        _CITIES,
        _lines("""{n} lives in {v}.
        {n} has a home in {v}.
        The home of {n} is in {v}.
        {n} moved to {v} last year.
        {n} now rents a flat in {v}.
        The flat of {n} is in {v}."""),
        _lines("""Where does {n} live?
        What city does {n} live in?
        In which city is the home of {n}?
        What city did {n} move to?
        Where is the flat of {n}?"""),
        _lines("""{n} now lives in a flat in {v}.
        {n} has a flat in {v}."""),
        _lines("""Which city does {n} live in?"""),
    ),
    Attribute(
        "birthplace",
        _CITIES,
        _lines("""{n} was born in {v}.
        {n} was a child in {v}.
        The birth of {n} was in {v}.
        {n} comes from {v}.
        {n} is a native of {v}.
        The family of {n} is from {v}."""),
        _lines("""Where was {n} born?
        What city was {n} born in?
        Which city does {n} come from?
        Where is the family of {n} from?
        What is the city of birth of {n}?"""),
        _lines("""The family of {n} comes from {v}.
        {n} was born as a native of {v}."""),
        _lines("""In which city was {n} born?"""),
    ),
    Attribute(
        "job",
        tuple(
            """doctor baker pilot nurse farmer lawyer teacher painter singer chef writer tailor \
dentist judge plumber
        banker""".split()
        ),
        _lines("""{n} works as a {v}.
        {n} is a {v} by trade.
        The job of {n} is {v}.
        {n} earns a living as a {v}.
        {n} found work as a {v}.
        The trade of {n} is that of a {v}."""),
        _lines("""What does {n} do for work?
        What is the job of {n}?
        What does {n} work as?
        What is the trade of {n}?
        How does {n} earn a living?"""),
        _lines("""{n} has a job as a {v}.
        {n} found a living as a {v}."""),
        _lines("""What does {n} do for a living?"""),
    ),
    Attribute(
        "pet",
        tuple(
            "dog cat parrot turtle rabbit hamster horse snake goat frog ferret lizard pony canary"
            " mouse duck".split()
        ),
        _lines("""{n} keeps a {v}.
        {n} owns a {v} as a pet.
        The pet of {n} is a {v}.
        {n} looks after a {v}.
        {n} has a tame {v} at home.
        The animal of {n} is a {v}."""),
        _lines("""What pet does {n} have?
        Which animal does {n} keep?
        What is the pet of {n}?
        What kind of animal does {n} own?
        What animal does {n} look after?"""),
        _lines("""{n} keeps a {v} as a pet.
        {n} owns a tame {v}."""),
        _lines("""Which pet does {n} own?"""),
    ),
    Attribute(
        "car",
        tuple(
            """red blue green black white silver yellow orange purple brown pink gray golden \
beige maroon
        teal""".split()
        ),
        _lines("""{n} drives a {v} car.
        The car of {n} is {v}.
        {n} bought a {v} car.
        {n} has a car that is {v}.
        {n} parks a {v} car outside.
        The color of the car of {n} is {v}."""),
        _lines("""What color is the car of {n}?
        Which color of car does {n} drive?
        What is the color of the car of {n}?
        What color of car did {n} buy?
        What color is the car that {n} drives?"""),
        _lines("""{n} drives a car that is {v}.
        {n} bought a car in {v}."""),
        _lines("""What color of car does {n} have?"""),
    ),
    Attribute(
        "food",
        tuple(
            """pizza sushi pasta curry salad soup tacos ramen bread cheese stew rice noodles \
pancakes dumplings
        beans""".split()
        ),
        _lines("""{n} loves {v}.
        {n} likes to eat {v}.
        The favorite food of {n} is {v}.
        {n} often cooks {v}.
        {n} would eat {v} every day.
        The favorite dish of {n} is {v}."""),
        _lines("""What does {n} love to eat?
        What is the favorite food of {n}?
        Which food does {n} like?
        What is the favorite dish of {n}?
        What would {n} eat every day?"""),
        _lines("""{n} loves to eat {v}.
        {n} often would eat {v}."""),
        _lines("""Which food does {n} love?"""),
    ),
    Attribute(
        "instrument",
        tuple(
            """piano guitar violin flute drums harp cello trumpet banjo organ tuba clarinet oboe \
lute fiddle
        accordion""".split()
        ),
        _lines("""{n} plays the {v}.
        {n} practices the {v} every day.
        {n} takes lessons on the {v}.
        The instrument of {n} is the {v}.
        {n} makes music on the {v}.
        The music that {n} makes is on the {v}."""),
        _lines("""What instrument does {n} play?
        Which instrument does {n} practice?
        What is the instrument of {n}?
        What does {n} make music on?
        What does {n} take lessons on?"""),
        _lines("""{n} plays music on the {v}.
        {n} practices on the {v}."""),
        _lines("""Which instrument does {n} play?"""),
    ),
    Attribute(
        "room",
        tuple(str(n) for n in range(11, 31)),
        _lines("""{n} sits in room {v}.
        The desk of {n} is in room {v}.
        {n} has an office in room {v}.
        {n} can be found in room {v}.
        {n} was given room {v}.
        The room of {n} is number {v}."""),
        _lines("""What room does {n} sit in?
        In which room is the desk of {n}?
        What is the room number of {n}?
        Which room was {n} given?
        What is the number of the room of {n}?"""),
        _lines("""The office of {n} is in room {v}.
        {n} has a desk in room number {v}."""),
        _lines("""Which room is the office of {n} in?"""),
    ),
)

ATTRIBUTES: dict[str, Attribute] = {a.name: a for a in _ALL}

OPENINGS: tuple[str, ...] = (
    "These days,",
    "As we all know,",
    "By all accounts,",
    "Of course,",
    "In fact,",
)

FILLERS: tuple[str, ...] = _lines("""The weather was mild all week.
Nobody could say why.
It rained most of the day.
The train was late again.
{n} waved to {m} from the street.
{n} and {m} met for tea.
{n} was late again.
{m} wrote a long letter to {n}.
The market opens early in the morning.
There was a long line outside the shop.
{n} asked {m} about the news.
That is all we know for now.
The old clock in the hall is slow.
{n} did not say much that day.
Some people were in the office all night.
The garden looks old after the rain.""")
