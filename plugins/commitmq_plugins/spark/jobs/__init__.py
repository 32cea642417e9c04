"""Jobs over stores, one module each: a function that takes a session and returns a report.

The verbs of ``commitmq pipeline`` call them, and any program can call them.

Every job takes a list of sources, each a store's folder or a node's address, and reads them as one.
"""

from __future__ import annotations

from commitmq.extras import SPARK_MODULES, need

# Checked here, because each of the modules imports pyarrow.
need("a Spark job", "spark", SPARK_MODULES)
