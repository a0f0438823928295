package fault

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/test/testenv"
)

// The API at a worker's own loopback outlives every replica in turn: whoever asks there gets an answer all the time.
func TestAPIOnEveryNode(t *testing.T) {
	var clients []kubernetes.Interface
	for _, worker := range []string{"w1", "w2"} {
		h := testenv.Host(t, worker)
		cfg := testenv.RestConfig(t)
		cfg.Host = "https://127.0.0.1:6443" // which the replicas' certificates name
		cfg.QPS, cfg.Burst = 100, 10
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
	var answered struct {
		sync.Mutex
		calls   []int // of each worker
		longest time.Duration
		cut     int // answers that ended in their middle, as the replica did that gave them
	}
	answered.calls = make([]int, len(clients))
	more := func(n int) {
		t.Helper()
		answered.Lock()
		from := slices.Clone(answered.calls)
		answered.Unlock()
		testenv.Eventually(t, soon, func() error {
			answered.Lock()
			defer answered.Unlock()
			for i, calls := range answered.calls {
				if calls-from[i] < n {
					return fmt.Errorf("%d calls answered at worker %d, want %d", calls-from[i], i+1, n)
				}
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
				if ctx.Err() != nil {
					cancel()
					return
				}
				// However the way ends, in its midst: one such end for each worker and kill.
				cut := err != nil && call.Err() == nil &&
					(utilnet.IsProbableEOF(err) || utilnet.IsConnectionReset(err) ||
						utilnet.IsHTTP2ConnectionLost(err) ||
						strings.Contains(err.Error(), "unexpected EOF"))
				cancel()
				if err != nil && !cut {
					t.Errorf("worker %d: after %s: %v", i+1, time.Since(began).Round(time.Millisecond), err)
					return
				}
				answered.Lock()
				if cut {
					answered.cut++
				} else {
					answered.calls[i]++
				}
				answered.longest = max(answered.longest, time.Since(began))
				answered.Unlock()
			}
		})
	}
	more(20)
	for _, replica := range testenv.Replicas() {
		forHosts(t, testenv.Lab().Kill, replica)
		more(100)
		forHosts(t, testenv.Lab().Restart, replica)
		awaitVoters(t)
		awaitReplicas(t)
	}
	answered.Lock()
	defer answered.Unlock()
	t.Logf("%v calls at the workers' loopback while each replica was killed, %d cut off in their answer: "+
		"the longest took %s",
		answered.calls, answered.cut, answered.longest.Round(time.Millisecond))
	if killed := len(testenv.Replicas()); answered.cut > killed*len(clients) {
		t.Errorf("%d responses were cut off by %d kills", answered.cut, killed)
	}
}
