package durable

import (
	"testing"
	"time"
)

// All replicas are killed at once, again and again, at any moment: under load,
// during an election, while they start. F52
func TestKillAll(t *testing.T) {
	b := newTestGroup(t, false, 3, shortSettings())
	b.load.bytes = 64 << 10 // so that journals turn and snapshots are taken
	for range roundCount(25) {
		b.startWriters()
		if b.rand.IntN(5) > 0 {
			b.awaitProgress(b.ledger.Acknowledged())
		}
		b.waitRandomly(150 * time.Millisecond)
		b.killAll()
		b.stopWriters()
		b.startAll()
		for b.rand.IntN(4) == 0 { // not even up, and down again
			b.waitRandomly(100 * time.Millisecond)
			b.killAll()
			b.startAll()
		}
		b.checkLedger()
	}
	t.Logf("%d revisions", b.ledger.Acknowledged())
}
