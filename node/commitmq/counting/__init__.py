"""Counters, gauges and histograms of a worker, in a file that other processes map: :mod:`commitmq.counting.table`."""
