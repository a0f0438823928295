package registry

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/controlplane/registry/watchcache"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// garbage returns invalid values: no envelope, another kind, a truncated message, JSON of the wrong
// type, and another object's name.
func garbage(t testing.TB, e *env) map[string][]byte {
	t.Helper()
	other, err := storedform.NewCodec(e.kinds.ByType(pod("a", "b")).Storage).Encode(pod("a", "b"))
	if err != nil {
		t.Fatal(err)
	}
	whole, err := storedform.NewCodec(e.kinds.ByType(configMap("a", "b")).Storage).Encode(configMap("a", "elsewhere",
		"k", strings.Repeat("v", 100)))
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]byte{
		"bytes": []byte("\x00\xffnothing"), "empty": {}, "otherkind": other, "cut": whole[:len(whole)/2],
		"json": []byte(`{"metadata":[]}`), "named": whole,
	}
}

// put writes directly to the store and waits for the cache.
func (e *env) put(ops ...raftstore.Op) raftstore.Revision {
	e.t.Helper()
	rev, err := e.store.Commit(e.ctx, raftstore.Commit{Ops: ops})
	if err != nil {
		e.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(e.ctx, time.Minute)
	defer cancel()
	if err := e.cache.WaitFor(ctx, rev); err != nil {
		e.t.Fatalf("the cache did not take in revision %d: %v", rev, err)
	}
	return rev
}

// settle waits until the cache has all writes.
func (e *env) settle() {
	e.t.Helper()
	if _, err := e.cache.Refresh(e.ctx); err != nil {
		e.t.Fatal(err)
	}
}

// An undecodable object is listed as such and can be deleted. It affects nothing else, neither when
// it is written nor at the start of a replica.
func TestUndecodableObjects(t *testing.T) {
	for _, when := range []string{"written while running", "there at the start"} {
		for name, value := range garbage(t, newEnv(t)) {
			t.Run(when+"/"+name, func(t *testing.T) {
				key := storedform.Root + "configmaps/default/" + name
				mem := storetest.NewMemory()
				if when == "there at the start" {
					if _, err := mem.Commit(t.Context(),
						raftstore.Commit{Ops: []raftstore.Op{raftstore.Create(key, value)}}); err != nil {
						t.Fatal(err)
					}
				}
				e := startEnv(t, mem, mem)
				w := e.watch(configMap("default", ""), metav1.ListOptions{})
				if when != "there at the start" {
					e.put(raftstore.Create(key, value))
				}
				checkUndecodable(t, e, name, key, w)
			})
		}
	}
}

func checkUndecodable(t *testing.T, e *env, name, key string, w *watchcache.Watcher) {
	t.Helper()
	e.create(configMap("default", "healthy"))
	if got := show(e.next(w)); !strings.HasPrefix(got, "ADDED healthy@") {
		t.Errorf("the watch gave %s, want the healthy object", got)
	}
	_, err := e.get(configMap("default", name))
	status := refused(t, err, 500, metav1.StatusReasonInternalError)
	for _, part := range []string{key, "kubectl delete configmaps " + name, "backup"} {
		if !strings.Contains(status.Message, part) {
			t.Errorf("the refusal does not say %q: %s", part, status.Message)
		}
	}
	_, err = e.tryUpdate(configMap("default", name), "")
	refused(t, err, 500, metav1.StatusReasonInternalError)
	_, err = e.tryCreate(configMap("default", name))
	refused(t, err, 409, metav1.StatusReasonAlreadyExists)

	ctx, said := api.WithWarnings(e.ctx)
	req := e.request(api.VerbList, configMap("default", ""))
	req.Internal.Pointers = true
	list, err := e.Registry.List(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	if items := list.(*api.ObjectList).Items; len(items) != 1 || items[0].GetName() != "healthy" {
		t.Errorf("the list has %v", items)
	}
	if texts := said(); len(texts) != 1 || !strings.Contains(texts[0], "default/"+name) {
		t.Errorf("the list warns of %q", texts)
	}
	if all := e.Unreadable(); len(all) != 1 || all[0].Name != name || all[0].Key != key || all[0].Reason == "" {
		t.Errorf("unreadable are %+v", all)
	}

	wrong := types.UID("x")
	_, _, err = e.tryDelete(configMap("default", name),
		metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &wrong}})
	refused(t, err, 500, metav1.StatusReasonInternalError)
	if _, gone := e.delete(configMap("default", name), metav1.DeleteOptions{}); !gone {
		t.Error("deleting it left it there")
	}
	if _, err := e.get(configMap("default", name)); !apierrors.IsNotFound(err) {
		t.Errorf("after its deletion: %v", err)
	}
	if all := e.Unreadable(); len(all) != 0 {
		t.Errorf("unreadable are still %+v", all)
	}
	e.create(configMap("default", name))
	if got := show(e.next(w)); !strings.HasPrefix(got, "ADDED "+name+"@") {
		t.Errorf("the watch gave %s, want the new object", got)
	}
}

// An object that becomes undecodable is removed once, for watches and lists, and reappears when its
// value is repaired.
func TestObjectBecomesUndecodable(t *testing.T) {
	e := newEnv(t)
	w := e.watch(configMap("default", ""), metav1.ListOptions{})
	made := e.create(configMap("default", "a", "k", "v"))
	e.next(w)
	key := storedform.Root + "configmaps/default/a"
	whole, err := storedform.NewCodec(e.kinds.ByType(made).Storage).Encode(configMap("default", "a"))
	if err != nil {
		t.Fatal(err)
	}
	rev := e.put(raftstore.Put(key, []byte("broken")))
	if got, want := show(e.next(w)), fmt.Sprintf("DELETED a@%d", rev); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	e.put(raftstore.Put(key, []byte("broken again")))
	rev = e.put(raftstore.Put(key, whole))
	if got, want := show(e.next(w)), fmt.Sprintf("ADDED a@%d", rev); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if all := e.Unreadable(); len(all) != 0 {
		t.Errorf("unreadable are still %+v", all)
	}
	// An invalid value and its repair in one batch, and the deletion of an object that was never
	// decodable.
	e.put(raftstore.Put(key, []byte("broken")), raftstore.Put(storedform.Root+"configmaps/default/b", []byte("broken")))
	e.put(raftstore.Delete(storedform.Root + "configmaps/default/b"))
	if all := e.Unreadable(); len(all) != 1 {
		t.Errorf("unreadable are %+v", all)
	}
}

// DeleteCollection in a namespace also deletes undecodable objects, unless it has a selector.
func TestDeleteCollectionOfUndecodable(t *testing.T) {
	e := newEnv(t)
	e.create(configMap("default", "a"))
	e.put(raftstore.Put(storedform.Root+"configmaps/default/b", []byte("broken")),
		raftstore.Put(storedform.Root+"configmaps/other/c", []byte("broken")))
	req := e.request(api.VerbDeleteCollection, configMap("default", ""))
	req.List.LabelSelector = "a=b"
	if _, err := e.DeleteCollection(e.ctx, req, e.admit); err != nil {
		t.Fatal(err)
	}
	if all := e.Unreadable(); len(all) != 2 {
		t.Errorf("a selector deleted: left are %+v", all)
	}
	req.List.LabelSelector = ""
	if _, err := e.DeleteCollection(e.ctx, req, e.admit); err != nil {
		t.Fatal(err)
	}
	e.settle()
	if all := e.Unreadable(); len(all) != 1 || all[0].Namespace != "other" {
		t.Errorf("left are %+v, want that of the other namespace", all)
	}
}

// The deletion of an undecodable Service releases its address.
func TestUndecodableServiceReleasesItsAddress(t *testing.T) {
	e := newEnv(t)
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.77", ClusterIPs: []string{"10.96.0.77"},
		Ports: []corev1.ServicePort{{Port: 80}}}}
	e.create(svc)
	e.settle()
	if !e.Reserved(SpaceClusterIPs, "10.96.0.77") {
		t.Fatal("the address is not reserved")
	}
	e.put(raftstore.Put(storedform.Root+"services/default/web", []byte("broken")))
	e.delete(svc, metav1.DeleteOptions{})
	e.settle()
	if e.Reserved(SpaceClusterIPs, "10.96.0.77") {
		t.Error("the address is still reserved")
	}
}
