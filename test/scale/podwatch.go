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

// podWatch records the pods of a namespace from a watch that was started when there were no pods.
type podWatch struct {
	mu         sync.Mutex
	made       map[types.UID]bool
	node       map[types.UID]string // where the pod is bound
	bound      []time.Time          // when each pod was first seen bound, in that order
	violations []string             // errors such as a pod that was bound twice
	err        error                // why the watch ended
	changed    chan struct{}        // closed and replaced at each change
}

// watchPods starts a watch of the pods of a namespace that lasts until ctx ends. It returns an
// error if the namespace has pods.
func watchPods(ctx context.Context, cs kubernetes.Interface, namespace string) (*podWatch, error) {
	list, err := cs.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) > 0 {
		return nil, fmt.Errorf("namespace %s has %d pods before the measurement: %w", namespace,
			len(list.Items), err)
	}
	w, err := cs.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	if err != nil {
		return nil, fmt.Errorf("watching pods of %s: %w", namespace, err)
	}
	o := &podWatch{made: map[types.UID]bool{}, node: map[types.UID]string{}, changed: make(chan struct{})}
	go func() {
		defer w.Stop()
		for e := range w.ResultChan() {
			o.handleEvent(e, time.Now())
		}
		o.failed(errors.New("the watch of pods ended"))
	}()
	return o, nil
}

func (o *podWatch) failed(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.err = err
	o.wakeWaiters()
}

// wakeWaiters wakes all waiting callers of await. The caller holds mu.
func (o *podWatch) wakeWaiters() {
	close(o.changed)
	o.changed = make(chan struct{})
}

func (o *podWatch) handleEvent(e watch.Event, now time.Time) {
	p, ok := e.Object.(*v1.Pod)
	if !ok {
		o.failed(fmt.Errorf("the watch of pods has returned %v", e.Object))
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	defer o.wakeWaiters()
	o.made[p.UID] = true
	before := o.node[p.UID]
	switch {
	case p.Spec.NodeName == "" && before == "":
	case before == "":
		o.node[p.UID] = p.Spec.NodeName
		o.bound = append(o.bound, now)
	case before != p.Spec.NodeName:
		o.violations = append(o.violations, fmt.Sprintf("pod %s moved from node %s to %q", p.Name, before,
			p.Spec.NodeName))
	}
}

// awaitBound waits until at least this number of pods are bound. It returns an error if the watch
// ends first.
func (o *podWatch) awaitBound(ctx context.Context, pods int) error {
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

// seenCount returns the number of pods seen so far.
func (o *podWatch) seenCount() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.made)
}

// checkCounts returns an error unless exactly this number of pods was created and bound, and no pod
// changed its node.
func (o *podWatch) checkCounts(pods int) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	errs := []error{o.violationErrors()}
	if len(o.made) != pods {
		errs = append(errs, fmt.Errorf("%d pods were created, want %d", len(o.made), pods))
	}
	if len(o.bound) != pods {
		errs = append(errs, fmt.Errorf("%d pods were bound, want %d", len(o.bound), pods))
	}
	return errors.Join(errs...)
}

// checkBoundOnce returns an error for each pod that was bound to another node later.
func (o *podWatch) checkBoundOnce() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.violationErrors()
}

// violationErrors returns the recorded violations. The caller holds mu.
func (o *podWatch) violationErrors() error {
	var errs []error
	for _, w := range o.violations {
		errs = append(errs, errors.New(w))
	}
	return errors.Join(errs...)
}

// longestGap returns the longest time between two successive bindings, or between the start and the
// first binding.
func (o *podWatch) longestGap(began time.Time) (longest time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	last := began
	for _, t := range slices.SortedFunc(slices.Values(o.bound), time.Time.Compare) {
		longest, last = max(longest, t.Sub(last)), t
	}
	return longest
}
