package mvcc

// Snapshot is the view as it can be written out, by anyone and at any time,
// without the proposals that the machine remembers: a backup holds the state of
// the store and not what its clients were about.
func (v *View) Snapshot() *Snapshot { return &Snapshot{view: v, recent: newRecent()} }
