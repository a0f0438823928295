package replica

import (
	"sync"

	"keelson.dev/keelson/internal/wakeup"
)

// LastIndex is the last entry in this replica's log.
func (r *Replica) LastIndex() uint64 { return r.node.raft.LastIndex() }

// Hold blocks each sync until goOn is called. The channel receives a value when the first sync
// blocks.
func (p *PowerCut) Hold() (hangs <-chan struct{}, goOn func()) {
	seen, gone := wakeup.New(), make(chan struct{})
	p.layer.Fail(func(op, _ string) error {
		if op == "sync" {
			seen.Send()
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
func SmallFiles(c *Config) { c.Storage.journalBytes, c.Storage.segmentBytes = 64<<10, 128<<10 }
