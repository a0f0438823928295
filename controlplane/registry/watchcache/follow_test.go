package watchcache

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

func (e *env) follow(like api.Object) api.Follower {
	e.t.Helper()
	req := e.request(api.VerbWatch, like)
	req.Namespace, req.Name, req.Internal.Follow, req.Internal.Light = "", "", true, true
	w, err := e.reader.Watch(e.ctx, req)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(w.Stop)
	return w.(api.Follower)
}

// stateOf returns the objects of a view by key.
func stateOf(v api.View) map[string]api.Object {
	all := map[string]api.Object{}
	v.Scan("", func(key string, obj api.Object) bool {
		all[key] = obj
		return true
	})
	return all
}

// F62, F65: the changes that a follower gets lead from each state to the next, whenever it reads.
// That also holds if history was dropped, compressed, or lost in a reload.
func TestFollowerIsToldTheState(t *testing.T) {
	for name, c := range map[string]struct {
		with    []option
		pack    bool
		guesses bool
	}{
		"all of it":       {},
		"packed":          {pack: true},
		"history is lost": {with: []option{withHistory(3, 1<<20)}, guesses: true},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, c.with...)
			random := rand.New(rand.NewPCG(7, 8))
			e.create(pod("a", "before"))
			if err := e.WaitFor(e.ctx, e.store.Applied()); err != nil {
				t.Fatal(err)
			}
			f := e.follow(pod("", ""))
			v, changes, err := f.Follow(e.ctx)
			if err != nil || changes != nil || v.Len() != 1 || v.Get("a/before") == nil {
				t.Fatalf("first %v, %d changes, %v", v, len(changes), err)
			}
			model := stateOf(v)
			have := map[string]*corev1.Pod{}
			guessed := false
			for step := range 400 {
				changeSomePod(e, random, have, step)
				if random.IntN(6) > 0 {
					continue
				}
				if err := e.WaitFor(e.ctx, e.store.Applied()); err != nil {
					t.Fatal(err)
				}
				if c.pack {
					e.packAll()
				}
				v, changes, err := f.Follow(within(t, e))
				if err != nil {
					t.Fatal(err)
				}
				for _, d := range changes {
					guessed = guessed || d.Guessed
					follows(t, model, d)
				}
				if now := stateOf(v); !maps.EqualFunc(model, now, sameRevision) || v.Len() != len(have)+1 {
					t.Fatalf("step %d: the changes lead to\n%v\nthe state is\n%v", step, model, now)
				}
				for key, p := range have {
					if got := v.Get(key); got == nil || got.GetResourceVersion() != p.ResourceVersion {
						t.Fatalf("step %d: %s is %v, want %s", step, key, got, p.ResourceVersion)
					}
				}
				var below []string
				v.Scan("b/", func(key string, _ api.Object) bool {
					below = append(below, key)
					return true
				})
				want := slices.Sorted(maps.Keys(have))
				want = slices.DeleteFunc(want, func(key string) bool { return !strings.HasPrefix(key, "b/") })
				if !slices.Equal(below, want) {
					t.Fatalf("below b/ is %v, want %v", below, want)
				}
			}
			if guessed != c.guesses {
				t.Errorf("deletions were guessed: %v, want %v", guessed, c.guesses)
			}
		})
	}
}

func sameRevision(a, b api.Object) bool { return a.GetResourceVersion() == b.GetResourceVersion() }

// follows applies a change to a state and fails if the change does not fit.
func follows(t *testing.T, model map[string]api.Object, d api.Delta) {
	t.Helper()
	was := model[d.Key]
	switch {
	case (was == nil) != (d.Old == nil), was != nil && !sameRevision(was, d.Old), d.New == nil:
		t.Fatalf("%s was %v, the change says from %v to %v", d.Key, was, d.Old, d.New)
	case d.Gone:
		delete(model, d.Key)
	default:
		model[d.Key] = d.New
	}
}

// A waiting follower wakes at a change, at the end of its context, and at its own end. Other
// followers lose no event.
func TestFollowerWaits(t *testing.T) {
	e := newEnv(t)
	f := e.follow(pod("", ""))
	if _, _, err := f.Follow(e.ctx); err != nil {
		t.Fatal(err)
	}
	type answer struct {
		changes []api.Delta
		err     error
	}
	wait := func(ctx context.Context) chan answer {
		c := make(chan answer, 1)
		go func() {
			_, changes, err := f.Follow(ctx)
			c <- answer{changes, err}
		}()
		return c
	}
	woken := wait(within(t, e))
	e.create(configMap("default", "c"))
	e.create(pod("a", "p"))
	if a := <-woken; a.err != nil || len(a.changes) != 1 || a.changes[0].Key != "a/p" || a.changes[0].Old != nil ||
		a.changes[0].Gone {
		t.Fatalf("woken with %+v", a)
	}
	short, cancel := context.WithTimeout(e.ctx, time.Millisecond)
	defer cancel()
	if a := <-wait(short); a.err == nil {
		t.Fatalf("at the end of its context it was told %+v", a)
	}
	e.create(pod("a", "q")) // the cancelled wait has lost nothing
	if a := <-wait(within(t, e)); a.err != nil || len(a.changes) != 1 || a.changes[0].Key != "a/q" {
		t.Fatalf("afterwards %+v", a)
	}
	stopped := wait(within(t, e))
	f.Stop()
	if a := <-stopped; a.err == nil {
		t.Fatalf("stopped, it was told %+v", a)
	}
}

// BenchmarkFollow measures one change for a follower of 10,000 pods.
func BenchmarkFollow(b *testing.B) {
	e := newEnv(b)
	for i := range 10_000 {
		e.create(pod("default", fmt.Sprint("p", i)))
	}
	f := e.follow(pod("", ""))
	if _, _, err := f.Follow(e.ctx); err != nil {
		b.Fatal(err)
	}
	p := pod("default", "p7")
	n := 0
	for b.Loop() {
		n++
		e.modify(p, func(obj api.Object) { obj.SetAnnotations(map[string]string{"n": fmt.Sprint(n)}) })
		if _, changes, err := f.Follow(e.ctx); err != nil || len(changes) != 1 {
			b.Fatal(changes, err)
		}
	}
}
