package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/controlplane/registry/registrytest"
	"keelson.dev/keelson/controlplane/scheduler"
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// bed is a scheduler over a registry in memory.
type bed struct {
	t         testing.TB
	ctx       context.Context
	client    *client.Client
	informers *client.Informers
	timeline  *api.Timeline
	scheduler *scheduler.Scheduler
	store     *storetest.Memory
	binds     func(node string) error // a fault on the way of a binding
	calls     func(r *api.Request)    // sees every call; may be nil
	late      atomic.Bool             // informers do not hear of pods
	binding   func(pod string)        // is called before each binding
	commits   *lateStore
	// changes the context of a call, or fails it; may be nil
	mark  func(context.Context, *api.Request) (context.Context, error)
	mu    sync.Mutex
	bound map[string]int
}

func newBed(t testing.TB, with func(h *framework.Handle) []framework.WeightedPlugin) *bed {
	t.Helper()
	return newBedOf(t, scheduler.Config{Plugins: with})
}

// newBedOf is a bed whose scheduler is configured otherwise; the bed adds what it works with.
func newBedOf(t testing.TB, cfg scheduler.Config) *bed {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	store := storetest.NewMemory()
	table := kinds.All()
	commits := &lateStore{Memory: store}
	reg := registry.New(commits, table)
	var wg sync.WaitGroup
	run := func(what string, f func(context.Context) error) {
		wg.Go(func() {
			if err := f(ctx); err != nil && !errors.Is(err, raftstore.ErrClosed) && ctx.Err() == nil {
				t.Errorf("%s: %v", what, err)
			}
		})
	}
	run("registry", reg.Run)
	<-reg.Ready()
	b := &bed{t: t, ctx: ctx, timeline: api.NewTimeline(64), store: store, commits: commits,
		bound: make(map[string]int), binds: func(string) error { return nil },
		binding: func(string) {}}
	b.client = client.New(backend{registrytest.NewBackend(reg), b}, table).As(api.User{Name: "test",
		Groups: []string{api.GroupMasters}})
	b.informers = client.NewInformers(b.client)
	cfg.Client, cfg.Informers, cfg.Actor, cfg.Timeline = b.client, b.informers, "scheduler/cp1", b.timeline
	b.scheduler = scheduler.New(cfg)
	run("informers", b.informers.Run)
	if err := b.informers.WaitForSync(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		store.Close()
	})
	if _, err := client.Create(ctx, b.client, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}); err !=
		nil {
		t.Fatal(err)
	}
	return b
}

// backend counts bindings per pod and may fail them.
type backend struct {
	api.Backend
	b *bed
}

func (x backend) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	if x.b.calls != nil {
		x.b.calls(r)
	}
	if x.b.mark != nil {
		var err error
		if ctx, err = x.b.mark(ctx, r); err != nil {
			return nil, err
		}
	}
	if r.Subresource == "binding" {
		x.b.binding(r.Name)
		if err := x.b.binds(r.Object.(*v1.Binding).Target.Name); err != nil {
			return nil, err
		}
	}
	out, err := x.Backend.Do(ctx, r)
	if r.Subresource == "binding" && err == nil {
		x.b.mu.Lock()
		x.b.bound[r.Name]++
		x.b.mu.Unlock()
	}
	return out, err
}

// Watch implements api.Backend: what informers hear of pods may come late.
func (x backend) Watch(ctx context.Context, r *api.Request) (watch.Interface, error) {
	w, err := x.Backend.Watch(ctx, r)
	f, ok := w.(api.Follower)
	if err != nil || !ok || r.Kind.Resource != "pods" {
		return w, err
	}
	return &lateFollower{Interface: w, follow: f.Follow, late: &x.b.late}, nil
}

type lateFollower struct {
	watch.Interface
	follow func(context.Context) (api.View, []api.Delta, error)
	late   *atomic.Bool
}

// Follow implements api.Follower.
func (l *lateFollower) Follow(ctx context.Context) (api.View, []api.Delta, error) {
	v, changes, err := l.follow(ctx)
	for err == nil && l.late.Load() {
		err = wait.Delay(ctx, time.Millisecond)
	}
	return v, changes, err
}

// lead runs the scheduler until the returned function is called.
func (b *bed) lead() (depose func()) {
	b.t.Helper()
	return b.leadIn(0)
}

// leadIn is lead with the fence of a term.
func (b *bed) leadIn(fence uint64) (depose func()) {
	b.t.Helper()
	if err := b.informers.WaitForSync(b.ctx); err != nil { // as the server does
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.ctx)
	done := make(chan error, 1)
	go func() { done <- b.scheduler.Run(ctx, fence) }()
	depose = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			b.t.Errorf("Run: %v", err)
		}
	})
	b.t.Cleanup(depose)
	return depose
}

// node makes a node, which the scheduler knows then.
func (b *bed) node(name, cpu string, change ...func(*v1.Node)) {
	b.t.Helper()
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelHostname: name}}}
	n.Status.Allocatable = v1.ResourceList{v1.ResourceCPU: resource.MustParse(cpu),
		v1.ResourceMemory: resource.MustParse("64Gi"), v1.ResourcePods: resource.MustParse("110")}
	for _, c := range change {
		c(n)
	}
	made, err := client.Create(b.ctx, b.client, n)
	if err != nil {
		b.t.Fatal(err)
	}
	made.Status = n.Status
	if made, err = client.UpdateStatus(b.ctx, b.client, made); err != nil {
		b.t.Fatal(err)
	}
	b.eventually("the scheduler knows node "+name, func() error {
		if v := b.scheduler.NodeVersion(name); v != made.ResourceVersion {
			return fmt.Errorf("version %q, want %s", v, made.ResourceVersion)
		}
		return nil
	})
}

func (b *bed) pod(name, cpu string, change ...func(*v1.Pod)) *v1.Pod {
	b.t.Helper()
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: v1.PodSpec{Containers: []v1.Container{{
			Name: "c", Image: "hello",
			Resources: v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse(cpu)}}}}}}
	for _, c := range change {
		c(pod)
	}
	pod, err := client.Create(b.ctx, b.client, pod)
	if err != nil {
		b.t.Fatal(err)
	}
	return pod
}

func (b *bed) eventually(what string, cond func() error) {
	b.t.Helper()
	await.Until(b.ctx, b.t, await.Patience, time.Millisecond, what, cond)
}

func (b *bed) get(name string) *v1.Pod {
	b.t.Helper()
	pod, err := client.Get[*v1.Pod](b.ctx, b.client, "default", name)
	if err != nil {
		b.t.Fatal(err)
	}
	return pod
}

func (b *bed) awaitNode(pod, node string) {
	b.t.Helper()
	b.eventually("pod "+pod, func() error {
		if got := b.get(pod).Spec.NodeName; got == "" || node != "" && got != node {
			return fmt.Errorf("on node %q, want %q", got, node)
		}
		return nil
	})
}

func (b *bed) awaitReason(pod, message string) {
	b.t.Helper()
	b.eventually("condition of "+pod, func() error {
		p := b.get(pod)
		for _, c := range p.Status.Conditions {
			if c.Type == v1.PodScheduled {
				if c.Status != v1.ConditionFalse || c.Reason != v1.PodReasonUnschedulable || c.Message != message {
					return fmt.Errorf("condition %+v", c)
				}
				if c.ObservedGeneration != p.Generation {
					return fmt.Errorf("the condition observed generation %d of %d", c.ObservedGeneration, p.Generation)
				}
				return nil
			}
		}
		return errors.New("no condition")
	})
}

func (b *bed) events(pod string) []string {
	b.t.Helper()
	list, err := client.List[*v1.Event](b.ctx, b.client, "default", metav1.ListOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	var out []string
	for _, e := range list {
		if e.InvolvedObject.Name == pod {
			out = append(out, e.Reason+": "+e.Message)
		}
	}
	slices.Sort(out)
	return out
}

// eventBy says what is amiss until the pod has an event of that scheduler.
func (b *bed) eventBy(pod, name string) error {
	list, err := client.List[*v1.Event](b.ctx, b.client, "default", metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, e := range list {
		if e.InvolvedObject.Name == pod && e.Source.Component == name && e.ReportingController == name {
			return nil
		}
	}
	return fmt.Errorf("no event of %s for pod %s", name, pod)
}

// bindAs binds a pod as a program outside does.
func (b *bed) bindAs(ctx context.Context, pod, node string) error {
	_, err := client.Sub[*v1.Pod](ctx, b.client, "default", pod, "binding", &v1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: pod},
		Target:     v1.ObjectReference{Kind: "Node", Name: node}})
	return err
}
