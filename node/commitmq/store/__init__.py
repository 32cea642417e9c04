"""The store on disk: its formats and algorithms. No process and no socket; tests, tools and Spark use it alone."""
