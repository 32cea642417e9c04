"""Jobs over stores, one module each: a function that takes a session and returns a report. The verbs of
``commitmq pipeline`` call them, and so can any program.

Every job takes a list of sources and reads them as one: a store's folder, or a node's address.
"""

from __future__ import annotations

from commitmq.extras import SPARK_MODULES, need

# Here, because each of the modules imports pyarrow.
need("a Spark job", "spark", SPARK_MODULES)
