package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

// podWatch is what a client saw of the pods of a namespace from when there were none.
type podWatch struct {
	mu      sync.Mutex
	made    map[types.UID]bool
	node    map[types.UID]string // where it was bound
	bound   []time.Time          // when each pod was seen bound first, in that order
	wrong   []string             // what must not be
	err     error                // why the watch ended
	changed chan struct{}        // closed and replaced
}

// watchPods watches until ctx ends. It returns when the watch stands.
func watchPods(ctx context.Context, cs kubernetes.Interface, namespace string) (*podWatch, error) {
	list, err := cs.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) > 0 {
		return nil, fmt.Errorf("pods of %s before there are any: %d: %w", namespace, len(list.Items), err)
	}
	w, err := cs.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	if err != nil {
		return nil, fmt.Errorf("watching pods of %s: %w", namespace, err)
	}
	o := &podWatch{made: map[types.UID]bool{}, node: map[types.UID]string{}, changed: make(chan struct{})}
	go func() {
		defer w.Stop()
		for e := range w.ResultChan() {
			o.event(e, time.Now())
		}
		o.failed(errors.New("the watch of pods ended"))
	}()
	return o, nil
}

func (o *podWatch) failed(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.err = err
	o.tell()
}

// tell is called under the lock.
func (o *podWatch) tell() {
	close(o.changed)
	o.changed = make(chan struct{})
}

func (o *podWatch) event(e watch.Event, now time.Time) {
	p, ok := e.Object.(*v1.Pod)
	if !ok {
		o.failed(fmt.Errorf("the watch of pods says %v", e.Object))
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	defer o.tell()
	o.made[p.UID] = true
	before := o.node[p.UID]
	switch {
	case p.Spec.NodeName == "" && before == "":
	case before == "":
		o.node[p.UID] = p.Spec.NodeName
		o.bound = append(o.bound, now)
	case before != p.Spec.NodeName:
		o.wrong = append(o.wrong, fmt.Sprintf("pod %s went from node %s to %q", p.Name, before, p.Spec.NodeName))
	}
}

// await waits until so many pods are bound.
func (o *podWatch) await(ctx context.Context, pods int) error {
	for {
		o.mu.Lock()
		have, changed, err := len(o.bound), o.changed, o.err
		o.mu.Unlock()
		switch {
		case have >= pods:
			return nil
		case err != nil:
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%d of %d pods are bound: %w", have, pods, ctx.Err())
		}
	}
}

// seen is how many pods there have been.
func (o *podWatch) seen() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.made)
}

// verdict is what was wrong once all pods are there: each has been made once, and bound once.
func (o *podWatch) verdict(pods int) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	errs := []error{o.moved()}
	if len(o.made) != pods {
		errs = append(errs, fmt.Errorf("%d pods were made for %d", len(o.made), pods))
	}
	if len(o.bound) != pods {
		errs = append(errs, fmt.Errorf("%d pods were bound for %d", len(o.bound), pods))
	}
	return errors.Join(errs...)
}

// boundOnce says which pods were bound more than once.
func (o *podWatch) boundOnce() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.moved()
}

// moved is called under the lock.
func (o *podWatch) moved() error {
	var errs []error
	for _, w := range o.wrong {
		errs = append(errs, errors.New(w))
	}
	return errors.Join(errs...)
}

// gap is the longest time between two bindings in succession, or before the first.
func (o *podWatch) gap(began time.Time) (longest time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	last := began
	for _, t := range slices.SortedFunc(slices.Values(o.bound), time.Time.Compare) {
		longest, last = max(longest, t.Sub(last)), t
	}
	return longest
}
