package pod

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/virtual"
)

// wallClock gives the runtime a clock that can be set during the test.
func wallClock(n *node) (set func(by time.Duration)) {
	var offset atomic.Int64
	n.rt.Clock = fake.Clock{Now: func() time.Time { return time.Now().Add(time.Duration(offset.Load())).Round(0) }}
	return func(by time.Duration) { offset.Store(int64(by)) }
}

var skews = []time.Duration{-time.Hour, 0, time.Hour, 365 * 24 * time.Hour}

// Back-offs do not depend on the runtime's clock, also if it differs from the agent's.
func TestBackoffIgnoresTheWallClock(t *testing.T) {
	for _, skew := range skews {
		t.Run(skew.String(), func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				n := newNode(t)
				set := wallClock(n)
				n.startAgent()
				defer func() { n.stop() }()
				n.cluster.Put(simplePod("u1"))
				n.expectStatus("u1", running)
				// The clock is set while the container runs: its run time must not reset the
				// back-off.
				set(skew)
				for i, delay := range []time.Duration{0, time.Second, 2 * time.Second, 4 * time.Second} {
					virtual.Wait()
					if err := n.rt.Exit("u1", "app", 1, ""); err != nil {
						t.Fatal(err)
					}
					if delay > 0 {
						time.Sleep(delay - time.Millisecond) // virtual time
						virtual.Wait()
						if n.rt.Running("u1", "app") != "" {
							t.Fatalf("restart %d came before %s", i+1, delay)
						}
						time.Sleep(time.Millisecond)
					}
					virtual.Wait()
					if n.rt.Running("u1", "app") == "" {
						t.Fatalf("restart %d did not come after %s", i+1, delay)
					}
				}
			})
		})
	}
}

// After the clock was set back, a restarted agent waits no longer than the back-off, and probes
// start in time.
func TestClockSetBackBetweenTwoLives(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		wallClock(n)(time.Hour) // earlier time stamps are now in the future
		started := make(chan time.Time, 10)
		n.cfg.Deps.Prober = prober{func(ctx context.Context, q agent.ProbeTarget, on func(agent.ProbeEvent)) {
			started <- q.StartedAt
			<-ctx.Done()
		}}
		p := simplePod("u1", v1.Container{Name: "app", Image: "hello:1",
			LivenessProbe: &v1.Probe{InitialDelaySeconds: 5}})
		n.startAgent()
		n.cluster.Put(p)
		virtual.Wait()
		for range 3 {
			virtual.Wait()
			if err := n.rt.Exit("u1", "app", 1, ""); err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Second)
		}
		virtual.Wait()
		if err := n.rt.Exit("u1", "app", 1, ""); err != nil {
			t.Fatal(err)
		}
		n.startAgent()
		defer func() { n.stop() }()
		time.Sleep(4*time.Second - time.Millisecond)
		virtual.Wait()
		if n.rt.Running("u1", "app") != "" {
			t.Error("the back-off was forgotten")
		}
		time.Sleep(time.Millisecond)
		virtual.Wait()
		if n.rt.Running("u1", "app") == "" {
			t.Error("the back-off does not end")
		}
		n.startAgent()
		virtual.Wait()
		for len(started) > 0 {
			if at := <-started; at.After(time.Now()) {
				t.Errorf("probes begin %s from now", time.Until(at))
			}
		}
	})
}

func TestAnchor(t *testing.T) {
	now := epoch
	at := func(d time.Duration) time.Time { return now.Add(d) }
	for _, c := range []struct {
		stamp, notBefore, want time.Time
	}{
		{at(-time.Second), time.Time{}, at(-time.Second)},
		{at(-time.Second), at(-time.Minute), at(-time.Second)},
		{at(-time.Hour), at(-time.Minute), now},
		{at(time.Hour), at(-time.Minute), now},
		{at(time.Hour), time.Time{}, now},
		{time.Time{}, time.Time{}, now},
		{now, now, now},
	} {
		if got := monotonicTime(c.stamp, c.notBefore, now); !got.Equal(c.want) {
			t.Errorf("anchor(%s, %s) is %s, want %s", c.stamp, c.notBefore, got, c.want)
		}
	}
}

// The grace period of a deleted pod is measured with the agent's clock, whatever the time stamp is.
func TestDeletionDeadline(t *testing.T) {
	seconds := int64(30)
	for skew, known := range map[time.Duration]bool{0: true, time.Hour: true, -time.Hour: true, 2 * time.Hour: false} {
		p := simplePod("u1")
		end := metav1.NewTime(epoch.Add(skew + 30*time.Second))
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &end, &seconds
		notBefore := time.Time{}
		if known {
			notBefore = epoch.Add(-time.Second)
		}
		if got := deletionDeadline(p, notBefore, epoch); !got.Equal(epoch.Add(30 * time.Second)) {
			t.Errorf("stamped with a clock that is off by %s: it ends %s from now", skew, got.Sub(epoch))
		}
	}
	if got := deletionDeadline(simplePod("u1"), time.Time{}, epoch); !got.IsZero() {
		t.Errorf("a pod that is not deleted ends %s", got)
	}
}

// A lost sandbox is re-created after its own back-off, and deadlines use the agent's monotonic
// clock.
func TestSandboxAndDeadlineIgnoreTheWallClock(t *testing.T) {
	for _, skew := range skews {
		t.Run(fmt.Sprint(skew), func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				n := newNode(t)
				wallClock(n)(skew)
				n.startAgent()
				defer func() { n.stop() }()
				p := simplePod("u1")
				limit := int64(600)
				p.Spec.ActiveDeadlineSeconds = &limit
				n.cluster.Put(p)
				virtual.Wait()
				for range 2 {
					time.Sleep(time.Minute)
					if err := n.rt.KillSandbox("u1"); err != nil {
						t.Fatal(err)
					}
					time.Sleep(10 * time.Second)
					virtual.Wait()
					if n.rt.Running("u1", "app") == "" {
						t.Fatalf("no new sandbox: %q", slices.Clone(n.rt.Journal()))
					}
				}
				n.startAgent()
				time.Sleep(time.Duration(limit)*time.Second - 141*time.Second)
				virtual.Wait()
				if st := n.reportedPod("u1").Status; st.Phase != v1.PodRunning {
					t.Fatalf("before its deadline: %s %s", st.Phase, st.Reason)
				}
				time.Sleep(3 * time.Second)
				virtual.Wait()
				if st := n.reportedPod("u1").Status; st.Reason != "DeadlineExceeded" {
					t.Fatalf("after its deadline: %s %s", st.Phase, st.Reason)
				}
			})
		})
	}
}
