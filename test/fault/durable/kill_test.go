package durable

import (
	"testing"
	"time"
)

// All replicas are killed at once, again and again, at any moment: under load,
// during an election, while they start. F52
func TestKillAll(t *testing.T) {
	b := newBed(t, false, 3, quick())
	b.load.bytes = 64 << 10 // so that journals turn and snapshots are taken
	for range times(25) {
		b.write()
		if b.rand.IntN(5) > 0 {
			b.awaitProgress(b.ledger.Acknowledged())
		}
		b.moment(150 * time.Millisecond)
		b.kill()
		b.quiet()
		b.start()
		for b.rand.IntN(4) == 0 { // not even up, and down again
			b.moment(100 * time.Millisecond)
			b.kill()
			b.start()
		}
		b.check()
	}
	t.Logf("%d revisions", b.ledger.Acknowledged())
}
