"""Types of the tables that say which options have an effect in which case, for refusals, help and printed commands.

A way, such as a backend on a device, a precision, a preset or a kind of input, honours an option if the option has an
effect there. The tables are in table and reduction_table. Imports nothing heavy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ground.errors import BadInput

ANY: None = None
Values = tuple[str, ...] | None
"""The values of an option that a way honours; ANY stands for all values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to do a command's work, with the options that it honours.

    `label` names the way in messages, `how` is what a user types to get it, and `instead` has, by option that it
    doesn't honour, the end of the message: the reason, or what to do for the same effect.
    """

    label: str
    how: str
    supported: Mapping[str, Values]
    instead: Mapping[str, str] = field(default_factory=dict)

    def supports(self, option: str, value: object) -> bool:
        if option not in self.supported:
            return False
        allowed, every = self.supported[option], value if isinstance(value, tuple | list) else (value,)
        return allowed is None or all(str(each) in allowed for each in every)


def variant(
    label: str, how: str, names: str = "", instead: Mapping[str, str] | None = None, **values: Values
) -> Variant:
    """Return a Variant that honours the options `names`, such as "threads mode=eager,compiled" (two values of mode)."""
    pairs = (word.partition("=") for word in names.split())
    supported = {name: tuple(some.split(",")) if some else ANY for name, _, some in pairs}
    return Variant(label=label, how=how, supported=supported | values, instead=instead or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A table of alternative ways by name, such as all backends of `bench`.

    If a command uses several ways at once, each of them has to honour an option; for an option in `picks`, one way is
    enough.
    """

    variants: Mapping[str, Variant]
    picks: frozenset[str] = frozenset()

    @property
    def options(self) -> tuple[str, ...]:
        """The options that at least one way honours; `refuse` and `supported` let all other options pass."""
        return tuple(dict.fromkeys(option for variant in self.variants.values() for option in variant.supported))

    def refuse(self, at_work: Iterable[tuple[str, str]], options: Mapping[str, Any]) -> None:
        """Raise BadInput for an option that the ways at work would ignore.

        `at_work` has pairs: the file that a way works on, for the message ("" for none), and the way's name.
        """
        working = [(what, self.variants[name]) for what, name in at_work]
        for option, value in options.items():
            failing = [(what, each) for what, each in working if not each.supports(option, value)]
            ignored = failing and (option not in self.picks or len(failing) == len(working))
            if not ignored or option not in self.options:
                continue
            what, variant = failing[0]
            able = [f"{each.label} ({each.how})" for each in self.variants.values() if each.supports(option, value)]
            supporting_text = f"it affects {', '.join(able)}" if able else "it affects nothing"
            hint = f"; {variant.instead[option]}" if option in variant.instead else ""
            spelled = " ".join(spelling(option, value) or spelling(f"no_{option}", value is False))
            where = f" ({what})" if what else ""
            raise BadInput(f"{spelled} has no effect on {variant.label}{where}; {supporting_text}{hint}")

    def help(self, option: str) -> str:
        """Return the sentence of a help text that names the ways which honour an option, or each of its values."""
        values = tuple(
            dict.fromkeys(value for variant in self.variants.values() for value in variant.supported.get(option) or ())
        )
        supporters = {value: self._supporters(option, value) for value in values or (None,)}
        if len(set(supporters.values())) == 1:
            return f"For {next(iter(supporters.values()))}."
        return "; ".join(f"{value}: {words}" for value, words in supporters.items()) + "."

    def _supporters(self, option: str, value: str | None) -> str:
        able = [
            variant.label
            for variant in self.variants.values()
            if (option in variant.supported if value is None else variant.supports(option, value))
        ]
        return "all" if len(able) == len(self.variants) else ", ".join(able)

    def supported(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return `values` (by option) without those that the way `name` ignores and another way honours."""
        variant = self.variants[name]
        return {key: value for key, value in values.items() if key not in self.options or variant.supports(key, value)}


def spelled(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def spelling(option: str, value: object) -> list[str]:
    """Return an option's words: none for None and False, a flag for True, commas for a tuple, repeats for a list."""
    name = spelled(option)
    if value is None or value is False:
        return []
    if value is True:
        return [name]
    if isinstance(value, list):
        return [word for each in value for word in spelling(option, each)]
    return [name, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Return options and their values, in their order, as the words of one command line."""
    return [word for option, value in values.items() for word in spelling(option, value)]
