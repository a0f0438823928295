package policy

import (
	"context"
	"errors"
	"testing"
	"time"

	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/virtual"
)

// On a busy node, where reading the table takes long, damage is checked for as often as elsewhere:
// only the CPU time of reading counts.
func TestBusyNodeIsLookedAt(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		it, _ := memory(fake.NewCluster())
		it.built, it.generation = true, func() (uint32, error) { return 1, nil }
		it.listTable = func(context.Context) (tableContents, error) {
			time.Sleep(time.Minute) // virtual time
			return tableContents{cost: 10 * time.Millisecond}, errors.New("something is not as it was made")
		}
		must(t, it.checkTable(t.Context()))
		if rest := time.Until(it.nextCheck); rest != checkCostFactor*10*time.Millisecond || it.built {
			t.Errorf("the table is looked at again after %s", rest)
		}
	})
}
