package scheduler_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/internal/virtual"
)

// noRoom returns the message of a pod that fits on none of the given number of nodes.
func noRoom(nodes int) string {
	return fmt.Sprintf("0/%[1]d nodes are available: %[1]d Insufficient cpu. preemption: 0/%[1]d nodes are available: "+
		"%[1]d No preemption victims found for incoming pod.", nodes)
}

// F87: the last message of a pod stays, even if the write of the previous message took long.
func TestTheLastReasonStays(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		b.node("w1", "1")
		var slow atomic.Bool
		slow.Store(true)
		b.calls = func(r *api.Request) {
			if pod, ok := r.Object.(*v1.Pod); ok && r.Subresource == "status" && slow.Load() &&
				strings.Contains(fmt.Sprint(pod.Status.Conditions), "0/1 nodes") {
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

// F87: a repeated message is written even if the informer has not received the message in between.
func TestAReasonThatComesBack(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		b.node("w1", "1")
		b.lead()
		pod := b.pod("big", "2")
		b.awaitReason("big", noRoom(1))
		b.eventually("the informer shows it", func() error {
			if have, _ := client.Cached[*v1.Pod](b.informers, "default", "big"); have.ResourceVersion ==
				pod.ResourceVersion {
				return fmt.Errorf("it has revision %s", have.ResourceVersion)
			}
			return nil
		})
		b.late.Store(true)
		defer b.late.Store(false)
		b.node("w2", "1")
		b.awaitReason("big", noRoom(2))
		if err := client.Delete[*v1.Node](b.ctx, b.client, "", "w2", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w1, err := client.Get[*v1.Node](b.ctx, b.client, "", "w1")
		if err != nil {
			t.Fatal(err)
		}
		w1 = w1.DeepCopy()
		w1.Status.Allocatable[v1.ResourceCPU] = resource.MustParse("1500m") // more, and not enough
		if _, err := client.UpdateStatus(b.ctx, b.client, w1); err != nil {
			t.Fatal(err)
		}
		b.awaitReason("big", noRoom(1))
	})
}
