package registry

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/controlplane/registry/watchcache"
	"keelson.dev/keelson/raftstore/storetest"
)

// replicated runs a registry on each of three replicas.
func replicated(t testing.TB) (*storetest.Cluster, map[string]*env) {
	t.Helper()
	c := storetest.NewCluster(t, 3, nil)
	c.AwaitReady()
	envs := make(map[string]*env)
	for _, name := range c.Names() {
		r := New(c.Replica(name), kinds.All())
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = r.Run(ctx) // the registry of a killed replica ends with ErrClosed
		}()
		t.Cleanup(func() { cancel(); <-ended })
		<-r.Ready()
		envs[name] = &env{Registry: r, t: t, ctx: ctx, admit: Stages{Validating: kindstest.ValidateAttempt},
			user: api.User{Name: "alice"}}
	}
	return c, envs
}

// F46: every replica shows a write that one replica has acknowledged; all reject an outdated
// update.
func TestReplicasAgree(t *testing.T) {
	c, envs := replicated(t)
	names := c.Names()
	for i := range 30 {
		writer, reader := envs[names[i%3]], envs[names[(i+1)%3]]
		cm := configMap("default", fmt.Sprint("c", i), "n", "1")
		made := writer.create(cm)
		got, err := reader.get(cm)
		if err != nil || got.GetUID() != made.GetUID() || got.GetResourceVersion() != made.GetResourceVersion() {
			t.Fatalf("%s wrote %s@%s, %s reads %v, %v", names[i%3], made.GetName(), made.GetResourceVersion(),
				names[(i+1)%3], got, err)
		}
		changed := got.DeepCopyObject().(*corev1.ConfigMap)
		changed.Data["n"] = "2"
		reader.update(changed, "")
		changed.Data["n"] = "3"
		_, err = envs[names[(i+2)%3]].tryUpdate(changed, "")
		refused(t, err, 409, metav1.StatusReasonConflict)
	}
}

// F48 F75: after the leader's death, writes through the other replicas continue. A watcher that
// moves to another replica sees every write exactly once.
func TestWatchMovesToAnotherReplica(t *testing.T) {
	c, envs := replicated(t)
	leader, followers := c.Leader(), c.Followers()
	through, second := envs[followers[0]], envs[followers[1]]
	w := envs[leader].watch(configMap("default", ""),
		metav1.ListOptions{ResourceVersion: storedform.FormatRevision(c.Replica(leader).Applied())})
	const writes = 60
	moves := make(chan struct{}) // closed when the watcher has received enough events from the leader
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := range writes {
			if i == writes/3 {
				select {
				case <-moves:
				case <-through.ctx.Done():
				}
				c.Kill(leader)
			}
			ctx, cancel := context.WithTimeout(through.ctx, time.Minute)
			req := through.request(api.VerbCreate, configMap("default", fmt.Sprint("c", i)))
			req.Object = configMap("default", fmt.Sprint("c", i))
			if _, err := through.Registry.Create(ctx, req, nil); err != nil {
				t.Errorf("create %d: %v", i, err)
			}
			cancel()
		}
	})
	var last string
	seen := 0
	take := func(w *watchcache.Watcher, from *env, n int) {
		ctx, cancel := context.WithTimeout(from.ctx, time.Minute)
		defer cancel()
		for range n {
			ev, ok := w.Next(ctx)
			if !ok {
				t.Fatalf("the watch gave no event after %d", seen)
			}
			if want := fmt.Sprint("c", seen); ev.Object.(api.Object).GetName() != want {
				t.Fatalf("event %d is %s", seen, show(ev))
			}
			last = ev.Object.(api.Object).GetResourceVersion()
			seen++
		}
	}
	take(w, envs[leader], writes/4)
	w.Stop()
	close(moves)
	take(second.watch(configMap("default", ""), metav1.ListOptions{ResourceVersion: last}), second, writes-seen)
	wg.Wait()
}
