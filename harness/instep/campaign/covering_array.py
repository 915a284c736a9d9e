"""Few rows of settings that together contain every pair of values that may be combined.

A *factor* is a setting with its values, a *cell* one of them, and a *row* has a cell of every factor. A *group* is a
pair of cells, or a single one. A row may be refused, and only `refusal` knows why, for whole rows.
Leaves out: what a row runs (`all_settings.py`).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations, product

Row = Mapping[str, Hashable]
Cell = tuple[str, Hashable]
Group = tuple[Cell, ...]
STARTS = 24  # groups that are due, around each of which a row is tried


class CoveringArray:
    """The rows that contain every group, one at a time, as `met` and `fail` report how the earlier ones ended.

    factors  setting -> its values, the usual one first
    refusal  why a row is refused, "" if it is not
    size     of a group: 2 for pairs, 1 for each value
    usual    other usual values

    rows     group that may be served -> the row around it with the fewest unusual cells
    refused  group -> why it is in no row; a cell that is always refused is there alone. Nothing: no row is served
    failed   group of `refused` -> the row that failed for it
    due      groups that no row has contained yet
    """

    def __init__(
        self, factors: Mapping[str, Sequence[Hashable]], refusal: Callable[[Row], str], size: int = 2,
        usual: Row | None = None,
    ) -> None:
        self.factors, self.size = factors, size
        self.usual = {name: values[0] for name, values in factors.items()} | dict(usual or {})
        self._asked, self._refusal, self.failed = dict[tuple[Hashable, ...], str](), refusal, dict[Group, Row]()
        self._again = list[Row]()  # rows with fewer unusual cells than one that failed
        self._ended = set[Cell]()  # cells of rows that were served
        self.rows, self.refused = dict[Group, Row](), dict[Group, str]()
        self._needs: dict[Cell, list[dict[str, Hashable]]] = {
            cell: self._needed(cell) for name, values in factors.items() for cell in ((name, one) for one in values)
        }
        for names in combinations(factors, size):
            for values in product(*(factors[name] for name in names)):
                self._place(tuple(zip(names, values, strict=True)))
        self.due = set(self.rows)

    def why(self, row: Row) -> str:
        """Why a row is refused; "" if it is not."""
        key = tuple(row[name] for name in self.factors)
        if key not in self._asked:
            self._asked[key] = self._refusal(row)
        cells = set(row.items())
        return self._asked[key] or next((self.refused[one] for one in self.failed if cells.issuperset(one)), "")

    def groups(self, row: Row) -> Iterator[Group]:
        """The groups of a row, in the order of the factors."""
        return combinations(((name, row[name]) for name in self.factors), self.size)

    def __iter__(self) -> Iterator[Row]:
        """The rows that are still to be run: report each by `met` or `fail` before the next one."""
        if self.due and not self.why(self.usual):
            yield self.usual
        while self.due:
            row = self._again.pop() if self._again else self._with_most_due()
            if self._gain(row) and not self.why(row):
                yield row

    def met(self, row: Row) -> None:
        """Note that a row was served."""
        self.due.difference_update(self.groups(row))
        self._ended |= set(row.items())

    def fail(self, row: Row, why: str) -> None:
        """Note that a row was not served after all: its cells are tried apart, until the reason is one group."""
        unusual = [cell for cell in row.items() if cell[1] != self.usual[cell[0]]]
        nearest = [cell for cell in unusual if row == self._nearest((cell,))]
        self._asked[tuple(row[name] for name in self.factors)] = why
        if not unusual:
            self._drop((), row, why)
            self.rows.clear()
            self.due.clear()
        elif nearest:
            self._drop((nearest[0],), row, why)
        elif alone := [cell for cell in unusual if cell not in self._ended]:
            self._again += [one for cell in alone if (one := self._nearest((cell,))) is not None]
        else:
            around = [group for group in self.groups(row) if group in self.due]
            for group in around:
                if self.rows[group] == row:
                    self._drop(group, row, why)
            self._again += [self.rows[group] for group in around if group in self.due]

    def _drop(self, cells: Group, row: Row, why: str) -> None:
        """Let no row have these cells together."""
        self.failed[cells], self.refused[cells] = row, why
        for group in [group for group in self.due if cells and self.why(self.rows[group])]:
            self.due.remove(group)
            del self.rows[group]
            if not set(cells) <= set(group):
                self._place(group)
                self.due |= {group} & self.rows.keys()

    def _needed(self, cell: Cell) -> list[dict[str, Hashable]]:
        """The fewest other changes with which a cell is served: none, or each single one that suffices."""
        if not self.why(self.usual | dict((cell,))):
            return [{}]
        return [change for change in self._changes((cell,)) if not self.why(self.usual | change | dict((cell,)))]

    def _changes(self, group: Group) -> Iterator[dict[str, Hashable]]:
        """Every unusual cell of another factor."""
        fixed = {name for name, _ in group}
        return ({name: one} for name, values in self.factors.items() if name not in fixed
                for one in values if one != self.usual[name])  # fmt: skip

    def _nearest(self, group: Group) -> Row | None:
        """The served row around a group with the fewest unusual cells: what each needs, and one further change."""
        needs = [{name: one for need in each for name, one in need.items()} | dict(group)
                 for each in product(*(self._needs[cell] for cell in group))]  # fmt: skip
        tries = (self.usual | need | change | dict(group) for change in ({}, *self._changes(group)) for need in needs)
        return next((row for row in tries if not self.why(row)), None)

    def _place(self, group: Group) -> None:
        """Find a row around a group, or the reason why there is none."""
        never = [cell for cell in group if not self._needs[cell]]
        row = None if never else self._nearest(group)
        if row is not None:
            self.rows[group] = row
        else:
            cells = (never[0],) if never else group
            self.refused[cells] = self.why(self.usual | self._first_need(cells) | dict(cells))

    def _first_need(self, cells: Group) -> dict[str, Hashable]:
        return {name: one for cell in cells for need in self._needs[cell][:1] for name, one in need.items()}

    def _with_most_due(self) -> Row:
        """A row around a group that is due, with many others: the one with the most among several tries."""
        begins = sorted(self.due, key=repr)[:: max(1, len(self.due) // STARTS)]
        return max(map(self._filled, begins), key=self._gain)

    def _filled(self, group: Group) -> Row:
        """A row around a group, in which each other cell in turn is the one that adds most."""
        row = dict(self.rows[group])
        fixed = {name for name, _ in group}
        for name, values in self.factors.items():
            if name in fixed:
                continue
            tries = sorted(({**row, name: one} for one in values), key=self._gain, reverse=True)
            row = next((one for one in tries if not self.why(one)), row)
        return row

    def _gain(self, row: Row) -> int:
        return sum(group in self.due for group in self.groups(row))
