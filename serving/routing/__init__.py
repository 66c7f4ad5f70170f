"""Which tier answers a request. Knows neither torch nor ray, and no protocol."""
