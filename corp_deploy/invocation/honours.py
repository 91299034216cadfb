"""Which way of doing a command's work honours which of its options: the refusal, the help and the printed commands.

A way is whatever does the work: a backend on a device, a precision, a preset, a kind of input. The ways themselves are
data, see table and reduction_table. Imports nothing heavy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ground.errors import BadInput

ANY: None = None
Values = tuple[str, ...] | None
"""The values of an option that a way honours; ANY is all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to do a command's work: its name in words, how a user gets it, and the options it honours.

    `instead` says, option by option, what to do for the same effect where the way does not honour it.
    """

    words: str
    ask: str
    honours: Mapping[str, Values]
    instead: Mapping[str, str] = field(default_factory=dict)

    def takes(self, option: str, value: object) -> bool:
        if option not in self.honours:
            return False
        allowed = self.honours[option]
        return allowed is None or all(str(each) in allowed for each in _each(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The ways of one command. Of several at work at once each must honour an option, or one where it `picks`."""

    command: str
    ways: Mapping[str, Way]
    picks: frozenset[str] = frozenset()

    @property
    def options(self) -> tuple[str, ...]:
        """Every option that some way honours, and so every one that is looked at."""
        return tuple(dict.fromkeys(option for way in self.ways.values() for option in way.honours))

    def refuse(self, at_work: Iterable[tuple[str, str]], options: Mapping[str, Any]) -> None:
        """Raise BadInput for an option that the ways at work would ignore; (what it works on, way's name) each."""
        working = tuple(at_work)
        for option, value in options.items():
            if option in self.options:
                self._refuse_option(option, value, working)

    def _refuse_option(self, option: str, value: object, working: Sequence[tuple[str, str]]) -> None:
        deaf = [(what, self.ways[name]) for what, name in working if not self.ways[name].takes(option, value)]
        if not deaf or (option in self.picks and len(deaf) < len(working)):
            return
        what, way = deaf[0]
        able = [f"{each.words} ({each.ask})" for each in self.ways.values() if each.takes(option, value)]
        honoured = f"it is honoured by {', '.join(able)}" if able else "nothing honours it"
        hint = f"; {way.instead[option]}" if option in way.instead else ""
        spelled = " ".join(spelling(option, value) or spelling(f"no_{option}", value is False))
        where = f" ({what})" if what else ""
        raise BadInput(f"{spelled} is not honoured by {way.words}{where}; {honoured}{hint}")

    def help(self, option: str) -> str:
        """Who honours an option, for its help text: value by value where the ways take different ones."""
        values = tuple(dict.fromkeys(value for way in self.ways.values() for value in way.honours.get(option) or ()))
        if not values:
            return f"For {self._takers(option, None)}."
        takers = {value: self._takers(option, value) for value in values}
        if len(set(takers.values())) == 1:
            return f"For {takers[values[0]]}."
        return "; ".join(f"{value}: {words}" for value, words in takers.items()) + "."

    def _takers(self, option: str, value: str | None) -> str:
        able = [
            way.words
            for way in self.ways.values()
            if (option in way.honours if value is None else way.takes(option, value))
        ]
        return "all" if len(able) == len(self.ways) else ", ".join(able)

    def honoured(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the values that a way honours; options that no way is asked about pass."""
        way = self.ways[name]
        return {key: value for key, value in values.items() if key not in self.options or way.takes(key, value)}


def _each(value: object) -> Sequence[object]:
    return value if isinstance(value, tuple | list) else (value,)


def spelled(option: str) -> str:
    """An option's name as it is typed."""
    return f"--{option.replace('_', '-')}"


def spelling(option: str, value: object) -> list[str]:
    """An option as the words of a command: flags alone, a tuple with commas, a list as the option over again."""
    name = spelled(option)
    if value is None or value is False:
        return []
    if value is True:
        return [name]
    if isinstance(value, list):
        return [word for each in value for word in spelling(option, each)]
    return [name, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Options and their values as the words of a command, in the order given."""
    return [word for option, value in values.items() for word in spelling(option, value)]
