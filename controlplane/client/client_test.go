package client_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/controlplane/registry/registrytest"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// start runs a registry over a store in memory and returns a client of it.
func start(t *testing.T, opts ...registry.Option) (*client.Client, *storetest.Memory, context.Context) {
	t.Helper()
	store := storetest.NewMemory()
	table := kinds.All()
	r := registry.New(store, table, opts...)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, raftstore.ErrClosed) {
			t.Errorf("Run: %v", err)
		}
		store.Close()
	})
	<-r.Ready()
	return client.New(registrytest.NewBackend(r), table).As(api.User{Name: api.UserController}), store, ctx
}

func configMap(name, value string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
		Labels: map[string]string{"v": value}},
		Data: map[string]string{"v": value}}
}

func TestTypedCalls(t *testing.T) {
	c, _, ctx := start(t)
	in := configMap("a", "1")
	made, err := client.Create(ctx, c, in)
	if err != nil {
		t.Fatal(err)
	}
	if in.UID != "" || made.UID == "" {
		t.Fatal("Create changed the caller's object or returned it without server-set metadata")
	}
	// The answer is the caller's own: changing it must not reach the cache.
	made.Data["v"] = "2"
	shared, err := client.Get[*corev1.ConfigMap](ctx, c, "default", "a")
	if err != nil || shared.Data["v"] != "1" {
		t.Fatalf("got %v, %v", shared, err)
	}
	updated, err := client.Update(ctx, c, made)
	if err != nil || updated.Data["v"] != "2" {
		t.Fatalf("updated %v, %v", updated, err)
	}
	patched, err := client.Patch[*corev1.ConfigMap](ctx, c, "default", "a", "", types.MergePatchType,
		[]byte(`{"data":{"w":"3"}}`))
	if err != nil || patched.Data["w"] != "3" || patched.Data["v"] != "2" {
		t.Fatalf("patched %v, %v", patched, err)
	}
	if _, err := client.Update(ctx, c, made); !apierrors.IsConflict(err) {
		t.Fatalf("a stale update gave %v", err)
	}
	list, err := client.List[*corev1.ConfigMap](ctx, c, "", metav1.ListOptions{LabelSelector: "v=1"})
	if err != nil || len(list) != 1 {
		t.Fatalf("listed %d, %v", len(list), err)
	}
	if err := client.Delete[*corev1.ConfigMap](ctx, c, "default", "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Get[*corev1.ConfigMap](ctx, c, "default", "a"); !apierrors.IsNotFound(err) {
		t.Fatalf("after delete: %v", err)
	}
}

func TestBindingThroughSub(t *testing.T) {
	c, _, ctx := start(t)
	_, err := client.Create(ctx, c, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "x"}}}})
	if err != nil {
		t.Fatal(err)
	}
	bind := func(node string) error {
		_, err := client.Sub[*corev1.Pod](ctx, c, "default", "p", "binding",
			&corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "p"},
				Target: corev1.ObjectReference{Kind: "Node", Name: node}})
		return err
	}
	if err := bind("w1"); err != nil {
		t.Fatal(err)
	}
	if err := bind("w2"); !apierrors.IsConflict(err) { // F90
		t.Fatalf("the second binding gave %v", err)
	}
	p, err := client.Get[*corev1.Pod](ctx, c, "default", "p")
	if err != nil || p.Spec.NodeName != "w1" {
		t.Fatalf("bound to %v, %v", p, err)
	}
}

func TestDeposedClientCannotWrite(t *testing.T) {
	c, store, ctx := start(t)
	leader := c.Fenced(1)
	if _, err := client.Create(ctx, leader, configMap("a", "1")); err != nil {
		t.Fatal(err)
	}
	store.Depose()
	if _, err := client.Create(ctx, leader, configMap("b", "1")); !storeerrors.IsLeadershipEnded(err) {
		t.Fatalf("got %v", err)
	}
}

// F62 F64: informers hold the watch cache's own objects, and WaitForSync means that what was
// acknowledged before is in the index.
func TestInformersShareObjectsAndCatchUp(t *testing.T) {
	c, _, ctx := start(t)
	for i := range 20 {
		if _, err := client.Create(ctx, c, configMap(fmt.Sprintf("before-%d", i), "1")); err != nil {
			t.Fatal(err)
		}
	}
	inf := client.NewInformers(c, client.DetectMutations(func(what string) { t.Error(what) }))
	client.Informer[*corev1.ConfigMap](inf)
	client.Informer[*corev1.Pod](inf) // nothing of this kind ever exists
	run(t, ctx, inf)

	short, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := inf.WaitForSync(short); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		name := fmt.Sprintf("after-%d", i)
		if _, err := client.Create(ctx, c, configMap(name, "2")); err != nil {
			t.Fatal(err)
		}
		if i%2 == 1 {
			if err := client.Delete[*corev1.ConfigMap](ctx, c, "default", name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		if err := inf.WaitForSync(short); err != nil {
			t.Fatal(err)
		}
		got, ok := client.Cached[*corev1.ConfigMap](inf, "default", name)
		if ok != (i%2 == 0) {
			t.Fatalf("%s: in the index is %v", name, ok)
		}
		if !ok {
			continue
		}
		shared, err := client.Get[*corev1.ConfigMap](ctx, c, "default", name)
		if err != nil || shared != got {
			t.Fatalf("%s: the informer holds %p, the watch cache %p (%v)", name, got, shared, err)
		}
	}
	if n := len(client.CachedList[*corev1.ConfigMap](inf, "default",
		labels.SelectorFromSet(labels.Set{"v": "2"}))); n != 25 {
		t.Fatalf("the index has %d objects labelled v=2, want 25", n)
	}
	if n := len(client.CachedList[*corev1.ConfigMap](inf, "", nil)); n != 45 {
		t.Fatalf("the index has %d objects, want 45", n)
	}
}

func run(t *testing.T, ctx context.Context, inf *client.Informers) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- inf.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("informers: %v", err)
		}
	})
}

// F65 F76: an informer whose place in history is gone lists again, and ends up right.
func TestInformerSurvivesLostHistory(t *testing.T) {
	c, _, ctx := start(t, registry.WithHistory(4, 1<<20))
	inf := client.NewInformers(c)
	informer := client.Informer[*corev1.ConfigMap](inf)
	hold := make(chan struct{})
	var once bool
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(any) {
		if !once { // handlers run one after the other
			once = true
			<-hold
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	run(t, ctx, inf)
	for i := range 2000 {
		if _, err := client.Create(ctx, c, configMap(fmt.Sprintf("c%d", i), "1")); err != nil {
			t.Fatal(err)
		}
	}
	close(hold)
	await.Until(ctx, t, await.Patience, 5*time.Millisecond, "2000 objects in the index", func() error {
		if n := len(client.CachedList[*corev1.ConfigMap](inf, "", nil)); n != 2000 {
			return fmt.Errorf("%d objects in the index", n)
		}
		return nil
	})
}
