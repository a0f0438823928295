package fault

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// The leader is stopped in good order while clients write through it and through the others: through the others no
// call fails, and through itself none that it heard, but those that it listens to no more.
func TestLeaderStoppedUnderWrites(t *testing.T) {
	voters(t)
	ns := testenv.Namespace(t)
	victim, others := leader(t)
	w := write(t, ns, others...)
	cs := testenv.ClientAt(t, victim)
	var written atomic.Int32
	var at sync.WaitGroup
	for n := range 4 {
		at.Go(func() {
			for i := 0; ; i++ {
				call, cancel := context.WithTimeout(context.Background(), 30*time.Second)
				var asked atomic.Bool // at the last connection that was tried: one that ends before that has been heard by nobody
				call = httptrace.WithClientTrace(call, &httptrace.ClientTrace{
					GetConn: func(string) { asked.Store(false) }, WroteHeaders: func() { asked.Store(true) }})
				cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("victim-%d-%d", n, i)}}
				_, err := cs.CoreV1().ConfigMaps(ns).Create(call, cm, metav1.CreateOptions{})
				cancel()
				if err == nil {
					written.Add(1)
					continue
				}
				if asked.Load() && !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("%s heard it and did not do it: %v", victim, err)
				}
				return
			}
		})
	}
	w.more(t, 100)
	stopped := time.Now()
	mustLab(t, testenv.Lab().Stop, victim)
	at.Wait()
	w.more(t, 100)
	acked := w.end(t)
	t.Logf("%d creates through %s; the longest time without one through the others was %s",
		written.Load(), victim, longestGap(acked, stopped).Round(time.Millisecond))
	for _, replica := range others {
		checkHolds(t, testenv.ClientAt(t, replica), ns, acked, replica)
	}
	mustLab(t, testenv.Lab().Restart, victim)
	voters(t)
}
