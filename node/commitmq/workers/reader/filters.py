"""The filters of a reader: the known expression types, and the compiled expressions of pulls.

A plugin's filter is imported at the first pull that asks for its type. A failure of the plugin that does not end the
process fails one request only. The error names the plugin.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import FilterError, ProtocolError
from commitmq.kernels.codes import MATCH, NO_MATCH, NO_RECORD
from commitmq.plugin.hookspecs import CompiledFilter
from commitmq.plugin.loading import resolve
from commitmq.store.queues.message_filter import FilterBatch, Flags
from commitmq.store.queues.record_filter import RecordFilter
from commitmq.store.queues.tag_filter import TagFilter

TAG: Final = "TAG"
INVALID: Final = "INVALID_PARAMETER"
FAILED: Final = "FILTER_FAILED"
# Neither a client's expression nor a plugin's compiled filter may grow without bound; no filter needs more than this.
MAX_EXPRESSION_CHARACTERS: Final = 65_536
# Shorter tag expressions are compiled each time: that costs less than to look them up.
_SHARED_FROM_CHARACTERS: Final = 64


class ExpressionFilter:
    """A compiled filter of a plugin, for the reader of queues. Every failure of the plugin becomes a FilterError."""

    __slots__ = ("_compiled", "_names", "expression", "kind", "plugin", "terms")

    def __init__(self, kind: str, expression: str, plugin: str, compiled: CompiledFilter) -> None:
        """Raises FilterError when ``compiled`` does not name the properties that it wants."""
        self.kind = kind
        self.expression = expression
        self.plugin = plugin
        self._compiled = compiled
        names = getattr(compiled, "properties", None)
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise self._failure("its filter has no attribute properties, a tuple of names")
        self._names = tuple(dict.fromkeys(names))
        if not all(isinstance(name, str) and name for name in self._names):
            raise self._failure("the names in its filter's properties must be strings that are not empty")
        terms = getattr(compiled, "terms", len(self._names))
        if type(terms) is not int:
            raise self._failure("its filter's attribute terms must be an integer")
        self.terms = max(1, terms)

    def may_match(self, units: object, codes: NDArray[np.int64], extensions: object) -> Flags:
        """Every unit may match: only the properties decide."""
        return np.ones(len(codes), np.bool_)

    def judge(
        self,
        data: NDArray[np.uint8],
        positions: NDArray[np.int64],
        sizes: NDArray[np.int64],
        verdicts: NDArray[np.uint8],
    ) -> None:
        """Set ``verdicts`` to MATCH, NO_MATCH or NO_RECORD. Raises FilterError when the plugin fails."""
        batch = FilterBatch(data, positions, sizes, self._names)
        try:
            matches: Any = np.asarray(self._compiled.matches(batch))
        except BaseException as error:  # SystemExit too: no exception of a plugin ends this process
            raise self._failure(f"it raised {error!r:.500}") from error
        if matches.dtype != np.bool_ or matches.shape != (len(batch),):
            raise self._failure(
                f"it must answer with {len(batch)} booleans, not with {matches.dtype} of shape {matches.shape}"
            )
        verdicts[:] = np.where(batch.whole, np.where(matches, MATCH, NO_MATCH), NO_RECORD)

    def _failure(self, why: str) -> FilterError:
        return FilterError(f"the filter {self.kind} of plugin {self.plugin} failed: {why}", plugin=self.plugin)


class Filters:
    """Filters by type, and the newest ``limit`` compiled expressions."""

    def __init__(self, specs: Iterable[Mapping[str, Any]], *, limit: int) -> None:
        """``specs``: ``type``, ``factory`` and ``plugin`` of each filter type that plugins add."""
        self._specs = {str(one["type"]): one for one in specs}
        self._limit = limit
        self._factories: dict[str, Any] = {}
        self._compiled: OrderedDict[tuple[str, str], ExpressionFilter] = OrderedDict()
        self._parsed: WeakValueDictionary[str, TagFilter] = WeakValueDictionary()

    @property
    def types(self) -> list[str]:
        """Every type that a pull may name."""
        return [TAG, *sorted(self._specs)]

    def __len__(self) -> int:
        """Compiled expressions that are kept."""
        return len(self._compiled)

    def keep_only(self, wanted: Container[tuple[str, str]]) -> None:
        """Drop every compiled expression except ``wanted``, by type and expression."""
        for key in [key for key in self._compiled if key not in wanted]:
            del self._compiled[key]

    def get(self, kind: str | None, expression: str | None) -> RecordFilter | None:
        """The filter for a pull; None when the pull wants all messages. Raises ProtocolError: INVALID_PARAMETER for an
        unknown type or a wrong expression, FILTER_FAILED when the plugin failed.
        """
        if kind is None or kind == TAG:
            return self._tags(expression)
        spec = self._specs.get(kind)
        if spec is None:
            raise ProtocolError(INVALID, f"this node has no filter type {kind!r:.100}; it has {', '.join(self.types)}")
        if expression is None:
            raise ProtocolError(INVALID, f"a filter of type {kind} needs an expression")
        key = (kind, expression)
        found = self._compiled.get(key)
        if found is not None:
            self._compiled.move_to_end(key)
            return found
        if len(expression) > MAX_EXPRESSION_CHARACTERS:
            raise ProtocolError(INVALID, f"a filter may have {MAX_EXPRESSION_CHARACTERS} characters at most")
        found = self._compile(kind, expression, spec)
        self._compiled[key] = found
        if len(self._compiled) > self._limit:
            self._compiled.popitem(last=False)
        return found

    def _tags(self, expression: str | None) -> TagFilter | None:
        """The compiled tag filter. Waiting pulls with the same expression share it, as long as any of them waits."""
        found = None if expression is None else self._parsed.get(expression)
        if found is None:
            try:
                found = TagFilter.parse(expression)
            except ValueError as error:
                raise ProtocolError(INVALID, str(error)) from error
            if found is not None and expression is not None and len(expression) > _SHARED_FROM_CHARACTERS:
                self._parsed[expression] = found
        return found

    def _compile(self, kind: str, expression: str, spec: Mapping[str, Any]) -> ExpressionFilter:
        plugin = str(spec["plugin"])
        try:
            return ExpressionFilter(kind, expression, plugin, self._factory(kind, spec).compile(expression))
        except FilterError as error:
            if error.plugin is not None:
                raise ProtocolError(FAILED, str(error)) from error
            raise ProtocolError(INVALID, f"the {kind} filter is wrong {error}") from error
        except BaseException as error:
            raise ProtocolError(
                FAILED, f"the filter {kind} of plugin {plugin} failed: it raised {error!r:.500}"
            ) from error

    def _factory(self, kind: str, spec: Mapping[str, Any]) -> Any:
        """The plugin's filter. A filter that could not be imported is tried again at the next pull that asks for it."""
        if kind not in self._factories:
            made: Any = resolve(str(spec["factory"]))
            self._factories[kind] = made() if isinstance(made, type) or not hasattr(made, "compile") else made
        return self._factories[kind]
