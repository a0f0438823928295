package nodegateway

import (
	"testing"

	v1 "k8s.io/api/core/v1"
)

// Every node gets the DNS server's configuration, and its deletion, whatever pods it runs.
func TestEverywhere(t *testing.T) {
	w := newWorld(mostGone)
	a := newAssignment("w1", w, resumption{})
	if c, err := a.step(a.swapRefs(nil, everywhere, nil)); err != nil || len(c.upserts) != 0 {
		t.Fatalf("without a ConfigMap: %v %v", c.upserts, err)
	}
	k := everywhere[0]
	w.set(k, &v1.ConfigMap{})
	if c, err := a.step([]key{k}); err != nil || len(c.upserts) != 1 || c.upserts[0].Name != "coredns" || w.watched[k] == 0 {
		t.Errorf("with it: %v %v", c.upserts, err)
	}
	w.remove(k)
	if c, err := a.step([]key{k}); err != nil || len(c.deletes) != 1 {
		t.Errorf("after it: %v %v", c.deletes, err)
	}
}
