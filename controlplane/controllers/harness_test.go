package controllers_test

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
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/certificate"
	"keelson.dev/keelson/controlplane/controllers/clusterroleaggregation"
	"keelson.dev/keelson/controlplane/controllers/configrestart"
	"keelson.dev/keelson/controlplane/controllers/cronjob"
	"keelson.dev/keelson/controlplane/controllers/customresourcedefinition"
	"keelson.dev/keelson/controlplane/controllers/daemonset"
	"keelson.dev/keelson/controlplane/controllers/deployment"
	"keelson.dev/keelson/controlplane/controllers/devicetainteviction"
	"keelson.dev/keelson/controlplane/controllers/disruption"
	"keelson.dev/keelson/controlplane/controllers/endpoints"
	"keelson.dev/keelson/controlplane/controllers/endpointslice"
	"keelson.dev/keelson/controlplane/controllers/ephemeralvolume"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/gateway"
	"keelson.dev/keelson/controlplane/controllers/horizontalpodautoscaler"
	"keelson.dev/keelson/controlplane/controllers/ingress"
	"keelson.dev/keelson/controlplane/controllers/job"
	"keelson.dev/keelson/controlplane/controllers/loadbalancer"
	"keelson.dev/keelson/controlplane/controllers/namespace"
	"keelson.dev/keelson/controlplane/controllers/nodecidr"
	"keelson.dev/keelson/controlplane/controllers/nodelifecycle"
	"keelson.dev/keelson/controlplane/controllers/persistentvolume"
	"keelson.dev/keelson/controlplane/controllers/podgc"
	"keelson.dev/keelson/controlplane/controllers/podgroupprotection"
	"keelson.dev/keelson/controlplane/controllers/rebalance"
	"keelson.dev/keelson/controlplane/controllers/replicaset"
	"keelson.dev/keelson/controlplane/controllers/resourceclaim"
	"keelson.dev/keelson/controlplane/controllers/resourcequota"
	"keelson.dev/keelson/controlplane/controllers/resourceslice"
	"keelson.dev/keelson/controlplane/controllers/serviceaccount"
	"keelson.dev/keelson/controlplane/controllers/servicecidr"
	"keelson.dev/keelson/controlplane/controllers/statefulset"
	"keelson.dev/keelson/controlplane/controllers/volumeattach"
	"keelson.dev/keelson/controlplane/controllers/volumeattributes"
	"keelson.dev/keelson/controlplane/controllers/volumecapacity"
	"keelson.dev/keelson/controlplane/controllers/volumeexpansion"
	"keelson.dev/keelson/controlplane/controllers/volumeprotection"
	"keelson.dev/keelson/controlplane/controllers/volumeprovision"
	"keelson.dev/keelson/controlplane/controllers/volumesnapshot"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/controlplane/scheduler"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// world is a control plane without HTTP: the real registry over a store in
// memory, every controller, and nodes that exist as a controller too.
type world struct {
	t         *testing.T
	ctx       context.Context
	admin     *client.Client
	informers *client.Informers
	calls     *counting
	nodes     *fakeNodes
	drivers   *drivers
	timeline  *api.Timeline
	all       []*controllers.Controller
	deps      controllers.Deps
	store     *storetest.Memory
	scheduler *scheduler.Scheduler // nil where whoever plays the nodes binds pods

	podsAtStart []*corev1.Pod // of the last watchPods
	replaced    atomic.Bool   // another replica leads, and the engine continues
}

// confirmLeadership fails once another replica leads.
func (w *world) confirmLeadership(context.Context, uint64) error {
	if w.replaced.Load() {
		return raftstore.ErrFenced
	}
	return nil
}

// watchPods watches the default namespace's pods from now on.
func (w *world) watchPods() (watch.Interface, error) {
	k := w.admin.Kinds().ByType(&corev1.Pod{})
	list, err := w.admin.Do(w.ctx, &api.Request{Verb: api.VerbList, Kind: k, Namespace: "default", Pointers: true})
	if err != nil {
		return nil, err
	}
	all := list.(*api.ObjectList)
	w.podsAtStart = nil
	for _, o := range all.Items {
		w.podsAtStart = append(w.podsAtStart, o.(*corev1.Pod))
	}
	return w.calls.Watch(w.ctx, &api.Request{User: api.User{Name: "admin"}, Verb: api.VerbWatch, Kind: k, Namespace: "default",
		List: metav1.ListOptions{ResourceVersion: all.ResourceVersion}})
}

// options configures a world.
type options struct {
	engine controllers.Options
	change func(c *controllers.Controller) // applied to every controller
	quiet  bool                            // no mutation guard: it copies every object
	behind func(api.Backend) api.Backend   // the backend of all calls; nil means the registry
	only   func(d controllers.Deps) []*controllers.Controller
	placed bool // the scheduler places pods, and not whoever plays the nodes

	aggregated controllers.AggregatedAPIs // nil = none
}

// newWorld builds a world; its engine starts with lead.
func newWorld(t *testing.T, o options) *world {
	t.Helper()
	store := storetest.NewMemory()
	table := kinds.All()
	reg := registry.New(store, table, registry.WithCompanions(&corev1.Service{}, networking.ServiceCompanions))
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := reg.Run(ctx); err != nil && !errors.Is(err, raftstore.ErrClosed) {
			t.Errorf("registry: %v", err)
		}
	})
	<-reg.Ready()
	backend := registry.Direct(reg)
	if o.behind != nil {
		backend = o.behind(backend)
	}
	w := &world{t: t, ctx: ctx, store: store, calls: &counting{Backend: backend}, timeline: api.NewTimeline(4096)}
	c := client.New(w.calls, table)
	w.admin = c.As(api.User{Name: "admin"})
	var guard []client.InformersOption
	if !o.quiet {
		guard = append(guard, client.DetectMutations(func(what string) { t.Error(what) }))
	}
	w.informers = client.NewInformers(c.As(api.User{Name: api.UserController}), guard...)
	w.deps = controllers.Deps{
		Client: c, Informers: w.informers, Log: slog.New(slog.NewTextHandler(testLog{t}, &slog.HandlerOptions{Level: slog.LevelWarn})),
		Timeline: w.timeline, Replica: "cp1", ConfirmLeadership: w.confirmLeadership, Aggregated: o.aggregated,
	}
	addresses, err := podaddress.New(podaddress.Rules{Services: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}},
		client.Informer[*corev1.Node](w.informers), client.Informer[*corev1.Pod](w.informers),
		client.Informer[*networkingv1.ServiceCIDR](w.informers))
	if err != nil {
		t.Fatal(err)
	}
	w.deps.PodAddresses = addresses
	w.nodes = &fakeNodes{dead: map[string]bool{}, held: map[string]bool{}, turn: map[types.UID]int{}, placed: o.placed}
	w.drivers = &drivers{volumes: map[string]*onDisk{}, snaps: map[string]*onDisk{}, room: 1 << 50}
	d := w.deps
	if o.placed {
		w.scheduler = scheduler.New(scheduler.Config{Client: c.As(api.User{Name: api.UserScheduler}), Informers: w.informers, Actor: "scheduler/cp1"})
	}
	if o.only != nil {
		w.all = o.only(d)
	} else {
		w.all = []*controllers.Controller{
			deployment.New(d), replicaset.New(d), replicaset.NewForReplicationControllers(d), statefulset.New(d), daemonset.New(d), job.New(d), cronjob.New(d),
			endpointslice.New(d), endpointslice.NewMirror(d), endpoints.New(d),
			garbagecollector.New(d), namespace.New(d),
			nodelifecycle.New(d), nodecidr.New(d, nodecidr.Options{ClusterCIDR: "10.244.0.0/16"}),
			servicecidr.New(d, "10.96.0.0/16"), servicecidr.NewRepair(d), loadbalancer.New(d),
			persistentvolume.New(d), volumeprotection.New(d), podgroupprotection.New(d), volumeexpansion.New(d, w.drivers), volumeattributes.New(d, w.drivers), volumeprovision.New(d, w.drivers), volumecapacity.New(d, w.drivers), volumeattach.New(d, w.drivers), volumesnapshot.New(d, w.drivers), podgc.New(d, podgc.Options{Quarantine: 200 * time.Millisecond}), disruption.New(d),
			serviceaccount.New(d, serviceaccount.Fixed("PEM")), serviceaccount.NewTokens(d, serviceaccount.Fixed("PEM"), tokenOf), clusterroleaggregation.New(d), customresourcedefinition.New(d), resourcequota.New(d),
			horizontalpodautoscaler.New(d, &meters{load: -1}, horizontalpodautoscaler.Defaults),
			ephemeralvolume.New(d), resourceclaim.New(d), resourceslice.New(d), devicetainteviction.New(d), configrestart.New(d), rebalance.New(d, rebalance.Options{Trial: w.trial}),
			certificate.New(d, certificate.Options{Sign: signRequest}), gateway.New(d, gateway.Options{}), ingress.New(d, ingress.Options{}),
		}
	}
	w.all = append(w.all, w.nodes.controller(d))
	if o.change != nil {
		for _, c := range w.all {
			o.change(c)
		}
	}
	running.Go(func() { _ = w.informers.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		store.Close()
	})
	if err := w.informers.WaitForSync(ctx); err != nil {
		t.Fatal(err)
	}
	w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}})
	return w
}

// cutOff cancels one in oneIn reconciles of a controller at a random time, as if the process were
// killed between two writes.
func cutOff(name string, oneIn int, within time.Duration) func(c *controllers.Controller) {
	return func(c *controllers.Controller) {
		if c.Name != name {
			return
		}
		lead := c.Lead
		c.Lead = func(t *controllers.Term) controllers.Reconcile {
			reconcile := lead(t)
			return func(ctx context.Context, key controllers.Key) (time.Duration, error) {
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

// loseEvents makes the watches of a controller lose some events, in another pattern each time.
func loseEvents(c *controllers.Controller, seed *atomic.Uint64) {
	for i := range c.Watches {
		c.Watches[i].Informer = lossy{c.Watches[i].Informer, rand.New(rand.NewPCG(seed.Add(1), 0))}
	}
}

// failing cuts a controller off, and has it miss events.
func failing(name string, oneIn int, within time.Duration) func(c *controllers.Controller) {
	var seed atomic.Uint64
	cut := cutOff(name, oneIn, within)
	return func(c *controllers.Controller) {
		if cut(c); c.Name == name {
			loseEvents(c, &seed)
		}
	}
}

// failingAmong cuts a controller off, and has it and all others miss events, also of the kinds that they follow without naming them.
func failingAmong(name string, oneIn int, within time.Duration) func(c *controllers.Controller) {
	var seed atomic.Uint64
	cut := cutOff(name, oneIn, within)
	return func(c *controllers.Controller) {
		cut(c)
		loseEvents(c, &seed)
		if c.Dynamic != nil {
			loseSome(c.Dynamic, &seed)
		}
	}
}

// gone returns nil if an object in namespace default does not exist.
func gone[T api.Object](w *world, name string) error {
	_, err := client.Get[T](w.ctx, w.admin, "default", name)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return err
	}
	return errors.New(name + " is there")
}

// lead runs an engine until the returned function is called.
func (w *world) lead(o controllers.Options) (stop func()) {
	w.t.Helper()
	if err := w.informers.WaitForSync(w.ctx); err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.ctx)
	e := controllers.NewEngine(w.deps, o, w.all...)
	var running sync.WaitGroup
	running.Go(func() { _ = e.Run(ctx, 1) })
	if w.scheduler != nil {
		running.Go(func() { _ = w.scheduler.Run(ctx, 1) })
	}
	var once sync.Once
	stop = func() { once.Do(func() { cancel(); running.Wait() }) }
	w.t.Cleanup(stop)
	return stop
}

// start returns a world whose engine runs, with three ready nodes.
func start(t *testing.T, o options) *world {
	w := newWorld(t, o)
	w.lead(o.engine)
	for i := range 3 {
		w.node(fmt.Sprintf("w%d", i+1))
	}
	w.usable(3)
	return w
}

// usable waits until whoever binds pods sees so many nodes, each ready and without a taint.
func (w *world) usable(nodes int) {
	w.t.Helper()
	w.eventually("nodes without taints", func() error {
		all := controllers.CachedAll[*corev1.Node](client.Informer[*corev1.Node](w.informers))
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

// create stores an object of any type in the table.
func (w *world) create(o api.Object) {
	w.t.Helper()
	gvk := w.admin.Kinds().ByType(o)
	if _, err := w.admin.Do(w.ctx, &api.Request{Verb: api.VerbCreate, Kind: gvk, Namespace: o.GetNamespace(), Object: o.DeepCopyObject()}); err != nil {
		w.t.Fatalf("creating %s/%s: %v", o.GetNamespace(), o.GetName(), err)
	}
}

// node adds a ready node.
func (w *world) node(name string) {
	w.t.Helper()
	w.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelTopologyZone: "z"}}})
	w.setReady(name, corev1.ConditionTrue)
}

func (w *world) setReady(name string, status corev1.ConditionStatus) {
	w.t.Helper()
	w.eventually("setting the condition of "+name, func() error {
		n, err := client.Get[*corev1.Node](w.ctx, w.admin, "", name)
		if err != nil {
			return err
		}
		n = n.DeepCopy()
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status, LastTransitionTime: metav1.Now()}}
		_, err = client.UpdateStatus(w.ctx, w.admin, n)
		return err
	})
}

// edit changes an object as an administrator does, again where a controller wrote it meanwhile.
func edit[T api.Object](w *world, o T, write func(context.Context, *client.Client, T) (T, error), change func(T)) {
	w.t.Helper()
	w.eventually("the administrator's change of "+o.GetName(), func() error {
		now, err := client.Get[T](w.ctx, w.admin, o.GetNamespace(), o.GetName())
		if err != nil {
			return err
		}
		next := now.DeepCopyObject().(T)
		change(next)
		_, err = write(w.ctx, w.admin, next)
		return err
	})
}

// eventually waits until cond returns nil.
func (w *world) eventually(what string, cond func() error) {
	w.t.Helper()
	w.within(time.Minute, what, cond)
}

func (w *world) within(d time.Duration, what string, cond func() error) {
	w.t.Helper()
	w.checkEvery(5*time.Millisecond, d, what, cond)
}

// checkEvery waits at most a duration until cond returns nil, and calls cond once in each interval. In virtual time the number
// of calls is all that waiting costs.
func (w *world) checkEvery(interval, d time.Duration, what string, cond func() error) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, d)
	defer cancel()
	if err := wait.For(ctx, interval, cond); err != nil {
		w.t.Fatalf("%s: %v", what, err)
	}
}

// pods are the pods of the default namespace that are not going.
func (w *world) pods() []*corev1.Pod {
	w.t.Helper()
	list, err := client.List[*corev1.Pod](w.ctx, w.admin, "default", metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	var out []*corev1.Pod
	for _, p := range list {
		if p.DeletionTimestamp == nil {
			out = append(out, p)
		}
	}
	return out
}

func (w *world) sets() []*appsv1.ReplicaSet {
	w.t.Helper()
	list, err := client.List[*appsv1.ReplicaSet](w.ctx, w.admin, "default", metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return list
}

// lose stops a node, which must have pods, from doing anything; it returns how many.
func (w *world) lose(name string) int {
	w.t.Helper()
	n := 0
	for _, p := range w.pods() {
		if p.Spec.NodeName == name {
			n++
		}
	}
	if n == 0 {
		w.t.Fatalf("no pod runs on %s", name)
	}
	w.nodes.set(w.nodes.dead, name, true)
	return n
}

// update changes an object of namespace default, or of none, again when someone was faster.
func update[T interface {
	api.Object
	DeepCopy() T
}](w *world, name string, change func(o T)) {
	w.t.Helper()
	var zero T
	namespace := ""
	if w.admin.Kinds().ByType(zero).Namespaced {
		namespace = "default"
	}
	w.eventually(fmt.Sprintf("updating %T %s", zero, name), func() error {
		o, err := client.Get[T](w.ctx, w.admin, namespace, name)
		if err != nil {
			return err
		}
		o = o.DeepCopy()
		change(o)
		_, err = client.Update(w.ctx, w.admin, o)
		return err
	})
}

// rolledOut waits until a Deployment is complete with n replicas of the newest template.
func (w *world) rolledOut(name string, n int32) {
	w.t.Helper()
	w.within(time.Minute, "rollout of "+name, func() error {
		d, err := client.Get[*appsv1.Deployment](w.ctx, w.admin, "default", name)
		if err != nil {
			return err
		}
		s := d.Status
		if s.ObservedGeneration < d.Generation || s.UpdatedReplicas != n || s.Replicas != n || s.AvailableReplicas != n {
			return fmt.Errorf("generation %d, status %+v", d.Generation, s)
		}
		return nil
	})
}

// app is a Deployment.
func app(name string, replicas int32, image string) *appsv1.Deployment {
	l := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: l},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: l},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: image, Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}}}},
			},
		},
	}
}

// counting counts the calls of controllers and records each caller and request.
type counting struct {
	api.Backend
	reads, writes atomic.Int64
	late          atomic.Pointer[late] // set by a test
	wrote         atomic.Pointer[func(r *api.Request, out runtime.Object)]
	asks          atomic.Pointer[func(r *api.Request)] // called before each request

	mu    sync.Mutex
	asked map[call]bool
}

// call is a request as authorization sees it.
type call struct{ user, verb, group, resource string }

func (c *counting) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	if r.User.Name != "admin" {
		switch r.Verb {
		case api.VerbGet, api.VerbList:
			c.reads.Add(1)
		default:
			c.writes.Add(1)
		}
		a := call{r.User.Name, string(r.Verb), r.Kind.GVK.Group, r.Kind.Resource}
		if r.Subresource != "" {
			a.resource += "/" + r.Subresource
		}
		c.mu.Lock()
		if c.asked == nil {
			c.asked = map[call]bool{}
		}
		c.asked[a] = true
		c.mu.Unlock()
		if l := c.late.Load(); l != nil && r.Verb == api.VerbList && r.Kind == l.kind && l.done.CompareAndSwap(false, true) {
			if _, err := l.admin.Do(ctx, &api.Request{Verb: api.VerbCreate, Kind: l.kind, Namespace: l.make.GetNamespace(), Object: l.make}); err != nil {
				return nil, err
			}
		}
	}
	if f := c.asks.Load(); f != nil {
		(*f)(r)
	}
	out, err := c.Backend.Do(ctx, r)
	if f := c.wrote.Load(); f != nil && err == nil && r.Verb != api.VerbGet && r.Verb != api.VerbList {
		(*f)(r, out)
	}
	return out, err
}

func (c *counting) Watch(ctx context.Context, r *api.Request) (watch.Interface, error) {
	return c.Backend.Watch(ctx, r)
}

type testLog struct{ t *testing.T }

func (l testLog) Write(b []byte) (int, error) { l.t.Logf("%s", b); return len(b), nil }
