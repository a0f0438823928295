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

// seen is what a client saw of a pod, each moment at the arrival of the first
// watch event that shows it; zero = not yet.
type seen struct {
	bound, ready, gone time.Time
	trace              string // id of its timeline
	last               *v1.Pod
}

// observer watches the pods of a namespace.
type observer struct {
	mu      sync.Mutex
	pods    map[string]*seen
	changed chan struct{} // closed and replaced at every event
	err     error         // why the watch ended
}

// observe watches until ctx ends. It returns when the watch stands.
func observe(ctx context.Context, client kubernetes.Interface, namespace string) (*observer, error) {
	w, err := client.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("watching pods of %s: %w", namespace, err)
	}
	o := &observer{pods: map[string]*seen{}, changed: make(chan struct{})}
	go func() {
		defer w.Stop()
		for e := range w.ResultChan() {
			o.event(e, time.Now())
		}
		o.fail(errors.New("the watch of pods ended"))
	}()
	return o, nil
}

func (o *observer) event(e watch.Event, now time.Time) {
	pod, ok := e.Object.(*v1.Pod)
	if !ok {
		if e.Type == watch.Error {
			o.fail(fmt.Errorf("the watch of pods failed: %v", e.Object))
		}
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	s := o.pods[pod.Name]
	if s == nil {
		s = &seen{}
		o.pods[pod.Name] = s
	}
	s.last, s.trace = pod, api.TraceID(pod.Annotations[api.TraceParentAnnotation])
	first := func(at *time.Time, when bool) {
		if at.IsZero() && when {
			*at = now
		}
	}
	first(&s.bound, pod.Spec.NodeName != "")
	first(&s.ready, podReady(pod))
	first(&s.gone, e.Type == watch.Deleted)
	o.wake()
}

func (o *observer) fail(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.err = errors.Join(o.err, err)
	o.wake()
}

func (o *observer) wake() {
	close(o.changed)
	o.changed = make(chan struct{})
}

// await waits until what was seen of a pod satisfies a condition.
func (o *observer) await(ctx context.Context, name, what string, done func(seen) bool) (seen, error) {
	for {
		o.mu.Lock()
		var s seen
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
			return s, fmt.Errorf("waiting until pod %s is %s: %w; %s", name, what, ctx.Err(), s.describe())
		}
	}
}

// describe says what a person would look at when a pod does not come up.
func (s seen) describe() string {
	if s.last == nil {
		return "no event of it was seen"
	}
	out := fmt.Sprintf("phase %s, node %q", s.last.Status.Phase, s.last.Spec.NodeName)
	for _, c := range s.last.Status.Conditions {
		if c.Status != v1.ConditionTrue {
			out += fmt.Sprintf(", %s=%s %s %s", c.Type, c.Status, c.Reason, c.Message)
		}
	}
	for _, c := range s.last.Status.ContainerStatuses {
		if c.State.Waiting != nil {
			out += fmt.Sprintf(", container %s waits: %s %s", c.Name, c.State.Waiting.Reason, c.State.Waiting.Message)
		}
	}
	return out
}

func podReady(p *v1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == v1.PodReady {
			return c.Status == v1.ConditionTrue
		}
	}
	return false
}
