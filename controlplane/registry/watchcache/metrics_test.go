package watchcache

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/raftstore/storetest"
)

// Many resources share one series of store requests beyond the bound, and a resource that is no
// longer served gives its place to another.
func TestStoreRequestsAreBounded(t *testing.T) {
	r := newStoreRequests()
	of := func(i int) schema.GroupResource {
		return schema.GroupResource{Group: "many.example.com", Resource: fmt.Sprint("kinds", i)}
	}
	served := map[schema.GroupResource]*storageCache{}
	for i := range maxMeasuredResources + 5 {
		r.operationMetrics(of(i), OpGet)
		if i > 0 {
			served[of(i)] = &storageCache{}
		}
	}
	if n := len(r.measured); n != maxMeasuredResources {
		t.Errorf("%d resources are measured, want %d", n, maxMeasuredResources)
	}
	r.deleteUnserved(served)
	if n := len(r.measured); n != maxMeasuredResources-1 || r.measured[of(0)] {
		t.Errorf("%d resources are measured, with the first: %t", n, r.measured[of(0)])
	}
	r.operationMetrics(of(maxMeasuredResources+1), OpGet)
	if !r.measured[of(maxMeasuredResources+1)] {
		t.Error("the free place is not used")
	}
}

// BenchmarkObserveRequest measures the cost of the metrics for one request to the store.
func BenchmarkObserveRequest(b *testing.B) {
	table := kinds.All()
	store := storetest.NewMemory()
	defer store.Close()
	c := New(store, table, Options{})
	s := c.ByKind(table.ByType(&corev1.Pod{}))
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			s.ObserveRequest(OpGet, time.Now(), nil)
		}
	})
}
