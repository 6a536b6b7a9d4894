"""Load on a running system: arrivals, measurement, percentiles, figures."""
