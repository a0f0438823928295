package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/internal/virtual"
)

// Grace timers: the newest epoch counts, a session stops the timer, and a failed write is retried.
func TestNodeTimers(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var (
			mu    sync.Mutex
			lost  []string
			fails = map[string]int{"flaky": 2}
			began = time.Now()
		)
		l := newNodeTimers(slog.New(slog.DiscardHandler), func(_ context.Context, node string, epoch uint64) error {
			mu.Lock()
			defer mu.Unlock()
			if fails[node] > 0 {
				fails[node]--
				return errors.New("no leader")
			}
			lost = append(lost, fmt.Sprintf("%s/%d at %s", node, epoch, time.Since(began)))
			return nil
		})
		done := make(chan error, 1)
		go func() { done <- l.runTimers(ctx) }()
		l.startTimer("dead", 1, 5*time.Second)
		l.startTimer("dead", 1, time.Second) // a second call for the same loss has no effect
		l.startTimer("back", 1, 5*time.Second)
		l.startTimer("again", 1, 5*time.Second)
		l.startTimer("flaky", 1, 5*time.Second)
		l.startTimer("moved", 1, 5*time.Second)
		time.Sleep(2 * time.Second)
		l.stopTimer("back")
		l.startTimer("again", 2, 5*time.Second) // reconnected, then lost again
		l.retainTimers(func(node string, _ uint64) bool { return node != "moved" })
		time.Sleep(time.Minute)
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		want := []string{"again/2 at 7s", "dead/1 at 5s", "flaky/1 at 6s"}
		slices.Sort(lost)
		if !slices.Equal(lost, want) {
			t.Errorf("lost %v, want %v", lost, want)
		}
	})
}

// A node of a failed replica gets a second grace period per session while its agent is connected to
// this replica. A node that is not connected is lost at once.
func TestMovingNodes(t *testing.T) {
	m, began := newMovingNodes(5*time.Second), time.Now()
	for _, c := range []struct {
		after     time.Duration
		epoch     uint64
		connected bool
		wait      bool
	}{
		{0, 1, true, true}, {4 * time.Second, 1, true, true}, {5 * time.Second, 1, true, false},
		{6 * time.Second, 2, true, true}, {7 * time.Second, 2, false, false},
		{8 * time.Second, 3, false, false},
	} {
		if got := m.shouldWait("w1", c.epoch, c.connected, began.Add(c.after)); got != c.wait {
			t.Errorf("after %s, session %d, connected %v: waits %v", c.after, c.epoch, c.connected, got)
		}
	}
	if len(m.byNode) != 0 {
		t.Errorf("%d nodes are remembered", len(m.byNode))
	}
}

// F115: the conditions of a lost node keep the time of its last heartbeat, which is in no store
// while the node is Ready. The stored time stays when the replica does not know a later one.
func TestLostNodeKeepsItsLastHeartbeat(t *testing.T) {
	stored := metav1.NewTime(time.Unix(1_000, 0))
	for what, c := range map[string]struct{ known, want time.Time }{
		"heartbeats since the stored one":  {stored.Add(time.Hour), stored.Add(time.Hour)},
		"none since this replica started":  {time.Time{}, stored.Time},
		"an older session of this replica": {stored.Add(-time.Hour), stored.Time},
	} {
		status := &v1.NodeStatus{Conditions: []v1.NodeCondition{
			{Type: v1.NodeReady, Status: v1.ConditionTrue, LastHeartbeatTime: stored},
			{Type: v1.NodeDiskPressure, Status: v1.ConditionFalse, LastHeartbeatTime: stored},
			{Type: v1.NodeNetworkUnavailable, Status: v1.ConditionFalse, LastHeartbeatTime: stored},
		}}
		got := lostNodeStatus(status, c.known, metav1.Now())
		for i, want := range []time.Time{c.want, c.want, stored.Time} {
			if at := got.Conditions[i].LastHeartbeatTime; !at.Time.Equal(want) {
				t.Errorf("%s: %s has its heartbeat at %s, want %s", what, got.Conditions[i].Type, at, want)
			}
		}
	}
}
