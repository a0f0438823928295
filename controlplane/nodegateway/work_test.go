package nodegateway

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"keelson.dev/keelson/internal/virtual"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Queued writes of a node are bounded in size. A newer write for the same object replaces the older
// one, and the queue is empty after the store has recovered.
func TestWaitingWorkIsBounded(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		w := newWork(ctx, 16)
		stuck := make(chan struct{})
		do := func(ctx context.Context) error {
			<-stuck
			return nil
		}
		const size = 1 << 20
		let := 0
		for w.put(fmt.Sprintf("pod/%d", let), size, do) && let < 1000 {
			let++
			virtual.Wait()
		}
		if most := maxWaiting/size + 16; let > most {
			t.Errorf("%d MiB were taken on, want at most %d", let, most)
		}
		if last := fmt.Sprintf("pod/%d", let-1); !w.put(last, size, do) {
			t.Error("a newer word for what waits already is refused")
		}
		close(stuck)
		virtual.Wait()
		if w.bytes != 0 || len(w.todo) != 0 {
			t.Errorf("%d bytes of %d jobs are left", w.bytes, len(w.todo))
		}
		if !w.put("pod/again", size, do) {
			t.Error("nothing is taken on any more")
		}
		w.wait()
	})
}

// Overlong object names are refused before they are stored.
func TestHostileNamesInReports(t *testing.T) {
	x := &session{work: newWork(t.Context(), 1)}
	long := strings.Repeat("x", 1<<20)
	for what, err := range map[string]error{
		"status": x.podStatus(&fleetv1.PodStatus{Uid: long}),
		"gone":   x.podGone(&fleetv1.PodGone{Name: long}),
	} {
		if err == nil || x.work.backlog() != 0 {
			t.Errorf("%s of a pod with a name of a megabyte: %v, %d jobs", what, err, x.work.backlog())
		}
	}
}
