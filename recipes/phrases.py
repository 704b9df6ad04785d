"""The sentences of the speech recipe: a small grammar of commands, numbers, dates, times and plain statements."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator

# `{name}` in a line stands for one line of RULES[name]; all lines of a rule are equally likely.
_LISTS = {
    "digit": "zero|one|two|three|four|five|six|seven|eight|nine",
    "teen": "ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen",
    "tens": "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety",
    "hour": "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve",
    "first": "first|second|third|fourth|fifth|sixth|seventh|eighth|ninth",
    "weekday": "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
    "month": "January|February|March|April|May|June|July|August|September|October|November|December",
    "name": "Anna|Peter|Maria|David|Laura|Simon|Emma|Thomas|Julia|Martin",
    "room": "kitchen|bedroom|bathroom|garage|office|hall|garden",
    "device": "light|lamp|heater|radio|fan|television|camera|music",
    "thing": "door|window|gate|box|curtain|book",
    "food": "apples|bread|butter|cheese|coffee|eggs|milk|onions|oranges|potatoes|rice|sugar|tomatoes|water",
    "animal": "dog|cat|horse|bird|fox|rabbit|sheep|cow",
    "person": "teacher|doctor|farmer|girl|boy|woman|man|driver",
    "adjective": "small|big|young|happy|tired|quiet|brown|white|black|clever",
    "object": "key|letter|bag|cup|chair|table|ticket|bicycle|coat|picture",
    "place": "station|market|school|river|airport|library|park|bridge|hotel|village",
    "doing": "is sleeping|is waiting|is walking|is running|is eating|is sitting|is standing",
    "where": "near the {place}|behind the {thing}|under the table|in the {room}|across the {place}|beside the {person}",
    "made": "found|lost|bought|sold|painted|carried|opened",
    "weather": "sunny|cloudy|windy|foggy|cold|warm|rainy",
    "half": "morning|afternoon|evening",
    "when": "tomorrow|tonight|on {weekday}|in the {half}|at {time}|after lunch|before dinner",
    "chore": "water the plants|feed the {animal}|call {name}|clean the {room}|pay the bill|visit the {person}",
    "small": "{digit}|{teen}|{tens}|{tens} {unit}|{tens} {unit}",
    "unit": "one|two|three|four|five|six|seven|eight|nine",
    "number": "{small}|{unit} hundred|{unit} hundred and {small}|{unit} thousand|{unit} thousand {unit} hundred",
    "time": "{hour} o'clock|{hour} fifteen|{hour} thirty|{hour} forty five|half past {hour}|ten past {hour}"
    "|quarter to {hour}|quarter past {hour}|{hour} {tens}|noon|midnight",
    "day": "{first}|{first}|tenth|eleventh|twelfth|thirteenth|fifteenth|eighteenth|twentieth|twenty {first}|thirtieth",
    "year": "nineteen {tens} {unit}|nineteen {tens}|two thousand and {unit}|twenty {teen}|twenty twenty {unit}",
    "date": "the {day} of {month}|{weekday} the {day} of {month}|{month} the {day}|the {day} of {month} {year}",
}
RULES = {name: lines.split("|") for name, lines in _LISTS.items()}
RULES["sentence"] = """\
turn {switch} the {room} {device}
please turn {switch} the {device} in the {room}
set the {device} to {small} percent
set the {room} heater to {small} degrees
set a timer for {small} minutes
start a timer for {small} seconds
wake me up at {time}
wake me at {time} on {weekday}
set the alarm for {time}
call {name} {when}
send a message to {name}
play some music in the {room}
stop the music
open the {thing}
close the {thing} in the {room}
lock the garage door at {time}
remind me to {chore} {when}
remind {name} to {chore}
add {number} {food} to the list
buy some {food} and some {food}
we need {food}, {food} and {food}
take the {food} out of the {room}
what time is it
it is {time} now
the train leaves at {time}
the next bus goes to the {place} at {time}
the {place} opens at {time} and closes at {time}
dinner is at {time} in the {half}
the meeting with {name} starts at {time}
today is {date}
the meeting is on {date}
{name} was born on {date}
the letter came on {date}
the {place} was built in {year}
my number is {digits}
the code is {code}
please write down {digits}
the answer is {number}
{small} plus {small} is {number}
{number} minus {small} is {number}
it costs {number} dollars
it is {number} miles to the {place}
the {place} is {small} minutes from here
page {number} of the {adjective} book
count to {number}
the {adjective} {animal} {doing} {where}
the {adjective} {person} {doing} {where}
the {adjective} {animal} and the {adjective} {animal} live {where}
the {person} {made} the {adjective} {object}
the {person} {made} the {object} {where}
{name} {made} {number} {food}
{name} and {name} are waiting {where}
where is the {adjective} {object}
how far is it to the {place}
do you have the {object} of the {person}
I have lost my {object}
I will be at the {place} at {time}
the weather is {weather} and {weather}
it will be {weather} {when}
yesterday was {weather} but today is {weather}
no, thank you
yes, please open the {thing}
thank you very much
good {half}, {name}
{name}, please close the {thing}""".splitlines()
RULES["switch"] = ["on", "off"]
RULES["digits"] = [" ".join(["{digit}"] * count) for count in range(4, 11)]
RULES["code"] = [" ".join(["{digit}"] * count) for count in range(3, 6)]
_QUESTIONS = ("what", "where", "how", "do ")
_HELD_OUT_PERCENT = 10


def expand(line: str, choose: random.Random) -> str:
    """The line with every `{name}` replaced by a random line of that rule, again and again."""
    while "{" in line:
        line = re.sub(r"\{(\w+)\}", lambda found: choose.choice(RULES[found[1]]), line)
    return line


def is_held_out(sentence: str) -> bool:
    """Whether a sentence is kept apart for evaluation; decided by its text."""
    return zlib.crc32(sentence.encode()) % 100 < _HELD_OUT_PERCENT


def drawn(*, held_out: bool, seed: int = 0) -> Iterator[str]:
    """Yields sentences of one side of the split, as they are written, without end; short lines come again and again."""
    choose = random.Random(f"{seed} {held_out}")
    while True:
        line = expand(choose.choice(RULES["sentence"]), choose)
        sentence = line[0].upper() + line[1:] + ("?" if line.startswith(_QUESTIONS) else ".")
        if is_held_out(sentence) == held_out:
            yield sentence


def sentences(count: int, *, held_out: bool, seed: int = 0) -> Iterator[str]:
    """Yields `count` different sentences of one side of the split."""
    seen: set[str] = set()
    for sentence in drawn(held_out=held_out, seed=seed):
        if sentence not in seen:
            seen.add(sentence)
            yield sentence
        if len(seen) == count:
            return


def vocabulary() -> set[str]:
    """Every word of the grammar, in lower case."""
    lines = (line for rule in RULES.values() for line in rule)
    return {word for line in lines for word in re.findall(r"[a-z']+", re.sub(r"\{\w+\}", " ", line).lower())}
