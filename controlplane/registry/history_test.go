package registry

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
	"weak"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

// An encoding that was made for a client dies with the version of the object that it is of.
func TestEncodingsKeepNoOldVersions(t *testing.T) {
	e := newEnv(t, WithHistory(1, 1<<20))
	old := func() weak.Pointer[entry] {
		if err := e.cache.waitFor(e.ctx, revisionOf(t, e.create(configMap("default", "a")))); err != nil {
			t.Fatal(err)
		}
		kc := e.cache.byKind[e.kinds.ByType(&corev1.ConfigMap{})]
		obj := kc.get(objectKey(kc.kind, "default", "a")).obj
		if _, err := e.Encoded(obj, k8sruntime.ContentTypeJSON); err != nil {
			t.Fatal(err)
		}
		return weak.Make(e.cache.entryOf(obj))
	}()
	if old.Value() == nil {
		t.Fatal("the version is gone while it is current")
	}
	for i := range 4 {
		e.update(configMap("default", "a", "n", fmt.Sprint(i)), "")
	}
	err := wait.For(within(t, e), time.Millisecond, func() error {
		if runtime.GC(); old.Value() != nil {
			return errors.New("an encoding keeps a version of four updates ago")
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// What happened long ago is forgotten although nothing happens any more.
func TestHistoryIsForgottenByAge(t *testing.T) {
	e := newEnv(t, WithHistoryAge(20*time.Millisecond))
	first := e.create(configMap("default", "a"))
	last := e.update(configMap("default", "a", "n", "1"), "")
	err := wait.For(within(t, e), time.Millisecond, func() error {
		w := e.watch(configMap("default", ""), metav1.ListOptions{ResourceVersion: first.GetResourceVersion()})
		if got := show(e.next(w)); got != "ERROR 410 Expired" {
			return fmt.Errorf("a watch from before the last change got %s", got)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	kc := e.cache.byKind[e.kinds.ByType(&corev1.ConfigMap{})]
	kc.mu.RLock()
	if n := len(kc.recent) + len(kc.history.events); n != 0 || kc.history.bytes != 0 {
		t.Errorf("%d versions and %d bytes of history are left", n, kc.history.bytes)
	}
	kc.mu.RUnlock()
	// Who has seen all of it has lost nothing.
	w := e.watch(configMap("default", ""), metav1.ListOptions{ResourceVersion: last.GetResourceVersion()})
	next := e.update(configMap("default", "a", "n", "2"), "")
	if got := show(e.next(w)); got != "MODIFIED a@"+next.GetResourceVersion() {
		t.Errorf("a watch from the last change got %s", got)
	}
}

// The history of all kinds together is bounded: the largest gives way, and a small one stays.
func TestHistoryOfAllKindsIsBounded(t *testing.T) {
	const limit = 1 << 20
	e := newEnv(t, WithHistory(16384, limit))
	small := e.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"}})
	e.update(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"}, StringData: map[string]string{"k": "v"}}, "")
	for i := range 200 {
		e.create(configMap("default", fmt.Sprint("c", i), "v", strings.Repeat("x", 10_000)))
	}
	if err := e.cache.waitFor(e.ctx, e.store.Applied()); err != nil {
		t.Fatal(err)
	}
	var sum int64
	for _, kc := range e.cache.byKind {
		kc.mu.RLock()
		for _, ev := range kc.history.events {
			sum += ev.size()
		}
		kc.mu.RUnlock()
	}
	if sum != e.cache.kept || sum > limit || sum < limit/2 {
		t.Errorf("history takes %d bytes, is counted as %d, the limit is %d", sum, e.cache.kept, limit)
	}
	w := e.watch(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default"}}, metav1.ListOptions{ResourceVersion: small.GetResourceVersion()})
	if got := show(e.next(w)); !strings.HasPrefix(got, "MODIFIED s@") {
		t.Errorf("the history of a kind with few changes was taken: %s", got)
	}
}

func revisionOf(t *testing.T, obj metav1.Object) raftstore.Revision {
	t.Helper()
	n, err := strconv.ParseUint(obj.GetResourceVersion(), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return raftstore.Revision(n)
}

// within is a time that is long enough for anything.
func within(t *testing.T, e *env) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(e.ctx, 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}
