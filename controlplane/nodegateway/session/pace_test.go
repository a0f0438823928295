package session

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/virtual"
)

// In large clusters the heartbeat interval and the suspect timeout are longer. The grace period is
// shorter accordingly, so that a silent node is lost after the same time.
func TestPace(t *testing.T) {
	for _, c := range []struct {
		nodes         int
		beat, silence time.Duration
	}{{0, time.Second, 4 * time.Second}, {1000, time.Second, 4 * time.Second}, {3000, 2 * time.Second, 6 * time.Second},
		{5000, 3 * time.Second, 8 * time.Second}, {1 << 20, 3 * time.Second, 8 * time.Second}} {
		beat, silence := heartbeatPace(time.Second, 4*time.Second, c.nodes)
		if beat != c.beat || silence != c.silence {
			t.Errorf("%d nodes: each %s, given up after %s; want %s and %s", c.nodes, beat, silence, c.beat, c.silence)
		}
		s := &Server{cfg: Config{Timing: Timing{Suspect: 4 * time.Second, Grace: 5 * time.Second}}}
		if lost := silence + s.graceAfterSilence(silence); lost != 9*time.Second {
			t.Errorf("%d nodes: one that is silent is lost after %s, want 9s", c.nodes, lost)
		}
	}
	s := &Server{cfg: Config{Timing: Timing{Suspect: 4 * time.Second, Grace: 5 * time.Second}}}
	if got := s.graceAfterSilence(0); got != 5*time.Second {
		t.Errorf("whose connection broke has %s to come back", got)
	}
}

// The number of starting sessions is bounded. A further session waits for a slot and gets an error
// after a timeout. A session that starts too slowly loses its slot.
func TestStartSlots(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		turns := make(startSlots, 2)
		ctx := context.Background()
		first, err := turns.acquireSlot(ctx, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := turns.acquireSlot(ctx, time.Second); err != nil { // and keeps the slot
			t.Fatal(err)
		}
		if _, err := turns.acquireSlot(ctx, time.Second); status.Code(err) != codes.Unavailable {
			t.Errorf("without a turn: %v", err)
		}
		first()
		first()
		end, err := turns.acquireSlot(ctx, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(maxSlotTime)
		virtual.Wait()
		end()
		if len(turns) != 0 {
			t.Errorf("%d turns are taken at the end", len(turns))
		}
		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		turns <- struct{}{}
		turns <- struct{}{}
		if _, err := turns.acquireSlot(cancelled, time.Second); err == nil {
			t.Error("a turn for one who has gone")
		}
	})
}
