package proposals

import (
	"testing"
)

func TestIdentitiesSettleInOrder(t *testing.T) {
	d := Identities{Incarnation: 7, Waiting: make(map[uint64]struct{})}
	a, b, c := d.NextID(), d.NextID(), d.NextID()
	d.SettleID(b)
	if id := d.NextID(); id.Settled != 0 || id.Sequence != 4 {
		t.Errorf("with the first open: %v", id)
	}
	d.SettleID(a)
	if id := d.NextID(); id.Settled != 2 {
		t.Errorf("with the third open: %v", id)
	}
	d.SettleID(c)
	if id := d.NextID(); id.Settled != 3 || id.Incarnation != 7 {
		t.Errorf("with the fourth open: %v", id)
	}
}
