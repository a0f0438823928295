package registry

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
)

// counted returns an admission that permits at most limit config maps, counted in a Secret.
func counted(e *env, limit int) Stages {
	counter := e.kinds.ByType(&corev1.Secret{})
	add := func(n int) func(api.Object) (api.Object, error) {
		return func(stored api.Object) (api.Object, error) {
			s := counterSecret()
			if stored != nil {
				s = stored.DeepCopyObject().(*corev1.Secret)
			}
			now := used(s) + n
			if now > limit {
				return nil, apierrors.NewForbidden(corev1.Resource("configmaps"), "",
					fmt.Errorf("exceeded quota: %d of %d", now, limit))
			}
			s.Data = map[string][]byte{"n": []byte(strconv.Itoa(now))}
			return s, nil
		}
	}
	return Stages{Validating: func(_ context.Context, a *api.Attempt) error {
		n := map[api.Operation]int{api.Create: 1, api.Delete: -1}[a.Operation]
		if a.IsCoreResource("configmaps") && n != 0 {
			a.Write(api.Change{Ref: api.Ref{Kind: counter, Namespace: "default", Name: "counter"}, Next: add(n)})
		}
		return nil
	}}
}

func counterSecret() *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "counter"}}
}

func used(s *corev1.Secret) int {
	n, _ := strconv.Atoi(string(s.Data["n"]))
	return n
}

// agree checks that the counter equals the number of config maps, at most most, and returns it.
func agree(t *testing.T, store raftstore.Store, most int) (now int) {
	t.Helper()
	ctx := t.Context()
	if _, err := store.Sync(ctx); err != nil {
		t.Fatal(err)
	}
	l, err := store.List(ctx, storedform.Root+"configmaps/", raftstore.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(l.Items) > most {
		t.Errorf("there are %d objects, at most %d may be", len(l.Items), most)
	}
	return len(l.Items)
}

// hammer concurrently creates and deletes config maps through all envs.
func hammer(t *testing.T, envs []*env, limit, rounds int, seed uint64) (refusals int64) {
	var wg sync.WaitGroup
	var denied atomic.Int64
	var live atomic.Int64
	for n, e := range envs {
		for m := range 4 {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(seed, uint64(10*n+m)))
				var mine []string
				for i := range rounds {
					if len(mine) > 0 && rng.IntN(3) == 0 {
						last := len(mine) - 1
						live.Add(-1) // decremented before the deletion, incremented after the creation: never too high
						if _, _, err := e.tryDelete(configMap("default", mine[last]), metav1.DeleteOptions{}); err !=
							nil {
							t.Errorf("delete: %v", err)
							return
						}
						mine = mine[:last]
						continue
					}
					name := fmt.Sprintf("c-%d-%d-%d", n, m, i)
					switch _, err := e.tryCreate(configMap("default", name)); {
					case err == nil:
						mine = append(mine, name)
						if now := live.Add(1); now > int64(limit) {
							t.Errorf("%d objects of %d", now, limit)
						}
					case apierrors.IsForbidden(err):
						denied.Add(1)
					default:
						t.Errorf("create: %v", err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	return denied.Load()
}

// A counter in another object, changed in the same commits, is exact and never exceeds its limit,
// for any number of concurrent writers.
func TestCountsAreExact(t *testing.T) {
	for _, seed := range []uint64{1, rand.Uint64()} {
		e := newEnv(t)
		e.admit = counted(e, 9)
		if hammer(t, []*env{e}, 9, 60, seed) == 0 {
			t.Errorf("seed %d: the limit was never met", seed)
		}
		got, err := e.get(counterSecret())
		if err != nil || used(got.(*corev1.Secret)) != agree(t, e.store, 9) {
			t.Errorf("seed %d: the counter says %v, %v; there are %d", seed, got, err, agree(t, e.store, 9))
		}
	}
}

// The same with three replicas.
func TestCountsAreExactOnAllReplicas(t *testing.T) {
	c, byName := replicated(t)
	var envs []*env
	for _, name := range c.Names() {
		byName[name].admit = counted(byName[name], 9)
		envs = append(envs, byName[name])
	}
	seed := rand.Uint64()
	if hammer(t, envs, 9, 20, seed) == 0 {
		t.Errorf("seed %d: the limit was never met", seed)
	}
	for _, name := range c.Names() {
		got, err := byName[name].get(counterSecret())
		if n := agree(t, c.Replica(name), 9); err != nil || used(got.(*corev1.Secret)) != n {
			t.Errorf("seed %d: on %s the counter says %v, %v; there are %d", seed, name, got, err, n)
		}
	}
}

// Whether a change is rejected depends on the newest state: a replica that lags behind rejects no
// valid request.
func TestChangesAreJudgedByTheNewestState(t *testing.T) {
	c, byName := replicated(t)
	names := c.Names()
	other, e := byName[names[0]], byName[names[1]]
	other.create(counterSecret())
	e.admit = counted(e, 1)
	for i := range 50 {
		full, free := counterSecret(), counterSecret()
		full.Data, free.Data = map[string][]byte{"n": []byte("1")}, map[string][]byte{"n": []byte("0")}
		if i > 0 {
			free.Annotations = map[string]string{"round": fmt.Sprint(i)}
		}
		other.update(full, "")
		if err := e.cache.WaitFor(e.ctx, other.Revision()); err != nil {
			t.Fatal(err)
		}
		other.update(free, "")
		e.create(configMap("default", fmt.Sprint("c", i)))
	}
}

// In a dry run, changes are evaluated and nothing is written.
func TestChangesInADryRun(t *testing.T) {
	e := newEnv(t)
	e.admit = counted(e, 1)
	e.create(configMap("default", "a"))
	before := e.store.Applied()
	dry := e.request(api.VerbCreate, configMap("default", "b"))
	dry.Object, dry.Create.DryRun = configMap("default", "b"), []string{metav1.DryRunAll}
	if _, err := e.Registry.Create(e.ctx, dry, e.admit); !apierrors.IsForbidden(err) {
		t.Errorf("a dry run beyond the limit: %v", err)
	}
	e.admit = counted(e, 2)
	dry.Object = configMap("default", "b")
	if _, err := e.Registry.Create(e.ctx, dry, e.admit); err != nil {
		t.Errorf("a dry run within the limit: %v", err)
	}
	if e.store.Applied() != before {
		t.Error("a dry run wrote")
	}
}

// The possible results of several changes and checks of the same objects in one attempt.
func TestChangesOfOneAttempt(t *testing.T) {
	e := newEnv(t)
	secrets := e.kinds.ByType(&corev1.Secret{})
	ref := api.Ref{Kind: secrets, Namespace: "default", Name: "counter"}
	append1 := func(what string) api.Change {
		return api.Change{Ref: ref, Next: func(stored api.Object) (api.Object, error) {
			s := counterSecret()
			if stored != nil {
				s = stored.DeepCopyObject().(*corev1.Secret)
			}
			s.Data = map[string][]byte{"n": append(s.Data["n"], what...)}
			return s, nil
		}}
	}
	gone := api.Change{Ref: ref, Next: func(api.Object) (api.Object, error) { return nil, nil }}
	leave := api.Change{Ref: ref, Next: func(stored api.Object) (api.Object, error) { return stored, nil }}
	fail := api.Change{Ref: ref, Next: func(api.Object) (api.Object, error) { return nil, errors.New("no") }}
	absent := api.Check{Ref: ref}
	for i, c := range []struct {
		ask  func(a *api.Attempt)
		want string // expected counter; "-" = it does not exist
		code int32  // expected status code
	}{
		{func(a *api.Attempt) { a.Require(absent) }, "-", 0},
		{func(a *api.Attempt) { a.Write(append1("a")); a.Write(append1("b")) }, "ab", 0},
		{func(a *api.Attempt) { a.Write(leave) }, "ab", 0},
		{func(a *api.Attempt) { a.Write(append1("c")); a.Write(leave) }, "abc", 0},
		{func(a *api.Attempt) { a.Require(absent) }, "abc", 409}, // retried, and rejected in the end
		{func(a *api.Attempt) { a.Write(fail) }, "abc", 500},
		{func(a *api.Attempt) {
			a.Write(api.Change{Ref: api.Ref{Kind: a.Kind, Namespace: "default", Name: a.Name}, Next: gone.Next})
		}, "abc", 500},
		{func(a *api.Attempt) { a.Write(api.Change{Ref: api.Ref{Name: "x"}, Next: gone.Next}) }, "abc", 500},
		{func(a *api.Attempt) { a.Write(append1("d")); a.Write(gone) }, "-", 0},
		{func(a *api.Attempt) { a.Write(gone) }, "-", 0},
	} {
		e.admit = Stages{Validating: func(_ context.Context, a *api.Attempt) error { c.ask(a); return nil }}
		_, err := e.tryCreate(configMap("default", fmt.Sprint("c", i)))
		var status apierrors.APIStatus
		if errors.As(err, &status); err == nil != (c.code == 0) || err != nil && status.Status().Code != c.code {
			t.Errorf("case %d: %v, want %d", i, err, c.code)
		}
		have := "-"
		if s, err := e.get(counterSecret()); err == nil {
			have = string(s.(*corev1.Secret).Data["n"])
		}
		if have != c.want {
			t.Errorf("case %d: the counter is %q, want %q", i, have, c.want)
		}
	}
	if len(e.locks.busy) != 0 {
		t.Errorf("%d turns are held when nobody writes", len(e.locks.busy))
	}
}

// Objects of a kind are committed only while the object that defines the kind exists. It is deleted
// during many writes; all stored objects were stored before the deletion.
func TestNothingIsStoredAfterTheKindIsGone(t *testing.T) {
	e := newEnv(t)
	for round := range 8 {
		name := fmt.Sprint("crd", round)
		definition := configMap("default", name)
		made := e.create(definition)
		k := widgetKind()
		k.Commit.Presence = func() (api.Ref, types.UID) {
			return api.Ref{Kind: e.kinds.ByType(definition), Namespace: "default", Name: name}, made.GetUID()
		}
		if err := e.kinds.Register(k); err != nil {
			t.Fatal(err)
		}
		var stored atomic.Int64
		var wg sync.WaitGroup
		begun := make(chan struct{}, 3)
		for n := range 3 {
			wg.Go(func() {
				for i := 0; ; i++ {
					_, err := e.Registry.Create(e.ctx, e.of(k, api.VerbCreate,
						widget(fmt.Sprintf("w-%d-%d-%d", round, n, i), 1)), e.admit)
					if i == 0 {
						begun <- struct{}{}
					}
					if err != nil {
						if !apierrors.IsNotFound(err) {
							t.Errorf("after the definition went: %v", err)
						}
						return
					}
					stored.Add(1)
				}
			})
		}
		for range 3 {
			<-begun
		}
		last, _ := e.delete(definition, metav1.DeleteOptions{})
		wg.Wait()
		if err := e.kinds.Drop(k); err != nil {
			t.Fatal(err)
		}
		end, err := storedform.ParseRevision(last.GetResourceVersion())
		if err != nil {
			t.Fatal(err)
		}
		l, err := e.store.List(e.ctx, k.Storage.Prefix, raftstore.ListOptions{})
		if err != nil || len(l.Items) < int(stored.Load()) {
			t.Fatalf("%d items of %d, %v", len(l.Items), stored.Load(), err)
		}
		for _, it := range l.Items {
			if it.Modified > end {
				t.Fatalf("round %d: %s was stored at %d, the definition went at %d", round, it.Key, it.Modified, end)
			}
		}
	}
}

// A write that is in admission when its kind is dropped stores nothing.
func TestAWriteInAdmissionWhenItsKindIsDropped(t *testing.T) {
	e := newEnv(t)
	for _, verb := range []api.Verb{api.VerbCreate, api.VerbUpdate, api.VerbDelete} {
		k := widgetKind()
		if err := e.kinds.Register(k); err != nil {
			t.Fatal(err)
		}
		l := &load{e: e, fail: t.Errorf}
		if verb != api.VerbCreate {
			if err := l.one(e.ctx, k, api.VerbCreate, widget(string(verb), 1)); err != nil {
				t.Fatal(err)
			}
		}
		before := e.store.Applied()
		was := e.admit
		e.admit = Stages{Validating: func(context.Context, *api.Attempt) error { return e.kinds.Drop(k) }}
		if err := l.one(e.ctx, k, verb, widget(string(verb), 2)); !apierrors.IsNotFound(err) {
			t.Errorf("%s: %v", verb, err)
		}
		e.admit = was
		if e.store.Applied() != before {
			t.Errorf("%s: something was stored after the kind was dropped", verb)
		}
	}
}
