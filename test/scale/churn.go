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

// deleters are how many delete pods at once.
const deleters = 8

// latencies are how long the calls of each sort took.
type latencies struct {
	mu    sync.Mutex
	calls map[string][]time.Duration
}

func (l *latencies) note(sort string, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls[sort] = append(l.calls[sort], took)
}

func (l *latencies) values(into map[string]float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for sort, took := range l.calls {
		for name, v := range figures.Latencies(took) {
			into[sort+" "+name] = v
		}
		into[sort+" calls"] = float64(len(took))
	}
}

// churn replaces pods at a rate, as nodes and their controllers do all day, and asks meanwhile what people ask.
func (n *nodes) churn(ctx context.Context, during time.Duration, rate int) (map[string]float64, error) {
	names, err := n.podNames(ctx)
	if err != nil {
		return nil, err
	}
	before, err := n.revision(ctx)
	if err != nil {
		return nil, err
	}
	l := &latencies{calls: map[string][]time.Duration{}}
	limited, cancel := context.WithTimeout(ctx, during)
	defer cancel()
	var callers sync.WaitGroup
	var mu sync.Mutex
	var failed error
	call := func(sort string, every time.Duration, do func(ctx context.Context, i int) error) {
		callers.Go(func() {
			if err := paced(limited, ctx, every, func(i int) error {
				began := time.Now()
				err := do(ctx, i)
				l.note(sort, time.Since(began))
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
	call("get pod", 20*time.Millisecond, func(ctx context.Context, _ int) error { return n.getPod(ctx, names[rand.IntN(len(names))]) })
	call("list pods of a node", 50*time.Millisecond, func(ctx context.Context, _ int) error {
		_, err := n.cs.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.anyNode()})
		return err
	})
	call("create", 50*time.Millisecond, func(ctx context.Context, i int) error {
		_, err := n.cs.CoreV1().ConfigMaps(fleetSpace).Create(ctx, &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("made-", i)}}, metav1.CreateOptions{})
		return err
	})
	callers.Go(func() {
		if err := n.watched(limited, ctx, l); err != nil {
			mu.Lock()
			defer mu.Unlock()
			failed = errors.Join(failed, err)
		}
	})
	callers.Wait()
	if failed != nil {
		return nil, failed
	}
	after, err := n.revision(ctx)
	if err != nil {
		return nil, err
	}
	out := map[string]float64{"seconds": during.Seconds(), "writes": float64(after - before)}
	l.values(out)
	took, err := n.until(ctx, "pods run again", settleWithin, func() (int, int, error) { return n.running(ctx) })
	out["settled_s"] = took.Seconds()
	return out, err
}

// paced calls at a rate until the limit ends, and late calls as soon as it may.
func paced(limited, ctx context.Context, every time.Duration, do func(i int) error) error {
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

// podNames are those of all pods, in no order.
func (n *nodes) podNames(ctx context.Context) ([]string, error) {
	list, err := n.cs.CoreV1().Pods(fleetSpace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	names := make([]string, len(list.Items))
	for to, from := range rand.Perm(len(names)) {
		names[to] = list.Items[from].Name
	}
	return names, nil
}

func (n *nodes) deletePod(ctx context.Context, name string) error {
	return ignoreNotFound(n.cs.CoreV1().Pods(fleetSpace).Delete(ctx, name, metav1.DeleteOptions{}))
}

func (n *nodes) getPod(ctx context.Context, name string) error {
	_, err := n.cs.CoreV1().Pods(fleetSpace).Get(ctx, name, metav1.GetOptions{})
	return ignoreNotFound(err)
}

// watched measures how long after a write its watch tells of it.
func (n *nodes) watched(limited, ctx context.Context, l *latencies) error {
	w, err := n.cs.CoreV1().ConfigMaps(v1.NamespaceDefault).Watch(ctx, metav1.ListOptions{LabelSelector: "seen=late"})
	if err != nil {
		return fmt.Errorf("watching: %w", err)
	}
	defer w.Stop()
	leader, err := n.client(n.leader)
	if err != nil {
		return err
	}
	return paced(limited, ctx, 50*time.Millisecond, func(i int) error {
		cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("seen-", i), Labels: map[string]string{"seen": "late"}}}
		if _, err := leader.CoreV1().ConfigMaps(v1.NamespaceDefault).Create(ctx, cm, metav1.CreateOptions{}); err != nil {
			return err
		}
		written := time.Now()
		seen, cancel := context.WithTimeout(ctx, settleWithin)
		defer cancel()
		return wait.For(seen, time.Millisecond, func() error {
			e, ok := <-w.ResultChan()
			if !ok {
				return errors.New("the watch ended")
			}
			if got, ok := e.Object.(*v1.ConfigMap); !ok || got.Name != cm.Name {
				return errors.New("another object")
			}
			l.note("watch", time.Since(written))
			return nil
		})
	})
}
