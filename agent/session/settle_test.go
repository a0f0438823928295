package session

import (
	"context"
	"errors"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/internal/virtual"
)

// A restarted agent opens its session when it is ready, or after a second. A new agent opens it at
// once.
func TestSettle(t *testing.T) {
	says := func(ready v1.ConditionStatus) *v1.Node {
		n := &v1.Node{}
		n.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: ready}}
		return n
	}
	for _, tt := range []struct {
		name  string
		first *v1.Node
		back  bool          // has a checkpoint
		after time.Duration // until the agent is ready; 0 = never
		want  time.Duration
	}{
		{"new", says(v1.ConditionFalse), false, 0, 0},
		{"back", says(v1.ConditionFalse), true, 200 * time.Millisecond, 200 * time.Millisecond},
		{"back and broken", says(v1.ConditionFalse), true, 0, readinessWait},
		{"back and ready", says(v1.ConditionTrue), true, 0, 0},
		{"back, with nothing to say of it", &v1.Node{}, true, 0, 0},
		{"back, without facts", nil, true, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				s := New(Config{NodeName: "w1", Facts: tt.first})
				if tt.back {
					s.view.completeBatch(7, true)
				}
				if tt.after > 0 {
					time.AfterFunc(tt.after/2, func() { s.Facts(says(v1.ConditionFalse)) })
					time.AfterFunc(tt.after, func() { s.Facts(says(v1.ConditionTrue)) })
				}
				began := time.Now()
				if err := s.awaitReadiness(t.Context()); err != nil {
					t.Fatal(err)
				}
				if got := time.Since(began); got != tt.want {
					t.Errorf("settled after %s, want %s", got, tt.want)
				}
			})
		})
	}
	t.Run("ended", func(t *testing.T) {
		s := New(Config{NodeName: "w1", Facts: says(v1.ConditionFalse)})
		s.view.completeBatch(7, true)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := s.awaitReadiness(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("settle after the end: %v", err)
		}
	})
}
