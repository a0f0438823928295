package disk

import (
	"testing"
)

// TestDiskDoesNotGrow: with snapshots and compactions, the size of the data directory stays that of
// the first rounds, however much is written.
func TestDiskDoesNotGrow(t *testing.T) {
	forEachLogKind(t, func(t *testing.T, kind LogStoreKind, keys *Keyring) {
		b := newDiskEnv(t, t.TempDir(), kind, keys)
		state := make([]byte, 200<<10)
		const trailing = 20
		round := func() {
			for range 10 {
				b.appendEntries(t, 1, 5, 8<<10)
			}
			b.takeSnapshot(t, b.last, 1, state)
			b.compact(t, b.last-trailing)
		}
		for range 6 {
			round()
		}
		early := dirBytes(b.cfg.Dir)
		most := early
		for i := range 40 {
			if round(); i%10 == 0 {
				b.reopen(t)
			}
			most = max(most, dirBytes(b.cfg.Dir))
		}
		written := int64(46 * 50 * 8 << 10)
		if most > 2*early || most > written/4 {
			t.Errorf("%d bytes on the disk after a few rounds, up to %d later; %d were written", early, most, written)
		}
		b.requireSame(t)
		b.close(t)
	})
}
