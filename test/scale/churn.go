package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/figures"
)

// deleters is the number of concurrent clients that delete pods.
const deleters = 8

// callLatencies collects the durations of calls by kind of call. It is safe for concurrent use.
type callLatencies struct {
	mu    sync.Mutex
	calls map[string][]time.Duration
}

func (l *callLatencies) addCall(sort string, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls[sort] = append(l.calls[sort], took)
}

func (l *callLatencies) values(into map[string]float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for sort, took := range l.calls {
		for name, v := range figures.Latencies(took) {
			into[sort+" "+name] = v
		}
		into[sort+" calls"] = float64(len(took))
	}
}

// measureChurn deletes pods at the given rate per second, so that their Deployments replace them.
// Concurrent clients read, list, create and watch meanwhile. It returns the latencies of the calls,
// the number of writes and the time until all pods run again.
func (n *agentFleet) measureChurn(ctx context.Context, during time.Duration, rate int) (map[string]float64, error) {
	names, err := n.podNames(ctx)
	if err != nil {
		return nil, err
	}
	before, err := n.storeRevision(ctx)
	if err != nil {
		return nil, err
	}
	l := &callLatencies{calls: map[string][]time.Duration{}}
	limited, cancel := context.WithTimeout(ctx, during)
	defer cancel()
	var callers sync.WaitGroup
	var mu sync.Mutex
	var failed error
	call := func(sort string, every time.Duration, do func(ctx context.Context, i int) error) {
		callers.Go(func() {
			if err := runAtInterval(limited, ctx, every, func(i int) error {
				began := time.Now()
				err := do(ctx, i)
				l.addCall(sort, time.Since(began))
				return err
			}); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed = errors.Join(failed, fmt.Errorf("%s: %w", sort, err))
			}
		})
	}
	for c := range deleters {
		call("delete pod", deleters*time.Second/time.Duration(rate), func(ctx context.Context, i int) error {
			return n.deletePod(ctx, names[(i*deleters+c)%len(names)])
		})
	}
	call("get pod", 20*time.Millisecond, func(ctx context.Context, _ int) error {
		return n.getPod(ctx, names[rand.IntN(len(names))])
	})
	call("list pods of a node", 50*time.Millisecond, func(ctx context.Context, _ int) error {
		_, err := n.cs.CoreV1().Pods("").List(ctx,
			metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.randomNodeName()})
		return err
	})
	call("create", 50*time.Millisecond, func(ctx context.Context, i int) error {
		_, err := n.cs.CoreV1().ConfigMaps(fleetNamespace).Create(ctx,
			&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("made-", i)}}, metav1.CreateOptions{})
		return err
	})
	callers.Go(func() {
		if err := n.measureWatchDelay(limited, ctx, l); err != nil {
			mu.Lock()
			defer mu.Unlock()
			failed = errors.Join(failed, err)
		}
	})
	callers.Wait()
	if failed != nil {
		return nil, failed
	}
	after, err := n.storeRevision(ctx)
	if err != nil {
		return nil, err
	}
	out := map[string]float64{"seconds": during.Seconds(), "writes": float64(after - before)}
	l.values(out)
	took, err := n.awaitCount(ctx, "pods run again", settleTimeout, func() (int, int, error) {
		return n.countReadyPods(ctx)
	})
	out["settled_s"] = took.Seconds()
	return out, err
}

// runAtInterval calls do once per interval until the context limited ends, and returns the first
// error. do gets ctx. If do is slower than the interval, the next call follows at once and further
// ticks are dropped.
func runAtInterval(limited, ctx context.Context, every time.Duration, do func(i int) error) error {
	t := time.NewTicker(every)
	defer t.Stop()
	for i := 0; ; i++ {
		select {
		case <-limited.Done():
			return ctx.Err()
		case <-t.C:
		}
		if err := do(i); err != nil {
			return err
		}
	}
}

// podNames returns the names of all pods in random order.
func (n *agentFleet) podNames(ctx context.Context) ([]string, error) {
	list, err := n.cs.CoreV1().Pods(fleetNamespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	names := make([]string, len(list.Items))
	for to, from := range rand.Perm(len(names)) {
		names[to] = list.Items[from].Name
	}
	return names, nil
}

func (n *agentFleet) deletePod(ctx context.Context, name string) error {
	return ignoreNotFound(n.cs.CoreV1().Pods(fleetNamespace).Delete(ctx, name, metav1.DeleteOptions{}))
}

func (n *agentFleet) getPod(ctx context.Context, name string) error {
	_, err := n.cs.CoreV1().Pods(fleetNamespace).Get(ctx, name, metav1.GetOptions{})
	return ignoreNotFound(err)
}

// measureWatchDelay creates ConfigMaps through the leader until the context limited ends. It adds
// the time until a watch at a follower receives each of them to l.
func (n *agentFleet) measureWatchDelay(limited, ctx context.Context, l *callLatencies) error {
	w, err := n.cs.CoreV1().ConfigMaps(v1.NamespaceDefault).Watch(ctx, metav1.ListOptions{LabelSelector: "seen=late"})
	if err != nil {
		return fmt.Errorf("watching: %w", err)
	}
	defer w.Stop()
	leader, err := n.plane.newClient(n.leader)
	if err != nil {
		return err
	}
	return runAtInterval(limited, ctx, 50*time.Millisecond, func(i int) error {
		cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("seen-", i),
			Labels: map[string]string{"seen": "late"}}}
		if _, err := leader.CoreV1().ConfigMaps(v1.NamespaceDefault).Create(ctx, cm, metav1.CreateOptions{}); err !=
			nil {
			return err
		}
		written := time.Now()
		seen, cancel := context.WithTimeout(ctx, settleTimeout)
		defer cancel()
		return wait.For(seen, time.Millisecond, func() error {
			e, ok := <-w.ResultChan()
			if !ok {
				return errors.New("the watch ended")
			}
			if got, ok := e.Object.(*v1.ConfigMap); !ok || got.Name != cm.Name {
				return errors.New("the event is for another object")
			}
			l.addCall("watch", time.Since(written))
			return nil
		})
	})
}
