package disk

import (
	"testing"

	"github.com/hashicorp/raft"
)

// TestFoundingCutShort: a founding that a crash interrupted after raft's first term and before the
// configuration is repeated. No other state is reset. F52
func TestFoundingCutShort(t *testing.T) {
	for _, c := range []struct {
		name  string
		done  func(*Data) error
		again bool
	}{
		{"term only", func(*Data) error { return nil }, true},
		{"has voted", func(d *Data) error { return d.stable.SetUint64([]byte(keyVoteTerm), 1) }, false},
		{"later term", func(d *Data) error { return d.stable.SetUint64(keyTerm, 2) }, false},
		{"has a log", func(d *Data) error {
			return d.Log.StoreLog(&raft.Log{Index: 1, Term: 1, Type: raft.LogConfiguration})
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, err := openDisk(Config{Name: "r1", Dir: t.TempDir(), NoSync: true}.withDefaults(), func(err error) {
				t.Error(err)
			})
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			if err := d.stable.SetUint64(keyTerm, 1); err != nil {
				t.Fatal(err)
			}
			if err := c.done(d); err != nil {
				t.Fatal(err)
			}
			if err := d.ResetInterruptedBootstrap(); err != nil {
				t.Fatal(err)
			}
			if empty, err := d.IsEmpty(); err != nil || empty != c.again {
				t.Errorf("can be founded: %v, error %v; want %v", empty, err, c.again)
			}
		})
	}
}
