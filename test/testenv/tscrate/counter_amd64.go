package tscrate

// readCounter returns the time stamp counter.
func readCounter() uint64
