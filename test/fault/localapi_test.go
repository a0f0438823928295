package fault

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/test/bed"
)

// The API at a worker's own loopback outlives every replica in turn: whoever asks there gets an answer all the time.
func TestAPIOnEveryNode(t *testing.T) {
	var clients []kubernetes.Interface
	for _, worker := range []string{"w1", "w2"} {
		h := bed.Host(t, worker)
		cfg := bed.RestConfig(t)
		cfg.Host = "https://127.0.0.1:6443" // which the replicas' certificates name
		cfg.Dial = func(ctx context.Context, _, address string) (net.Conn, error) { return h.Dial(ctx, address) }
		cs, err := kubernetes.NewForConfig(cfg)
		if err != nil {
			t.Fatal(err)
		}
		clients = append(clients, cs)
	}
	ctx, stop := context.WithCancel(context.Background())
	var asking sync.WaitGroup
	defer asking.Wait()
	defer stop()
	type count struct {
		sync.Mutex
		calls   int
		longest time.Duration
	}
	var answered count
	more := func(n int) {
		t.Helper()
		answered.Lock()
		from := answered.calls
		answered.Unlock()
		bed.Eventually(t, soon, func() error {
			answered.Lock()
			defer answered.Unlock()
			if answered.calls-from < n {
				return fmt.Errorf("%d calls answered, want %d", answered.calls-from, n)
			}
			return nil
		})
	}
	for i, cs := range clients {
		asking.Go(func() {
			for ctx.Err() == nil {
				began := time.Now()
				call, cancel := context.WithTimeout(ctx, 20*time.Second)
				_, err := cs.CoreV1().Namespaces().Get(call, "default", metav1.GetOptions{})
				cancel()
				if ctx.Err() != nil {
					return
				}
				if err != nil {
					t.Errorf("worker %d: after %s: %v", i+1, time.Since(began).Round(time.Millisecond), err)
					return
				}
				answered.Lock()
				answered.calls, answered.longest = answered.calls+1, max(answered.longest, time.Since(began))
				answered.Unlock()
			}
		})
	}
	more(20)
	for _, replica := range bed.Replicas() {
		mustLab(t, bed.Lab().Kill, replica)
		more(100)
		mustLab(t, bed.Lab().Restart, replica)
		voters(t)
		allReady(t)
	}
	t.Logf("%d calls at the workers' loopback while each replica was killed: the longest took %s", answered.calls, answered.longest.Round(time.Millisecond))
}
