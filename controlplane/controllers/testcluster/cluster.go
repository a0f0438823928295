// Package testcluster is a control plane in memory, without HTTP, for the tests of controllers: the
// real registry and admission, all controllers or some of them, and simulated nodes, volume drivers
// and metrics.
package testcluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/certificate"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/nodecidr"
	"keelson.dev/keelson/controlplane/controllers/podgc"
	"keelson.dev/keelson/controlplane/controllers/rebalance"
	"keelson.dev/keelson/controlplane/controllers/serviceaccount"
	"keelson.dev/keelson/controlplane/scheduler"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// Cluster is a control plane without HTTP: the real registry and admission over a store in memory,
// all or selected controllers, and nodes that a controller simulates. It is created by New.
type Cluster struct {
	T           *testing.T
	Ctx         context.Context
	Admin       *client.Client
	Informers   *client.Informers
	Calls       *RecordingBackend
	Nodes       *FakeNodes
	Drivers     *Drivers
	Timeline    *api.Timeline
	Controllers []*engine.Descriptor
	Deps        engine.Deps
	Store       *storetest.Memory
	Scheduler   *scheduler.Scheduler // nil if Nodes binds the pods

	PodsAtStart []*corev1.Pod // the pods at the start of the last WatchPods
	Replaced    atomic.Bool   // true simulates that another replica leads, while the engine continues
}

// confirmLeadership returns raftstore.ErrFenced if Replaced is set, and nil otherwise.
func (w *Cluster) confirmLeadership(context.Context, uint64) error {
	if w.Replaced.Load() {
		return raftstore.ErrFenced
	}
	return nil
}

// WatchPods stores the pods of namespace default in PodsAtStart, and returns a watch of their later
// changes.
func (w *Cluster) WatchPods() (watch.Interface, error) {
	k := w.Admin.Kinds().ByType(&corev1.Pod{})
	list, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbList, Kind: k, Namespace: "default",
		Internal: api.InternalOptions{Pointers: true}})
	if err != nil {
		return nil, err
	}
	all := list.(*api.ObjectList)
	w.PodsAtStart = nil
	for _, o := range all.Items {
		w.PodsAtStart = append(w.PodsAtStart, o.(*corev1.Pod))
	}
	return w.Calls.Watch(w.Ctx, &api.Request{User: api.User{Name: "admin"}, Verb: api.VerbWatch, Kind: k,
		Namespace: "default",
		List:      metav1.ListOptions{ResourceVersion: all.ResourceVersion}})
}

// Options configures a Cluster.
type Options struct {
	Engine           engine.Options
	ChangeController func(c *engine.Descriptor)    // called for every controller before it runs
	NoMutationGuard  bool                          // disables the (expensive) check for modified cached objects
	WrapBackend      func(api.Backend) api.Backend // wraps the backend of all calls; nil uses the API server directly
	Controllers      func(d engine.Deps) []*engine.Descriptor
	WithScheduler    bool // the real scheduler binds pods, instead of Cluster.Nodes

	Aggregated engine.AggregatedAPIs // the aggregated APIs; nil = the cluster has none
}

// New returns a Cluster without nodes. Its controllers do not run until Lead is called.
func New(t *testing.T, o Options) *Cluster {
	t.Helper()
	store := storetest.NewMemory()
	table := kinds.All()
	ctx, cancel := context.WithCancel(context.Background())
	w := &Cluster{T: t, Ctx: ctx, Store: store, Timeline: api.NewTimeline(4096)}
	log := slog.New(slog.NewTextHandler(testLog{t}, &slog.HandlerOptions{Level: slog.LevelWarn}))
	reg, server := newAPIServer(t, store, table, log, func() *podaddress.Index { return w.Deps.PodAddresses })
	var running sync.WaitGroup
	running.Go(func() {
		if err := reg.Run(ctx); err != nil && !errors.Is(err, raftstore.ErrClosed) {
			t.Errorf("registry: %v", err)
		}
	})
	running.Go(func() {
		if err := server.Run(ctx); err != nil {
			t.Errorf("API server: %v", err)
		}
	})
	<-reg.Ready()
	backend := server.Backend()
	if o.WrapBackend != nil {
		backend = o.WrapBackend(backend)
	}
	w.Calls = &RecordingBackend{Backend: backend}
	c := client.New(w.Calls, table)
	w.Admin = c.As(administrator())
	var guard []client.InformersOption
	if !o.NoMutationGuard {
		guard = append(guard, client.DetectMutations(func(what string) { t.Error(what) }))
	}
	w.Informers = client.NewInformers(c.As(api.User{Name: api.UserController}), guard...)
	w.Deps = engine.Deps{
		Client: c, Informers: w.Informers, Log: log,
		Timeline: w.Timeline, Replica: "cp1", ConfirmLeadership: w.confirmLeadership, Aggregated: o.Aggregated,
	}
	addresses, err := podaddress.New(podaddress.Rules{Services: []netip.Prefix{netip.MustParsePrefix(serviceCIDR)}},
		client.Informer[*corev1.Node](w.Informers), client.Informer[*corev1.Pod](w.Informers),
		client.Informer[*networkingv1.ServiceCIDR](w.Informers))
	if err != nil {
		t.Fatal(err)
	}
	w.Deps.PodAddresses = addresses
	w.Nodes = &FakeNodes{Dead: map[string]bool{}, Held: map[string]bool{}, Turn: map[types.UID]int{},
		Placed: o.WithScheduler}
	w.Drivers = &Drivers{Volumes: map[string]*StoredVolume{}, Snapshots: map[string]*StoredVolume{}, Capacity: 1 << 50}
	d := w.Deps
	if o.WithScheduler {
		w.Scheduler = scheduler.New(scheduler.Config{Client: c.As(api.User{Name: api.UserScheduler}),
			Informers: w.Informers, Actor: "scheduler/cp1"})
	}
	if o.Controllers != nil {
		w.Controllers = o.Controllers(d)
	} else {
		w.Controllers = controllers.All(controllers.Deps{
			Engine:    d,
			NodeCIDRs: nodecidr.Options{ClusterCIDR: podCIDR}, ServiceCIDR: serviceCIDR,
			Drivers: w.Drivers, Roots: serviceaccount.FixedRoots("PEM"), SignToken: FakeToken,
			PodMetrics:   &FakeMetrics{CurrentLoad: -1},
			PodGC:        podgc.Options{Quarantine: 200 * time.Millisecond},
			Rebalance:    rebalance.Options{Trial: w.NewTrial},
			Certificates: certificate.Options{Sign: SignRequest},
		})
	}
	w.Controllers = append(w.Controllers, w.Nodes.newController(d))
	if o.ChangeController != nil {
		for _, c := range w.Controllers {
			o.ChangeController(c)
		}
	}
	running.Go(func() { _ = w.Informers.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		store.Close()
	})
	if err := w.Informers.WaitForSync(ctx); err != nil {
		t.Fatal(err)
	}
	w.createDefaults(server)
	return w
}

// CutOff returns a function for Options.ChangeController. In the controller with this name, it
// cancels one in oneIn reconciles at a random time below within. This simulates a process that is
// killed between two writes.
func CutOff(name string, oneIn int, within time.Duration) func(c *engine.Descriptor) {
	return func(c *engine.Descriptor) {
		if c.Name != name {
			return
		}
		lead := c.Lead
		c.Lead = func(t *engine.Term) engine.Reconcile {
			reconcile := lead(t)
			return func(ctx context.Context, key engine.Key) (time.Duration, error) {
				if rand.IntN(oneIn) > 0 {
					return reconcile(ctx, key)
				}
				cut, cancel := context.WithTimeout(ctx, rand.N(within))
				defer cancel()
				_, _ = reconcile(cut, key)
				return time.Millisecond, nil
			}
		}
	}
}

// LoseEvents makes the Watches of a controller lose half of their events. Each call selects other
// events, because it increments seed.
func LoseEvents(c *engine.Descriptor, seed *atomic.Uint64) {
	for i := range c.Watches {
		c.Watches[i].Informer = LossyInformer{c.Watches[i].Informer, rand.New(rand.NewPCG(seed.Add(1), 0))}
	}
}

// FailReconciles returns a function for Options.ChangeController. It cancels reconciles of the
// controller with this name as CutOff does, and makes it lose half of its events.
func FailReconciles(name string, oneIn int, within time.Duration) func(c *engine.Descriptor) {
	var seed atomic.Uint64
	cut := CutOff(name, oneIn, within)
	return func(c *engine.Descriptor) {
		if cut(c); c.Name == name {
			LoseEvents(c, &seed)
		}
	}
}

// FailReconcilesAmong returns a function for Options.ChangeController. It cancels reconciles of the
// controller with this name as CutOff does. All controllers lose half of their events, including
// the events of kinds that they watch dynamically.
func FailReconcilesAmong(name string, oneIn int, within time.Duration) func(c *engine.Descriptor) {
	var seed atomic.Uint64
	cut := CutOff(name, oneIn, within)
	return func(c *engine.Descriptor) {
		cut(c)
		LoseEvents(c, &seed)
		if c.Dynamic != nil {
			LoseSomeEvents(c.Dynamic, &seed)
		}
	}
}

// CheckGone returns an error if the object of type T with this name exists in namespace default.
func CheckGone[T api.Object](w *Cluster, name string) error {
	_, err := client.Get[T](w.Ctx, w.Admin, "default", name)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return err
	}
	return errors.New(name + " is there")
}

// Lead runs the controllers, and the scheduler if Options.WithScheduler is set, as a leader with
// raft term 1. stop ends the leadership and waits until the controllers have stopped. It is called
// at the end of the test at the latest.
func (w *Cluster) Lead(o engine.Options) (stop func()) {
	w.T.Helper()
	if err := w.Informers.WaitForSync(w.Ctx); err != nil {
		w.T.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.Ctx)
	e := engine.NewEngine(w.Deps, o, w.Controllers...)
	var running sync.WaitGroup
	running.Go(func() { _ = e.Run(ctx, 1) })
	if w.Scheduler != nil {
		running.Go(func() { _ = w.Scheduler.Run(ctx, 1) })
	}
	var once sync.Once
	stop = func() { once.Do(func() { cancel(); running.Wait() }) }
	w.T.Cleanup(stop)
	return stop
}

// StartCluster returns a Cluster with running controllers and three ready nodes.
func StartCluster(t *testing.T, o Options) *Cluster {
	w := New(t, o)
	w.Lead(o.Engine)
	for i := range 3 {
		w.AddNode(fmt.Sprintf("w%d", i+1))
	}
	w.AwaitUsableNodes(3)
	return w
}

// AwaitUsableNodes waits until the informers contain this number of nodes, each ready and without a
// taint.
func (w *Cluster) AwaitUsableNodes(nodes int) {
	w.T.Helper()
	w.Eventually("nodes without taints", func() error {
		all := engine.CachedAll[*corev1.Node](client.Informer[*corev1.Node](w.Informers))
		if len(all) != nodes {
			return fmt.Errorf("%d nodes, want %d", len(all), nodes)
		}
		for _, n := range all {
			if len(n.Spec.Taints) > 0 || len(n.Status.Conditions) == 0 {
				return fmt.Errorf("%s has %v", n.Name, n.Spec.Taints)
			}
		}
		return nil
	})
}

// CreateObject stores o, which may have any built-in kind. It fails the test if the creation fails.
func (w *Cluster) CreateObject(o api.Object) {
	w.T.Helper()
	w.createAs(w.Admin, o)
}

// SetNodeReady sets the status of the node's condition Ready.
func (w *Cluster) SetNodeReady(name string, status corev1.ConditionStatus) {
	w.T.Helper()
	w.Eventually("setting the condition of "+name, func() error {
		n, err := client.Get[*corev1.Node](w.Ctx, w.Admin, "", name)
		if err != nil {
			return err
		}
		n = n.DeepCopy()
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status,
			LastTransitionTime: metav1.Now()}}
		_, err = client.UpdateStatus(w.Ctx, w.Admin, n)
		return err
	})
}

// Edit reads object o, changes it with change and stores it with write, as user admin. It repeats
// this until write succeeds, because a controller may write o at the same time.
func Edit[T api.Object](w *Cluster, o T, write func(context.Context, *client.Client, T) (T, error), change func(T)) {
	w.T.Helper()
	w.Eventually("the administrator's change of "+o.GetName(), func() error {
		now, err := client.Get[T](w.Ctx, w.Admin, o.GetNamespace(), o.GetName())
		if err != nil {
			return err
		}
		next := now.DeepCopyObject().(T)
		change(next)
		_, err = write(w.Ctx, w.Admin, next)
		return err
	})
}

// Eventually waits at most a minute until cond returns nil, and fails the test otherwise. what
// names the expected state in the failure.
func (w *Cluster) Eventually(what string, cond func() error) {
	w.T.Helper()
	w.EventuallyWithin(time.Minute, what, cond)
}

// EventuallyWithin does the same as Eventually, with the maximum waiting time d.
func (w *Cluster) EventuallyWithin(d time.Duration, what string, cond func() error) {
	w.T.Helper()
	w.CheckEvery(5*time.Millisecond, d, what, cond)
}

// CheckEvery does the same as Eventually, with the maximum waiting time d. It calls cond once in
// each interval. A long interval saves calls of cond in tests with virtual time, where waiting
// itself takes no time.
func (w *Cluster) CheckEvery(interval, d time.Duration, what string, cond func() error) {
	w.T.Helper()
	ctx, cancel := context.WithTimeout(w.Ctx, d)
	defer cancel()
	if err := wait.For(ctx, interval, cond); err != nil {
		w.T.Fatalf("%s: %v", what, err)
	}
}

// LivePods returns the pods of namespace default that are not being deleted.
func (w *Cluster) LivePods() []*corev1.Pod {
	w.T.Helper()
	list, err := client.List[*corev1.Pod](w.Ctx, w.Admin, "default", metav1.ListOptions{})
	if err != nil {
		w.T.Fatal(err)
	}
	var out []*corev1.Pod
	for _, p := range list {
		if p.DeletionTimestamp == nil {
			out = append(out, p)
		}
	}
	return out
}

// ReplicaSets returns the ReplicaSets of the default namespace.
func (w *Cluster) ReplicaSets() []*appsv1.ReplicaSet {
	w.T.Helper()
	list, err := client.List[*appsv1.ReplicaSet](w.Ctx, w.Admin, "default", metav1.ListOptions{})
	if err != nil {
		w.T.Fatal(err)
	}
	return list
}

// LoseNode makes the simulated agent of a node stop working, and returns the number of pods on the
// node. It fails the test if the node has no pods.
func (w *Cluster) LoseNode(name string) int {
	w.T.Helper()
	n := 0
	for _, p := range w.LivePods() {
		if p.Spec.NodeName == name {
			n++
		}
	}
	if n == 0 {
		w.T.Fatalf("no pod runs on %s", name)
	}
	w.Nodes.Mark(w.Nodes.Dead, name, true)
	return n
}

// Update changes an object of type T with change. The object is in namespace default or, for a
// cluster-scoped kind, in no namespace. Update repeats this if another client has changed the
// object at the same time.
func Update[T interface {
	api.Object
	DeepCopy() T
}](w *Cluster, name string, change func(o T)) {
	w.T.Helper()
	var zero T
	namespace := ""
	if w.Admin.Kinds().ByType(zero).Namespaced {
		namespace = "default"
	}
	w.Eventually(fmt.Sprintf("updating %T %s", zero, name), func() error {
		o, err := client.Get[T](w.Ctx, w.Admin, namespace, name)
		if err != nil {
			return err
		}
		o = o.DeepCopy()
		change(o)
		_, err = client.Update(w.Ctx, w.Admin, o)
		return err
	})
}

// AwaitRollout waits until a Deployment has exactly n pods, all available and of the newest
// template.
func (w *Cluster) AwaitRollout(name string, n int32) {
	w.T.Helper()
	w.EventuallyWithin(time.Minute, "rollout of "+name, func() error {
		d, err := client.Get[*appsv1.Deployment](w.Ctx, w.Admin, "default", name)
		if err != nil {
			return err
		}
		s := d.Status
		if s.ObservedGeneration < d.Generation || s.UpdatedReplicas != n || s.Replicas != n ||
			s.AvailableReplicas != n {
			return fmt.Errorf("generation %d, status %+v", d.Generation, s)
		}
		return nil
	})
}

// NewDeployment returns a Deployment in namespace default. Its pods have label app=name and one
// container with port "http".
func NewDeployment(name string, replicas int32, image string) *appsv1.Deployment {
	l := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: l},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: l},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: image,
					Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}}}},
			},
		},
	}
}

// RecordingBackend passes calls to Backend. It counts the reads and writes of all users except
// admin, and records which calls each user has made.
type RecordingBackend struct {
	api.Backend
	Reads, Writes atomic.Int64
	Late          atomic.Pointer[LateObject] // object to create during a list; nil creates none
	OnWritten     atomic.Pointer[func(r *api.Request, out runtime.Object)]
	OnRequest     atomic.Pointer[func(r *api.Request)] // called before each request

	Mu   sync.Mutex
	Seen map[Call]bool
}

// Call is the part of a request on which the authorization decision depends. Resource includes the
// subresource, for example "pods/status".
type Call struct{ User, Verb, Group, Resource string }

// Do implements api.Backend.
func (c *RecordingBackend) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	if r.User.Name != "admin" {
		switch r.Verb {
		case api.VerbGet, api.VerbList:
			c.Reads.Add(1)
		default:
			c.Writes.Add(1)
		}
		a := Call{r.User.Name, string(r.Verb), r.Kind.GVK.Group, r.Kind.Resource}
		if r.Subresource != "" {
			a.Resource += "/" + r.Subresource
		}
		c.Mu.Lock()
		if c.Seen == nil {
			c.Seen = map[Call]bool{}
		}
		c.Seen[a] = true
		c.Mu.Unlock()
		if l := c.Late.Load(); l != nil && r.Verb == api.VerbList && r.Kind == l.Kind &&
			l.Done.CompareAndSwap(false, true) {
			if _, err := l.Admin.Do(ctx, &api.Request{Verb: api.VerbCreate, Kind: l.Kind,
				Namespace: l.Object.GetNamespace(), Object: l.Object}); err != nil {
				return nil, err
			}
		}
	}
	if f := c.OnRequest.Load(); f != nil {
		(*f)(r)
	}
	out, err := c.Backend.Do(ctx, r)
	if f := c.OnWritten.Load(); f != nil && err == nil && r.Verb != api.VerbGet && r.Verb != api.VerbList {
		(*f)(r, out)
	}
	return out, err
}

// Watch implements api.Backend.
func (c *RecordingBackend) Watch(ctx context.Context, r *api.Request) (watch.Interface, error) {
	return c.Backend.Watch(ctx, r)
}

type testLog struct{ t *testing.T }

func (l testLog) Write(b []byte) (int, error) { l.t.Logf("%s", b); return len(b), nil }

// LeadWithDriver returns a Cluster with running controllers. All its nodes have the fake CSI
// driver, and StorageClass "now" uses it. replaced ends the term of leadership and starts the next
// one.
func LeadWithDriver(t *testing.T, o Options, settings engine.Options, nodes ...string) (w *Cluster, replaced func()) {
	t.Helper()
	w = New(t, o)
	stop := w.Lead(settings)
	t.Cleanup(func() { stop() })
	for _, n := range nodes {
		w.AddNode(n)
	}
	w.AddDriver(nodes...)
	w.CreateClass("now", storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete)
	return w, func() { stop(); stop = w.Lead(settings) }
}
