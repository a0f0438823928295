package scheduler_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/virtual"
)

// noRoom is what a pod is told that is too large for so many nodes.
func noRoom(nodes int) string {
	return fmt.Sprintf("0/%[1]d nodes are available: %[1]d Insufficient cpu. preemption: 0/%[1]d nodes are available: %[1]d No preemption victims found for incoming pod.", nodes)
}

// F87: what a pod is told last stays, however long it took to write what it was told before.
func TestTheLastReasonStays(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		b.node("w1", "1")
		var slow atomic.Bool
		slow.Store(true)
		b.calls = func(r *api.Request) {
			if p, ok := r.Object.(*v1.Pod); ok && r.Subresource == "status" && slow.Load() && strings.Contains(fmt.Sprint(p.Status.Conditions), "0/1 nodes") {
				slow.Store(false)
				time.Sleep(5 * time.Second)
			}
		}
		b.lead()
		b.pod("big", "2")
		time.Sleep(time.Second)
		b.node("w2", "1")
		time.Sleep(10 * time.Second)
		b.awaitReason("big", noRoom(2))
	})
}
