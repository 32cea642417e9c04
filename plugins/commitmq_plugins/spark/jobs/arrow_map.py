"""``DataFrame.mapInArrow`` without pandas, which PySpark requires there and does not use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


def map_in_arrow(
    frame: DataFrame, work: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], ddl: str
) -> DataFrame:
    """``frame`` with each partition mapped by ``work``, from Arrow batches to Arrow batches with the columns ``ddl``."""
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType
    from pyspark.sql.udf import UserDefinedFunction
    from pyspark.util import PythonEvalType

    # The same steps as pyspark.sql.pandas.map_ops, without its check for pandas.
    function = UserDefinedFunction(work, StructType.fromDDL(ddl), evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    columns = function(*(frame[name] for name in frame.columns))
    return DataFrame(frame._jdf.mapInArrow(columns._jc, False, None), frame.sparkSession)
