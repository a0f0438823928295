package replica

import "sync"

// LastIndex is the last entry in this replica's log.
func (r *Replica) LastIndex() uint64 { return r.raft.LastIndex() }

// Hold lets no sync return until it is told to go on. The channel is told of
// the first that hangs.
func (p *PowerCut) Hold() (hangs <-chan struct{}, goOn func()) {
	seen, gone := make(chan struct{}, 1), make(chan struct{})
	p.layer.Fail(func(op, _ string) error {
		if op == "sync" {
			nudge(seen)
			<-gone
		}
		return nil
	})
	return seen, sync.OnceFunc(func() {
		p.layer.Fail(nil)
		close(gone)
	})
}

// SmallFiles makes the log lie in small files, which are quickly made.
func SmallFiles(c *Config) { c.journalBytes, c.segmentBytes = 64<<10, 128<<10 }
