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

// The leader is stopped gracefully while clients write through it and through the others. Through
// the others no call fails. Through the leader no received call fails, except calls on connections
// that it has stopped reading.
func TestLeaderStoppedUnderWrites(t *testing.T) {
	awaitVoters(t)
	ns := testenv.Namespace(t)
	victim, others := leaderAndOthers(t)
	w := startWriters(t, ns, others...)
	cs := testenv.ClientAt(t, victim)
	var written atomic.Int32
	var at sync.WaitGroup
	for n := range 4 {
		at.Go(func() {
			for i := 0; ; i++ {
				call, cancel := context.WithTimeout(context.Background(), 30*time.Second)
				// for the last connection attempt: a connection that ends earlier was not received
				var asked atomic.Bool
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
					t.Errorf("%s received the call and did not execute it: %v", victim, err)
				}
				return
			}
		})
	}
	w.awaitMore(t, 100)
	stopped := time.Now()
	forHosts(t, testenv.Lab().Stop, victim)
	at.Wait()
	w.awaitMore(t, 100)
	acked := w.stopAll(t)
	t.Logf("%d creates through %s; the longest time without one through the others was %s",
		written.Load(), victim, longestGap(acked, stopped).Round(time.Millisecond))
	for _, replica := range others {
		requireWrites(t, testenv.ClientAt(t, replica), ns, acked, replica)
	}
	forHosts(t, testenv.Lab().Restart, victim)
	awaitVoters(t)
}
