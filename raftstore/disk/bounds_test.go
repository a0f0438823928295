package disk

import (
	"testing"
)

// However much is written, with snapshots taken and the log shortened behind
// them, the disk holds no more than it did after the first rounds.
func TestDiskDoesNotGrow(t *testing.T) {
	forKinds(t, func(t *testing.T, kind LogStoreKind, keys *Keyring) {
		b := newDiskBed(t, t.TempDir(), kind, keys)
		state := make([]byte, 200<<10)
		const trailing = 20
		round := func() {
			for range 10 {
				b.append(t, 1, 5, 8<<10)
			}
			b.snap(t, b.last, 1, state)
			b.compact(t, b.last-trailing)
		}
		for range 6 {
			round()
		}
		early := folderBytes(b.cfg.Dir)
		most := early
		for i := range 40 {
			if round(); i%10 == 0 {
				b.reopen(t)
			}
			most = max(most, folderBytes(b.cfg.Dir))
		}
		written := int64(46 * 50 * 8 << 10)
		if most > 2*early || most > written/4 {
			t.Errorf("%d bytes on the disk after a few rounds, up to %d later; %d were written", early, most, written)
		}
		b.same(t)
		b.close(t)
	})
}
