package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
)

// podView is a client's view of a pod. Each time is the arrival of the first watch event that shows
// the state; zero = not yet.
type podView struct {
	bound, ready, gone time.Time
	traceID            string // trace ID of its timeline
	last               *v1.Pod
}

// podObserver watches the pods of a namespace.
type podObserver struct {
	mu      sync.Mutex
	pods    map[string]*podView
	changed chan struct{} // closed and replaced at every event
	err     error         // why the watch ended
}

// observePods starts a watch that lasts until ctx ends.
func observePods(ctx context.Context, client kubernetes.Interface, namespace string) (*podObserver, error) {
	w, err := client.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("watching pods of %s: %w", namespace, err)
	}
	o := &podObserver{pods: map[string]*podView{}, changed: make(chan struct{})}
	go func() {
		defer w.Stop()
		for e := range w.ResultChan() {
			o.handleEvent(e, time.Now())
		}
		o.setError(errors.New("the watch of pods ended"))
	}()
	return o, nil
}

func (o *podObserver) handleEvent(e watch.Event, now time.Time) {
	pod, ok := e.Object.(*v1.Pod)
	if !ok {
		if e.Type == watch.Error {
			o.setError(fmt.Errorf("the watch of pods failed: %v", e.Object))
		}
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	s := o.pods[pod.Name]
	if s == nil {
		s = &podView{}
		o.pods[pod.Name] = s
	}
	s.last, s.traceID = pod, api.TraceID(pod.Annotations[api.TraceParentAnnotation])
	first := func(at *time.Time, when bool) {
		if at.IsZero() && when {
			*at = now
		}
	}
	first(&s.bound, pod.Spec.NodeName != "")
	first(&s.ready, isPodReady(pod))
	first(&s.gone, e.Type == watch.Deleted)
	o.wakeWaiters()
}

func (o *podObserver) setError(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.err = errors.Join(o.err, err)
	o.wakeWaiters()
}

func (o *podObserver) wakeWaiters() {
	close(o.changed)
	o.changed = make(chan struct{})
}

// awaitPod waits until done returns true for the view of the named pod, and returns the view. what
// describes the awaited state in errors.
func (o *podObserver) awaitPod(ctx context.Context, name, what string, done func(podView) bool) (podView, error) {
	for {
		o.mu.Lock()
		var s podView
		if p := o.pods[name]; p != nil {
			s = *p
		}
		changed, err := o.changed, o.err
		o.mu.Unlock()
		if done(s) {
			return s, nil
		}
		if err != nil {
			return s, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return s, fmt.Errorf("waiting until pod %s is %s: %w; %s", name, what, ctx.Err(), s.describeState())
		}
	}
}

// describeState returns the pod's phase, node, false conditions and waiting containers, for an
// error message.
func (s podView) describeState() string {
	if s.last == nil {
		return "no event has arrived"
	}
	out := fmt.Sprintf("phase %s, node %q", s.last.Status.Phase, s.last.Spec.NodeName)
	for _, c := range s.last.Status.Conditions {
		if c.Status != v1.ConditionTrue {
			out += fmt.Sprintf(", %s=%s %s %s", c.Type, c.Status, c.Reason, c.Message)
		}
	}
	for _, c := range s.last.Status.ContainerStatuses {
		if c.State.Waiting != nil {
			out += fmt.Sprintf(", container %s is waiting: %s %s", c.Name, c.State.Waiting.Reason,
				c.State.Waiting.Message)
		}
	}
	return out
}

func isPodReady(p *v1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == v1.PodReady {
			return c.Status == v1.ConditionTrue
		}
	}
	return false
}
