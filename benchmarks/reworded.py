"""Passages and two rewordings of each: `light` keeps most sentences' words and changes some in each, `heavy` says the same in other
words. Written for `like_donors.py`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reworded:
    """The same text three times. No sentence of `light` is longer than the runs that the index of copied text finds."""

    title: str
    text: str
    light: str
    heavy: str


PASSAGES = (
    Reworded(
        "the harbour",
        "The harbour of Vesterhavn was built in 1887 for the herring fleet. Its two stone piers were extended after the storm of "
        "1911, which sank nine boats at their moorings. Today the inner basin is used by pleasure craft, while the ferry to the "
        "islands leaves from the outer pier four times a day. The fish auction moved to the mainland in 1994, and its red brick "
        "hall now holds a museum of navigation. Visitors may climb the old signal tower on Sundays.",
        "The harbour of Vesterhavn was built in 1887 for the whaling fleet. Its two stone piers were lengthened after the storm of "
        "1911, which sank eleven boats at their moorings. Today the inner basin is used by sailing boats, while the ferry to the "
        "islands departs from the outer pier six times a day. The fish auction moved to the capital in 1994, and its red brick "
        "hall now houses a museum of navigation. Visitors can climb the old signal tower on Saturdays.",
        "Vesterhavn got its port in the late nineteenth century, when herring was the town's living. A great storm some decades "
        "later destroyed nine vessels, and so both moles were made longer. Nowadays yachts lie inside and a ferry serves the islands "
        "from the mole outside, four crossings daily. Since the nineties no fish has been sold there, and in the former auction "
        "building one can see old compasses and charts. The tower from which signals were given is open once a week.",
    ),
    Reworded(
        "the telescope",
        "The telescope on Cerro Alto has a mirror of 3.6 metres and has observed the southern sky since 1979. It was the first "
        "large telescope with a computer that corrects its pointing every second. Most of its nights are given to the search for "
        "planets of other stars, for which it measures the speed of a star to within one metre a second. The dome is opened at "
        "sunset to let the air inside cool down. A night costs about forty thousand euros, most of it for staff and power.",
        "The telescope on Cerro Alto has a mirror of 4.2 metres and has watched the southern sky since 1979. It was the first "
        "large telescope with a computer that adjusts its pointing every minute. Most of its nights are given to the hunt for "
        "planets of other stars, for which it determines the speed of a star to within two metres a second. The dome is opened before "
        "sunset to let the air inside cool off. A night costs about thirty thousand euros, much of it for staff and power.",
        "For more than four decades an instrument with a mirror of 3.6 metres has looked at the stars of the south from Cerro Alto. "
        "No other of its size had its aim corrected by a computer before. Astronomers mainly use it to find worlds around distant "
        "suns: the smallest motion of a star that it can see is a metre in a second. At dusk the roof slides away so that warm air "
        "escapes. Each night of work is worth some forty thousand euros, chiefly wages and electricity.",
    ),
    Reworded(
        "the backup policy",
        "Every server is backed up to the second site at two in the morning. Full copies are made on Sundays and kept for eight "
        "weeks, and what changed since then is copied on the other days and kept for two weeks. A restore is tested on the first "
        "Monday of each month with a machine that is chosen by lot. If a test fails, the operator on duty opens a ticket of the "
        "highest priority and informs the head of the department. Databases write their logs to both sites at once.",
        "Every server is backed up to the third site at four in the morning. Full copies are made on Fridays and kept for twelve "
        "weeks, and what changed since then is copied on the other days and kept for three weeks. A restore is tested on the first "
        "Tuesday of each month with a machine that is picked by lot. If a test fails, the operator on duty files a ticket of the "
        "highest priority and informs the manager of the department. Databases send their logs to both sites at once.",
        "Backups run nightly, two hours after midnight, and go to another location. Once a week everything is saved and stays "
        "available for two months; between these runs only differences are saved, for a fortnight. To be sure that they can be read, "
        "one randomly selected computer is recovered at the beginning of every month. Whoever is on call reports a failed recovery "
        "with top urgency and tells management. Transaction logs are mirrored immediately.",
    ),
    Reworded(
        "the glacier",
        "The Fjellbreen glacier has lost a third of its ice since it was first measured in 1923. Its tongue retreats by about "
        "thirty metres a year and has left a lake that is dammed by loose gravel. Geologists fear that the dam may break after a "
        "warm spring and flood the village below. In 2016 a channel was cut that keeps the lake two metres under its former level. "
        "Three sensors report the height of the water every ten minutes, and a siren warns the village if it rises too fast.",
        "The Fjellbreen glacier has lost a quarter of its ice since it was first surveyed in 1923. Its tongue retreats by about "
        "fifty metres a year and has formed a lake that is dammed by loose gravel. Geologists expect that the dam may break after a "
        "wet spring and flood the village below. In 2018 a channel was dug that keeps the lake two metres under its former level. "
        "Three sensors report the height of the water every five minutes, and a siren alerts the village if it rises too fast.",
        "Measurements that began in 1923 show that one third of Fjellbreen is gone. Each year its end lies thirty metres further up, "
        "and behind a bank of stones the meltwater has gathered. Experts warn that heat in spring could burst this bank, with "
        "disaster for the houses in the valley. A ditch dug some years ago therefore lowers the water by two metres. Gauges are read "
        "six times an hour, and an alarm sounds when the level climbs quickly.",
    ),
    Reworded(
        "the library",
        "The city library lends books for four weeks and films for one week. A loan is extended twice unless somebody else has "
        "reserved the title. Readers under sixteen pay nothing, adults pay twenty euros a year, and a day ticket costs three euros. "
        "Late books cost ten cents a day up to the price of the book. The reading room on the top floor is open until ten in the "
        "evening, and its forty desks can be booked from home. Rare maps are shown on request and under supervision only.",
        "The city library lends books for three weeks and films for two weeks. A loan is extended once unless somebody else has "
        "requested the title. Readers under eighteen pay nothing, adults pay thirty euros a year, and a day ticket costs four euros. "
        "Late books cost twenty cents a day up to the price of the book. The reading room on the first floor is open until nine in the "
        "evening, and its sixty desks can be reserved from home. Rare maps are shown on request and with supervision only.",
        "At the municipal library novels may be taken home for a month, movies for seven days. Nobody waiting for it, an item can be "
        "renewed two times. Children use it for free; grown-ups buy an annual card at twenty euros or pay three for a single visit. "
        "Overdue items are charged by the day, never beyond their value. One may study upstairs till late at night at one of forty "
        "places, which are allotted online. Old charts leave their cabinet for those who ask, with a librarian at their side.",
    ),
    Reworded(
        "the recipe",
        "For the dough mix five hundred grams of flour with a spoon of salt, a little sugar and half a cube of yeast. Add three "
        "hundred millilitres of warm water and knead it for ten minutes until it no longer sticks to the bowl. Let it rest under a "
        "cloth for an hour, in which it should double its size. Spread it on an oiled tray, press small hollows into it with your "
        "fingers and fill them with olive oil and rosemary. Bake it at two hundred and twenty degrees for twenty minutes.",
        "For the dough mix six hundred grams of flour with a spoon of salt, a little honey and half a cube of yeast. Add four "
        "hundred millilitres of cold water and knead it for eight minutes until it no longer sticks to the table. Let it rest under a "
        "towel for an hour, in which it should double its volume. Spread it on a floured tray, press small hollows into it with your "
        "thumbs and fill them with olive oil and thyme. Bake it at two hundred and forty degrees for fifteen minutes.",
        "Combine flour, a pound of it, with yeast, sugar and salt. Pour in lukewarm water, about a third of a litre, and work the mass "
        "by hand till it is smooth and comes off the sides. Cover it and wait until it is twice as large, which takes some sixty "
        "minutes. Grease a sheet, lay the dough out flat, make dents in it and drip oil and herbs into these. In a very hot oven it is "
        "done in twenty minutes.",
    ),
)
