package replica

// ReadRounds is how often this replica has asked for an index to read at.
func (r *Replica) ReadRounds() uint64 { return r.node.meters.readRounds.Load() }
