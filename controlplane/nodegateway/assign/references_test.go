package assign

import (
	"testing"

	v1 "k8s.io/api/core/v1"
)

// Every node gets the DNS server's configuration, and its deletion, whatever pods it runs.
func TestObjectsOnAllNodes(t *testing.T) {
	w := newWorld(maxDeletionRecords)
	a := newAssignment("w1", w, Resumption{})
	if c, err := a.computeChange(a.updateReferences(nil, objectsOnAllNodes, nil)); err != nil || len(c.upserts) != 0 {
		t.Fatalf("without a ConfigMap: %v %v", c.upserts, err)
	}
	k := objectsOnAllNodes[0]
	w.set(k, &v1.ConfigMap{})
	if c, err := a.computeChange([]key{k}); err != nil || len(c.upserts) != 1 || c.upserts[0].Name != "coredns" ||
		w.watched[k] == 0 {
		t.Errorf("with it: %v %v", c.upserts, err)
	}
	w.remove(k)
	if c, err := a.computeChange([]key{k}); err != nil || len(c.deletes) != 1 {
		t.Errorf("after it: %v %v", c.deletes, err)
	}
}
